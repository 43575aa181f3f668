"""The reuse audit: whether later tokens can use what a token leaves behind that stopped early.

    K, own depth / depth of earlier output tokens:   f/f  e/f  e/e              f full, e by the exit rule
    total = NLL(K, e/e) - NLL(reference, f/f) = rule + read + reuse
    rule  = NLL(K, f/f) - NLL(reference, f/f)      read = NLL(K, e/f) - NLL(K, f/f)
    reuse = NLL(K, e/e) - NLL(K, e/f)

The reference keeps one entry per iteration, as looped models are trained. Windows are held-out texts: a prompt at full
depth, then teacher-forced tokens one by one, with the loop and caches that are not the engine's own. The fourth arm,
f/e, is measured too: what exits of the past cost a token that itself runs deep. A stopped token is read at its exit; a
delay of delta steps lets it write deeper entries first, and delta* is the least delay that passes.

Reference: "Learning to Compute Is Not Learning to Retain or Reuse" raises the question; the measure is ours.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.engine.sampling import uniform
from looplab.engine.slots import bytes_per_token, name_of, shapes_of
from looplab.engine.verdict import FreeRun, ReuseResult, ReuseVerdict, Stratum, Word, judge
from looplab.intervals import Draws, Interval, document_draws, percentile_interval
from looplab.models.folder import weight_hash
from looplab.recurrence.exit import ExitRule, FullExit, Seen, exit_points, forward_until
from looplab.recurrence.kv import Anchor, Cache, DepthIndexed, KVRule
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.state import standard_noise

REFERENCE = DepthIndexed()
LEAST = 8
"""Windows below which intervals would say nothing."""
DISTANCES = ((1, 1), (2, 3), (4, 7), (8, 15))
"""Strata of the distance to the nearest early exit; farther, or none, is a stratum of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DelayedExit(ExitRule):
    """`inner`, and then `delay` further steps."""

    inner: ExitRule
    delay: int

    @property
    def early(self) -> bool:
        return self.inner.early

    @property
    def name(self) -> str:
        return f"{self.inner}+{self.delay}"

    def check(self, spec: LoopSpec) -> None:
        self.inner.check(spec)

    def fits(self, points: Mapping[int, int]) -> None:
        self.inner.fits(points)

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> Any:
        never = torch.zeros(state.shape[:2], dtype=torch.long, device=state.device)
        return _Waiting(self.inner.start(spec, state), never)

    def observe(self, memory: Any, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Any]:
        wants, inner = self.inner.observe(memory.inner, seen)
        age = seen.steps[:, None].expand_as(wants)
        fires = (memory.fired == 0) & wants & (age >= self.inner.min_steps)
        fired = torch.where(fires, age, memory.fired)
        return (fired > 0) & (age >= fired + self.delay), _Waiting(inner, fired)


class _Waiting(NamedTuple):
    inner: Any
    fired: Int[Tensor, "batch seq"]
    """Step after which the inner rule fired; 0: not yet."""


def delayed(rule: ExitRule, delay: int) -> ExitRule:
    """The rule, whose tokens run `delay` steps more."""
    if delay < 0:
        raise ValueError(f"reuse: delay must be at least 0. Got {delay}. Leave it out.")
    if not delay:
        return rule

    class Delayed(DelayedExit):
        reads_score, reads_logits, reads_context = rule.reads_score, rule.reads_logits, rule.reads_context

    return Delayed(inner=rule, delay=delay)


