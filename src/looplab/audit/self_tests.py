"""Nine checks of a model before any number of it is believed, on four of its own evaluation documents.

    T1 readout     head of gathered hidden states = the model's logits
    T2 native      a plain loop over the full plan = the model's forward, and the original forward that an adapter wraps
    T3 padding     scored losses do not change under left and right padding
    T4 batch       rows permuted, or alone, give the same
    T5 repeatable  twice the same run, the same bits
    T6 classes     equal operator classes give equal outputs, those of coarser grids of step sizes included
    T7 causality   changing the last token leaves earlier logits alone
    T8 sharing     schedules of the shared walk = the same schedules run from the start
    T9 frozen      eval mode, the same weights before and after

A difference is the maximum absolute one over max(1, max |logit|); its limit depends on the dtype (`_tolerances.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from looplab._tolerances import SELF_TEST
from looplab._types import Float
from looplab.audit.documents import extras_of, pad
from looplab.audit.reading import ScoredDocument
from looplab.audit.result import SelfTest
from looplab.audit.runner import Runner, weight_hash
from looplab.audit.schedules import FullPlan, prefix, regrid, repeat, suffix, trie
from looplab.records import Finding, Level
from looplab.recurrence import state as states
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward, walk
from looplab.recurrence.plan import Application, Plan, PlanNode

DOCUMENTS = 4
EXTRA_PADDING = 7
MAX_INDICES = 16


TESTS = {
    "T1": (
        "readout equals the model's logits",
        "the head on gathered hidden states differs from the model's logits",
        "The readout does something besides coda and head.",
    ),
    "T2": (
        "rollout equals the model's forward",
        "rollout differs from the model's forward",
        "The adapter or the checkpoint version is wrong.",
    ),
    "T3": (
        "padding changes no scored loss",
        "padding changes scored losses",
        "The model reads padding; audit it with an adapter that masks it.",
    ),
    "T4": ("rows do not see each other", "a row changes with its batch", "The model mixes the rows of a batch."),
    "T5": ("the same run twice gives the same bits", "two equal runs differ", "Turn off dropout and other randomness."),
    "T6": (
        "equal operator classes give equal outputs",
        "applications declared equal differ",
        "The model's operator classes are declared wrongly.",
    ),
    "T7": (
        "the last token changes no earlier logit",
        "a later token changes earlier logits",
        "Declare the model as not causal.",
    ),
    "T8": (
        "the shared walk equals runs from the start",
        "the shared walk differs from a run from the start",
        "The model keeps something between calls.",
    ),
}
"""Name -> title, what went wrong, what to do."""


class SelfTestError(ValueError):
    """A model failed a self-test; nothing measured on it would mean what it says."""


class NonFiniteError(ValueError):
    """The full plan gives logits that are not finite."""


@dataclass(frozen=True, eq=False)
class Checks:
    """The self-tests of one model. `run` is the way in."""

    runner: Runner
    full: FullPlan
    documents: tuple[ScoredDocument, ...]
    ledger: Ledger

    @cached_property
    def limit(self) -> float:
        """The largest difference allowed for the model's dtype."""
        return SELF_TEST[str(self.runner.weights.dtype).removeprefix("torch.")]

    @cached_property
    def even(self) -> tuple[ScoredDocument, ...]:
        """The documents cut to the shortest, so that nothing is padded."""
        shortest = min(len(document.tokens) for document in self.documents)
        return tuple(document.trimmed(shortest) for document in self.documents)

    @cached_property
    def together(self) -> tuple[ScoredDocument, ...]:
        """What may share a launch."""
        return self.documents if self.runner.pads else self.even

    def logits(
        self,
        documents: Sequence[ScoredDocument],
        plan: Plan,
        *,
        side: Any = "right",
        extra: int = 0,
    ) -> list[Float[Tensor, "seq vocab"]]:
        """Logits of every document's own positions after a plain rollout, the documents padded to one batch."""
        tokens, valid = pad(documents, side=side, extra=extra)
        context, state = self._start(documents, tokens, valid)
        logits = self._logits(self.runner.rollout(plan, context, state), context)
        self._count(plan, *tokens.shape)
        rows = [slice(None)] * len(documents) if valid is None else list(valid)
        return [row[own] for row, own in zip(logits, rows, strict=True)]

    def _start(self, documents: Sequence[ScoredDocument], tokens: Tensor, valid: Tensor | None) -> tuple[Any, Any]:
        items = [document.item(0) for document in documents]
        return self.runner.start(tokens, valid, items, self.ledger, extras_of(documents))

    def _logits(self, state: Any, context: Any) -> Float[Tensor, "batch seq vocab"]:
        hidden = self.runner.hidden(state, context)
        with torch.no_grad():
            return self.runner.head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])

    def _count(self, plan: Sequence[Application] | Plan, rows: int, tokens: int) -> None:
        for block, _ in plan:
            self.ledger.count_step(self.runner.spec, block, rows=rows, tokens=tokens)
        self.ledger.count_coda(self.runner.spec, rows=rows, tokens=tokens)
        self.ledger.count_head(self.runner.spec, tokens=rows * tokens)

    @cached_property
    def alone(self) -> list[Float[Tensor, "seq vocab"]]:
        """Full-plan logits of every document run by itself, without padding."""
        return [self.logits([document], self.full.plan)[0] for document in self.documents]

    def finite(self) -> None:
        """Refuses a full plan whose logits are not finite."""
        for document, logits in zip(self.documents, self.alone, strict=True):
            check_finite(logits[document.read], document)

    def readout_and_native(self) -> tuple[SelfTest, SelfTest]:
        """T1 and T2."""
        tokens, valid = pad(self.even)
        context, state = self._start(self.even, tokens, valid)
        noise = self.runner.noise(context.positions, [document.item(0) for document in self.even])
        with torch.no_grad():
            native = forward(
                self.runner.model,
                tokens.to(context.embeds.device),
                plan=self.full.plan,
                noise=noise,
                extras=self.runner.placed(extras_of(self.even)),
                ledger=self.ledger,
            )
        assert native.logits is not None
        model_logits = native.logits.cpu()
        gathered = self.runner.head(native.hidden.cpu().flatten(0, 1)).unflatten(0, native.hidden.shape[:2]).detach()
        rolled = self._logits(self.runner.rollout(self.full.plan, context, state), context)
        self._count(self.full.plan, *tokens.shape)
        margin = difference(rolled, model_logits)
        if self.full.plan == self.runner.spec.plan():
            with torch.no_grad():
                original = self.runner.model.native(tokens.to(context.embeds.device))
            if original is not None:
                self._count(self.full.plan, *tokens.shape)
                margin = max(margin, difference(rolled, original.cpu()))
        return self._judge("T1", difference(gathered, model_logits)), self._judge("T2", margin)

    def padding(self) -> tuple[SelfTest, list[Finding]]:
        """T3. Padding on the left may fail alone, for a model that ignores its mask: the audit pads on the right."""
        supported = self.runner.spec.padding
        margins = {side: self._padded(side) for side in ("right", "left") if side in supported}
        limit = self.limit
        note = (
            ", ".join(f"{side} {margin:.1e}" for side, margin in margins.items())
            or "only documents of equal length share a launch"
        )
        findings = []
        if "left" in margins and not margins["left"] <= limit and margins.get("right", 1.0) <= limit:
            findings.append(_mask_ignored(margins.pop("left"), limit))
        margin = max(margins.values(), default=0.0, key=lambda m: float("inf") if m != m else m)
        test = self._judge("T3", margin, note=note)
        return test, findings

    def _padded(self, side: str) -> float:
        batch = self.logits(self.documents, self.full.plan, side=side, extra=EXTRA_PADDING)
        scale = max(1.0, *(float(logits.abs().max()) for logits in self.alone))
        losses = zip(self.documents, batch, self.alone, strict=True)
        return max(float((_nll(d, own) - _nll(d, single)).abs().max()) / scale for d, own, single in losses)

    def batch_order(self) -> SelfTest:
        """T4."""
        together = self.logits(self.together, self.full.plan)
        turned = self.logits(self.together[::-1], self.full.plan)[::-1]
        alone = self.alone
        if self.together is not self.documents:
            alone = [self.logits([document], self.full.plan)[0] for document in self.together]
        others = zip(together, turned, alone, strict=True)
        margin = max(max(difference(row, again), difference(row, single)) for row, again, single in others)
        return self._judge("T4", margin)

    def repeatable(self) -> SelfTest:
        """T5, bitwise."""
        once, twice = (self.logits(self.even, self.full.plan) for _ in range(2))
        margin = max(difference(a, b) for a, b in zip(once, twice, strict=True))
        return self._judge("T5", margin, limit=0.0)

    def operator_classes(self) -> tuple[SelfTest, list[Finding]]:
        """T6: every block, every pair of its first indices (`_indices`), from the initial and from the first state."""
        tokens, valid = pad(self.even)
        context, initial = self._start(self.even, tokens, valid)
        origins = [initial, self.runner.rollout(self.full.plan[:1], context, initial)]
        margin, inert = 0.0, []
        for block in sorted({block for block, _ in self.full.plan}):
            indices = self._indices(block)
            outputs = {t: [self.runner.rollout([Application(block, t)], context, s) for s in origins] for t in indices}
            self._count([Application(block, t) for t in indices for _ in origins], *tokens.shape)
            for a, b in combinations(indices, 2):
                apart = max(map(_state_difference, outputs[a], outputs[b]))
                if self.full.operator_class(block, a) == self.full.operator_class(block, b):
                    margin = max(margin, apart) if apart == apart else apart
                elif apart == 0.0:
                    inert.append(Plan.of([(block, a), (block, b)]))
        test = self._judge("T6", margin)
        return test, [_index_inert(inert)] if inert else []

    def _indices(self, block: int) -> list[int]:
        """Up to 16 indices of the full plan and up to 16 more of `regrid`, the first step of every grid first."""
        own = sorted({iteration for b, iteration in self.full.plan if b == block})
        grids = [regrid(k).plan(self.full) for k in range(1, self.full.M + 1)] if self.full.regrids else []
        ids = [[iteration for b, iteration in plan if b == block] for plan in grids]
        coarser = [grid[step] for step in range(self.full.M) for grid in ids if step < len(grid)]
        return own[:MAX_INDICES] + [iteration for iteration in coarser if iteration not in own][:MAX_INDICES]

    def causality(self) -> SelfTest:
        """T7."""
        if not self.runner.spec.causal:
            return SelfTest(name="T7", title=TESTS["T7"][0], passed=True, margin=None, limit=None, note="not causal")
        spec = self.runner.spec
        size = spec.vocab[0] if spec.token_ids is None else spec.token_ids
        changed = tuple(_with_other_ending(document, size) for document in self.even)
        margin = 0.0
        for plan in (prefix(1).plan(self.full), self.full.plan):
            pairs = zip(self.logits(self.even, plan), self.logits(changed, plan), strict=True)
            margin = max(margin, *(difference(a[:-1], b[:-1]) for a, b in pairs))
        return self._judge("T7", margin)

    def sharing(self) -> SelfTest:
        """T8."""
        half = max(1, self.full.M // 2)
        chosen = [s for s in (prefix(half), suffix(half), repeat(half)) if s.written(self.full)]
        plans = {str(s): (s.plan(self.full), self.full.word(s.plan(self.full))) for s in chosen}
        tokens, valid = pad(self.even)
        context, state = self._start(self.even, tokens, valid)
        shared: dict[str, Tensor] = {}

        def visit(node: PlanNode, state: Any) -> None:
            shared.update(dict.fromkeys(node.wanted, self._logits(state, context)))

        walk(self.runner.model, context, state, trie(plans), visit, ledger=self.ledger)
        margin = max(
            difference(torch.stack(self.logits(self.even, plan)), shared[name]) for name, (plan, _) in plans.items()
        )
        return self._judge("T8", margin)

    def _judge(self, name: str, margin: float, *, limit: float | None = None, note: str = "") -> SelfTest:
        limit = self.limit if limit is None else limit
        title, complaint, cause = TESTS[name]
        if not margin <= limit:
            raise SelfTestError(
                f"self-test {name} failed: {complaint} by {margin:.2g} (limit {limit:g}). No result is printed. {cause}"
            )
        return SelfTest(name=name, title=title, passed=True, margin=margin, limit=limit, note=note)


def run(
    runner: Runner,
    full: FullPlan,
    documents: Sequence[ScoredDocument],
    ledger: Ledger,
    report: Callable[[SelfTest], None] = lambda test: None,
) -> tuple[tuple[SelfTest, ...], tuple[Finding, ...]]:
    """All self-tests, each reported when it passes.

    Args:
        documents: The probe batch is the first four.
        ledger: Receives what ran.
        report: Called with every passed test.

    Raises:
        SelfTestError: A test failed.
        NonFiniteError: The full plan gives logits that are not finite.
    """
    checks = Checks(runner, full, tuple(documents[:DOCUMENTS]), ledger)
    before = weight_hash(runner.model)
    checks.finite()
    passed: list[SelfTest] = []
    findings: list[Finding] = []

    def add(*tests: SelfTest) -> None:
        for test in tests:
            passed.append(test)
            report(test)

    add(*checks.readout_and_native())
    padded, ignored = checks.padding()
    add(padded, checks.batch_order(), checks.repeatable())
    classes, inert = checks.operator_classes()
    add(classes, checks.causality(), checks.sharing(), _frozen(runner.model, before))
    return tuple(passed), (*findings, *ignored, *inert)


def check_finite(values: Float[Tensor, "seq dim"], document: ScoredDocument) -> None:
    """Refuses numbers of one document's scored positions, in order, that are not finite."""
    bad = ~torch.isfinite(values).all(dim=1)
    if bool(bad.any()):
        position = int(document.positions[int(bad.nonzero()[0])])
        raise NonFiniteError(
            f"the full plan gives non-finite logits (first: document {document.line}, position {position}). "
            "Try --dtype float32."
        )


def difference(a: Tensor, b: Tensor) -> float:
    """Maximum absolute difference over max(1, max |b|); NaN if anything is NaN."""
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max()) / max(1.0, float(b.abs().max()))


