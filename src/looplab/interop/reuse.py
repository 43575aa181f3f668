"""What `--reuse` makes of a checkpoint that is about to be served: the stored verdict, or an audit at the start.

off | check | require   the verdict of reuse.json beside the checkpoint, for its default exit rule and KV rule
pick                    the same; where none is stored, an audit on the held-out side of the built-in corpus. Tokens are
                        guessed (`draft_steps`) only where it decides for full depth
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from looplab.data.corpus import builtin_corpus
from looplab.data.documents import Document
from looplab.engine.config import EngineConfig
from looplab.engine.profile import served_kv_rule
from looplab.engine.reuse import audit, cut_windows
from looplab.engine.slots import name_of, rule_of
from looplab.engine.verdict import Choice, ReuseResult, choose, read_results
from looplab.interop.checkpoint import LoadedModel
from looplab.models.folder import weight_hash
from looplab.recurrence.exit import ExitRule, exit_rule
from looplab.recurrence.kv import KVRule

AUDITED = ("last_exited", "single", "first")
WINDOWS, PROMPT = 32, 64
"""Of an audit at the start, whose windows have as many output tokens; `looplab reuse` measures on more."""


class Settled(NamedTuple):
    """How a checkpoint is served."""

    config: EngineConfig
    choice: Choice | None
    """None where no token stops early by default."""
    results: tuple[ReuseResult, ...]
    """All verdicts that are known."""


def default_rule(config: EngineConfig, gates: Mapping[str, ExitRule]) -> ExitRule | None:
    """The exit rule of requests that name none; None where it stops no token early.

    Raises:
        KeyError, ValueError: As for `exit_rule`.
    """
    name = config.exit_rule
    if name is None:
        return None
    if name in gates:
        changes: dict[str, float] = {} if config.exit_threshold is None else {"threshold": config.exit_threshold}
        rule = dataclasses.replace(gates[name], min_steps=config.min_steps, **changes)  # type: ignore[arg-type]
    else:
        rule = exit_rule(name, config.exit_threshold, min_steps=config.min_steps)
    return rule if rule.early else None


def settle_reuse(loaded: LoadedModel, config: EngineConfig, gates: Mapping[str, ExitRule]) -> Settled:
    """The configuration to serve with, and why.

    Raises:
        ValueError: `require` without a pass; `pick` where nothing can be measured.
    """
    rule = default_rule(config, gates)
    if rule is None:
        return Settled(config, None, read_results(loaded.folder))
    spec, weights = loaded.model.spec, weight_hash(loaded.model)
    kv_rule = served_kv_rule(spec, config.kv_rule)[0] or name_of(spec.kv_rule)
    results = read_results(loaded.folder)
    known = any((one.weights, one.exit_rule) == (weights, str(rule)) for one in results)
    if config.reuse == "pick" and not known:
        results = (*results, audit_at_start(loaded, rule))
    choice = choose(
        config.reuse, results, weights=weights, exit_rule=str(rule), kv_rule=kv_rule, delay=config.exit_delay
    )
    if config.reuse != "pick":
        return Settled(config, choice, results)
    if not choice.exits:
        return Settled(dataclasses.replace(config, exit_rule=None, exit_threshold=None), choice, results)
    early = dataclasses.replace(config, kv_rule=choice.kv_rule, exit_delay=choice.delay, draft_steps=None)
    return Settled(early, choice, results)


def audit_at_start(loaded: LoadedModel, rule: ExitRule) -> ReuseResult:
    """The reuse audit on a few windows of the built-in corpus, for every KV rule that the model supports.

    Raises:
        ValueError: The model has no tokenizer, supports none of them, or has too short a context.
    """
    if loaded.tokenizer is None:
        raise ValueError(f"reuse: --reuse pick needs a tokenizer. {loaded.name} has none. Run `looplab reuse` first.")
    supported: dict[str, KVRule] = {}
    for name in AUDITED:
        if any(one.allows(rule_of(name)) for one in loaded.model.spec.kv_rules):
            supported[name] = rule_of(name)
    half = min(PROMPT, (loaded.model.spec.max_positions or 2 * PROMPT) // 2)
    found = builtin_corpus("heldout")
    texts = [document.text for document in found.documents if isinstance(document, Document)]
    windows = cut_windows(loaded.tokenizer.encode_all(texts), length=2 * half + 1, windows=WINDOWS)
    return audit(
        loaded.model,
        windows,
        rule,
        supported,
        prompt=half,
        name=Path(loaded.name).name,
        text=found.name,
        text_hash=found.hash,
    )
