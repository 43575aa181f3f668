"""The contract of a training objective: a batch and a plan in, named parts of a loss out.

    value_i = sum_i / count_i           count_i: scored terms of the *global* batch
    total   = sum over parts of weight_i * value_i

Sums and counts travel apart. Micro-batches (and ranks) add their sums before anything is divided, so a batch that is
cut differently gives the same loss and the same gradient up to rounding.

Most objectives score the states of one rollout: they write `loss`. One that makes passes of its own, starts from other
states, or keeps something between steps (`carries`) writes `run`, which gets everything a step has.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from looplab._registry import Registry
from looplab._types import Bool, Float, Int
from looplab.data.packing import Batch
from looplab.recurrence import state as states
from looplab.recurrence.aligned import run_aligned
from looplab.recurrence.gradient.base import GradientStrategy
from looplab.recurrence.gradient.full import FullBPTT
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import run_plan
from looplab.recurrence.philox import stream_key
from looplab.recurrence.plan import Plan
from looplab.recurrence.trace import Recorder

OBJECTIVES: Registry[type["Objective"]] = Registry("objective", package="looplab.objectives")

IGNORED = -100
"""Label of a position that is not scored."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an objective reads. The trainer keeps and computes nothing else."""

    states: Literal["last", "every"] = "last"
    """The states it scores: after the last application, or after every one. Cuts of the graph need the second."""
    targets: bool = False
    """Whether every iteration has a target of its own, which only some tasks have (`tasks.base.Progress`)."""


@dataclass(frozen=True)
class Part:
    """One term of a loss, not yet divided."""

    sum: Float[Tensor, ""]
    """Over the scored terms."""
    count: int
    """Number of scored terms."""
    weight: float
    """Factor of the mean in the total."""


class LossParts(Mapping[str, Part]):
    """Parts by name, in order. `a + b` joins the parts of two micro-batches."""

    def __init__(self, parts: Mapping[str, Part]):
        self._parts = dict(parts)

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __add__(self, other: "LossParts") -> "LossParts":
        if list(self) != list(other):
            raise ValueError(f"LossParts must have the same parts to be added. Got {list(self)} and {list(other)}.")
        return LossParts(
            {name: Part(a.sum + other[name].sum, a.count + other[name].count, a.weight) for name, a in self.items()}
        )

    def detach(self) -> "LossParts":
        """The same numbers without a graph."""
        return LossParts({name: replace(part, sum=part.sum.detach()) for name, part in self.items()})

    def share(self, counts: Mapping[str, int]) -> Float[Tensor, ""]:
        """These parts' share of the total of a global batch with `counts` scored terms; what is differentiated."""
        terms = [part.weight / counts[name] * part.sum for name, part in self.items()]
        return torch.stack(terms).sum()

    def means(self) -> dict[str, float]:
        """Mean of every part, in float64."""
        return {name: float(part.sum.detach()) / part.count for name, part in self.items()}

    @property
    def total(self) -> float:
        """Sum of weight * value, in float64."""
        return sum(self[name].weight * value for name, value in self.means().items())


@dataclass
class Rollout:
    """One pass through the loop, as an objective sees it."""

    model: Any
    context: Any
    plan: Plan
    states: Mapping[int, Any]
    """Number of applications so far -> state; holds what the objective `reads`."""
    ledger: Ledger | None = None
    beside: nn.Module | None = None
    """See `Pass`."""

    def hidden(self, applications: int) -> Float[Tensor, "batch seq dim"]:
        """What the head reads after that many applications."""
        hidden = self.model.coda(self.states[applications], self.context)
        if self.ledger is not None:
            rows, tokens = hidden.shape[:2]
            self.ledger.count_coda(self.model.spec, rows=rows, tokens=tokens, gradient=torch.is_grad_enabled())
        return hidden

    def laws(
        self, applications: int, labels: Int[Tensor, "batch seq *cells"]
    ) -> Float[Tensor, "batch seq *cells symbols"]:
        """Logits after that many applications, one law per label; float32 at least."""
        logits = self.model.head(self.hidden(applications))
        if self.ledger is not None:
            tokens, gradient = labels.shape[0] * labels.shape[1], torch.is_grad_enabled()
            self.ledger.count_head(self.model.spec, tokens=tokens, gradient=gradient)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if labels.dim() == 2 else logits.unflatten(-1, (labels.shape[-1], -1))

    def to_state_alone(self, applications: int, read: Callable[["Rollout"], Float[Tensor, ""]]) -> Float[Tensor, ""]:
        """`read(rollout)`, whose gradient reaches the state after that many applications and nothing else."""
        if not torch.is_grad_enabled():
            return read(self)
        state = self.states[applications]
        leaves = states.leaves(state)
        free = states.map(lambda leaf: leaf.detach().requires_grad_(), state)
        value = read(replace(self, states={applications: free}))
        total = value.detach()
        for leaf, slope in zip(leaves, torch.autograd.grad(value, states.leaves(free), allow_unused=True), strict=True):
            if slope is not None and leaf.requires_grad:
                total = total + ((leaf - leaf.detach()) * slope).sum()  # 0, with this slope
        return total


