"""The dense negative control: the same interventions where there is no recurrence.

A dense model of L layers is cut at k = floor(f L + 1/2), f in {0.25, 0.5, 0.75, 0.86, 0.93}. Its probe gains stand
beside those of the looped model on the same documents; it gets no application, distinct or composition shares.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
Deviations: their script rounds half to even; the comparison is made at the nearest gap in nats per byte.
"""

from collections.abc import Mapping, Sequence

from looplab.audit.bootstrap import Losses, estimate
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import FULL, Pair, difference, measured_prefixes, net_gain, share_rows
from looplab.audit.result import RAW, ControlComparison, Estimate


def gaps_per_byte(
    losses: Losses, *, grid: Sequence[int], units: int, reasons: Mapping[Pair, str | None], config: AuditConfig
) -> dict[str, Estimate]:
    """Gap of prefix(k) to full in nats per byte, by schedule name; tokens per byte are those of all documents.

    Raises:
        ValueError: The losses do not know the size of their text.
    """
    return {
        f"prefix({k})": estimate(
            _per_byte(losses) * losses.point(difference(RAW, f"prefix({k})", FULL)),
            _per_byte(losses) * losses.rows(difference(RAW, f"prefix({k})", FULL)),
            units=losses.documents,
            level=config.level,
        )
        for k in measured_prefixes(losses, grid, units, reasons)
    }


def _per_byte(losses: Losses) -> float:
    if not losses.num_bytes:
        raise ValueError(
            f"gaps_per_byte: losses must have num_bytes above 0. Got {losses.num_bytes}. Pass it to bootstrap_losses."
        )
    return losses.tokens / losses.num_bytes


def dense_depths(layers: int) -> tuple[int, ...]:
    """Depths at which a dense model of `layers` layers is cut: floor(f L + 1/2) for five fractions, L removed."""
    depths = {(2 * percent * layers + 100) // 200 for percent in (25, 50, 75, 86, 93)}
    return tuple(sorted(depths - {0, layers}))


def compare_dense(
    looped: Losses, dense: Losses, *, looped_grid: Sequence[int], dense_grid: Sequence[int], config: AuditConfig
) -> tuple[ControlComparison, ...]:
    """Net probe share of the looped model at its smallest k minus the dense control's, on the same documents.

    The dense control is read at its smallest k and at the k whose gap in nats per byte is nearest, because probe shares
    depend on the size of the gap. The claim that the readout part is specific to recurrence is decided at the nearest
    gap; both rows of a probe carry that word.

    Raises:
        ValueError: Losses over different numbers of documents.
    """
    if looped.documents != dense.documents:
        raise ValueError(
            f"compare_dense: both models must be scored on the same documents. Got {looped.documents} and "
            f"{dense.documents}. Audit the control on the same data."
        )
    smallest = min(looped_grid)
    gaps = gaps_per_byte(dense, grid=dense_grid, units=max(dense_grid) + 1, reasons={}, config=config)
    looped_gap = _per_byte(looped) * looped.point(difference(RAW, f"prefix({smallest})", FULL))
    depths = [k for k in sorted(dense_grid) if f"prefix({k})" in gaps]
    nearest = min(depths, key=lambda k: abs(gaps[f"prefix({k})"].value - looped_gap))
    comparisons = []
    for probe in (r for r in looped.readouts if r in dense.readouts and r != RAW):
        decisive = _share_difference(looped, dense, probe, smallest, nearest, config)
        word = "not measured" if decisive is None else "supported" if decisive.low > 0 else "not supported"
        for at, k in (("smallest k", depths[0]), ("nearest gap", nearest)):
            comparisons.append(
                ControlComparison(
                    probe=probe,
                    looped_k=smallest,
                    dense_k=k,
                    at=at,
                    looped_gap_per_byte=looped_gap,
                    dense_gap_per_byte=gaps[f"prefix({k})"].value,
                    difference=_share_difference(looped, dense, probe, smallest, k, config),
                    word=word,
                )
            )
    return tuple(comparisons)


def _share_difference(
    looped: Losses, dense: Losses, probe: str, looped_k: int, dense_k: int, config: AuditConfig
) -> Estimate | None:
    points, replicates = [], []
    for losses, k in ((looped, looped_k), (dense, dense_k)):
        net, whole = net_gain(probe, k)
        if losses.estimate(whole, config.level).low <= config.gap_floor:
            return None
        points.append(losses.point(net) / losses.point(whole))
        replicates.append(share_rows(losses, net, whole))
    shared = min(map(len, replicates))
    return estimate(
        points[0] - points[1],
        replicates[0][:shared] - replicates[1][:shared],
        units=looped.documents,
        level=config.level,
    )
