"""One run on several processes: where its parameters are, and what the processes add up.

    Alone          one process
    Replicated     every process has the whole model; gradients are summed (DDP around the whole step)
    Sharded        every process has a piece of parameters, gradients and optimizer state (FSDP2, `training.units`)

Every process trains its own rows of the global batch (`training.deal`). A loss is a sum over rows divided by a count
over the rows of all processes, so shares of gradients are added, never averaged, and a run has the same losses as on
one process up to rounding. What is recorded is summed over all processes.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.data.packing import Batch
from looplab.models.base import LoopedLM
from looplab.objectives.base import LossParts, Objective, Part, scored_positions
from looplab.objectives.prefix_distillation import PrefixDistillation
from looplab.recurrence.gradient.base import GradientStrategy
from looplab.recurrence.ledger import Ledger
from looplab.training.config import RunConfig
from looplab.training.ranks import Ranks
from looplab.training.step import Drawn, TrainingStep, depth_plan, scored_counts
from looplab.training.units import CODA, HEAD, SplitModel, Unit, unit_parts

Rows = Callable[[], tuple[Batch, Float[Tensor, "batch seq noise"] | None]]
"""Makes a few rows, on the CPU, to watch a model read its parameters."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One process, and what is alike for several."""

    ranks: Ranks = Ranks()
    compiles: ClassVar[bool] = True
    """Whether parts of the model may be compiled."""

    @property
    def name(self) -> str:
        """For records: empty for one process."""
        return ""

    def check(self, config: RunConfig) -> None:
        """Refuses runs that would not be the same run on these processes.

        Raises:
            ValueError: Names the field.
        """
        size, objective = self.ranks.size, config.objective
        if size == 1:
            return
        name = type(objective).__name__
        if objective.carries:
            raise ValueError(
                f"RunConfig.objective must keep nothing between steps to train on {size} processes. Got {name}, which "
                "keeps states of whole batches. Train it on one process."
            )
        if isinstance(objective, PrefixDistillation):
            raise ValueError(
                f"RunConfig.objective must score all rows alike to train on {size} processes. Got {name}, which has no "
                "part where no row ends. Train it on one process."
            )
        if config.state_norms:
            raise ValueError(
                f"RunConfig.state_norms must be False on {size} processes, each of which has its own rows only. Got "
                "True. Train on one process."
            )
        if config.optimizer.tables is not None:
            raise ValueError(
                f"RunConfig.optimizer.tables must be None on {size} processes: puzzle tables are no parameters, and "
                f"nothing adds up their gradients. Got {config.optimizer.tables}. Train on one process."
            )
        if config.data.rows % (size * config.micro_batches):
            raise ValueError(
                f"The rows of the global batch must be a multiple of processes * micro_batches "
                f"({size} * {config.micro_batches}). Got {config.data.rows}. Change one of the three."
            )

    def place(self, step: TrainingStep, rows: Rows) -> nn.Module:
        """Puts the step on the device of this process and returns what is called in its place."""
        return step.to(self.ranks.device)

    def deal(self, rows: Sequence[Int[Tensor, " piece"]], drawn: Sequence[Drawn], spec: Any) -> tuple[Any, list[Drawn]]:
        """Numbers of the rows of this process, and the depths of its micro-batches; None: all rows.

        Args:
            rows: Row numbers of the micro-batches of the global batch.
        """
        if self.ranks.size == 1:
            return None, list(drawn)
        own, mine = [], []
        for piece, draw in zip(rows, drawn, strict=True):
            places = torch.arange(self.ranks.rank, len(piece), self.ranks.size)  # a row's data and draws go with it
            own.append(piece[places])
            if draw.depths is not None:
                depths = draw.depths[places]
                draw = Drawn(float(depths.double().mean()), depth_plan(spec, int(depths.max())), depths)
            mine.append(draw)
        return torch.cat(own), mine

    def counts(self, objective: Objective, pieces: Sequence[Batch], drawn: Sequence[Drawn]) -> dict[str, int]:
        """Scored terms of the global batch; the micro-batches are those of this process.

        Raises:
            ValueError: No process has any.
        """
        if self.ranks.size == 1:
            return scored_counts(objective, pieces, drawn)
        own = scored_counts(objective, pieces, drawn) if any(scored_positions(p.labels) for p in pieces) else {}
        names = own or objective.counts(torch.zeros_like(pieces[0].labels), len(drawn[0].plan))
        total = self.ranks.total_counts([own.get(name, 0) for name in names])
        return dict(zip(names, total, strict=True)) if any(total) else scored_counts(objective, pieces, drawn)

    def parts(self, parts: LossParts) -> LossParts:
        """The parts over the global batch, in float64."""
        if self.ranks.size == 1:
            return parts
        sums = self.ranks.total([float(part.sum) for part in parts.values()])
        counts = self.ranks.total_counts([part.count for part in parts.values()])
        return LossParts(
            {
                name: Part(torch.tensor(s, dtype=torch.float64), count, part.weight)
                for (name, part), s, count in zip(parts.items(), sums, counts, strict=True)
            }
        )

    def ledger(self, ledger: Ledger) -> Ledger:
        """What all processes ran."""
        if self.ranks.size == 1:
            return ledger
        counts = ledger.to_dict(times=False)
        blocks = sorted(counts.pop("applications").items())
        names = [name for name in counts if name not in ("kv_bytes", "row_applications")]
        total = self.ranks.total_counts([*(n for _, n in blocks), *(counts[name] for name in names)])
        applications = dict(zip((block for block, _ in blocks), total, strict=False))
        return Ledger.from_dict(
            {"applications": applications, "kv_bytes": 0, **dict(zip(names, total[len(blocks) :], strict=True))}
        )

    def accumulating(self, called: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch; gradients may stay apart until the last one."""
        return nullcontext()

    def backward(self, share: Float[Tensor, ""]) -> None:
        """Adds the gradient of a share of the loss."""
        share.backward()

    def gathered(self, step: TrainingStep) -> AbstractContextManager[None]:
        """Around calls of the model itself: with all parameters in place."""
        return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Replicated(Alone):
    """The whole model on every process."""

    @property
    def name(self) -> str:
        return f"{self.ranks.size} processes (ddp)"

    def place(self, step: TrainingStep, rows: Rows) -> nn.Module:
        step = step.to(self.ranks.device)
        # A step need not reach every parameter: a short prefix leaves the last block out, a depth of 1 an injection
        # that acts from the second application on. Such a parameter stays without a gradient, as on one process.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # its new name is of 2.13
            return nn.parallel.DistributedDataParallel(step, broadcast_buffers=False, find_unused_parameters=True)

    def accumulating(self, called: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else called.no_sync()  # type: ignore[operator]

    def backward(self, share: Float[Tensor, ""]) -> None:
        (share * self.ranks.size).backward()  # DDP divides by it


@dataclass(frozen=True, kw_only=True)
class Sharded(Alone):
    """A piece of everything on every process."""

    compiles: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.ranks.size} processes (fsdp)"

    def check(self, config: RunConfig) -> None:
        super().check(config)
        name, inner = type(config.objective).__name__, getattr(config.gradient, "inner", config.gradient)
        if config.objective.inner_gradient:
            raise ValueError(
                f"RunConfig.objective must take no gradient inside of its forward pass to be sharded. Got {name}. "
                "Train it with ddp."
            )
        if config.compile is True:
            raise ValueError(
                "RunConfig.compile must be False or 'auto' (which leaves it out) to be sharded. Got True. Train with "
                "ddp."
            )
        if type(inner).walk is not GradientStrategy.walk:
            raise ValueError(
                f"RunConfig.gradient must be a strategy that cuts the graph only to be sharded. Got "
                f"{type(inner).__name__}. Use TruncatedBPTT, or train with ddp."
            )

    def place(self, step: TrainingStep, rows: Rows) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(torch.device(self.ranks.device).type, (self.ranks.size,))
        _refuse_scalars(step.model)
        units = {name: Unit(parts) for name, parts in unit_parts(step.model, *rows()).items()}
        step.units = nn.ModuleDict(units)
        done: set[nn.Parameter] = set()
        for name, unit in units.items():
            readout = name in (CODA, HEAD)
            fully_shard(unit, mesh=mesh, reshard_after_forward=not readout)
            unit.set_reshard_after_backward(not readout)  # type: ignore[operator]
            done |= set(unit.parameters())
        # The parameters of units are still found through the model, too.
        fully_shard(step, mesh=mesh, ignored_params=done)
        for module in (step, *units.values()):
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        step.split = SplitModel(step.model, units)
        return step

    @contextmanager
    def accumulating(self, called: nn.Module, *, last: bool) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing is in place
            yield
        # Readouts may be many, so what they read was kept until here.
        for unit in (*called.units.values(), called):  # type: ignore[union-attr,operator]
            unit.reshard()  # type: ignore[operator]

    @contextmanager
    def gathered(self, step: TrainingStep) -> Iterator[None]:
        modules: list[Any] = [step, *step.units.values()]
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()


def _refuse_scalars(model: LoopedLM) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ValueError(
            f"A sharded parameter must have an axis. Got {', '.join(scalars)} without one. Train with ddp."
        )
