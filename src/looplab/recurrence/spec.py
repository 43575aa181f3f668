"""LoopSpec: what every looped model declares about itself, and the only thing outside code asks it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from looplab.nn.cost import CostSpec
from looplab.recurrence.depth.base import Depth
from looplab.recurrence.kv.base import KVRule
from looplab.recurrence.plan import Plan, PlanOrder, Steps


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A stack of layers applied as one unit. Two blocks may name the same stored layers."""

    layers: tuple[int, ...]
    """Ids of stored layers, in the order they run."""
    params: int
    """Stored parameters of these layers and of what only this block owns."""
    reads: tuple[str, ...] = ("state",)
    writes: tuple[str, ...] = ("state",)


@dataclass(frozen=True, kw_only=True)
class StateField:
    """One tensor of the state."""

    width: int
    per: Literal["token", "row"] = "token"
    init: str = ""
    """The rule of the first value, in words."""
    random: bool = False
    read_by_coda: bool = True
    prefix: int = 0
    """Positions before those of the tokens: the field is `prefix + tokens` long, token i stands at prefix + i."""


@dataclass(frozen=True, kw_only=True)
class HaltSpec:
    """The trained stopping score of a model."""

    layout: str
    """hazard: logit of the exit probability; q_halt: one output; q_halt_continue: two."""
    per: Literal["token", "row"]
    rule: str
    """When the trained model stops, in words."""
    horizon: int = 0
    """0: the score speaks of this step; 1: of the next one."""


@dataclass(frozen=True, kw_only=True)
class ParamCount:
    """Parameters by group. Every storage counts once, buffers are left out, a tied head counts 0."""

    embedding: int = 0
    position: int = 0
    prelude: int = 0
    injection: int = 0
    core: tuple[int, ...] = ()
    """Stored parameters per block; a layer shared by two blocks counts in the first."""
    coda: int = 0
    readout: int = 0
    head: int = 0
    halt: int = 0
    memory: int = 0
    router: int = 0
    active: int | None = None
    """Parameters used per token, where a mixture of experts makes that smaller than `total`."""

    @property
    def total(self) -> int:
        """Sum of all groups."""
        parts = (self.embedding, self.position, self.prelude, self.injection, *self.core, self.coda, self.readout)
        return sum(parts) + self.head + self.halt + self.memory + self.router


@dataclass(frozen=True)
class Refuse:
    """An iteration index past the table is an error."""


@dataclass(frozen=True)
class ClampLast:
    """An iteration index past the table reads its last entry."""


@dataclass(frozen=True)
class Cycle:
    """An iteration index past the table starts over."""


Beyond = Refuse | ClampLast | Cycle


def same_function(block: int, iteration: int) -> int:
    """The operator class of a model without an iteration index: every application is the same function."""
    return 0


def own_function(block: int, iteration: int) -> int:
    """The operator class of a model whose every iteration index has its own parameters."""
    return iteration


@dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """Blocks, order, trained depth, dependence on the iteration index, state, cache rule and exact counts."""

    name: str
    version: str
    """Bumped when numbers change."""
    blocks: tuple[BlockSpec, ...]
    order: PlanOrder
    trained_depth: Depth
    operator_class: Callable[[int, int], int] = same_function
    """(block, iteration) -> class; equal classes are the same function of (state, context)."""
    index_parts: frozenset[str] = frozenset()
    """What differs by index: embedding adaln lora router injection residual norm message."""
    max_iteration: int | None = None
    """Own parameters exist for iterations below it."""
    beyond: Beyond = Refuse()
    state: dict[str, StateField]
    noise_width: int = 0
    kv_rule: KVRule
    kv_rules: tuple[KVRule, ...]
    causal: bool = True
    padding: frozenset[str] = frozenset({"left", "right"})
    max_positions: int | None = None
    """Longest trained context, in tokens."""
    fixed_length: int | None = None
    """Tokens of every row, where the model is built for no other number."""
    grid: Callable[[int], tuple[int, ...]] | None = None
    """Step-size-conditioned models: k -> the iteration ids of k steps to the trained end time."""
    refine: Callable[[], object] | None = None
    """The same model with single layers as blocks."""
    vocab: tuple[int, int]
    """(columns of the logits, rows of the padded embedding)."""
    token_ids: int | None = None
    """Token ids that are read, 0 .. token_ids - 1; None: as many as the logits have columns."""
    cells: int = 1
    """Answers per position: the columns of the logits are cells * symbols, and each cell is a law of its own."""
    readout: tuple[str, ...]
    """Modules between state and logits, in order."""
    halt: HaltSpec | None = None
    params: ParamCount
    cost: CostSpec
    extras: dict[str, bool] = field(default_factory=dict)
    """Keys accepted in `encode(extras=...)` -> whether the key must be there."""

    @property
    def default_steps(self) -> Steps:
        """What the checkpoint's own forward runs."""
        return self.order.default_steps

    def plan(self, num_steps: Steps | None = None) -> Plan:
        """The plan of `num_steps` (default: `default_steps`).

        Where iterations have step sizes (`grid`), n steps are n equal ones to the trained end time.

        Raises:
            ValueError: Not an int >= 0 (or one per block), or an iteration index that the model has no parameters for.
        """
        plan = self.order.plan(self.default_steps if num_steps is None else num_steps, len(self.blocks))
        self.check(plan)
        return self.regridded(plan)

    def regridded(self, plan: Plan) -> Plan:
        """A plan whose blocks count 0, 1, .., n - 1, with the ids of n steps to the trained end time in their place."""
        if self.grid is None:
            return plan
        ids = {block: self.grid(n) for block, n in plan.iterations().items()}
        return Plan.of((block, ids[block][iteration]) for block, iteration in plan)

    def marks(self, num_steps: Steps | None = None) -> tuple[int, ...]:
        """Numbers of applications after which the readout is trained."""
        return self.order.marks(self.default_steps if num_steps is None else num_steps, len(self.blocks))

    def check(self, plan: Plan) -> None:
        """Refuses a block the model lacks, and an iteration index past the table under Refuse."""
        for block, iteration in plan:
            if block >= len(self.blocks):
                raise ValueError(f"plan: block must be below {len(self.blocks)}. Got {block} in {plan}.")
            if self.max_iteration is not None and isinstance(self.beyond, Refuse) and iteration >= self.max_iteration:
                part = ", ".join(sorted(self.index_parts))
                raise ValueError(
                    f"{part} has {self.max_iteration} iterations; iteration {iteration} asked for. "
                    "Choose beyond=ClampLast() or Cycle()"
                )

    @property
    def writes_readout(self) -> frozenset[int]:
        """Blocks that write a state field which `coda` reads."""
        read = {name for name, part in self.state.items() if part.read_by_coda}
        return frozenset(i for i, block in enumerate(self.blocks) if read & set(block.writes))
