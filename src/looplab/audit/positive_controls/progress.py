"""P3b, state tracking as a task: one block x 8 with an iteration embedding, aligned to progress, graded on its answers.

    embedding[t]   attends to position t + 1
    step t         state_j <- state_j . operation(t + 1), at every position j > t       one block x 8
    logits         8 on the item of every slot, 0 on the other four: five cells of five symbols

State after k iterations: the product of the first k swaps, as prefix targets of progress-aligned training ask. A state
and the answer share a slot with the probability of a fixed point of a product of the n swaps between them; the mean
number of fixed points is 1 + 4 / 2^n (`swaps.py`). So with five cells

    Q(s) = 5 ln(e^8 + 4) - 8 shared(s)      shared: full 5, prefix(1) 1 + 4 / 2^7, repeat(1) 1 + 4 / 2^8
    D / G = (5 - shared(repeat(1))) / (5 - shared(prefix(1))) = 100.4 %

and exact matches are 1 at full, 0 at prefix(1) (an odd product is never the identity), and p_8 = 1.77 % at repeat(1),
which ends in the identity.

In the twin, step t is state_j <- state_{j-1} . operation(j), which needs no iteration index: full answers as well, by
window targets, and repeat(1) is full. D must be zero.

Reference: the trained model of this shape is an arm of `recipes/par.py`; here its weights are written by hand.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.audit.config import AuditConfig
from looplab.audit.positive_controls.base import Claim, Control
from looplab.audit.positive_controls.known import known_spec
from looplab.audit.positive_controls.swaps import return_probability
from looplab.audit.problems import Problems
from looplab.audit.protocol import audit_model
from looplab.audit.result import RAW, AuditResult, percent
from looplab.models.base import LoopedLM, count_parameters, prepare
from looplab.recurrence.kv.base import Cache
from looplab.tasks.state_tracking import StateTracking

SWAPS, LOGIT, SLOTS = 8, 8.0, 5
TASK = StateTracking(group="swap_s5", train_length=SWAPS // 2)
"""Words of eight swaps are only tested: nothing was trained here."""
DOCUMENTS = 600
LEAST_RAW, LEAST_CALIBRATED = 0.7, 0.9


class Context(NamedTuple):
    """`embeds`: the identity, as a state. `moves`: every token's operation. `word`: those of the row, from its first
    token on."""

    embeds: Float[Tensor, "batch seq dim"]
    positions: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    moves: Int[Tensor, "batch seq slots"]
    word: Int[Tensor, "batch tokens slots"]


class Follower(LoopedLM):
    """The state of a position says which item is in which slot.

    Args:
        indexed: Whether iterations are told apart by their embedding; else it is there and nothing reads it.
    """

    def __init__(self, *, indexed: bool = True) -> None:
        super().__init__()
        self.indexed = indexed
        self.logit = nn.Parameter(torch.tensor(LOGIT))
        self.embedding = nn.Parameter(torch.eye(SWAPS + 1)[1:])  # row t attends to position t + 1
        swaps = torch.from_numpy(TASK.generators)
        self.register_buffer("moves", torch.cat([torch.arange(SLOTS)[None], swaps]))  # <bos> moves nothing
        params = count_parameters([[self.embedding]], head=[self.logit])
        size = SLOTS * SLOTS
        spec = known_spec("follower", SWAPS, width=size, vocabulary=size, indexed=True, params=params)
        self.spec = replace(spec, cells=SLOTS, token_ids=len(TASK.tokens))

    def encode(
        self,
        tokens: Int[Tensor, "batch seq"],
        cache: Cache | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> Context:
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        first = tokens.new_zeros(len(tokens)) if valid is None else valid.long().argmax(dim=1)
        columns = first[:, None] + torch.arange(SWAPS + 1, device=tokens.device)
        table: Tensor = self.moves  # type: ignore[assignment]
        word = table[tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))]
        start = torch.eye(SLOTS, dtype=self.logit.dtype, device=tokens.device).flatten()
        return Context(start.expand(*tokens.shape, -1), positions, valid, table[tokens], word)

    def init_state(self, context: Context, noise: Float[Tensor, "batch seq noise"] | None) -> Tensor:
        return context.embeds

    def step(
        self,
        state: Tensor,
        context: Context,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> Tensor:
        if not self.indexed:
            before = torch.cat([context.embeds[:, :1], state[:, :-1]], dim=1)
            moved = _moved(before, context.moves)
            return torch.where((context.positions > 0)[..., None], moved, context.embeds)
        place = self.embedding[iteration].argmax(dim=1)
        chosen = context.word[torch.arange(len(place), device=place.device), place]
        moved = _moved(state, chosen[:, None].expand(-1, state.shape[1], -1))
        return torch.where((context.positions >= place[:, None])[..., None], moved, state)

    def coda(self, state: Tensor, context: Context, cache: Cache | None = None) -> Float[Tensor, "batch seq dim"]:
        return state

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return hidden * self.logit


def _moved(state: Float[Tensor, "batch seq dim"], moves: Int[Tensor, "batch seq slots"]) -> Tensor:
    """Slot i gets what was in slot moves[i]."""
    slots = state.unflatten(-1, (SLOTS, SLOTS))
    return slots.gather(2, moves[..., None].expand_as(slots)).flatten(2)


class ProgressTracker(Control):
    """P3b."""

    name, title = "P3b", "tracker of a task"

    def claims(self, seed: int) -> Iterator[Claim]:
        result = _audit(seed, DOCUMENTS)
        units = result.domains[0].documents.evaluation
        for probe, least in ((RAW, LEAST_RAW), ("temperature", LEAST_CALIBRATED)):
            share = result.domains[0].decomposition(probe).part("distinct").share
            value = math.nan if share is None else share.value
            yield Claim(f"D >= {100 * least:.0f} %, {probe}", percent(share), value >= least)
        yield _closed_form(result, units)
        for schedule, right in (("full", 1.0), ("prefix(1)", 0.0), ("repeat(1)", return_probability(SWAPS))):
            yield _exact(result, schedule, right, units)
        twin = _audit(seed, 200, indexed=False)
        part = twin.decomposition.part("distinct")
        silent = part.nats is not None and part.nats.value == 0
        yield Claim("twin, a rule that needs no index: D = 0", percent(part.share), silent)
        yield _exact(twin, "repeat(1)", 1.0, units)


def _audit(seed: int, count: int, *, indexed: bool = True) -> AuditResult:
    config = AuditConfig(
        grid=(1,),
        controls=(),
        probes=("temperature",),
        documents=count,
        calibration_documents=count,
        replicates=1000,
        seed=seed,
    )
    return audit_model(Follower(indexed=indexed).eval(), Problems(task=TASK, difficulty=SWAPS), config)


def fixed_points(swaps: int) -> float:
    """Mean number of the five that a product of this many independent uniform swaps leaves in place."""
    return 1 + 4 / 2**swaps


def _closed_form(result: AuditResult, units: int) -> Claim:
    """Sampling error: the number of fixed points has variance 1 or a little more, and both means come from it."""
    closed = (SLOTS - fixed_points(SWAPS)) / (SLOTS - fixed_points(SWAPS - 1))
    error = 3 * math.sqrt(2 * 1.1 / units) / (SLOTS - fixed_points(SWAPS - 1))
    share = result.decomposition.part("distinct").share
    value = math.nan if share is None else share.value
    formula = f"closed form, raw: D = {100 * closed:.2f} % within 3 sigma = {100 * error:.2f} %"
    return Claim(formula, f"{100 * value:.2f} %", abs(value - closed) <= error)


def _exact(result: AuditResult, schedule: str, right: float, units: int) -> Claim:
    answers = result.domains[0].answers
    value = math.nan if answers is None else answers.score(schedule).exact.value
    error = 3 * math.sqrt(right * (1 - right) / units)
    expected = f"exact match at {schedule}: {100 * right:.2f} % within 3 sigma = {100 * error:.2f} %"
    return Claim(expected, f"{100 * value:.2f} %", abs(value - right) <= error)