def _state_difference(a: Any, b: Any) -> float:
    return max(difference(x, y) for x, y in zip(states.leaves(a), states.leaves(b), strict=True))


def _nll(document: ScoredDocument, logits: Tensor) -> Tensor:
    """Loss of every scored token, cell by cell where it has several."""
    targets = torch.from_numpy(document.targets).long()
    laws = logits[document.read].unflatten(1, (math.prod(targets.shape[1:]), -1)).flatten(0, 1)
    return torch.nn.functional.cross_entropy(laws, targets.flatten(), reduction="none")


def _with_other_ending(document: ScoredDocument, vocabulary: int) -> ScoredDocument:
    tokens = document.tokens.copy()
    tokens[-1] = (tokens[-1] + 1) % vocabulary
    return replace(document, tokens=tokens)


def _frozen(model: Any, before: str) -> SelfTest:
    training = [name or type(model).__name__ for name, module in model.named_modules() if module.training]
    if training:
        raise SelfTestError(
            f"self-test T9 failed: {training[0]} is in training mode. No result is printed. Call model.eval() first."
        )
    if weight_hash(model) != before:
        raise SelfTestError("self-test T9 failed: running the model changed its weights. No result is printed.")
    return SelfTest(name="T9", title="eval mode, weights unchanged", passed=True, margin=None, limit=None, note="")


def _mask_ignored(margin: float, limit: float) -> Finding:
    return Finding(
        kind="audit.mask_ignored",
        level=Level.WARNING,
        message="The model ignores its mask on left padding; the audit pads on the right.",
        remedy="Never batch this model with left padding.",
        value=margin,
        threshold=limit,
    )


def _index_inert(pairs: Sequence[Plan]) -> Finding:
    return Finding(
        kind="audit.index_inert",
        level=Level.INFO,
        message=f"{len(pairs)} pairs of indices are declared different and give the same bits (first: {pairs[0]}).",
        remedy="Zeros measured between such schedules are exact, because the index has no effect.",
        value=float(len(pairs)),
    )