@dataclass(kw_only=True)
class Pass:
    """Everything a training step has, for the rows of one micro-batch."""

    model: Any
    batch: Batch
    plan: Plan
    """The applications of the drawn depth."""
    noise: Float[Tensor, "batch seq noise"] | None = None
    """For models that start from noise."""
    depths: Int[Tensor, " batch"] | None = None
    """Iterations of every row, where rows have their own; the plan is that of the deepest."""
    row_bucket: int = 1
    """See `recurrence.aligned`."""
    all_rows: int | None = None
    """Rows of the global batch; None: those of this one."""
    gradient: GradientStrategy = field(default_factory=FullBPTT)
    step: int = 0
    """Optimizer step, from 0."""
    steps: int = 1
    """Optimizer steps of the run."""
    seed: int = 0
    """Of the run."""
    carry: Mapping[str, Tensor] = field(default_factory=dict)
    """What the objective kept of the step before; empty at the first one."""
    fetch: Callable[[int, Sequence[int]], Batch] | None = None
    """(difficulty, numbers) -> these rows of the stream, where rows are numbered (tasks)."""
    beside: nn.Module | None = None
    """What the objective trains beside a finished model (`Objective.beside`)."""
    ledger: Ledger | None = None
    recorder: Recorder | None = None

    def generator(self, stream: str) -> torch.Generator:
        """A generator of this step alone, the same for all its rows."""
        return torch.Generator().manual_seed(stream_key(self.seed, f"{stream}:{self.step}") >> 1)

    def normal(self, generator: torch.Generator, times: int, shape: Sequence[int]) -> Float[Tensor, "times *shape"]:
        """Standard normal numbers `times` over for these rows, drawn for the rows of the global batch.

        Args:
            shape: Of a tensor whose first axis are the rows.
        """
        if self.all_rows is None:
            return torch.randn((times, *shape), generator=generator, dtype=torch.float32)
        drawn = torch.randn((times, self.all_rows, *shape[1:]), generator=generator, dtype=torch.float32)
        return drawn[:, self.batch.rows.cpu()]

    def encode(self) -> Any:
        """The context of the batch, counted."""
        return encode(self.model, self.batch, ledger=self.ledger)

    def count_readout(self, hidden: Float[Tensor, "batch seq dim"]) -> None:
        """Enters one coda and one head over all tokens into the ledger."""
        if self.ledger is not None:
            rows, tokens = hidden.shape[:2]
            gradient = torch.is_grad_enabled()
            self.ledger.count_coda(self.model.spec, rows=rows, tokens=tokens, gradient=gradient)
            self.ledger.count_head(self.model.spec, tokens=rows * tokens, gradient=gradient)


class Outcome(NamedTuple):
    """What a pass came to."""

    parts: LossParts
    first: Any
    """State before the first application ..."""
    last: Any
    """... and after the last."""
    plan: Plan
    """The applications that ran."""
    carry: dict[str, Tensor] = {}  # noqa: RUF012, never written to
    """Detached tensors for the next step."""
    free: int = 0
    """The first applications of the plan, which the objective runs without a gradient under any strategy."""


class Objective(ABC):
    """What a training step minimises."""

    needs: ClassVar[Needs] = Needs()
    carries: ClassVar[bool] = False
    """Whether something is kept from step to step; checkpoints then hold it, and a batch is never cut."""
    inner_gradient: ClassVar[bool] = False
    """Whether a gradient is taken inside of the forward pass."""

    def check(self, model: Any) -> None:  # noqa: B027, most have nothing to refuse
        """Refuses a model that this objective cannot train; run configurations ask.

        Args:
            model: Its parameters say by `requires_grad` which of them are trained; it may have no storage.
        """

    def beside(self, model: Any) -> nn.Module | None:
        """A new module that is trained beside `model`, which then stays as it is; None: the model is trained."""
        return None

    def reads(self, length: int) -> Collection[int]:
        """Numbers of applications after which the state of a rollout is kept for `loss`."""
        return range(length + 1) if self.needs.states == "every" else (length,)

    @abstractmethod
    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Scored terms per part. The whole batch is counted before its first micro-batch runs.

        Args:
            length: Applications of the plan.
        Raises:
            ValueError: Nothing is scored.
        """

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The parts over the rows of `rollout`; `labels` are the targets of these rows, IGNORED where unscored."""
        raise TypeError(f"{type(self).__name__}.loss: it makes passes of its own. Call run(...)")

    def run(self, given: Pass) -> Outcome:
        """One forward pass under the gradient strategy, and its parts."""
        rollout, first, last = roll(given, self.reads(len(given.plan)))
        return Outcome(self.loss(rollout, given.batch.labels), first, last, given.plan)


