"""How many CPU threads are fastest here: a small matrix product is timed with 1, 2, .. of them.

On cores that others use too, two threads can be many times slower than one. The number decides bits, so a run keeps the
one that it began with.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch

SIZE, PRODUCTS, ROUNDS = 256, 20, 5


def fastest_threads(seconds: Callable[[int], float] | None = None, *, cores: int | None = None) -> int:
    """The number of threads with the least time; of equal ones the smallest. PyTorch keeps its own number.

    Args:
        seconds: Time with so many threads; None: that of a product of small matrices.
        cores: Largest number tried; None: the cores that this process may use.
    """
    cores = cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    before = torch.get_num_threads()
    try:
        times = {threads: (seconds or _measured)(threads) for threads in range(1, cores + 1)}
    finally:
        torch.set_num_threads(before)
    return min(times, key=lambda threads: (times[threads], threads))


def _measured(threads: int) -> float:
    """Median over rounds, after one for warming up."""
    torch.set_num_threads(threads)
    matrix, times = torch.ones(SIZE, SIZE), []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            matrix @ matrix
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
