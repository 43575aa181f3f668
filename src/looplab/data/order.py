"""The order of documents in an epoch: a keyed permutation that can be asked for any single place.

A Feistel network over the smallest power of two >= n, walked again while it lands outside 0..n-1 (cycle walking), so
it is a bijection on 0..n-1 for every key. With the halves (L, R) of an index and round keys k_i,

    L, R = R, L xor F(R, k_i)        F = the finaliser of SplitMix64, cut to the width of L

The round keys are the output of Philox4x64 under key (seed, stream) at counter (epoch, 0, 0, 0): no generator state.
Halves of unequal width follow Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002).
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 12
DATA_STREAM = 1  # among the streams init, data, depth, noise, augment, task, eval


def permuted(places: NDArray[np.int64], size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The document at each place of an epoch.

    Args:
        places: Places, each from 0 to size - 1.
        size: Number of documents, at least 1.
        seed: Seed of the run, 64 bits.
        epoch: Pass over the documents, from 0.
    """
    bits = max(2, (size - 1).bit_length())
    key, counter = np.array([seed, DATA_STREAM], np.uint64), np.array([epoch, 0, 0, 0], np.uint64)
    round_keys = np.random.Philox(key=key, counter=counter).random_raw(ROUNDS)
    result = _feistel(places.astype(np.uint64), bits, round_keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], bits, round_keys)
    return result.astype(np.int64)


def _feistel(index: NDArray[np.uint64], bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    low = bits // 2
    high = bits - low
    left, right = index >> np.uint64(low), index & np.uint64((1 << low) - 1)
    for key in round_keys:
        left, right = right, (left ^ _mix(right ^ key)) & np.uint64((1 << high) - 1)
        low, high = high, low
    return (left << np.uint64(low)) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
