"""The decomposition on parts of the documents and of their positions. Descriptions, without a verdict.

    loss       thirds of the documents by their mean loss at full depth
    length     thirds of the documents by their number of tokens
    position   scored tokens at positions 0-64, 64-256, 256-512, 512+ (the upper end excluded), at least 200 of them

Inside a stratum everything is as in the whole domain: a loss is the sum over tokens divided by their number, and an
interval comes from redrawing the stratum's documents, here with draws of its own. Every probe is the one fitted on the
whole domain and stays fixed: no temperature is fitted again, neither for the stratum nor in its replicates.

Strata by loss are chosen by an outcome. They show where a gap arises and are no subgroups that were fixed beforehand.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from looplab._types import Bool, Float, Integer
from looplab.audit.bootstrap import ScheduleSums, bootstrap_losses
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import FULL, Pair, decompositions, net_gain
from looplab.audit.result import RAW, Stratum
from looplab.intervals import document_draws

EDGES = (64, 256, 512)
BUCKETS = ("0-64", "64-256", "256-512", "512+")
MIN_TOKENS = 200
MIN_DOCUMENTS = 2


def position_buckets(positions: Integer[np.ndarray, " tokens"]) -> Integer[np.ndarray, " tokens"]:
    """The place in `BUCKETS` of every position."""
    return np.searchsorted(EDGES, positions, side="right")


@dataclass(frozen=True, kw_only=True, eq=False)
class StratumSums:
    """Loss sums in nats and token counts of the evaluation documents, by position bucket.

    With several noise seeds, losses are summed over the tokens of all seeds; token counts are those of one.
    """

    losses: Mapping[tuple[str, str], Float[np.ndarray, "documents 4"]]
    """(readout, schedule) -> sums; under every name in the decomposition, schedules of equal words included."""
    tokens: Integer[np.ndarray, "documents 4"]
    """Scored tokens."""
    lengths: Integer[np.ndarray, " documents"]
    """All tokens of a document, prompt included."""
    seeds: int = 1


def strata(
    sums: StratumSums,
    *,
    domain: str,
    units: int,
    kmid: int,
    reasons: Mapping[Pair, str | None],
    unmeasured: Mapping[str, str],
    config: AuditConfig,
) -> tuple[Stratum, ...]:
    """Every stratum with at least 2 documents, not all of them, and 200 tokens where it is one of positions.

    Args:
        units: M.
        kmid: Leading units with the block sequence of the first.
        reasons: Contrasts that carry no information (`decompose.identify`).
        unmeasured: Schedules without a number, with the reason. Without prefix(1) or full there are no strata.
    """
    if not {(RAW, "prefix(1)"), (RAW, FULL)} <= sums.losses.keys():
        return ()
    found = []
    for kind, label, documents, bucket in _members(sums):
        losses = {key: values[documents][:, bucket].sum(axis=1) for key, values in sums.losses.items()}
        tokens = sums.tokens[documents][:, bucket].sum(axis=1)
        draws = document_draws(
            len(tokens), config.replicates, seed=config.seed, domain=domain, split=f"evaluation/{kind}/{label}"
        )
        stratum = bootstrap_losses(
            _tables(losses), draws, tokens=(tokens * sums.seeds).astype(np.float64), weighting=config.weighting
        )
        (whole,) = decompositions(
            replace(stratum, readouts=(RAW,)),
            units=units,
            kmid=kmid,
            reasons=reasons,
            unmeasured=unmeasured,
            config=config,
        )
        found.append(
            Stratum(
                by=kind,
                label=label,
                documents=len(tokens),
                tokens=int(tokens.sum()),
                gap=whole.gap,
                parts={part.name: part.nats for part in whole.parts},
                gains={
                    probe: stratum.estimate(net_gain(probe, 1)[0], config.level)
                    for probe in stratum.readouts
                    if probe != RAW
                },
            )
        )
    return tuple(found)


def _members(sums: StratumSums) -> Iterator[tuple[str, str, Bool[np.ndarray, " documents"], slice]]:
    """Kind, label, documents and buckets of every stratum that is large enough."""
    tokens = sums.tokens.sum(axis=1)
    everywhere = slice(0, len(BUCKETS))
    for kind, labels, values in (
        ("loss", ("low", "middle", "high"), sums.losses[RAW, FULL].sum(axis=1) / tokens),
        ("length", ("short", "middle", "long"), sums.lengths),
    ):
        for label, documents in zip(labels, _thirds(values), strict=True):
            if documents.sum() >= MIN_DOCUMENTS and not documents.all():  # all of them are the domain again
                yield kind, label, documents, everywhere
    for b, label in enumerate(BUCKETS):
        documents = sums.tokens[:, b] > 0
        if documents.sum() >= MIN_DOCUMENTS and sums.tokens[:, b].sum() >= MIN_TOKENS:
            yield "position", label, documents, slice(b, b + 1)


def _thirds(values: Float[np.ndarray, " documents"] | Integer[np.ndarray, " documents"]) -> Sequence[np.ndarray]:
    """Documents up to the first tercile, up to the second, and above. Equal values fall together."""
    third = np.searchsorted(np.quantile(values, [1 / 3, 2 / 3]), values, side="left")
    return [third == i for i in range(3)]


def _tables(losses: Mapping[tuple[str, str], Float[np.ndarray, " documents"]]) -> dict[str, ScheduleSums]:
    readouts = dict.fromkeys(readout for readout, _ in losses if readout != RAW)
    return {
        name: ScheduleSums(raw=raw, fixed={r: losses[r, name] for r in readouts if (r, name) in losses})
        for (readout, name), raw in losses.items()
        if readout == RAW
    }
