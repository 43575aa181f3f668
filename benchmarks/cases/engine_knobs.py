"""What the engine can be told: `coda_rows`, `kv_rules` and `gates`.

kv_rules and gates read a checkpoint too, on held-out text of the built-in corpus: what a rule costs in nats, and how
often a gate stops where the model's own does. Arms whose depths come from a gate are run a second time with the depths
that they recorded, and must say the same tokens again.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.cases.engine_depth import FULL, compared, engine_of
from benchmarks.cases.engine_load import Drive, Load, Run, load_of, model_of, replayed, run
from benchmarks.cases.engine_table import (
    Row,
    Rows,
    check_alone,
    check_equal,
    counts,
    facts,
    fractions,
    in_turn,
    latency,
    speed,
)
from benchmarks.timing import CLOCKS
from looplab.data.corpus import builtin_corpus
from looplab.data.documents import Document
from looplab.engine.gates import gates_of
from looplab.engine.request import DepthParams
from looplab.engine.reuse import assess, cut_windows, measure, reference
from looplab.engine.slots import bytes_per_token, name_of, rule_of, shapes_of
from looplab.interop.checkpoint import LoadedModel, load
from looplab.recurrence.exit import ExitRule, HazardExit
from looplab.recurrence.kv import Anchor
from looplab.training.gates import chosen, full_run

KV_RULES = ("depth_indexed", "last_exited", "single", "first", "first_then_shared(2)")
TEACHER = "own gate"
GATES: dict[str, tuple[str, bool]] = {
    TEACHER: ("hazard", False),
    "same step": ("same_step", False),
    "delayed": ("same_step", True),
    "lookahead": ("lookahead", True),
    "pre-loop": ("preloop", True),
}
"""Arm -> its exit rule, and whether what a step says is read after the next one was launched (offset_one)."""


def coda_rows(options: argparse.Namespace) -> Rows:
    """Rows that a readout waits for, 1 .. R: throughput against the time between two tokens."""
    model = model_of(options.model, options.device, options.dtype)
    width, residents = options.rows, options.residents or options.rows + options.rows // 2
    load = load_of(
        "spread", model.spec.default_steps, requests=max(options.requests, 4 * residents), prompt=options.prompt,
        outputs=options.outputs, seed=0,
    )  # fmt: skip
    waits = sorted({1, *(max(1, residents // part) for part in (8, 4, 2, 1))})
    arms: dict[str, dict[str, Any]] = {FULL: {"segments": "plan"}}
    arms |= {f"m = {m}": {"min_coda_rows": m} for m in waits}

    def once(name: str) -> Run:
        engine = engine_of(model, width, residents, options, **arms[name])
        return run(engine, load, full=name == FULL, clock=CLOCKS[options.clock])

    runs = in_turn(list(arms), once, options.pairs)
    check_equal("all m", [runs[name][0].tokens for name in arms if name != FULL])
    return compared(load, runs)


def kv_rules(options: argparse.Namespace) -> Rows:
    """Rules for keys and values, at full depth and with exits: bytes, throughput, and what they cost in nats."""
    model = model_of(options.model, options.device, options.dtype)
    width, residents = options.rows, options.residents or options.rows + options.rows // 2
    load_ = load_of(
        "spread", model.spec.default_steps, requests=max(options.requests, 4 * residents), prompt=options.prompt,
        outputs=options.outputs, seed=0,
    )  # fmt: skip
    arms = [(rule, exits) for rule in KV_RULES for exits in ("full depth", "exits")]
    arms.remove(("depth_indexed", "exits"))  # which it forbids

    def once(name: str) -> Run:
        rule, exits = name.split(", ")
        full = exits == "full depth"
        changes = {"segments": "plan"} if full else {}
        engine = engine_of(model, width, residents, options, kv_rule=rule, **changes)
        return run(engine, load_, full=full, clock=CLOCKS[options.clock])

    runs = in_turn([", ".join(arm) for arm in arms], once, options.pairs)
    base = runs["depth_indexed, full depth"]
    quality = _quality(options)
    rows: Rows = []
    for rule, exits in arms:
        mine, full = runs[f"{rule}, {exits}"], exits == "full depth"
        # At full depth the two rules of as many entries as steps are one.
        alone = "last_exited" if rule == "depth_indexed" else rule
        check_alone(mine[0], load_, options.sequential, full=full, kv_rule=alone)
        rows.append(
            {"arm": f"{rule}, {exits}"}
            | facts(mine[0], load_)
            | {"bytes_per_token": mine[0].engine.runner.bytes_per_token}
            | quality[rule, exits]
            | speed(mine, base)
            | fractions(mine[0], load_, full=full)
            | counts(mine[0])
        )
    return rows


def _quality(options: argparse.Namespace) -> dict[tuple[str, str], Row]:
    """NLL of a checkpoint under every rule, and the parts of its cost by the reuse audit."""
    opened = load(options.checkpoint, device=options.device)
    model, prompt = opened.model, options.context // 2
    windows = cut_windows(texts_of(opened), length=options.context + 1, windows=options.windows)
    base = reference(model, windows, prompt=prompt)
    found: dict[tuple[str, str], Row] = {("depth_indexed", "full depth"): {"nll": float(base.mean())}}
    steps = model.spec.default_steps
    iterations, weight = model.spec.plan().iterations(), next(model.parameters())
    for name in KV_RULES[1:]:
        kv = rule_of(name)
        least = kv.n + 1 if isinstance(kv, Anchor) else 1
        exits = HazardExit(threshold=options.thresholds[0], min_steps=least)
        arms = measure(model, windows, exits, kv, prompt=prompt)
        held = bytes_per_token(shapes_of(model), kv, iterations, weight.dtype)
        said = assess(arms, base, kv_rule=name_of(kv), delay=0, steps=steps, kv_bytes=held)
        found[name, "full depth"] = {"nll": float(arms.full.mean()), "rule_nats": said.rule.estimate}
        found[name, "exits"] = {
            "nll": float(arms.exit.mean()), "rule_nats": said.rule.estimate, "read_nats": said.read.estimate,
            "reuse_nats": said.reuse.estimate, "reuse_low": said.reuse.low, "reuse_high": said.reuse.high,
            "verdict": said.word, "checkpoint_depth": said.mean_depth,
        }  # fmt: skip
    return found


def gates(options: argparse.Namespace) -> Rows:
    """Ways to know the depth of a token: the model's own gate, the same a step late, gates that look ahead."""
    opened = load(options.checkpoint, device=options.device)
    width, residents = options.rows, options.residents or options.rows + options.rows // 2
    texts = texts_of(opened)
    requests = max(options.requests, 4 * residents)
    prompts = cut_windows(texts, length=options.prompt, windows=requests).tolist()
    outputs = min(options.outputs, 255 - options.prompt)
    steps = opened.model.spec.default_steps
    texts_ = Load(
        prompts=tuple(map(tuple, prompts)), depths=((steps,) * (outputs - 1),) * len(prompts)
    )  # the prompts, and as many tokens as are to be said
    known = {name: gate.rule(0.5) for name, gate in gates_of(opened.folder, opened.model).items()}
    held_out = cut_windows(texts, length=options.context, windows=options.windows)
    rows: Rows = []
    for threshold in options.thresholds:
        agreed = _agreement(opened.model, held_out, known, threshold)

        def once(name: str, threshold: float = threshold, load: Load | None = None) -> Run:
            rule, late = GATES.get(name, ("", False))
            changes = {"segments": "plan"} if name == FULL else {"offset_one": late, "kv_rule": "last_exited"}
            engine = engine_of(opened.model, width, residents, options, gates=known, **changes)
            if name == FULL or load is not None:
                own = replayed(engine, load or texts_, full=name == FULL)
            else:
                own = lambda place: DepthParams(exit_rule=rule, exit_threshold=threshold)  # noqa: E731
            return Drive(engine, load or texts_, own, clock=CLOCKS[options.clock]).finish()

        runs = in_turn([FULL, *GATES], once, options.pairs)
        for name, mine in runs.items():
            said = Load(prompts=texts_.prompts, depths=tuple(map(tuple, mine[0].depths)))
            if name != FULL:
                again = once(name, load=said)
                check_equal(f"{name} and its recorded depths", [mine[0].tokens, again.tokens])
            rows.append(
                {"arm": name, "threshold": threshold, "checkpoint": opened.name}
                | facts(mine[0], said)
                | agreed.get(name, {})
                | speed(mine, runs[FULL])
                | fractions(mine[0], said, full=name == FULL)
                | counts(mine[0])
                | latency(mine)
            )
    return rows


