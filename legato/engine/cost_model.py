"""What a call will cost, in milliseconds, learned from the calls themselves. Pure.

A call of n tokens at mean depth d costs about a + b·n + c·n·d: launch, matrices, attention. Decode and prefill calls
have coefficients of their own: a row of a running stream and a token of a chunk are different work. They are fitted by
least squares over the calls so far, older ones weighing less, none below zero, pulled a little towards a first guess
where the calls leave something open. A machine that becomes slower is followed within some tens of steps. A single call
that took far longer than predicted (another program, a page fault) counts as an outlier and moves the fit only so far.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_SOLVE_EVERY = 32  # calls, a multiple of _SAMPLE; solving costs more than all the rest
_SETTLED, _SAMPLE = 64, 4  # after so many calls every fourth is enough: the fit itself takes time from the step
_FORGET = 0.96  # what a call still weighs after one more
_OUTLIER = 2.0  # a call counts as at most this many times its prediction
_TRUST_AFTER = 5  # calls before an outlier can be told from a bad first guess
_DEPTH_UNIT = 1024.0  # keeps the features of like size
_MOST = 2**31 - 1

Vector = NDArray[np.float64]

# Slow on purpose: the first chunks beside a running stream are rather too small than late.
_GUESS: Vector = np.array([2.0, 6.0, 1.0])
# How firmly the guess holds, in squared features: about what one call of eight tokens says.
_PULL: Vector = np.diag([0.1, 8.0, 2.0])


@dataclass(slots=True)
class CallCost:
    """The fit of one kind of call."""

    _weights: Vector = field(default_factory=_GUESS.copy)
    _seen: Vector = field(default_factory=lambda: np.zeros((3, 3)))  # Σ x·xᵀ, older calls fading
    _took: Vector = field(default_factory=lambda: np.zeros(3))  # Σ x·ms, likewise
    _num_calls: int = 0
    _is_solved: bool = True

    def predict_ms(self, num_tokens: int, depth: float) -> float:
        return float(self._solved() @ _features(num_tokens, depth))

    def learn(self, num_tokens: int, depth: float, took_ms: float) -> None:
        """A call of `num_tokens` with `depth` tokens before each of them, in the mean, took this long."""
        self._num_calls += 1
        if self._num_calls > _SETTLED and self._num_calls % _SAMPLE:
            return
        x = _features(num_tokens, depth)
        if self._num_calls > _TRUST_AFTER:
            took_ms = min(took_ms, float(self._weights @ x) * _OUTLIER + 1.0)
        self._seen = self._seen * _FORGET + np.outer(x, x)
        self._took = self._took * _FORGET + x * took_ms
        self._is_solved = False
        if self._num_calls < _SOLVE_EVERY or self._num_calls % _SOLVE_EVERY == 0:
            self._solved()  # outliers are told by these weights: they must not be old

    def _solved(self) -> Vector:
        if not self._is_solved:
            self._weights = _solve_not_negative(self._seen + _PULL, self._took + _PULL @ _GUESS)
            self._is_solved = True
        return self._weights

    def largest(self, budget_ms: float, depth: float) -> int:
        """The most tokens at this depth that fit the budget; can be 0."""
        launch, per_token, per_depth = self._solved()
        each = per_token + per_depth * depth / _DEPTH_UNIT
        return max(0, min(_MOST, int((budget_ms - launch) / each))) if each > 0 else _MOST


def _solve_not_negative(matrix: Vector, right: Vector) -> Vector:
    """matrix·w = right with w ≥ 0: a share that comes out negative is noise, is set to 0, and the rest solved again."""
    active = [0, 1, 2]
    while active:
        solved = np.linalg.solve(matrix[np.ix_(active, active)], right[active])
        worst = int(solved.argmin())
        if solved[worst] >= 0:
            weights = np.zeros(3)
            weights[active] = solved
            return weights
        del active[worst]
    return np.zeros(3)


def _features(num_tokens: int, depth: float) -> Vector:
    return np.array([1.0, num_tokens, num_tokens * depth / _DEPTH_UNIT])


@dataclass(slots=True)
class CostModel:
    """Both kinds of call."""

    decode: CallCost = field(default_factory=CallCost)
    prefill: CallCost = field(default_factory=CallCost)