@dataclass(frozen=True, eq=False)
class Arms:
    """What the arms of one KV rule gave, "windows tokens"."""

    full: Float[np.ndarray, "windows tokens"]
    """NLL f/f, nats."""
    read: Float[np.ndarray, "windows tokens"]
    """NLL e/f."""
    past: Float[np.ndarray, "windows tokens"]
    """NLL f/e."""
    exit: Float[np.ndarray, "windows tokens"]
    """NLL e/e."""
    kl: Float[np.ndarray, "windows tokens"]
    """KL(e/f || e/e)."""
    flipped: Bool[np.ndarray, "windows tokens"]
    """Whether their likeliest tokens differ."""
    depths: Any
    """Steps of every token in e/e, Int "windows tokens"."""

    @classmethod
    def join(cls, parts: Sequence["Arms"]) -> "Arms":
        """Windows of all parts, in order."""
        names = ("full", "read", "past", "exit", "kl", "flipped", "depths")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def cut_windows(documents: Sequence[Sequence[int]], *, length: int, windows: int) -> Int[Tensor, "windows length"]:
    """Windows of `length` tokens: the first of every document that is long enough, then the second, and so on.

    Raises:
        ValueError: Fewer than `LEAST` windows can be cut.
    """
    found: list[Sequence[int]] = []
    start = 0
    while len(found) < windows:
        new = [d[start : start + length] for d in documents if len(d) >= start + length]
        if not new:
            break
        found += new[: windows - len(found)]
        start += length
    if len(found) < LEAST:
        longest = max((len(d) for d in documents), default=0)
        raise ValueError(
            f"reuse: the text must hold at least {LEAST} windows of {length} tokens. Got {len(found)} in "
            f"{len(documents)} documents, the longest of {longest} tokens. Give longer documents, or lower "
            "--prompt-tokens and --output-tokens"
        )
    return torch.tensor([list(window) for window in found])


def check_auditable(model: Any, rule: ExitRule, kv: KVRule) -> None:
    """Refuses what no verdict can be about.

    Raises:
        ValueError: Exits are never early, the model is not causal or has several cells, or the KV rule refuses exits.
    """
    spec = model.spec
    if not rule.early:
        raise ValueError(f"reuse: the exit rule must stop tokens early. Got {rule}. Every token then runs equally deep")
    if spec.cells != 1 or not spec.causal:
        raise ValueError(f"reuse: MODEL must be a causal model of text. Got {spec.name}. Nothing is served of it")
    rule.check(spec)
    if kv == REFERENCE:
        raise ValueError("reuse: depth_indexed forbids exits; use last_exited")
    if isinstance(kv, Anchor) and rule.min_steps <= kv.n:
        raise ValueError(
            f"reuse: {name_of(kv)} needs min_steps of at least {kv.n + 1}. Got {rule.min_steps}. Raise --min-steps"
        )


def measure(
    model: Any,
    windows: Int[Tensor, "windows length"],
    rule: ExitRule,
    kv: KVRule,
    *,
    prompt: int,
    delay: int = 0,
    seed: int = 0,
    rows: int = 16,
    advanced: Callable[[int], None] | None = None,
) -> Arms:
    """All arms of one KV rule.

    Args:
        windows: Prompt, output and one more token that the last one predicts.
        rows: Windows that run together.
        advanced: Told tokens done (of all windows), after every step.
    """
    exits = delayed(rule, delay)
    parts = []
    for start in range(0, len(windows), rows):
        parts.append(_some(model, windows[start : start + rows], exits, kv, prompt, seed, advanced))
    return Arms.join(parts)


def reference(
    model: Any, windows: Int[Tensor, "windows length"], *, prompt: int, seed: int = 0, rows: int = 16
) -> Float[np.ndarray, "windows tokens"]:
    """NLL at full depth with one entry per iteration, or under the model's own rule where it has no such cache."""
    known = REFERENCE if any(known.allows(REFERENCE) for known in model.spec.kv_rules) else model.spec.kv_rule
    found = []
    with torch.no_grad():
        for start in range(0, len(windows), rows):
            some = windows[start : start + rows].to(next(model.parameters()).device)
            cache = _cache(model, some, known)
            _prefill(model, some, prompt, cache, seed)
            nll = []
            for place in range(prompt, some.shape[1] - 1):
                out = forward(model, some[:, place : place + 1], cache=cache, noise=_noise(model, some, place, seed))
                assert out.logits is not None
                nll.append(_nll(out.logits, some[:, place + 1])[0])
            found.append(torch.stack(nll, 1).double().cpu().numpy())
    return np.concatenate(found)


