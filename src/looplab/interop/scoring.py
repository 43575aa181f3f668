"""Log-likelihoods of continuations, at every depth of one rollout.

    log p(continuation | context) = sum over its tokens of log softmax(head(coda(s_k)))[token],   for every depth k

The plans of all depths form a trie, and `walk` makes each common prefix once: depths 1, 2, 4, 8 of a looped model cost
8 applications. Where the plan of k steps is no prefix of a longer one (step-size-conditioned models lay another grid,
layer-loops finish one block before the next), the trie shares what there is to share and runs the rest.

Rows are sorted by length and padded on a side that the model takes; equal inputs are run once, whatever is scored in
them. Noise belongs to the item, so a result does not depend on its batch. Logits exist for scored tokens alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.audit.runner import Runner
from looplab.audit.words import trie
from looplab.interop.adapters.base import positions_of
from looplab.recurrence.exit import ExitRule, forward_until
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import walk
from looplab.recurrence.plan import Plan, PlanNode
from looplab.recurrence.spec import LoopSpec

LOGIT_NUMBERS = 2**25
"""Most logits that exist at once."""
Progress = Callable[[int], None]
"""Called with the number of requests that were finished."""


class Request(NamedTuple):
    """One continuation to score. Both parts hold token ids and are not empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    item: int = 0
    """Names the noise."""


