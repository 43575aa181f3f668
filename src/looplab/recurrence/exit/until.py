"""One forward pass in which every token stops where an exit rule says.

    without a cache           the loop runs until the last token has stopped; a token is read at its own exit step, so
                              its logits are those of a run of that many steps (Ouro, arXiv:2510.25741)
    cache, one token a row    a row that has stopped keeps its state and writes no further entries; the loop ends when
                              every row has stopped. What later tokens read of it is the cache rule's matter
    cache, several tokens     a prompt: all steps, no decisions

A step is what `num_steps` counts, and a token may stop where a shorter run ends (`exit_points`). Padding stops after
the first of these, so that nothing waits for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.recurrence.exit.base import ExitRule, Seen, check_early, exit_points, readable
from looplab.recurrence.kv.base import Cache
from looplab.recurrence.kv.depth_indexed import DepthIndexed, Refuse
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import Output, depth_plan, forward, run_plan
from looplab.recurrence.plan import Plan, Steps
from looplab.recurrence.spec import LoopSpec, StateField


@dataclass
class ExitOutput(Output):
    """What a forward pass with exits returns: every token at its own exit step. `plan` is what ran."""

    steps: Int[Tensor, "batch seq"]
    """Step after which each token stopped, from 1; of padding, no number to read."""


def forward_until(
    model: Any,
    tokens: Int[Tensor, "batch seq"],
    rule: ExitRule,
    *,
    num_steps: Steps | None = None,
    noise: Float[Tensor, "batch seq noise"] | None = None,
    positions: Int[Tensor, "batch seq"] | None = None,
    valid: Bool[Tensor, "batch seq"] | None = None,
    extras: Mapping[str, Tensor] | None = None,
    cache: Cache | None = None,
    ledger: Ledger | None = None,
    logits_to_keep: int | None = None,
) -> ExitOutput:
    """`recurrence.loop.forward`, with every token stopped by `rule`.

    Args:
        num_steps: The deepest run: every token stops there at the latest (default: the model's own number).
        ledger: Counts what ran, the readouts made for decisions included; the dot product of a gate is not counted.
    Raises:
        ValueError: The model cannot answer the rule; bounds that contradict each other; recorded depths that do not
            fit; a cache that refuses tokens which stopped early.
    """
    spec = model.spec
    rule.check(spec)
    points = exit_points(spec, num_steps)
    if rule.early:
        check_early(spec, rule, points)
    rule.fits(points)
    if cache is not None and tokens.shape[1] != 1:
        out = forward(
            model,
            tokens,
            num_steps=num_steps,
            noise=noise,
            positions=positions,
            valid=valid,
            extras=extras,
            cache=cache,
            ledger=ledger,
            logits_to_keep=logits_to_keep,
        )
        return ExitOutput(**vars(out), steps=torch.full_like(tokens, max(points)))
    plan, _ = depth_plan(spec, num_steps, len(tokens))
    if cache is not None:
        _check_cache(rule, cache)
        cache.check(plan)
    past = 0 if cache is None else cache.length
    context = model.encode(tokens, cache, positions=positions, valid=valid, extras=extras)
    if ledger is not None:
        gradient = torch.is_grad_enabled()
        ledger.count_encode(spec, rows=len(tokens), tokens=tokens.shape[1], past=past, gradient=gradient)
    readout = _Readout(model, context, cache, ledger)
    state, hidden, steps = _run(model, rule, plan, points, model.init_state(context, noise), readout)
    kept = hidden if logits_to_keep is None else hidden[:, max(0, hidden.shape[1] - logits_to_keep) :]
    logits = readout.logits(kept) if kept.shape[1] else None
    ran = plan[: points[int(steps.max())]]
    if cache is not None:
        cache.advance(1, _executed(plan, points, steps))
        if ledger is not None:
            ledger.kv_bytes = max(ledger.kv_bytes, cache.nbytes)
    return ExitOutput(logits=logits, hidden=hidden, state=state, context=context, plan=ran, steps=steps)


def _run(
    model: Any, rule: ExitRule, plan: Plan, points: Mapping[int, int], state: Any, readout: "_Readout"
) -> tuple[Any, Float[Tensor, "batch seq dim"], Int[Tensor, "batch seq"]]:
    """State and hidden of every token at its own exit step, and that step."""
    spec, cache, last = model.spec, readout.cache, max(points)
    shape, device = readout.context.embeds.shape[:2], readout.context.embeds.device
    memory = rule.start(spec, readable(spec, state, shape[1]))
    padding = None if readout.context.valid is None else ~readout.context.valid
    running = torch.ones(shape, dtype=torch.bool, device=device)
    steps = torch.zeros(shape, dtype=torch.long, device=device)
    kept, hidden, done = state, None, 0
    for step, end in points.items():
        # Under a cache the rows that have stopped take no part; without one their tokens are still read by others.
        rows = None if cache is None or bool(running.all()) else running[:, 0]
        part, active = plan[done:end], [rows] * (end - done)
        state = run_plan(
            model, part, readout.context, state, active=active, cache=cache, part=True, ledger=readout.ledger
        )
        done, kept = end, _where_running(spec, running, state, kept)
        stop, now = running, None
        if step < last:
            score = model.halt(state) if rule.reads_score else None
            now = readout.peek(state, rows) if rule.reads_logits else None
            logits = None if now is None else readout.cells(now, rows)
            age = torch.full(shape[:1], step, device=device)
            context = readout.context.embeds if rule.reads_context else None
            seen = Seen(age, readable(spec, state, shape[1]), score, logits, context)
            wants, memory = rule.stops(memory, seen, last)
            stop = running & (wants if padding is None else wants | padding)
        if cache is None and bool(stop.any()):
            now = readout.hidden(state) if now is None else now
            hidden = now if hidden is None else torch.where(stop[..., None], now, hidden)
        steps = steps.masked_fill(stop, step)
        running = running & ~stop
        if not bool(running.any()):
            break
    return kept, readout.hidden(kept) if hidden is None else hidden, steps


@dataclass
class _Readout:
    """Coda and head of one forward pass, counted. `rows`: those that take part; None: all."""

    model: Any
    context: Any
    cache: Cache | None
    ledger: Ledger | None

    def hidden(self, state: Any, rows: Tensor | None = None) -> Float[Tensor, "batch seq dim"]:
        """What the head reads."""
        if self.ledger is not None:
            past = 0 if self.cache is None else self.cache.length
            count, tokens = self._count(rows), self.context.embeds.shape[1]
            gradient = torch.is_grad_enabled()
            self.ledger.count_coda(self.model.spec, rows=count, tokens=tokens, past=past, gradient=gradient)
        return self.model.coda(state, self.context, self.cache)

    def peek(self, state: Any, rows: Tensor | None) -> Float[Tensor, "batch seq dim"]:
        """The same for a decision: the cache is left as it was."""
        if self.cache is None:
            return self.hidden(state, rows)
        with self.cache.readonly():
            return self.hidden(state, rows)

    def logits(self, hidden: Float[Tensor, "batch kept dim"], rows: Tensor | None = None) -> Tensor:
        """Logits of these tokens."""
        if self.ledger is not None:
            tokens = self._count(rows) * hidden.shape[1]
            self.ledger.count_head(self.model.spec, tokens=tokens, gradient=torch.is_grad_enabled())
        return self.model.head(hidden)

    def cells(self, hidden: Float[Tensor, "batch seq dim"], rows: Tensor | None) -> Tensor:
        """Logits by cell, as `Seen` wants them."""
        return self.logits(hidden, rows).unflatten(-1, (self.model.spec.cells, -1))

    def _count(self, rows: Tensor | None) -> int:
        return self.context.embeds.shape[0] if rows is None else int(rows.sum())


def _check_cache(rule: ExitRule, cache: Cache) -> None:
    """Refuses tokens of different depths where a deeper one would look for what a shallower one never wrote."""
    if rule.early and isinstance(cache.rule, DepthIndexed) and isinstance(cache.rule.missing, Refuse):
        raise ValueError(
            f"exit: {rule} may stop early, but the cache is {cache.rule}, under which every token must run as deep as "
            "its readers. Make it with rule=DepthIndexed(missing=CopyLast()), Single() or First()"
        )


def _where_running(spec: LoopSpec, running: Bool[Tensor, "batch seq"], new: Any, old: Any) -> Any:
    """`new` for tokens that were running, `old` for those that had stopped. A row runs as long as any of its tokens."""
    row = running.any(dim=1, keepdim=True)

    def leaf(part: StateField, a: Tensor, b: Tensor) -> Tensor:
        mask = row if part.per == "row" else torch.cat([row.expand(-1, part.prefix), running], dim=1)
        return torch.where(mask.view(*mask.shape, *[1] * (a.dim() - mask.dim())), a, b)

    if isinstance(new, Tensor):
        return leaf(next(iter(spec.state.values())), new, old)
    changed = {name: leaf(part, getattr(new, name), getattr(old, name)) for name, part in spec.state.items()}
    return new._replace(**changed)


def _executed(plan: Plan, points: Mapping[int, int], steps: Int[Tensor, "batch 1"]) -> dict[int, Tensor]:
    """Block -> iterations that each token ran."""
    ran = [plan[: points[step]].iterations() for step in steps[:, 0].tolist()]
    return {
        block: torch.tensor([[counts.get(block, 0)] for counts in ran], device=steps.device)
        for block in plan.iterations()
    }
