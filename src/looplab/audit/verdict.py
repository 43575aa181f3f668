"""The words an audit may use about a domain, and its one sentence. Nothing else appears in a verdict.

    dominant        lower bound of the share >= 50 %        negligible    equivalent to zero within the margin
    substantial     lower bound >= 10 %                     harmful       upper bound < 0
    present         lower bound > 0                         inconclusive  none of these, or the gap is too small
    not identifiable (reason)                               not measured (reason)

`negligible` wins over `present` and `harmful`, and says "but not zero" where the interval excludes zero. A probe is
`present` above 5 %, `absent` below.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from looplab.audit.agreement import share_difference
from looplab.audit.result import RAW, Agreement, ControlComparison, Decomposition, Estimate, ProbeGain, Verdict, percent

DOMINANT, SUBSTANTIAL, CORRECTABLE = 0.50, 0.10, 0.05
EVERYWHERE, DIFFERS = "in every domain", "differs by domain"
_PART_TEXT = {
    "application": "Running more applications of the first unit",
    "distinct": "distinct iterations inside the first block",
    "composition": "later blocks",
}


def part_word(
    *, nats: Estimate | None, share: Estimate | None, equivalent: bool | None, margin: float, reason: str | None
) -> str:
    """The word for one part of a decomposition.

    Args:
        nats: The effect; None with `reason`.
        share: Its share of the gap; None where the gap is too small.
        equivalent: Whether two one-sided tests place the effect within `margin`.
        reason: "not identifiable: ..." or "not measured: ...".
    """
    if reason is not None:
        kind, _, phrase = reason.partition(": ")
        return f"{kind} ({phrase})"
    if nats is None or share is None:
        return "inconclusive"
    if share.low >= DOMINANT:
        return "dominant"
    if share.low >= SUBSTANTIAL:
        return "substantial"
    if equivalent:
        word = f"negligible (equivalent to zero within {margin:.3f} nats)"
        return f"{word}, but not zero" if nats.low > 0 or nats.high < 0 else word
    if share.low > 0:
        return "present"
    return "harmful" if share.high < 0 else "inconclusive"


def probe_word(share: Estimate | None) -> str:
    """Whether the gap is readout-correctable under a probe, from its net share."""
    if share is None:
        return "inconclusive (gap too small)"
    if share.low > CORRECTABLE:
        return "present"
    return "absent" if share.high < CORRECTABLE else "inconclusive"


def verdict(
    domain: str,
    *,
    applications: int,
    first: int = 1,
    decomposition: Decomposition | None,
    gains: Sequence[ProbeGain],
    comparisons: Sequence[ControlComparison] = (),
    reason: str = "",
) -> Verdict:
    """The answer for one domain.

    Args:
        applications: K.
        first: Applications of the first unit, which is prefix(1).
        decomposition: The raw one; None if it was not measured, for `reason`.
        gains: Probe gains; those at k = 1 are used.
        comparisons: Against the dense control; none without one.
    """
    shortest = {gain.probe: gain for gain in gains if gain.k == 1}
    best = max(shortest.values(), key=_size, default=None)
    recurrence = next(
        (c.word for c in comparisons if best is not None and c.probe == best.probe and c.at == "nearest gap"),
        "not measured",
    )
    if decomposition is None:
        words = dict.fromkeys(_PART_TEXT, f"not measured ({reason})")
        sentence = f"On {domain}, the gap is not measured ({reason})."
    else:
        words = {part.name: part.word for part in decomposition.parts}
        sentence = _sentence(domain, applications, first, decomposition, best)
    return Verdict(
        sentence=sentence,
        words=words,
        best_probe=None if best is None else best.probe,
        probe_words={probe: gain.word for probe, gain in shortest.items()},
        recurrence=recurrence,
    )


def _size(gain: ProbeGain) -> float:
    return gain.net.value if gain.share is None else gain.share.value


def _nats(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} nats [{estimate.low:.3f}, {estimate.high:.3f}]"


def _sentence(domain: str, applications: int, first: int, decomposition: Decomposition, best: ProbeGain | None) -> str:
    parts = {part.name: part for part in decomposition.parts}
    clauses = []
    for name, text in _PART_TEXT.items():
        part = parts[name]
        number = "" if part.nats is None else percent(part.share) if part.share is not None else _nats(part.nats)
        number = "0 (bitwise equal)" if part.bitwise_equal else number
        clauses.append(f"{text}: {number}, {part.word}" if number else f"{text}: {part.word}")
    return (
        f"On {domain}, {applications} applications instead of {first} lower the loss by {_nats(decomposition.gap)}. "
        f"{'; '.join(clauses)}. {_readout(best)}"
    )


def _readout(best: ProbeGain | None) -> str:
    if best is None:
        return "Refitting the readout: not measured (no probe)."
    flattening = ", by flattening a wrong answer" if best.flattening else ""
    amount = _nats(best.net) if best.share is None else f"{percent(best.share)} of the gap"
    return f"Refitting the readout ({best.probe}) removes {amount}, net of full depth{flattening}."


def agreements(
    by_domain: Mapping[str, Sequence[Decomposition]], gains: Mapping[str, Sequence[ProbeGain]] | None = None
) -> tuple[Agreement, ...]:
    """Whether each part's word is the same in every domain, per readout; nothing for a single domain.

    Args:
        gains: Probe gains of each domain; with them the refits at prefix(1) are compared too, as part "readout".
    """
    if len(by_domain) < 2:
        return ()
    words: dict[tuple[str, str], dict[str, str]] = {}
    shares: dict[tuple[str, str], dict[str, Estimate]] = {}
    for domain, decompositions in by_domain.items():
        for decomposition in decompositions:
            for part in decomposition.parts:
                words.setdefault((part.name, decomposition.probe), {})[domain] = part.word
                if part.share is not None:
                    shares.setdefault((part.name, decomposition.probe), {})[domain] = part.share
        for gain in (gains or {}).get(domain, ()):
            if gain.k == 1:
                words.setdefault(("readout", gain.probe), {})[domain] = gain.word
                if gain.share is not None:
                    shares.setdefault(("readout", gain.probe), {})[domain] = gain.share
    order = sorted(words, key=lambda key: key[1] != RAW)
    return tuple(
        Agreement(
            part=part,
            probe=probe,
            word=EVERYWHERE if _agree(words[part, probe], len(by_domain)) else DIFFERS,
            words=words[part, probe],
            differences=_differences(shares.get((part, probe), {})),
        )
        for part, probe in order
    )


def _differences(shares: Mapping[str, Estimate]) -> dict[str, Estimate]:
    return {f"{one} - {other}": share_difference(shares[one], shares[other]) for one, other in combinations(shares, 2)}


def _agree(words: Mapping[str, str], domains: int) -> bool:
    """Same word in every domain, whatever its bracket says."""
    return len(words) == domains and len({word.partition(" (")[0] for word in words.values()}) == 1
