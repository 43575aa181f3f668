"""The processes of one run, as torchrun starts them, and the few things they say to each other.

Rank 0 leads: it alone writes files and prints. Sums go over all ranks in float64 or int64. Texts are sent as bytes, so
nothing is pickled. One process alone says nothing, and needs no process group.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells every process."""


class LeaderFailed(RuntimeError):
    """Rank 0 could not do what all wait for; it says why itself."""


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of its run."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """Of this process."""

    @property
    def leads(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks, in float64, the same bits on every rank."""
        return self._summed(numbers, torch.float64)

    def total_counts(self, counts: Sequence[int]) -> list[int]:
        """The sums over all ranks, exact up to 2**63."""
        return self._summed(counts, torch.int64)

    def first(self, text: str | None) -> str | None:
        """The text of the lowest rank that has one."""
        if self.size == 1:
            return text
        having = torch.full((), self.size if text is None else self.rank, dtype=torch.int64, device=self.device)
        dist.all_reduce(having, dist.ReduceOp.MIN)
        source = int(having)
        return None if source == self.size else self._sent(text or "", source)

    def led(self, act: Callable[[], str]) -> str:
        """What `act` gives on rank 0, which alone calls it.

        Raises:
            LeaderFailed: On the other ranks, where it failed; rank 0 has the error itself.
        """
        if self.size == 1:
            return act()
        answer, error = "", None
        if self.leads:
            try:
                answer = "1" + act()
            except Exception as caught:
                error = caught
        answer = self._sent(answer, 0)
        if error is not None:
            raise error
        if not answer:
            raise LeaderFailed("rank 0 failed; see its message")
        return answer[1:]

    def _summed(self, numbers: Sequence[int | float], dtype: torch.dtype) -> list[Any]:
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=dtype, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def _sent(self, text: str, source: int) -> str:
        """The text of one rank, on all."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor(len(data), device=self.device)
        dist.broadcast(length, source)
        data = data if self.rank == source else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, source)
        return bytes(data.tolist()).decode()


def of_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started this process."""
    return all(name in environment for name in VARIABLES)


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Joins the processes that torchrun started, and leaves them at the end; NCCL on CUDA, else gloo.

    Args:
        device: "cuda" means a GPU of its own for every process of a machine.
    """
    if device.partition(":")[0] == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=torch.device(device))
    else:
        dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