def _agreement(model: Any, windows: torch.Tensor, known: Mapping[str, ExitRule], threshold: float) -> dict[str, Row]:
    """Share of held-out tokens at which a rule stops where the model's own gate does."""
    rules: dict[str, ExitRule] = {"hazard": HazardExit(threshold=threshold)}
    rules |= {name: replace(rule, threshold=threshold) for name, rule in known.items()}  # type: ignore[call-arg]
    depths: dict[str, list[np.ndarray]] = {name: [] for name in rules}
    for number, window in enumerate(windows):
        rollout, scores = full_run(model, window[None], number)
        for name, rule in rules.items():
            depths[name].append(chosen(rule, rollout, scores).cpu().numpy())
    joined = {name: np.concatenate(parts, axis=1) for name, parts in depths.items()}
    return {
        arm: {
            "agreement": float((joined[rule] == joined["hazard"]).mean()),
            "held_out_depth": float(joined[rule].mean()),
        }
        for arm, (rule, _) in GATES.items()
    }


def texts_of(opened: LoadedModel) -> list[list[int]]:
    """Held-out texts of the built-in corpus in tokens of a checkpoint."""
    if opened.tokenizer is None:
        raise ValueError(f"--checkpoint must read texts. Got {opened.name}, which reads ids of a task. Name another")
    texts = [one.text for one in builtin_corpus("heldout").documents if isinstance(one, Document)]
    return [list(ids) for ids in opened.tokenizer.encode_all(texts)]


CASES: dict[str, Callable[[argparse.Namespace], Rows]] = {"coda_rows": coda_rows, "kv_rules": kv_rules, "gates": gates}
