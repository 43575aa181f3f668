"""Verdicts of the reuse audit: what they say, where they are kept, and what an engine does about them. No torch.

    reusable       upper bounds of reuse <= 0.01 nats and of flipped top tokens <= 2 %
    not reusable   one of the lower bounds is above its limit
    undecided      neither; `windows_needed` says how many windows might decide it

A result belongs to weights, exit rule and threshold; the file reuse.json keeps several of one checkpoint.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from looplab._config import from_dict
from looplab.intervals import Interval
from looplab.records import dump_json, write_atomic

STORE, FORMAT, SCHEMA = "reuse.json", "looplab-reuse", 1
NATS, FLIPS = 0.01, 0.02
"""Limits of a pass: what later tokens may lose, and the share of top tokens that may change."""
Word = Literal["reusable", "not reusable", "undecided"]
Mode = Literal["off", "check", "pick", "require"]


@dataclass(frozen=True, kw_only=True)
class Stratum:
    """Mean of `reuse` over some tokens."""

    name: str
    tokens: int
    reuse: float
    """Nats."""


@dataclass(frozen=True, kw_only=True)
class FreeRun:
    """Generation at full depth beside generation with exits, by the same random numbers."""

    windows: int
    tokens: int
    """Generated per window."""
    diverged: int
    """Windows in which a token differs."""
    first: tuple[int, ...]
    """Position of the first different token of each of these, from 0, in order."""


@dataclass(frozen=True, kw_only=True)
class ReuseVerdict:
    """One KV rule under one exit rule and delay. Intervals are paired bootstraps over windows."""

    kv_rule: str
    delay: int
    """Steps that a token still runs after the rule fired."""
    word: Word
    rule: Interval
    """What sharing slots costs even at full depth, in nats per token."""
    read: Interval
    """What reading a token at its exit costs, deep past."""
    reuse: Interval
    """What tokens lose because earlier ones exited."""
    total: Interval
    """The sum of the three."""
    past: Interval
    """What tokens that run all steps themselves lose by the exits of earlier ones; no part of the sum."""
    kl: Interval
    """KL(read deep past || read exited past)."""
    flips: Interval
    """Share of tokens whose likeliest successor differs between the two."""
    mean_depth: float
    kv_bytes: int
    """Per token of context."""
    windows_needed: int | None = None
    """Where undecided; None: no number of windows is likely to decide it, or it is decided."""
    by_depth: tuple[Stratum, ...] = ()
    """By the depth of the token before."""
    by_distance: tuple[Stratum, ...] = ()
    """By the distance to the nearest earlier token that exited early."""
    slope: Interval | None = None
    """Nats per earlier token that exited early; None where their number does not vary."""
    free: FreeRun | None = None


@dataclass(frozen=True, kw_only=True)
class ReuseResult:
    """The audit of one checkpoint under one exit rule, without times: equal inputs give equal bytes."""

    model: str
    weights: str
    exit_rule: str
    """With its number, such as hazard(0.5)."""
    steps: int
    """Full depth."""
    prompt: int
    output: int
    """Tokens of a window that are read as a prompt, and those that may exit."""
    windows: int
    text: str
    text_hash: str
    seed: int
    replicates: int
    verdicts: tuple[ReuseVerdict, ...]
    """Delay 0 of every KV rule, then longer delays up to the first that passes."""
    command: str = ""

    def settle(self, kv_rule: str) -> int | None:
        """delta*: least delay with which the KV rule passes; None where none was found."""
        passed = [v.delay for v in self.verdicts if v.kv_rule == kv_rule and v.word == "reusable"]
        return min(passed, default=None)

    @property
    def rules(self) -> tuple[str, ...]:
        """KV rules, in order."""
        return tuple(dict.fromkeys(v.kv_rule for v in self.verdicts))

    def of(self, kv_rule: str, delay: int = 0) -> ReuseVerdict | None:
        """The verdict of a KV rule with a delay."""
        found = (v for v in self.verdicts if (v.kv_rule, v.delay) == (kv_rule, delay))
        return next(found, None)

    def __str__(self) -> str:
        lines = [f"{self.model} under {self.exit_rule}, {self.windows} windows of {self.prompt} + {self.output} tokens"]
        for kv_rule in self.rules:
            lines.append(sentence(self, kv_rule))
        return "\n".join(lines)


def judge(reuse: Interval, flips: Interval, windows: int) -> tuple[Word, int | None]:
    """The word, and where it is undecided the windows that would decide it if estimates stayed."""
    measured = ((reuse, NATS), (flips, FLIPS))
    if all(interval.high <= limit for interval, limit in measured):
        return "reusable", None
    if any(interval.low > limit for interval, limit in measured):
        return "not reusable", None
    needed = 0.0
    for interval, limit in measured:
        if interval.high > limit:
            gap = abs(limit - interval.estimate)
            half = max(interval.high - interval.estimate, interval.estimate - interval.low)
            needed = max(needed, windows * (half / gap) ** 2 if gap > 0 else float("inf"))
    return "undecided", int(needed) + 1 if needed <= 1e6 else None


def sentence(result: ReuseResult, kv_rule: str) -> str:
    """What was found of a KV rule, in a line or two."""
    verdict = result.of(kv_rule)
    assert verdict is not None
    said = (
        f"{kv_rule}: {verdict.word} (reuse {_nats(verdict.reuse)}, limit {NATS}; flips {_share(verdict.flips)}, limit "
        f"{FLIPS:.0%}; mean depth {verdict.mean_depth:.2f} of {result.steps})."
    )
    if verdict.windows_needed is not None:
        said += f" About {verdict.windows_needed} windows would decide it."
    if verdict.word == "undecided" and verdict.windows_needed is None:
        said += " It lies too near the limit for any number of windows."
    settle = result.settle(kv_rule)
    if verdict.word != "reusable" and settle is not None:
        later = result.of(kv_rule, settle)
        assert later is not None
        said += f" Passes with exit_delay={settle} (mean depth {later.mean_depth:.2f})."
    elif verdict.word != "reusable" and any(v.delay for v in result.verdicts if v.kv_rule == kv_rule):
        said += " No delay passes."
    return said


def _nats(interval: Interval) -> str:
    return f"{interval.estimate:.4f} [{interval.low:.4f}, {interval.high:.4f}] nats"


def _share(interval: Interval) -> str:
    return f"{interval.estimate:.1%} [{interval.low:.1%}, {interval.high:.1%}]"


def read_results(path: str | os.PathLike[str]) -> tuple[ReuseResult, ...]:
    """The results of a reuse.json, or of the one in a folder; none where there is no such file.

    Raises:
        ValueError: The file is something else.
    """
    file = Path(path) / STORE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        return ()
    try:
        data = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"reuse: {file} must be JSON. Got: {error}. Run `looplab reuse` again.") from None
    if not isinstance(data, dict) or (data.get("format"), data.get("schema")) != (FORMAT, SCHEMA):
        raise ValueError(
            f"reuse: {file} must have format {FORMAT!r} and schema {SCHEMA}. Got something else. "
            "Run `looplab reuse` again."
        )
    try:
        return tuple(from_dict(ReuseResult, result, path=f"{file}: results") for result in data["results"])
    except (KeyError, TypeError, ValueError) as error:
        message = error.args[0] if error.args else error
        raise ValueError(f"reuse: {message}. Run `looplab reuse` again.") from None


def store_result(path: str | os.PathLike[str], result: ReuseResult) -> Path:
    """Writes a result into a reuse.json, or into that of a folder, in place of an older one of the same exit rule.

    Results of other weights are dropped: the checkpoint has changed.
    """
    file = Path(path) / STORE if Path(path).is_dir() else Path(path)
    kept = [old for old in read_results(file) if old.weights == result.weights and old.exit_rule != result.exit_rule]
    ordered = sorted([*kept, result], key=lambda one: one.exit_rule)
    data = {"format": FORMAT, "schema": SCHEMA, "results": [dataclasses.asdict(one) for one in ordered]}
    write_atomic(file, dump_json(data))
    return file


def verdict_for(
    results: Sequence[ReuseResult], *, weights: str, exit_rule: str, kv_rule: str, delay: int = 0
) -> ReuseVerdict | None:
    """The verdict that was stored for exactly this; None: nobody has measured it."""
    for result in results:
        if (result.weights, result.exit_rule) == (weights, exit_rule):
            return result.of(kv_rule, delay)
    return None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How an engine serves a model of which tokens would stop early."""

    kv_rule: str
    delay: int
    exits: bool
    """False: every token runs all steps."""
    word: str
    """reusable, not reusable, undecided or unknown."""
    why: str
    """A line for the start log; a warning where `warns`."""
    warns: bool = False


