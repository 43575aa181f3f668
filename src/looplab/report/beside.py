"""Other audits beside the page's own: one row each, and their waterfalls at one scale."""

from collections.abc import Sequence

from looplab.audit.result import AuditResult, DomainResult
from looplab.report.figures.waterfall import headline_gain, waterfall, whole_gap
from looplab.report.keyed import Keyed
from looplab.report.measured import part_share, phrase
from looplab.report.plates import Plate
from looplab.report.tables import NONE, Cell, Table, nats, percent, short, unknown, words

PARTS = ("application", "distinct", "composition")


def comparison(result: AuditResult, beside: Sequence[AuditResult]) -> Table:
    """The answer of every audit on every domain; this page's own first."""
    rows = [
        _row(Keyed(each, home=home), domain)
        for home, each in enumerate((result, *beside))
        for domain in Keyed(each, home=home).domains
    ]
    columns = ("model", "trained depth", "domain", "gap (nats)", *PARTS, "best refit, net")
    note = (
        "Shares of each model's own gap, so read them beside its nats; below a share stands its word. "
        "Intervals cover documents, not training runs."
    )
    return Table("beside", "Side by side", columns, tuple(rows), note, (0, 1, 2))


def _row(result: Keyed, domain: Keyed) -> tuple[Cell, ...]:
    head = (words(result.model.name), words(result.model.trained_depth), words(domain.name))
    if domain.decompositions:
        raw = domain.decompositions[0]
        middle = (nats(raw.gap), *(_share(part) for part in raw.parts))
    else:
        gap = whole_gap(domain.held)
        shown = nats(domain.gains.where(schedule=gap[0])[0].gap) if gap else unknown(phrase("not measured"))
        middle = (shown, *(Cell(NONE, tone="muted") for _ in PARTS))
    best = headline_gain(domain.held)
    if best is None:
        return (*head, *middle, Cell(NONE, tone="muted"))
    gain = domain.gains[domain.held.gains.index(best)]
    return (*head, *middle, percent(gain.share).over(f"{best.probe}: {best.word}"))


def _share(part: Keyed) -> Cell:
    """The share with its word below; what has no share is told in nats."""
    known = part.held.share is not None or part.held.reason is not None or part.held.bitwise_equal
    shown = part_share(part) if known else nats(part.nats)
    _, _, reason = (part.held.reason or "").partition(": ")
    return shown.over(reason or short(part.held.word))


def waterfalls(result: AuditResult, beside: Sequence[AuditResult]) -> list[tuple[str, Plate]]:
    """(model, F1) of every audit on the page's first domain, at one scale."""
    wanted = result.domains[0].name
    drawn = [(each.model.name, waterfall(each, _domain(each, wanted))) for each in (result, *beside)]
    frames = [axes for _, figure in drawn for axes in figure.axes]
    ends = [axes.get_xlim() for axes in frames]
    for axes in frames:
        axes.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))
    return [
        (name, Plate(f"beside-{i}", f"Waterfall of {name}. {' '.join(figure.get_suptitle().split())}.", figure))
        for i, (name, figure) in enumerate(drawn)
    ]


def _domain(result: AuditResult, wanted: str) -> DomainResult:
    return next((domain for domain in result.domains if domain.name == wanted), result.domains[0])