class Kept(Recorder):
    """Keeps the states after the given numbers of applications and drops the others."""

    def __init__(self, wanted: Collection[int]):
        super().__init__(max_bytes=sys.maxsize)
        self.wanted, self.done = wanted, 0
        self.by_number: dict[int, Any] = {}

    def start(self, state: Any) -> None:
        self.by_number, self.done = {}, -1
        self._keep_state(state)

    def _keep_state(self, state: Any) -> None:
        self.done += 1
        if self.done in self.wanted:
            self.by_number[self.done] = state


def roll(
    given: Pass, wanted: Collection[int], *, before: Callable[[Any, int], Any] | None = None
) -> tuple[Rollout, Any, Any]:
    """One pass along the plan under the gradient strategy: the rollout, its first state and its last.

    Args:
        wanted: Numbers of applications after which the state is kept; where rows have depths of their own, the end of
            each is kept alone.
        before: See `run_plan`.
    """
    context = given.encode()
    first = given.model.init_state(context, given.noise)
    if given.depths is not None:
        last = run_aligned(
            given.model,
            given.depths,
            context,
            first,
            gradient=given.gradient,
            row_bucket=given.row_bucket,
            recorder=given.recorder,
            ledger=given.ledger,
        )
        states_kept = {len(given.plan): last}
        return Rollout(given.model, context, given.plan, states_kept, given.ledger, given.beside), first, last
    recorder = given.recorder or Kept(wanted)
    last = run_plan(
        given.model,
        given.plan,
        context,
        first,
        gradient=given.gradient,
        before=before,
        ledger=given.ledger,
        recorder=recorder,
    )
    kept = recorder.by_number if isinstance(recorder, Kept) else dict(enumerate(recorder.states))
    kept = {number: state for number, state in kept.items() if number in wanted} | {len(given.plan): last}
    return Rollout(given.model, context, given.plan, kept, given.ledger, given.beside), first, last


def read_points(rollout: Rollout) -> list[int]:
    """Numbers of applications after which the readout has something new to say."""
    writes = rollout.model.spec.writes_readout
    return [number for number, (block, _) in enumerate(rollout.plan, 1) if block in writes]


def scored_mask(labels: Int[Tensor, "batch seq *cells"]) -> Bool[Tensor, "batch seq"]:
    """Positions of which at least one cell has a label."""
    scored = labels != IGNORED
    return scored if labels.dim() == 2 else scored.any(-1)


def labelled(objective: Objective, labels: Int[Tensor, "batch seq *cells"]) -> int:
    """Positions with a label.

    Raises:
        ValueError: There are none.
    """
    scored = scored_positions(labels)
    if scored == 0:
        raise ValueError(
            f"{type(objective).__name__} needs at least one label. Got a batch in which all are -100. "
            "Check the prompts."
        )
    return scored


def scored_positions(labels: Int[Tensor, "batch seq *cells"]) -> int:
    """Positions of which at least one cell has a label."""
    return int(scored_mask(labels).sum())


def needs_gate(objective: Objective, model: Any) -> None:
    """Refuses a model without a gate that says per token how likely it stops after this application.

    Raises:
        ValueError: No stopping score at all, or one of another kind.
    """
    name, halt = type(objective).__name__, model.spec.halt
    if halt is None:
        raise ValueError(f"{name}: model {model.spec.name!r} has no halt(). Models with one: ouro, trm, hrm.")
    if (halt.layout, halt.per, halt.horizon) != ("hazard", "token", 0):
        raise ValueError(
            f"{name} needs a gate whose score is a hazard per token, of the same step. That of {model.spec.name!r} is "
            f"{halt.layout} per {halt.per} with horizon {halt.horizon}. Build the model with halt=HazardGate()."
        )


def encode(model: Any, batch: Batch, *, ledger: Ledger | None = None) -> Any:
    """The context of a batch, counted."""
    extras = None if batch.document_ids is None else {"document_ids": batch.document_ids}
    if "puzzle_ids" in model.spec.extras:
        # Problems have no identity of their own: they share the first entry of the table.
        extras = {**(extras or {}), "puzzle_ids": torch.zeros_like(batch.tokens[:, 0])}
    # Where documents are not told apart positions are the places, which is what every model takes by itself.
    positions = None if batch.document_ids is None else batch.positions
    context = model.encode(batch.tokens, positions=positions, extras=extras)
    if ledger is not None:
        rows, tokens = batch.tokens.shape
        ledger.count_encode(model.spec, rows=rows, tokens=tokens, gradient=torch.is_grad_enabled())
    return context
