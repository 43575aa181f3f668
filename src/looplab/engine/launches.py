"""What launches give, on its way from the device to the host."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplab._types import Bool, Int
from looplab.engine import sampling
from looplab.engine.stages import Drawn, Prefilled


class Launch:
    """A launch under way."""

    def __init__(self, device: torch.device, finish: Callable[[], Any]):
        self._finish, self._result = finish, None
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        else:
            self._result = finish()

    def done(self) -> bool:
        """Whether its results have come."""
        return self._event is None or self._event.query()

    def result(self) -> Any:
        """Its results; waits where they have not come."""
        if self._result is None:
            assert self._event is not None
            self._event.synchronize()
            self._result = self._finish()
        return self._result


class Found:
    """What a readout found, on its way to the host."""

    def __init__(
        self,
        tokens: Int[Tensor, " rows"],
        finite: Bool[Tensor, " rows"],
        told: sampling.Read | None,
        alternatives: Sequence[int | None],
    ):
        self.tokens, self.finite, self.alternatives = to_host(tokens), to_host(finite), alternatives
        self.told = None if told is None else sampling.Read(*map(to_host, told))

    def drawn(self, places: Sequence[tuple[int, int]]) -> list[Drawn]:
        """One per row. `places`: (position, steps) of the token that was read."""
        tokens = self.tokens.tolist()
        told = [None] * len(tokens) if self.told is None else sampling.told(self.told, tokens, self.alternatives)
        return [
            Drawn(token, logprob)
            if fine
            else Drawn(-1, None, f"non-finite logits at token {place[0]}, step {place[1]}")
            for token, logprob, fine, place in zip(tokens, told, self.finite.tolist(), places, strict=True)
        ]


class PromptReads(NamedTuple):
    """What a launch of spans reads out, by place in the launch."""

    first: dict[int, Callable[[], list[Drawn]]]
    prompt: dict[int, Callable[[], list[Drawn]]]


class SpanResult(NamedTuple):
    """One span of a launch."""

    launch: PromptReads
    place: int

    def finish(self) -> Prefilled:
        """What it gave."""
        drawn = self.launch.first[self.place]() if self.place in self.launch.first else []
        read = self.launch.prompt[self.place]() if self.place in self.launch.prompt else []
        error = next((one.error for one in (*read, *drawn) if one.error), "")
        return Prefilled(tuple(drawn), tuple(one.logprob for one in read if one.logprob is not None), error)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor where the host can read it; on CUDA a pinned copy under way."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