def _some(
    model: Any,
    windows: Int[Tensor, "rows length"],
    exits: ExitRule,
    kv: KVRule,
    prompt: int,
    seed: int,
    advanced: Callable[[int], None] | None,
) -> Arms:
    """The arms of windows that run together: a cache of deep entries, and one of entries as exits leave them."""
    windows = windows.to(next(model.parameters()).device)
    deep, early = _cache(model, windows, kv), _cache(model, windows, kv)
    columns: list[list[Tensor]] = [[] for _ in range(7)]
    full = FullExit()
    with torch.no_grad():
        for cache in (deep, early):
            _prefill(model, windows, prompt, cache, seed)
        for place in range(prompt, windows.shape[1] - 1):
            token, label = windows[:, place : place + 1], windows[:, place + 1]
            noise = _noise(model, windows, place, seed)
            with deep.readonly():
                read = forward_until(model, token, exits, cache=deep, noise=noise)
            with early.readonly():
                past = forward_until(model, token, full, cache=early, noise=noise)
            whole = forward_until(model, token, full, cache=deep, noise=noise)
            left = forward_until(model, token, exits, cache=early, noise=noise)
            (a, _), (b, law_b), (c, _), (d, law_d) = (_nll(out.logits, label) for out in (whole, read, past, left))
            kl = (law_b.exp() * (law_b - law_d)).sum(-1)
            flipped = law_b.argmax(-1) != law_d.argmax(-1)
            for column, value in zip(columns, (a, b, c, d, kl, flipped, left.steps[:, 0]), strict=True):
                column.append(value)
            if advanced is not None:
                advanced(len(windows))
    stacked = [torch.stack(column, 1).cpu() for column in columns]
    names = ("full", "read", "past", "exit", "kl")
    nats = {name: column.double().numpy() for name, column in zip(names, stacked, strict=False)}
    return Arms(**nats, flipped=stacked[5].numpy(), depths=stacked[6].numpy())


def free_run(
    model: Any,
    windows: Int[Tensor, "windows length"],
    rule: ExitRule,
    kv: KVRule,
    *,
    prompt: int,
    output: int,
    delay: int = 0,
    seed: int = 0,
    rows: int = 16,
) -> FreeRun:
    """Generates from the prompts at full depth and with exits, with the same uniform number for the same token."""
    first = []
    for start in range(0, len(windows), rows):
        some = windows[start : start + rows, :prompt]
        texts = [_generate(model, some, depth, kv, output, seed, start) for depth in (FullExit(), delayed(rule, delay))]
        for differs in (texts[0] != texts[1]).cpu():
            if bool(differs.any()):
                first.append(int(differs.long().argmax()))
    return FreeRun(windows=len(windows), tokens=output, diverged=len(first), first=tuple(sorted(first)))


def _generate(
    model: Any, prompts: Int[Tensor, "rows prompt"], rule: ExitRule, kv: KVRule, output: int, seed: int, offset: int
) -> Int[Tensor, "rows output"]:
    prompts = prompts.to(next(model.parameters()).device)
    length = prompts.shape[1]
    cache = _cache(model, prompts, kv, length + output)
    said: list[Tensor] = []
    with torch.no_grad():
        logits = _prefill(model, prompts, length, cache, seed)
        for index in range(output):
            u = [uniform(seed, offset + row, index) for row in range(len(prompts))]
            reached = logits[:, -1].double().softmax(-1).cumsum(-1)
            reached = reached / reached[:, -1:]
            token = (reached <= torch.tensor(u, dtype=reached.dtype, device=reached.device)[:, None]).sum(-1)
            said.append(token.clamp(max=logits.shape[-1] - 1))
            if index + 1 < output:
                noise = _noise(model, prompts, length + index, seed)
                out = forward_until(model, said[-1][:, None], rule, cache=cache, noise=noise)
                assert out.logits is not None
                logits = out.logits
    return torch.stack(said, 1)


def _cache(model: Any, windows: Tensor, kv: KVRule, capacity: int | None = None) -> Cache:
    parameter = next(model.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="kv_rule=", category=UserWarning)  # that is the question here
        return new_cache(
            model.spec,
            rows=len(windows),
            capacity=capacity or windows.shape[1],
            rule=kv,
            dtype=parameter.dtype,
            device=parameter.device,
        )


