"""What is fixed about an engine once it stands: what requests are checked against, and what it says of itself."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from looplab.engine.bound import Work, speedup_bound, work_of
from looplab.engine.check import CheckFacts
from looplab.engine.config import EngineConfig
from looplab.engine.cost_model import DepthLaw
from looplab.engine.probe import Prediction
from looplab.engine.request import DepthParams, RefusedError
from looplab.engine.stages import Facts
from looplab.engine.verdict import ReuseResult, ReuseVerdict, verdict_for
from looplab.recurrence.depth.base import DepthSampler, Grid
from looplab.recurrence.kv.depth_indexed import DepthIndexed
from looplab.recurrence.spec import LoopSpec

DEPTH_INDEXED = "depth_indexed"
FULL = "full depth"
"""In place of a verdict where no token stops early."""
SUMMED = ("hazard", "same_step", "lookahead", "preloop")
"""Rules whose number is a summed probability: with 1 every token runs all steps."""
DECIDING = (
    "exit_rule", "exit_threshold", "min_steps", "max_steps", "exit_delay", "offset_one", "draft_steps", "draft_tokens",
    "prefill_chunk", "max_model_len", "seed",
)  # fmt: skip
"""Fields of the configuration that answers depend on; the others are sizes, some of them found anew at every start."""


def served_kv_rule(spec: LoopSpec, asked: str | None) -> tuple[str | None, str]:
    """The KV rule to serve a model with, and why. None: the trained one."""
    if asked is not None:
        return asked, "as asked"
    if spec.kv_rule == DepthIndexed():
        return "last_exited", "reads as the trained depth_indexed does, and the last entry of tokens that exited early"
    return None, "as trained"


def rule_name(name: str, threshold: float | None, min_steps: int = 1) -> str:
    """An exit rule as audits write it: `hazard(0.5)`, `latent(0.1, min_steps=2)`."""
    inside = [f"{threshold:g}"] if threshold is not None else []
    inside += [f"min_steps={min_steps}"] if min_steps != 1 else []
    return f"{name}({', '.join(inside)})" if inside else name


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Facts of one engine.

    Args:
        weights: Hash of the model.
    """

    spec: LoopSpec
    config: EngineConfig
    """With nothing left open."""
    facts: Facts
    kv_rule: str
    kv_reason: str
    """Why this one, in words."""
    numerics: str
    noise: str
    bytes_per_token: int
    vocab: int
    weights: str
    gates: tuple[tuple[str, str], ...] = ()
    """Trained gates: name and hash of their weights."""
    rules: tuple[str, ...] = ()
    """Names of the exit rules that requests may use, those of gates among them."""
    refused_rules: Mapping[str, str] = field(default_factory=dict)
    """The others, and why."""
    drafts_refused: str = ""
    """Why no tokens are guessed ahead of full depth; empty: they may be."""
    verdicts: tuple[ReuseResult, ...] = ()
    """What the reuse audit found of this checkpoint, under one exit rule each."""
    prediction: Prediction | None = None
    """What launches of this machine make of early exits."""

    @property
    def work(self) -> Work:
        """Multiply-adds of a token."""
        return work_of(self.spec.cost)

    @property
    def step_work(self) -> float:
        """Multiply-adds of one step of a token, as its usage counts steps."""
        return sum(self.work.blocks) / self.facts.blocks

    @property
    def bound_at_half_depth(self) -> float:
        """What exits could gain at most if tokens ran half their steps."""
        most = float(sum(self.facts.max_steps))
        work = Work(outside=self.work.outside, blocks=(self.step_work,))
        return speedup_bound(work, [most], [max(1.0, most / 2)])

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_token * self.facts.page_tokens * self.facts.pages

    @property
    def trained(self) -> tuple[int, int] | None:
        """Least and most trained steps; None where nobody knows."""
        depth = self.spec.trained_depth
        if isinstance(depth, Grid):
            return int(min(depth.sizes)), int(max(depth.sizes))
        if not isinstance(depth, DepthSampler):
            return None
        support = depth.support()
        if depth.of_prefix:  # counted in applications of the full plan
            return 1, max(self.facts.max_steps)
        return min(support), max(support)

    @property
    def trained_words(self) -> str:
        """The same in words."""
        if self.trained is None:
            return ""
        low, high = self.trained
        return str(low) if low == high else f"{low}..{high}"

    def check_facts(self) -> CheckFacts:
        """What requests are checked against."""
        refused = ""
        if self.kv_rule == DEPTH_INDEXED:
            refused = "depth_indexed forbids exits; use last_exited"
        return CheckFacts(
            vocab=self.vocab,
            context=self.facts.max_tokens,
            pages=self.facts.pages - 1,
            page_tokens=self.facts.page_tokens,
            seats=self.config.max_resident or 1,
            max_steps=max(self.facts.max_steps),
            trained_steps=self.trained_words,
            exit_rules=self.rules,
            default_rule=self.config.exit_rule,
            refused_rules=tuple(self.refused_rules.items()),
            exits_refused=refused,
            draft_tokens=self.config.draft_tokens,
            draft_steps=self.config.draft_steps,
            drafts_refused=self.drafts_refused,
        )

    def root(self) -> bytes:
        """Of the prefix cache: what its entries depend on besides tokens, steps and grid."""
        said = f"{self.weights} {self.kv_rule} {self.numerics} {self.noise} {self.config.seed}"
        return hashlib.blake2b(said.encode(), digest_size=16).digest()

    def request_root(self, seed: int) -> bytes:
        """Of one request, where the first state is drawn with its seed."""
        return seed.to_bytes(9, "big", signed=True) if self.noise == "request" else b""

    def fingerprint(self) -> str:
        """Hash of what answers depend on: weights, gates, cache rule, numerics, first states and `DECIDING` fields."""
        decided = [getattr(self.config, name) for name in DECIDING]
        said = f"{self.weights} {self.gates} {self.rules} {self.kv_rule} {self.numerics} {self.noise} {decided}"
        return "fp_" + hashlib.blake2b(said.encode(), digest_size=6).hexdigest()

    def most_steps(self, depth: DepthParams) -> int:
        """Steps of a token at full depth, over all blocks."""
        asked = depth.num_steps if depth.num_steps is not None else depth.max_steps
        return self.facts.steps_of(max(self.facts.max_steps) if asked is None else asked)

    def early(self, depth: DepthParams) -> bool:
        """Whether tokens of a request may stop early."""
        rule = self.config.exit_rule if depth.exit_rule is None else depth.exit_rule
        threshold = depth.exit_threshold
        if threshold is None and rule == self.config.exit_rule:
            threshold = self.config.exit_threshold
        known = rule in (None, "full", "fixed") or (rule in SUMMED and threshold == 1)
        return depth.replay is not None or (depth.num_steps is None and not known)

    def verdict(self, depth: DepthParams) -> str:
        """Whether later tokens can use what those of this request leave: a word of the reuse audit, "unknown" where
        nobody measured it, "full depth" where no token stops early."""
        if not self.early(depth):
            return FULL
        found = self._measured(depth)
        return "unknown" if found is None else found.word

    def depth_law(self) -> tuple[DepthLaw, str]:
        """Depths of decoded tokens as far as they are known, and where they come from: of the default exit rule, if the
        reuse audit counted them under it; else spread evenly."""
        steps, early = max(self.facts.max_steps), self.early(DepthParams())
        found = self._measured(DepthParams()) if early else None
        counts = {int(one.name): one.tokens for one in found.by_depth} if found is not None else {}
        total = sum(counts.values())
        if found is None or not total or max(counts) > steps:
            return DepthLaw(chances=(1 / steps,) * steps), f"if depths were spread evenly over 1..{steps}"
        chances = tuple(counts.get(step, 0) / total for step in range(1, steps + 1))
        return DepthLaw(chances=chances), f"at the depths that looplab reuse measured, mean {found.mean_depth:.2f}"

    def _measured(self, depth: DepthParams) -> ReuseVerdict | None:
        """What the reuse audit found under the exit rule of a request."""
        name, threshold = depth.exit_rule, depth.exit_threshold
        if name is None:
            name, threshold = self.config.exit_rule, self.config.exit_threshold
        least = self.config.min_steps if depth.min_steps is None else depth.min_steps
        delay = self.config.exit_delay if depth.exit_delay is None else depth.exit_delay
        rule = rule_name(name or "replay", threshold, least)
        return verdict_for(self.verdicts, weights=self.weights, exit_rule=rule, kv_rule=self.kv_rule, delay=delay)

    def check_reuse(self, depth: DepthParams) -> None:
        """Refuses early exits without a pass, where the engine requires one.

        Raises:
            RefusedError: exit_refused.
        """
        if self.config.reuse == "require" and (word := self.verdict(depth)) not in (FULL, "reusable"):
            raise RefusedError(
                "exit_refused",
                f"reuse of what exited tokens leave is {word}, and this server requires a pass; run looplab reuse, or "
                "ask for num_steps",
                "exit_rule",
            )

    def warnings(self, depth: DepthParams) -> tuple[str, ...]:
        """What a client should know of the depth it asked for."""
        said = []
        most = depth.num_steps if depth.num_steps is not None else depth.max_steps
        if self.trained is not None and most is not None and most > self.trained[1]:
            said.append(f"{most} steps are more than the {self.trained[1]} of training")
        word = self.verdict(depth)
        if self.config.reuse == "check" and word not in (FULL, "reusable"):
            said.append(f"KV of tokens that exited early: {word} (KV rule {self.kv_rule}); see looplab reuse")
        return tuple(said)

    def describe(self) -> dict[str, Any]:
        """The whole as JSON-ready values."""
        return {
            "architecture": self.spec.name,
            "trained_steps": self.trained_words or "unknown",
            "max_steps": max(self.facts.max_steps),
            "exit_rules": list(self.rules),
            "refused_rules": dict(self.refused_rules),
            "kv_rule": self.kv_rule,
            "kv_reason": self.kv_reason,
            "depth_causal": self.facts.depth_causal,
            "draft_steps": self.config.draft_steps,
            "draft_tokens": self.config.draft_tokens,
            "reuse": self.verdict(DepthParams()),
            "context": self.facts.max_tokens,
            "numerics": self.numerics,
            "noise": self.noise,
            "launch_rows": self.config.launch_rows,
            "max_resident": self.config.max_resident,
            "min_coda_rows": self.config.min_coda_rows,
            "pages": self.facts.pages - 1,
            "page_tokens": self.facts.page_tokens,
            "kv_bytes_per_token": self.bytes_per_token,
            "kv_tokens": (self.facts.pages - 1) * self.facts.page_tokens,
            "bound_at_half_depth": round(self.bound_at_half_depth, 3),
            "predicted_realised": None if self.prediction is None else round(self.prediction.realised, 3),
            "predicted_for": "" if self.prediction is None else self.prediction.depths,
            "fingerprint": self.fingerprint(),
            "weights": self.weights,
            "config": asdict(self.config),
        }
