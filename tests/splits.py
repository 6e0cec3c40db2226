"""Every way to cut something into pieces: the boundary must never matter."""

import itertools
import random
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T", str, bytes)


def every_split(whole: T, *, most: int = 12) -> Iterator[list[T]]:
    """All 2**(n-1) ways for short inputs; for longer ones whole, unit by unit, every two-way cut, and random cuts."""
    size = len(whole)
    if size <= most:
        for mask in range(1 << max(size - 1, 0)):
            cuts = [0, *(i + 1 for i in range(size - 1) if mask >> i & 1), size]
            yield [whole[a:b] for a, b in itertools.pairwise(cuts)]
        return
    yield [whole]
    yield [whole[i : i + 1] for i in range(size)]
    for cut in range(1, size):
        yield [whole[:cut], whole[cut:]]
    rng = random.Random(size)
    for _ in range(200):
        cuts = [0, *sorted(rng.sample(range(1, size), rng.randint(1, size - 1))), size]
        yield [whole[a:b] for a, b in itertools.pairwise(cuts)]
