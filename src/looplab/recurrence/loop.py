"""The loop, written once and outside the models.

    context = encode(tokens);  s_0 = init_state(context, noise)
    s_{k+1} = step(s_k, context, block_k, iteration_k)             along the plan
    logits  = head(coda(s_K, context))

Depth is an argument: a plan, a number of steps, or one number per row. Gradient windows, recomputation, caches,
recording and counting are handed in. `walk` runs many plans at once and makes every common prefix only once.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.recurrence import state as states
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.gathering import Gathering, moves_of
from looplab.recurrence.gradient.base import GradientStrategy, Move
from looplab.recurrence.gradient.full import FullBPTT
from looplab.recurrence.kv.base import Cache, KVRule
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.plan import Application, Plan, PlanNode, Steps, check_steps
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.trace import Recorder


@dataclass
class Output:
    """What a forward pass returns. `logits` is None when none were asked for."""

    logits: Float[Tensor, "batch kept vocab"] | None
    hidden: Float[Tensor, "batch seq dim"]
    state: Any
    context: Any
    plan: Plan


def run_plan(
    model: Any,
    plan: Plan,
    context: Any,
    state: Any,
    *,
    active: Sequence[Bool[Tensor, " batch"] | None] | None = None,
    cache: Cache | None = None,
    gradient: GradientStrategy | None = None,
    on_segment_end: Callable[[Any, int], None] | None = None,
    before: Callable[[Any, int], Any] | None = None,
    part: bool = False,
    recorder: Recorder | None = None,
    ledger: Ledger | None = None,
) -> Any:
    """The state after running `plan` from `state`.

    Args:
        active: Per application, the rows it changes (None: all). Other rows keep their state.
        gradient: Where the graph is cut (default: nowhere). Several segments need somebody who reads their ends.
        on_segment_end: See `GradientStrategy.walk`.
        before: (state, applications so far) -> the state that the next application starts from: noise, a patch.
        part: The plan is a part of a longer one, which the caller has checked against the cache.
        recorder: Keeps states and records; states of one segment keep their graph.
        ledger: Receives the counts.
    """
    strategy = gradient or FullBPTT()
    rows, tokens = context.embeds.shape[:2]
    model.spec.check(plan)
    if cache is not None and not part:
        cache.check(plan)
    ends = [segment.stop for segment in strategy.segments(len(plan)) if segment.gradient]
    unread = on_segment_end is None and (recorder is None or not recorder.keep_states)
    if len(ends) > 1 and unread and torch.is_grad_enabled():
        raise ValueError(
            f"{strategy} needs a loss after {', '.join(map(str, ends))} applications; nothing reads the states there. "
            "Give on_segment_end or a recorder that keeps states, or use TruncatedBPTT"
        )
    wants_record = recorder is not None and recorder.keep_records
    indices: dict[int, Tensor] = {}

    done = 0

    def stretch(model: Any, state: Any, context: Any, moves: Sequence[Move] | None = None) -> Any:
        """Follows these moves, or walks the whole plan."""

        def run(state: Any, context: Any, unit: Sequence[Application], first: int) -> list[tuple[Any, Any]]:
            """(state, record) after every application of a unit; counts nothing, as a strategy may run it again."""
            results = []
            for number, (block, iteration) in enumerate(unit, first):
                state = state if before is None else before(state, number)
                mask = None if active is None else active[number]
                if cache is not None:
                    cache.launch(cache.ordinal(block, iteration), mask)
                if iteration not in indices:
                    indices[iteration] = torch.full((rows,), iteration, dtype=torch.long, device=context.embeds.device)
                record: dict[str, Any] | None = {} if wants_record else None
                # The record is an output of the recomputed unit, so what a model puts into it keeps its gradient.
                new = model.step(state, context, block, indices[iteration], cache, record=record)
                state = new if mask is None else states.where(mask, new, state)
                results.append((state, record))
            return results

        wrapped = strategy.wrap(run)

        def step(state: Any, unit: Sequence[Application]) -> Any:
            nonlocal done
            for (block, _), (state, record) in zip(unit, wrapped(state, context, unit, done), strict=True):  # noqa: B020
                if recorder is not None:
                    recorder.applied(state, record)
                if ledger is not None:
                    mask = None if active is None else active[done]
                    ledger.count_step(
                        model.spec,
                        block,
                        rows=rows if mask is None else int(mask.sum()),
                        tokens=tokens,
                        past=0 if cache is None else cache.length,
                        gradient=torch.is_grad_enabled(),
                        recomputed=strategy.recomputes,
                    )
                done += 1
            return state

        if moves is None:
            return strategy.walk(plan, step, state, on_segment_end)
        return strategy.follow(moves, step, state, on_segment_end)

    if recorder is not None:
        recorder.start(state)
    if isinstance(model, Gathering):
        return model.along(stretch, state, context, moves_of(strategy, plan))
    return stretch(model, state, context)


def forward(
    model: Any,
    tokens: Int[Tensor, "batch seq"],
    *,
    num_steps: Steps | Int[Tensor, " batch"] | None = None,
    plan: Plan | None = None,
    noise: Float[Tensor, "batch seq noise"] | None = None,
    positions: Int[Tensor, "batch seq"] | None = None,
    valid: Bool[Tensor, "batch seq"] | None = None,
    extras: Mapping[str, Tensor] | None = None,
    cache: Cache | None = None,
    gradient: GradientStrategy | None = None,
    recorder: Recorder | None = None,
    ledger: Ledger | None = None,
    logits_to_keep: int | None = None,
) -> Output:
    """One forward pass of any looped model.

    Args:
        num_steps: Iterations per block (default: the model's), a tuple with one count per block, or one count per row.
        plan: The applications to run, instead of `num_steps`.
        noise: Standard normal numbers for models with a random start (`state.standard_noise`).
        valid: False on padding.
        logits_to_keep: Trailing tokens whose logits are made; None: all, 0: none.
    Raises:
        ValueError: Both `num_steps` and `plan`; a depth or index that the model does not have.
    """
    if plan is not None and num_steps is not None:
        raise ValueError("forward: give num_steps or plan, not both.")
    rows, length = tokens.shape
    plan, active = (plan, None) if plan is not None else depth_plan(model.spec, num_steps, rows)
    past = 0 if cache is None else cache.length
    carries = torch.is_grad_enabled()
    context = model.encode(tokens, cache, positions=positions, valid=valid, extras=extras)
    if ledger is not None:
        ledger.count_encode(model.spec, rows=rows, tokens=length, past=past, gradient=carries)
    state = model.init_state(context, noise)
    state = run_plan(
        model,
        plan,
        context,
        state,
        active=active,
        cache=cache,
        gradient=gradient,
        recorder=recorder,
        ledger=ledger,
    )
    hidden = model.coda(state, context, cache)
    kept = hidden if logits_to_keep is None else hidden[:, max(0, length - logits_to_keep) :]
    logits = model.head(kept) if kept.shape[1] else None
    if ledger is not None:
        ledger.count_coda(model.spec, rows=rows, tokens=length, past=past, gradient=carries)
        ledger.count_head(model.spec, tokens=rows * kept.shape[1], gradient=carries)
    if cache is not None:
        cache.advance(length, _executed(plan, active, rows, length, tokens.device))
        if ledger is not None:
            ledger.kv_bytes = max(ledger.kv_bytes, cache.nbytes)
    return Output(logits=logits, hidden=hidden, state=state, context=context, plan=plan)


def depth_plan(
    spec: LoopSpec, num_steps: Steps | Int[Tensor, " batch"] | None, rows: int
) -> tuple[Plan, list[Bool[Tensor, " batch"] | None] | None]:
    """The plan of `num_steps`, and per application which of `rows` rows take part (None: all, in every application).

    With one count per row, the plan is that of the deepest row, and then those that it does not contain; a row takes
    part in an application that its own plan contains. Warns once when a depth lies beyond the trained law.
    """
    if not isinstance(num_steps, Tensor):
        if num_steps is not None:
            _warn_beyond(spec, check_steps(num_steps))
        return spec.plan(num_steps), None
    whole = not num_steps.is_floating_point() and num_steps.dtype != torch.bool
    if not whole or num_steps.shape != (rows,) or (rows and int(num_steps.min()) < 0):
        raise ValueError(f"num_steps must be an int >= 0 or Int[batch]. Got {num_steps}")
    counts = [int(n) for n in num_steps]
    _warn_beyond(spec, max(counts, default=0))
    plan = spec.plan(max(counts, default=0))
    own = {n: set(spec.plan(n)) for n in set(counts)}
    for n in sorted(own):
        if not own[n] <= set(plan):  # a coarser grid has iterations of its own, which only its rows run
            plan += spec.plan(n)
    active: list[Bool[Tensor, " batch"] | None] = []
    for application in plan:
        taking = [application in own[n] for n in counts]
        active.append(None if all(taking) else torch.tensor(taking, device=num_steps.device))
    return plan, active


def new_cache(
    spec: LoopSpec,
    *,
    rows: int,
    capacity: int,
    num_steps: Steps | None = None,
    rule: KVRule | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Cache:
    """An empty cache that fits `spec` at `num_steps`.

    Warns when `rule` is not the one the model was trained with: it then decodes another model.

    Raises:
        ValueError: The model is not causal, or does not support the rule.
    """
    if not spec.causal:
        raise ValueError(f"{spec.name} is not causal: no KV cache. Pass cache=None")
    rule = rule or spec.kv_rule
    if not any(known.allows(rule) for known in spec.kv_rules):
        supported = ", ".join(sorted({type(r).__name__ for r in spec.kv_rules}))
        raise ValueError(f"cache: {spec.name} supports {supported} only; got {rule}")
    if rule != spec.kv_rule:
        warnings.warn(
            f"kv_rule={rule} is not the trained rule {spec.kv_rule}; decoding under it changes the model.", stacklevel=2
        )
    plan = spec.plan(num_steps)
    cache = rule.cache(rows=rows, capacity=capacity, iterations=plan.iterations(), dtype=dtype, device=device)
    cache.first = {block: indices[0] for block, indices in plan.indices().items()}
    return cache


def walk(
    model: Any,
    context: Any,
    state: Any,
    root: PlanNode,
    visit: Callable[[PlanNode, Any], None],
    *,
    on_step: Callable[[PlanNode, Any, Any], None] | None = None,
    ledger: Ledger | None = None,
) -> int:
    """Runs all plans of a trie from one initial state; each node is applied exactly once.

    Depth first, children in the order given; a state is dropped before its last child is entered, so the number of live
    states is bounded by the shape of the trie. Runs without gradient and without a cache.

    Args:
        visit: Called with (node, state) at every node in whose `wanted` is something, the root included.
        on_step: Called with (node, state before, state after) for every application, before `visit`. It adds no live
            state: both exist at that moment anyway, and the walk keeps neither for it. What a later application is to
            be compared with, `on_step` has to keep itself.
    Returns:
        The largest number of states alive at once.
    """
    rows, tokens = context.embeds.shape[:2]
    largest = 1
    # Frames of (state, children not yet entered, last one first).
    frames: list[tuple[Any, list[PlanNode]]] = [(state, root.children[::-1])]
    with torch.no_grad():
        if root.wanted:
            visit(root, state)
        del state
        while frames:
            current, waiting = frames[-1]
            node = waiting.pop() if waiting else None
            if not waiting:
                frames.pop()
            if node is None:
                continue
            assert node.application is not None
            block, iteration = node.application
            model.spec.check(Plan((node.application,)))
            index = torch.full((rows,), iteration, dtype=torch.long, device=context.embeds.device)
            new = model.step(current, context, block, index)
            if on_step is not None:
                on_step(node, current, new)
            del current
            if ledger is not None:
                ledger.count_step(model.spec, block, rows=rows, tokens=tokens)
            if node.wanted:
                visit(node, new)
            if node.children:
                frames.append((new, node.children[::-1]))
            largest = max(largest, len(frames) + (not node.children))
            del new
    return largest


def _executed(
    plan: Plan, active: list[Any] | None, rows: int, length: int, device: torch.device
) -> Mapping[int, int | Int[Tensor, "batch seq"]]:
    """Block -> iterations that each token of this call ran; an int where rows do not differ."""
    if active is None:
        return {block: len(indices) for block, indices in plan.indices().items()}
    counts: dict[int, Tensor] = {}
    for (block, _), mask in zip(plan, active, strict=True):
        ran = torch.ones(rows, dtype=torch.long, device=device) if mask is None else mask.long()
        counts[block] = counts[block] + ran if block in counts else ran
    return {block: ran[:, None].expand(rows, length) for block, ran in counts.items()}


def _warn_beyond(spec: LoopSpec, num_steps: Steps) -> None:
    if not isinstance(spec.trained_depth, DepthSampler):
        return
    deepest, asked = max(spec.trained_depth.support()), spec.plan(num_steps)
    if spec.trained_depth.of_prefix:
        beyond = len(asked) > deepest
    else:
        trained = spec.plan(deepest).iterations()
        beyond = any(count > trained.get(block, 0) for block, count in asked.iterations().items())
    if beyond:
        warnings.warn(
            f"num_steps={num_steps} is beyond the trained depth {spec.trained_depth}; results are out of distribution",
            stacklevel=3,
        )