def _prefill(model: Any, windows: Tensor, prompt: int, cache: Cache, seed: int) -> Tensor:
    """Reads the prompts at full depth; logits of their last token."""
    noise = _noise(model, windows, range(prompt), seed)
    out = forward(model, windows[:, :prompt], cache=cache, noise=noise, logits_to_keep=1)
    assert out.logits is not None
    return out.logits


def _noise(model: Any, windows: Tensor, places: int | range, seed: int) -> Tensor | None:
    """First states by position, as an engine draws them."""
    width = model.spec.noise_width
    if not width:
        return None
    at = torch.tensor([places] if isinstance(places, int) else list(places)).expand(len(windows), -1)
    drawn = standard_noise(seed, [0] * len(windows), at, width)
    return drawn.to(device=windows.device, dtype=next(model.parameters()).dtype)


def _nll(logits: Tensor | None, label: Int[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
    """Loss of the last token's labels, and its law."""
    assert logits is not None
    law = logits[:, -1].log_softmax(-1)
    return -law.gather(-1, label[:, None])[:, 0], law


def assess(
    arms: Arms,
    base: Float[np.ndarray, "windows tokens"],
    *,
    kv_rule: str,
    delay: int,
    steps: int,
    kv_bytes: int,
    seed: int = 0,
    replicates: int = 2000,
    free: FreeRun | None = None,
) -> ReuseVerdict:
    """The verdict on the arms of one KV rule.

    Args:
        base: NLL of the reference.
        steps: Full depth.
    """
    draws = document_draws(len(base), replicates, seed=seed, domain="reuse", split="windows")
    reuse = arms.exit - arms.read
    terms = {
        "rule": arms.full - base,
        "read": arms.read - arms.full,
        "reuse": reuse,
        "total": arms.exit - base,
        "past": arms.past - arms.full,
        "kl": arms.kl,
        "flips": arms.flipped.astype(np.float64),
    }
    found = {name: _mean(draws, values) for name, values in terms.items()}
    word: Word
    word, needed = judge(found["reuse"], found["flips"], len(base))
    return ReuseVerdict(
        kv_rule=kv_rule,
        delay=delay,
        word=word,
        windows_needed=needed,
        mean_depth=float(arms.depths.mean()),
        kv_bytes=kv_bytes,
        by_depth=_by_depth(reuse, arms.depths),
        by_distance=_by_distance(reuse, arms.depths < steps),
        slope=_slope(draws, reuse, arms.depths < steps),
        free=free,
        **found,
    )


def audit_rule(
    model: Any,
    windows: Int[Tensor, "windows length"],
    rule: ExitRule,
    kv: KVRule,
    base: Float[np.ndarray, "windows tokens"],
    *,
    prompt: int,
    delays: Sequence[int] | None = None,
    seed: int = 0,
    replicates: int = 2000,
    free_tokens: int = 0,
    rows: int = 16,
    advanced: Callable[[int], None] | None = None,
) -> tuple[ReuseVerdict, ...]:
    """The verdict of a KV rule, and then of longer delays up to the first that passes.

    Args:
        delays: Those to try; None: 0, 1, .. as long as tokens can still exit early.
        free_tokens: Tokens to generate per window, without a delay, as far as the model's context goes; 0: none.
    """
    check_auditable(model, rule, kv)
    steps = max(exit_points(model.spec))
    weight = next(model.parameters())
    kv_bytes = bytes_per_token(shapes_of(model), kv, model.spec.plan().iterations(), weight.dtype)
    found = []
    for delay in range(steps) if delays is None else delays:
        arms = measure(model, windows, rule, kv, prompt=prompt, delay=delay, seed=seed, rows=rows, advanced=advanced)
        free = None
        if free_tokens and not delay:
            longest = model.spec.max_positions
            said = free_tokens if longest is None else min(free_tokens, longest - prompt)
            free = free_run(model, windows, rule, kv, prompt=prompt, output=said, seed=seed, rows=rows)
        found.append(
            assess(
                arms,
                base,
                kv_rule=name_of(kv),
                delay=delay,
                steps=steps,
                kv_bytes=kv_bytes,
                seed=seed,
                replicates=replicates,
                free=free,
            )
        )
        if found[-1].word == "reusable":
            break
    return tuple(found)


def audit(
    model: Any,
    windows: Int[Tensor, "windows length"],
    rule: ExitRule,
    rules: Mapping[str, KVRule],
    *,
    prompt: int,
    name: str,
    text: str,
    text_hash: str,
    delays: Sequence[int] | None = None,
    seed: int = 0,
    replicates: int = 2000,
    free_tokens: int = 0,
    rows: int = 16,
    command: str = "",
    began: Callable[[str, int], None] | None = None,
    advanced: Callable[[int], None] | None = None,
) -> ReuseResult:
    """The audit of one model under one exit rule; arguments as for `audit_rule`.

    Args:
        rules: KV rules by name.
        name: Of the checkpoint.
        text: Name of what the windows were cut from.
        began: Told the KV rule that comes next, and its tokens per delay.
    Raises:
        ValueError: As for `check_auditable`.
    """
    for kv in rules.values():
        check_auditable(model, rule, kv)
    base = reference(model, windows, prompt=prompt, seed=seed, rows=rows)
    verdicts: list[ReuseVerdict] = []
    for kv_name, kv in rules.items():
        if began is not None:
            began(kv_name, base.size)
        verdicts += audit_rule(
            model,
            windows,
            rule,
            kv,
            base,
            prompt=prompt,
            delays=delays,
            seed=seed,
            replicates=replicates,
            free_tokens=free_tokens,
            rows=rows,
            advanced=advanced,
        )
    return ReuseResult(
        model=name,
        weights=weight_hash(model),
        exit_rule=str(rule),
        steps=max(exit_points(model.spec)),
        prompt=prompt,
        output=base.shape[1],
        windows=len(windows),
        text=text,
        text_hash=text_hash,
        seed=seed,
        replicates=replicates,
        verdicts=tuple(verdicts),
        command=command,
    )


def _mean(draws: Draws, values: Float[np.ndarray, "windows tokens"]) -> Interval:
    sums = values.sum(1)
    tokens = values.size
    return percentile_interval(float(sums.sum() / tokens), draws.sums(sums[:, None])[:, 0] / tokens, units=len(values))


def _by_depth(reuse: Any, depths: Any) -> tuple[Stratum, ...]:
    later, before = reuse[:, 1:], depths[:, :-1]
    return tuple(
        Stratum(name=str(depth), tokens=int((before == depth).sum()), reuse=float(later[before == depth].mean()))
        for depth in sorted(set(before.flatten().tolist()))
    )


def _by_distance(reuse: Any, exited: Any) -> tuple[Stratum, ...]:
    places = np.arange(exited.shape[1])
    last = np.maximum.accumulate(np.where(exited, places, -(10**6)), axis=1)
    distance = np.full(exited.shape, 10**6)
    distance[:, 1:] = places[1:] - last[:, :-1]
    strata = [(f"{a}" if a == b else f"{a}-{b}", (distance >= a) & (distance <= b)) for a, b in DISTANCES]
    far = DISTANCES[-1][1]
    strata.append((f"above {far}, or none", distance > far))
    return tuple(
        Stratum(name=name, tokens=int(where.sum()), reuse=float(reuse[where].mean()))
        for name, where in strata
        if where.any()
    )


def _slope(draws: Draws, reuse: Any, exited: Any) -> Interval | None:
    """Least squares of reuse on the number of earlier tokens that exited."""
    x = np.zeros(exited.shape)
    x[:, 1:] = exited.cumsum(1)[:, :-1]
    if np.ptp(x) == 0:
        return None
    sums = np.stack([np.full(len(x), x.shape[1]), x.sum(1), reuse.sum(1), (x * x).sum(1), (x * reuse).sum(1)], 1)

    def slope(table: Any) -> Any:
        n, sx, sy, sxx, sxy = np.moveaxis(table, -1, 0)
        spread = n * sxx - sx * sx
        return np.where(spread > 0, (n * sxy - sx * sy) / np.where(spread > 0, spread, 1), 0.0)

    return percentile_interval(float(slope(sums.sum(0))), slope(draws.sums(sums)), units=len(x))
