"""Every way to cut something into pieces: the boundary must never matter."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T", str, bytes)

_SHORT = 12  # up to here all 2**(n-1) ways are tried


def every_split(whole: T) -> Iterator[list[T]]:
    """All ways for short inputs; for longer ones whole, unit by unit, every two-way cut, and random cuts."""
    for cuts in _all_cuts(len(whole)):
        yield [whole[a:b] for a, b in pairwise(cuts)]


def _all_cuts(size: int) -> Iterator[list[int]]:
    if size <= _SHORT:
        for mask in range(1 << max(size - 1, 0)):
            yield [0, *(i + 1 for i in range(size - 1) if mask >> i & 1), size]
        return
    yield [0, size]
    yield list(range(size + 1))
    for cut in range(1, size):
        yield [0, cut, size]
    rng = random.Random(size)
    for _ in range(200):
        yield [0, *sorted(rng.sample(range(1, size), rng.randint(1, size - 1))), size]
