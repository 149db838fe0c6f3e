"""A shuffle as arithmetic: a keyed bijection of [0, n) that is computed, not stored.

The numbers [0, n) are laid out in a grid of a x b cells, a = ceil(sqrt(n)), b = ceil(n / a), so fewer than `a` cells
are left over. A cell (left, right) is scrambled by ROUNDS alternating steps

    left  <- (left  + noise(right)) mod a
    right <- (right + noise(left))  mod b

Each step can be undone whatever `noise` is, so the whole is a bijection of the grid. A cell beyond n is scrambled again
until it falls below n (walking along its cycle, which must come back), and that makes a bijection of [0, n).

Only unsigned 64-bit integer arithmetic is used, which is the same on every host. The order is a format: a change
to anything here changes what every job reads, also one that is resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import shake_256
from math import isqrt

import numpy as np
from numpy.typing import NDArray

LARGEST = 2**48  # a and b fit in 24 bits: `mod` on 64-bit noise is then even to one part in 2^40
ROUNDS = 12  # with 8, the orders of half a dozen numbers were measurably uneven; each round has a 64-bit key

_MULTIPLIERS = tuple(np.uint64(m) for m in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFTS = tuple(np.uint64(s) for s in (30, 27, 31))

Words = NDArray[np.uint64]


class Permutation:
    """The bijection of [0, n) that belongs to `key`; 1 <= n <= 2^48. Another key gives an unrelated one."""

    def __init__(self, n: int, key: bytes) -> None:
        if not 1 <= n <= LARGEST:
            raise ValueError(f"a permutation of {n} numbers: it must be between 1 and {LARGEST}")
        self.n = n
        rows = isqrt(n - 1) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-n // rows))
        self._keys = tuple(np.frombuffer(shake_256(key).digest(8 * ROUNDS), dtype="<u8").astype(np.uint64))

    def at(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """What stands at each of these places. Any shape of integers in [0, n); the same shape, int64."""
        return self._walk(indices, self._scramble)

    def inverse(self, values: NDArray[np.integer]) -> NDArray[np.int64]:
        """The places at which these stand: `inverse(at(i)) == i`. Any shape of integers in [0, n)."""
        return self._walk(values, self._unscramble)

    def _walk(self, numbers: NDArray[np.integer], step: Callable[[Words], Words]) -> NDArray[np.int64]:
        given = np.asarray(numbers)
        if given.dtype.kind not in "iu":
            raise TypeError(f"indices of a permutation are integers, not {given.dtype}")
        if given.size and (int(given.min()) < 0 or int(given.max()) >= self.n):
            raise IndexError(f"an index outside [0, {self.n}): {int(given.min())} to {int(given.max())}")
        out = step(given.astype(np.uint64).reshape(-1))
        beyond = np.flatnonzero(out >= self.n)
        while beyond.size:
            out[beyond] = step(out[beyond])
            beyond = beyond[out[beyond] >= self.n]
        return out.astype(np.int64).reshape(given.shape)

    def _scramble(self, cells: Words) -> Words:
        left, right = cells // self._columns, cells % self._columns
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = (left + _noise(right, key) % self._rows) % self._rows
            else:
                right = (right + _noise(left, key) % self._columns) % self._columns
        return left * self._columns + right

    def _unscramble(self, cells: Words) -> Words:
        left, right = cells // self._columns, cells % self._columns
        for number, key in reversed(tuple(enumerate(self._keys))):
            if number % 2 == 0:
                left = (left + (self._rows - _noise(right, key) % self._rows)) % self._rows
            else:
                right = (right + (self._columns - _noise(left, key) % self._columns)) % self._columns
        return left * self._columns + right


def _noise(words: Words, key: np.uint64) -> Words:
    """Mixes every bit of the word and the key into every bit of the result (multiply and shift, twice)."""
    mixed = words * _MULTIPLIERS[0] + key
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MULTIPLIERS[1]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MULTIPLIERS[2]
    return mixed ^ (mixed >> _SHIFTS[2])
