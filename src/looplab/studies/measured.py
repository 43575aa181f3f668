"""What an audit answers, as rows of a study: shares, factors of overestimation, losses and words of its first domain.

    O_app          G / (G - A)    = 1 / (1 - a)                how far plain truncation overstates depth, for counting
    O_read         G / (G - Cal)  = 1 / (1 - c)                applications, for a miscalibrated readout,
    O_temperature  G / G_T        = 1 / ((1 - c)(1 - a_T))     and for both

with G the raw gap of prefix(1), A its application part and a = A / G, Cal the net gain of a temperature and
c = Cal / G, and G_T = Q_T(repeat(1)) - Q_T(full), a_T the application share under a temperature. A factor is a monotone
function of shares, so its interval is the image of theirs; for O_temperature, of two shares at once, which covers at
least 90 % where each covers 95 % (Bonferroni).

Reference: the protocol of Dau, Khuat, Dung, arXiv:2609.19934; the factors are our own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from looplab.audit.result import RAW, AuditResult, DomainResult, Estimate, Part, ProbeGain
from looplab.records import StudyRow
from looplab.studies.base import Arm

PARTS = ("application", "distinct", "composition")
TOO_SMALL = "the gap is too small to split"
NO_BLOCK = "no block is repeated"
NO_CONTROL = "no dense control"
NOT_MEASURED = "not measured"


class Rows:
    """Builds the rows of one arm."""

    def __init__(self, arm: Arm, result: AuditResult):
        self.arm, self.result = arm, result
        self.domain: DomainResult = result.domains[0]

    def gap(self) -> StudyRow:
        """Loss of the smallest prefix above full depth."""
        if self.domain.decompositions:
            return self._row("gap", "nats", self.domain.decomposition().gap, "prefix(1)")
        first = min(self.domain.gains, key=lambda gain: gain.k)
        return self._row("gap", "nats", first.gap, first.schedule)

    def full_loss(self) -> StudyRow:
        """Raw loss at full depth."""
        return self._row("loss at full depth", "nats", self.domain.schedule("full").loss().loss)

    def shares(self) -> list[StudyRow]:
        """Raw shares of the three parts."""
        return [self._share(name, self._part(name)) for name in PARTS]

    def share(self, part: str, probe: str) -> StudyRow:
        """Share of one part under a refitted readout."""
        return self._share(f"{part} share, {probe}", self._part(part, probe))

    def gain(self, probe: str, k: int) -> StudyRow:
        """Net share of the gap at prefix(k) that a refitted readout removes."""
        quantity = f"{probe} share, k = {k}"
        if probe not in self.result.config.probes:
            return self._unknown(quantity, "share", NOT_MEASURED)
        return self._gain(quantity, self._gains(k).get(probe))

    def best_gain(self) -> StudyRow:
        """The largest net share at the smallest prefix; its word names the probe."""
        first = min((gain.k for gain in self.domain.gains), default=1)
        gains = self._gains(first)
        best = gains.get(self.domain.verdict.best_probe or "") or max(gains.values(), key=lambda gain: gain.net.value)
        row = self._gain("best refit", best)
        return dataclasses.replace(row, word=f"{best.probe}: {best.word}")

    def recurrence(self) -> StudyRow:
        """The audit's word on whether the readout part is specific to recurrence."""
        return self._new("specific to recurrence", "fact", value=None, word=self.domain.verdict.recurrence)

    def above_dense(self, probe: str) -> StudyRow:
        """Net probe share minus that of the dense control, at the nearest gap."""
        quantity = f"{probe} share minus dense"
        comparisons = self.domain.control.comparisons if self.domain.control else ()
        found = [c for c in comparisons if (c.probe, c.at) == (probe, "nearest gap")]
        if not found:
            return self._unknown(quantity, "share", NO_CONTROL)
        if found[0].difference is None:
            return self._unknown(quantity, "share", TOO_SMALL)
        return self._row(quantity, "share", found[0].difference, found[0].word)

    def distinct(self, probe: str = RAW) -> StudyRow:
        """Effect of distinct iterations in nats, with the margin of its equivalence to zero."""
        quantity = f"distinct, {probe}"
        part = self._part("distinct", probe)
        if part is None or part.nats is None:
            return self._unknown(quantity, "nats", _reason(part))
        row = self._row(quantity, "nats", part.nats, part.word)
        return dataclasses.replace(row, margin=self.domain.decomposition(probe).margin)

    def distinct_identifiable(self) -> StudyRow:
        """1 if the distinct part can be told apart for this model, else 0."""
        part = self._part("distinct")
        known = part is not None and part.reason is None
        word = "" if known else _reason(part)
        return self._new("distinct identifiable", "fact", value=float(known), word=word)

    def factors(self) -> list[StudyRow]:
        """O_app, O_read and O_temperature."""
        application, after = self._part("application"), self._part("application", "temperature")
        gain = self._gains(1).get("temperature")
        reads = gain.share if gain else None
        rows = [
            self._factor("O_app", [application.share if application else None], _reason(application)),
            self._factor("O_read", [reads], TOO_SMALL if gain else NO_BLOCK),
        ]
        both = [reads, after.share if after else None]
        return [*rows, self._factor("O_temperature", both, _reason(after))]

    def _part(self, name: str, probe: str = RAW) -> Part | None:
        return self.domain.decomposition(probe).part(name) if self.domain.decompositions else None

    def _gains(self, k: int) -> dict[str, ProbeGain]:
        return {gain.probe: gain for gain in self.domain.gains if gain.k == k}

    def _share(self, quantity: str, part: Part | None) -> StudyRow:
        if part is None or part.share is None:
            return self._unknown(quantity, "share", _reason(part))
        return self._row(quantity, "share", part.share, part.word)

    def _gain(self, quantity: str, gain: ProbeGain | None) -> StudyRow:
        if gain is None or gain.share is None:
            return self._unknown(quantity, "share", TOO_SMALL if gain else NO_BLOCK)
        return self._row(quantity, "share", gain.share, gain.word)

    def _factor(self, quantity: str, shares: Sequence[Estimate | None], reason: str) -> StudyRow:
        known = [share for share in shares if share is not None]
        if len(known) < len(shares):
            return self._unknown(quantity, "factor", reason)
        ends = [[getattr(share, end) for share in known] for end in ("value", "low", "high", "low90", "high90")]
        if any(max(end) >= 1 for end in ends):
            return self._unknown(quantity, "factor", "nothing is left of the gap")
        value, low, high, low90, high90 = (_inverse(end) for end in ends)
        return self._new(quantity, "factor", value=value, low=low, high=high, low90=low90, high90=high90)

    def _row(self, quantity: str, unit: str, found: Estimate, word: str = "") -> StudyRow:
        ends = {name: getattr(found, name) for name in ("value", "low", "high", "low90", "high90")}
        return self._new(quantity, unit, word=word, **ends)

    def _unknown(self, quantity: str, unit: str, reason: str) -> StudyRow:
        return self._new(quantity, unit, value=None, reason=reason)

    def _new(self, quantity: str, unit: str, **fields: Any) -> StudyRow:
        return StudyRow(arm=self.arm.name, seed=self.arm.seed, quantity=quantity, unit=unit, **fields)


def _reason(part: Part | None) -> str:
    """Why a part has no number."""
    if part is None:
        return NO_BLOCK
    return part.reason.partition(": ")[2] if part.reason else TOO_SMALL


def _inverse(shares: Sequence[float]) -> float:
    left = 1.0
    for share in shares:
        left *= 1 - share
    return 1 / left
