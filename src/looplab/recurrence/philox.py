"""Philox4x32-10: random words as a pure function of a counter and a key, so nothing has a generator state.

    words = ten rounds of multiply, swap and xor over a 128-bit counter with a 64-bit key

Reference: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Four 32-bit words per counter.

    Args:
        counter: Array [..., 4]; each entry below 2**32.
        key: 64 bits; its low half is the first key word.
    Returns:
        Array [..., 4] of numbers below 2**32.
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


def stream_key(seed: int, stream: str) -> int:
    """64-bit key of a named stream ("data", "depth", "noise", ...) of one run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest(), "little")


def uniforms(key: int, step: int, rows: NDArray[np.int64], micro_batch: int = 0) -> NDArray[np.float64]:
    """One uniform in (0, 1) with 52 bits per row, at counter (step, micro_batch, row)."""
    counter = np.zeros((len(rows), 4), np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 2] = step, micro_batch, rows
    words = philox(counter, key)
    return ((words[:, 0] >> np.uint64(6)) * 2.0**26 + (words[:, 1] >> np.uint64(6)) + 0.5) * 2.0**-52