class Score(NamedTuple):
    """What one continuation came to at one depth."""

    logprob: float
    """Nats, summed over the continuation."""
    greedy: bool
    """Whether every token is the likeliest one."""
    steps: float | None = None
    """Mean exit step over the continuation, under an exit rule."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How many rows share a launch: at most `size` of them, or as many as fit `tokens` with their padding."""

    size: int | None = None
    tokens: int = 8192

    def __post_init__(self) -> None:
        for name, option in (("size", "batch_size"), ("tokens", "batch_tokens")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{option} must be at least 1. Got {value}. Raise it.")

    def split(self, lengths: Sequence[int], *, ragged: bool) -> Iterator[list[int]]:
        """Indices of the rows of every launch, longest rows first.

        Args:
            ragged: Whether rows of different lengths may share a launch.
        """
        launch: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            longest = lengths[launch[0]] if launch else 0
            full = len(launch) >= self.size if self.size else (len(launch) + 1) * longest > self.tokens
            if launch and (full or (not ragged and lengths[index] != longest)):
                yield launch
                launch = []
            launch.append(index)
        if launch:
            yield launch


class _Row(NamedTuple):
    """Inputs that are run once, with the requests whose scores they give."""

    tokens: tuple[int, ...]
    item: int
    requests: list[int]


def score(
    runner: Runner,
    requests: Sequence[Request],
    plans: dict[int, Plan],
    *,
    batching: Batching,
    exit_rule: ExitRule | None = None,
    num_steps: int | None = None,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
) -> dict[int, list[Score]]:
    """Depth -> one score per request, in the order given.

    Args:
        plans: Depth -> its plan.
        exit_rule: Every token is read where the rule leaves the loop, after `num_steps` (None: the model's) at the
            latest; `plans` then holds that depth alone.
    """
    found: dict[int, list[Any]] = {depth: [None] * len(requests) for depth in plans}
    root = trie({str(depth): (plan, plan.applications) for depth, plan in plans.items()})
    counts = Ledger() if ledger is None else ledger
    rows = list(_rows(requests, noisy=runner.spec.noise_width > 0))
    side = padding_side(runner.spec)
    for launch in batching.split([len(row.tokens) for row in rows], ragged=side is not None):
        batch = _Batch([rows[i] for i in launch], requests, side or "right", runner.weights.device)
        reads = (
            _walked(runner, batch, root, counts)
            if exit_rule is None
            else _exited(runner, batch, max(plans), exit_rule, num_steps, counts)
        )
        for depth, scores in reads:
            for index, value in scores:
                found[depth][index] = value
        if progress is not None:
            progress(sum(len(rows[i].requests) for i in launch))
    return found


def padding_side(spec: LoopSpec) -> str | None:
    """The side on which rows are padded, or None where the model takes rows of equal length only."""
    return "right" if "right" in spec.padding else "left" if "left" in spec.padding else None


def shared_applications(plans: dict[int, Plan]) -> tuple[int, int]:
    """Applications of one row when all depths share a rollout, and when each is run alone."""
    root = trie({str(depth): (plan, plan.applications) for depth, plan in plans.items()})
    return root.size(), sum(len(plan) for plan in plans.values())


def padded(
    rows: Sequence[Sequence[int]], side: str, device: torch.device
) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"] | None, list[int]]:
    """Token ids with padding on one side, which of them are valid (None: all), and where every row begins."""
    longest = max(map(len, rows))
    starts = [longest - len(row) if side == "left" else 0 for row in rows]
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    valid = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[i, start : start + len(row)] = torch.tensor(row)
        valid[i, start : start + len(row)] = True
    return tokens.to(device), None if bool(valid.all()) else valid.to(device), starts


def _rows(requests: Sequence[Request], *, noisy: bool) -> Iterator[_Row]:
    """Distinct inputs; the last token of a continuation is predicted and never read."""
    found: dict[tuple[Any, ...], _Row] = {}
    for index, (context, continuation, item) in enumerate(requests):
        tokens = context + continuation[:-1]
        item = item if noisy else 0
        found.setdefault((tokens, item), _Row(tokens, item, [])).requests.append(index)
    return iter(found.values())


class _Batch:
    """Rows of one launch, and where in them the scored tokens are predicted."""

    def __init__(self, rows: Sequence[_Row], requests: Sequence[Request], side: str, device: torch.device):
        self.tokens, self.valid, starts = padded([row.tokens for row in rows], side, device)
        self.items = [row.item for row in rows]
        self.requests = [index for row in rows for index in row.requests]
        places: list[tuple[int, int]] = []
        targets: list[int] = []
        for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
            for index in row.requests:
                context, continuation, _ = requests[index]
                first = start + len(context) - 1
                places += [(place, first + j) for j in range(len(continuation))]
                targets += continuation
        self.read = tuple(torch.tensor(column, device=device) for column in zip(*places, strict=True))
        self.targets = torch.tensor(targets, device=device)
        self.lengths = [len(requests[index].continuation) for index in self.requests]

    def scores(
        self, runner: Runner, hidden: Float[Tensor, "batch seq dim"], ledger: Ledger, steps: Tensor | None = None
    ) -> list[tuple[int, Score]]:
        """The scores of all requests, from what the head reads."""
        flat = hidden[self.read]
        ledger.count_head(runner.spec, tokens=len(flat))
        chunk = max(1, LOGIT_NUMBERS // runner.spec.vocab[0])
        logprobs, hits = [], []
        for part, target in zip(flat.split(chunk), self.targets.split(chunk), strict=True):
            logits = runner.model.head(part[None])[0]
            logprobs.append(logits.log_softmax(dim=-1).gather(1, target[:, None])[:, 0])
            hits.append(logits.argmax(dim=-1) == target)
        sums = torch.cat(logprobs).double().cpu().split(self.lengths)
        likeliest = torch.cat(hits).cpu().split(self.lengths)
        exits = [None] * len(sums) if steps is None else steps[self.read].double().cpu().split(self.lengths)
        return [
            (index, Score(float(part.sum()), bool(hit.all()), None if left is None else float(left.mean())))
            for index, part, hit, left in zip(self.requests, sums, likeliest, exits, strict=True)
        ]


Reads = list[tuple[int, list[tuple[int, Score]]]]


def _walked(runner: Runner, batch: _Batch, root: PlanNode, ledger: Ledger) -> Reads:
    """All depths of one rollout."""
    context, state = runner.start(batch.tokens, batch.valid, batch.items, ledger)
    found: Reads = []

    def visit(node: PlanNode, state: Any) -> None:
        hidden = runner.model.coda(state, context)
        ledger.count_coda(runner.spec, rows=batch.tokens.shape[0], tokens=batch.tokens.shape[1])
        scores = batch.scores(runner, hidden, ledger)
        found.extend((int(depth), scores) for depth in node.wanted)

    walk(runner.model, context, state, root, visit, ledger=ledger)
    return found


def _exited(runner: Runner, batch: _Batch, depth: int, rule: ExitRule, num_steps: int | None, ledger: Ledger) -> Reads:
    """Every token at its own exit step."""
    with torch.no_grad():
        out = forward_until(
            runner.model,
            batch.tokens,
            rule,
            num_steps=num_steps,
            noise=runner.noise(positions_of(batch.tokens, batch.valid), batch.items),
            valid=batch.valid,
            ledger=ledger,
            logits_to_keep=0,
        )
        return [(depth, batch.scores(runner, out.hidden, ledger, steps=out.steps))]
