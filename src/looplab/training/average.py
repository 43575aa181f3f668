"""The exponential average of the weights along a run, which evaluation uses in their place.

    a <- decay a + (1 - decay) w          after every update, in float32, from a = the first w

Of the parameters that are trained; all else of the model is its own. As in the runs of TRM, arXiv:2510.04871.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from looplab.training.optimizer import trained
from looplab.training.spread import as_placed


class WeightAverage:
    """A copy of the trained parameters that follows them slowly.

    Attributes:
        tensors: By name.
    """

    def __init__(self, model: nn.Module, decay: float):
        self._parameters, self._decay = dict(trained(model)), decay
        self.tensors = {name: p.detach().to(torch.float32, copy=True) for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Follows one update of the parameters."""
        for name, parameter in self._parameters.items():
            self.tensors[name].lerp_(parameter.float(), 1 - self._decay)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from saved averages."""
        for name, tensor in self.tensors.items():
            tensor.copy_(as_placed(tensors[name], tensor))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averages as its weights; afterwards it has its own again, to the bit."""
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._put(self.tensors)
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])
