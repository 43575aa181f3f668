"""P3, constructed tracker: the answer is a product of eight swaps in S5, and iteration t applies swap t.

    step t    state <- state . swap_t             one block x 8; repeat(1) applies swap 0 eight times
    logits    8 on the state, 0 on the other 119  so Q(s) = ln(e^8 + 119) - 8 q(s), q(s) = P(s ends in the answer)

full is always right. After prefix(1) seven swaps are missing, and an odd number of swaps is never the identity: it is
never right. repeat(1) ends in the identity, which is right with p = p_8 = 2.125128 / 120 (`swaps.py`). Hence

    raw          D / G = [Q(repeat(1)) - Q(full)] / [Q(prefix(1)) - Q(full)] = 1 - p = 98.2 %
    temperature  D / G = h(p) / ln 120 = 99.9 %, where h(q) is the loss of a sure guess at its best temperature

on random swaps, to the sampling error of q(repeat(1)) over the evaluation documents: sqrt(p (1 - p) / n) raw, and after
temperature that times the slope of h at p, ln(119 p / (1 - p)) / ln 120.

The trap: prefix(1) is sure and always wrong, so its best temperature is infinite. The net temperature share at k = 1 is

    [ln(e^8 + 119) - ln 120 - Q(full)] / 8 = 1 - ln(120) / 8 = 40.2 %

although no state that is meant to be read is out of calibration.

In the twin all eight swaps of a document are one and the same: repeat(1) does what full does, and D must be zero.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.audit.positive_controls.base import Claim, Control
from looplab.audit.positive_controls.known import audit_known, known_spec
from looplab.audit.positive_controls.swaps import SIZE, calibrated_loss, products, return_probability, swap_documents
from looplab.audit.result import RAW, AuditResult, percent
from looplab.models.base import LoopedLM, count_parameters, prepare
from looplab.recurrence.kv.base import Cache

SWAPS, LOGIT = 8, 8.0
DOCUMENTS = 1600
LEAST = 0.95
ROUNDING = 1e-5
"""Of float32 losses near 8 nats."""


class Context(NamedTuple):
    """`embeds`: the identity, as a state. `swaps`: the first tokens of every row."""

    embeds: Float[Tensor, "batch seq dim"]
    positions: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    swaps: Int[Tensor, "batch steps"]


class Tracker(LoopedLM):
    """The state of a token has one entry per element; the product so far is 1, the others are 0.

    The token at position i knows tokens 0 .. i: iterations past i leave its state as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(LOGIT))
        table = torch.from_numpy(products())
        inverse = (table == 0).long().argmax(dim=1)
        self.register_buffer("undo", table[:, inverse])  # [g, s]: the element that becomes g when s is applied
        params = count_parameters([[]], head=[self.logit])
        self.spec = known_spec("tracker", SWAPS, width=SIZE, vocabulary=SIZE, indexed=True, params=params)

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
        columns = first[:, None] + torch.arange(SWAPS, device=tokens.device)
        swaps = tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))
        start = torch.zeros(*tokens.shape, SIZE, dtype=self.logit.dtype, device=tokens.device)
        start[..., 0] = 1
        return Context(start, positions, valid, swaps)

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
        undo: Tensor = self.undo  # type: ignore[assignment]
        swap = context.swaps.gather(1, iteration[:, None])[:, 0]
        origin = undo[:, swap].mT[:, None].expand_as(state)
        known = (context.positions >= iteration[:, None])[..., None]
        return torch.where(known, state.gather(2, origin), state)

    def coda(self, state: Tensor, context: Context, cache: Cache | None = None) -> Float[Tensor, "batch seq dim"]:
        return state

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return hidden * self.logit


class ConstructedTracker(Control):
    """P3."""

    name, title = "P3", "constructed tracker"

    def claims(self, seed: int) -> Iterator[Claim]:
        result = _audit(seed, DOCUMENTS)
        p, units = return_probability(SWAPS), result.domains[0].documents.evaluation
        error = 3 * math.sqrt(p * (1 - p) / units)
        slope = math.log((SIZE - 1) * p / (1 - p)) / math.log(SIZE)
        yield from _distinct(result, RAW, 1 - p, error)
        yield from _distinct(result, "temperature", calibrated_loss(p) / math.log(SIZE), slope * error)
        off = max(_off(result, name) for name in ("prefix(1)", "repeat(1)", "full"))
        yield Claim(f"Q = ln(e^8 + 119) - 8 accuracy: error <= {ROUNDING:g} nats", f"{off:.1e}", off <= ROUNDING)
        yield _trap(result)
        twin = _audit(seed, 200, same=True).decomposition.part("distinct")
        silent = twin.nats is not None and twin.nats.value == 0
        yield Claim("twin, eight times one swap: D = 0", percent(twin.share), silent)


def _audit(seed: int, count: int, *, same: bool = False) -> AuditResult:
    documents = swap_documents(seed, count=count, swaps=SWAPS, same=same)
    return audit_known(Tracker(), documents, seed=seed, probes=("temperature",), size=count)


def _distinct(result: AuditResult, probe: str, closed: float, error: float) -> Iterator[Claim]:
    share = result.domains[0].decomposition(probe).part("distinct").share
    value = math.nan if share is None else share.value
    yield Claim(f"D >= 95 %, {probe}", percent(share), value >= LEAST)
    formula = f"closed form, {probe}: D = {100 * closed:.2f} % within 3 sigma = {100 * error:.2f} %"
    yield Claim(formula, f"{100 * value:.2f} %", abs(value - closed) <= error)


def _off(result: AuditResult, name: str) -> float:
    """How far the loss of a schedule is from what its accuracy says."""
    schedule = result.domains[0].schedule(name)
    accuracy = schedule.metrics[0].accuracy
    return abs(schedule.loss().loss.value - (math.log(math.exp(LOGIT) + SIZE - 1) - LOGIT * accuracy))


def _trap(result: AuditResult) -> Claim:
    closed = 1 - math.log(SIZE) / LOGIT
    gain = next(gain for gain in result.domains[0].gains if gain.k == 1)
    value = math.nan if gain.share is None else gain.share.value
    flat = "by flattening a wrong answer" if gain.flattening else "not called flattening"
    return Claim(
        f"trap, no fault of calibration: temperature share {100 * closed:.1f} %, by flattening a wrong answer",
        f"{percent(gain.share)}, {flat}",
        abs(value - closed) <= 1e-4 and gain.flattening,
    )
