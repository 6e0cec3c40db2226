"""What a call will cost, in milliseconds, learned from the calls themselves. Pure.

A call of n tokens at mean depth d costs about a + b·n + c·n·d: launch, matrices, attention. Decode and prefill calls
have coefficients of their own: a row of a running stream and a token of a chunk are different work. They are fitted by
recursive least squares with forgetting (Haykin, Adaptive Filter Theory), so a machine that becomes slower is followed
within some tens of steps. A single call that took far longer than predicted (another program, a page fault) counts as
an outlier and moves the fit only so far.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_FORGET = 0.96  # what a call still weighs after one more
_OUTLIER = 2.0  # a call counts as at most this many times its prediction
_TRUST_AFTER = 5  # calls before an outlier can be told from a bad first guess
_DEPTH_UNIT = 1024.0  # keeps the features of like size
_MOST = 2**31 - 1

Vector = NDArray[np.float64]


def _first_guess() -> Vector:
    """Slow on purpose: the first chunks beside a running stream are rather too small than late."""
    return np.array([2.0, 6.0, 1.0])


@dataclass(slots=True)
class CallCost:
    """The fit of one kind of call."""

    weights: Vector = field(default_factory=_first_guess)
    covariance: Vector = field(default_factory=lambda: np.diag([1e3, 1e3, 1e2]))
    num_calls: int = 0

    def predict_ms(self, num_tokens: int, depth: float) -> float:
        return float(self.weights @ _features(num_tokens, depth))

    def learn(self, num_tokens: int, depth: float, took_ms: float) -> None:
        """A call of `num_tokens` with `depth` tokens before each of them, in the mean, took this long."""
        x = _features(num_tokens, depth)
        predicted = float(self.weights @ x)
        if self.num_calls >= _TRUST_AFTER:
            took_ms = min(took_ms, predicted * _OUTLIER + 1.0)
        self.num_calls += 1
        spread = self.covariance @ x
        gain = spread / (_FORGET + x @ spread)
        # Nothing costs less than nothing: a negative share is noise, and would promise what cannot be kept.
        self.weights = np.maximum(self.weights + gain * (took_ms - predicted), 0.0)
        covariance = (self.covariance - np.outer(gain, spread)) / _FORGET
        # What has not varied for long must not become arbitrarily uncertain.
        self.covariance = covariance * min(1.0, 1e4 / max(float(np.trace(covariance)), 1e-9))

    def largest(self, budget_ms: float, depth: float) -> int:
        """The most tokens at this depth that fit the budget; can be 0."""
        launch, per_token, per_depth = self.weights
        each = per_token + per_depth * depth / _DEPTH_UNIT
        return max(0, min(_MOST, int((budget_ms - launch) / each))) if each > 0 else _MOST


def _features(num_tokens: int, depth: float) -> Vector:
    return np.array([1.0, num_tokens, num_tokens * depth / _DEPTH_UNIT])


@dataclass(slots=True)
class CostModel:
    """Both kinds of call."""

    decode: CallCost = field(default_factory=CallCost)
    prefill: CallCost = field(default_factory=CallCost)