def choose(
    mode: Mode, results: Sequence[ReuseResult], *, weights: str, exit_rule: str, kv_rule: str, delay: int = 0
) -> Choice:
    """What to do under a mode of `--reuse`.

    off       nothing is looked up
    check     as asked, with a warning where the stored verdict is no pass
    pick      the cheapest passing KV rule whose own cost at full depth is within the limit; else the one that passes
              with the least depth after a delay; else full depth
    require   as asked, and refused without a pass

    Args:
        results: Stored ones; for pick of an audit made at the start where none is stored.
        kv_rule: Asked for, or the default.
        delay: Asked for.
    Raises:
        ValueError: require, and no pass.
    """
    if mode == "off":
        return Choice(
            kv_rule=kv_rule, delay=delay, exits=True, word="unknown", why="reuse of exited KV is not looked at"
        )
    found = verdict_for(results, weights=weights, exit_rule=exit_rule, kv_rule=kv_rule, delay=delay)
    word = "unknown" if found is None else found.word
    how = f"{kv_rule} under {exit_rule}" + (f" with exit_delay={delay}" if delay else "")
    if mode == "require" and word != "reusable":
        raise ValueError(
            f"reuse: --reuse require needs a pass of {how} for these weights. Got {word}. Run `looplab reuse`, or "
            "serve with --reuse pick."
        )
    if mode != "pick":
        why = {
            "reusable": f"later tokens can use what exited ones leave ({how})",
            "not reusable": f"later tokens lose by what exited ones leave ({how}); try --reuse pick",
            "undecided": f"the audit of {how} is undecided; give `looplab reuse` more windows",
            "unknown": f"whether later tokens can use what exited ones leave ({how}) is unknown: run looplab reuse",
        }[word]
        return Choice(kv_rule=kv_rule, delay=delay, exits=True, word=word, why=why, warns=word != "reusable")
    own = [r for r in results if (r.weights, r.exit_rule) == (weights, exit_rule)]
    # A pass says nothing of what sharing slots costs by itself: `first` passes always, as exits change nothing in it.
    passed = [v for result in own for v in result.verdicts if v.word == "reusable" and v.rule.high <= NATS]
    at_once = sorted((v for v in passed if v.delay == 0), key=lambda v: (v.kv_bytes, v.mean_depth))
    later = sorted((v for v in passed if v.delay > 0), key=lambda v: (v.mean_depth, v.kv_bytes))
    for verdict in (*at_once, *later):
        wait = f" with exit_delay={verdict.delay}" if verdict.delay else ""
        return Choice(
            kv_rule=verdict.kv_rule,
            delay=verdict.delay,
            exits=True,
            word="reusable",
            why=f"picked {verdict.kv_rule}{wait}: the cheapest that passes under {exit_rule}",
        )
    none = "no KV rule passes" if own else "nothing was measured"
    return Choice(
        kv_rule=kv_rule,
        delay=0,
        exits=False,
        word=word,
        why=f"full depth: {none} under {exit_rule}; --draft-steps makes full depth faster without changing a token",
        warns=True,
    )
