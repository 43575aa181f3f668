"""Other audits beside the page's own: one row each, and their waterfalls at one scale."""

from collections.abc import Sequence

from looplab.audit.result import AuditResult, DomainResult
from looplab.report.figures.waterfall import headline_gain, waterfall, whole_gap
from looplab.report.keyed import Keyed
from looplab.report.measured import part_share, phrase
from looplab.report.plates import Plate
from looplab.report.tables import NONE, Cell, Table, nats, percent, unknown, words

PARTS = ("application", "distinct", "composition")


def comparison(result: AuditResult, beside: Sequence[AuditResult]) -> Table:
    """The answer of every audit on every domain; this page's own first."""
    rows = [
        _row(Keyed(each, home=home), domain)
        for home, each in enumerate((result, *beside))
        for domain in Keyed(each, home=home).domains
    ]
    columns = ("model", "trained depth", "domain", "gap (nats)", *PARTS, "best refit", "its net share", "word")
    note = "Each gap is split by its own size: read shares beside nats. Intervals cover documents, not training runs."
    return Table("beside", "Side by side", columns, tuple(rows), note, (0, 1, 2, 7, 9))


def _row(result: Keyed, domain: Keyed) -> tuple[Cell, ...]:
    head = (words(result.model.name), words(result.model.trained_depth), words(domain.name))
    if domain.decompositions:
        raw = domain.decompositions[0]
        middle = (nats(raw.gap), *(part_share(part) for part in raw.parts))
    else:
        gap = whole_gap(domain.held)
        shown = nats(domain.gains.where(schedule=gap[0])[0].gap) if gap else unknown(phrase("not measured"))
        middle = (shown, *(Cell(NONE, tone="muted") for _ in PARTS))
    best = headline_gain(domain.held)
    if best is None:
        return (*head, *middle, *(Cell(NONE, tone="muted") for _ in range(3)))
    gain = domain.gains[domain.held.gains.index(best)]
    return (*head, *middle, words(gain.probe), percent(gain.share), words(gain.word))


def waterfalls(result: AuditResult, beside: Sequence[AuditResult]) -> list[tuple[str, Plate]]:
    """(model, F1) of every audit on the page's first domain, at one scale."""
    wanted = result.domains[0].name
    pairs = [(each, _domain(each, wanted)) for each in (result, *beside)]
    span = max((gap[1].value for _, domain in pairs if (gap := whole_gap(domain))), default=None)
    drawn = [(each.model.name, waterfall(each, domain, span=span)) for each, domain in pairs]
    return [
        (name, Plate(f"beside-{i}", f"Waterfall of {name}. {' '.join(figure.get_suptitle().split())}.", figure))
        for i, (name, figure) in enumerate(drawn)
    ]


def _domain(result: AuditResult, wanted: str) -> DomainResult:
    return next((domain for domain in result.domains if domain.name == wanted), result.domains[0])
