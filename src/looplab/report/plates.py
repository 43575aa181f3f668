"""Which figures a result has, under which names, with the words for those who cannot see them."""

import dataclasses
import re
from collections.abc import Callable
from functools import cached_property

from matplotlib.figure import Figure

from looplab.audit.result import AuditResult, DomainResult
from looplab.report.figures.base import svg
from looplab.report.figures.dense_control import dense_control
from looplab.report.figures.depth_curves import depth_curves
from looplab.report.figures.depth_value import depth_value
from looplab.report.figures.equivalence import effects, equivalence
from looplab.report.figures.factorial import factorial
from looplab.report.figures.geometry import geometry
from looplab.report.figures.probe_gains import probe_gains
from looplab.report.figures.reliability import columns, reliability
from looplab.report.figures.schedule_map import schedule_map
from looplab.report.figures.strata import strata
from looplab.report.figures.temperature import temperature
from looplab.report.figures.updates import components, updates
from looplab.report.figures.waterfall import waterfall


@dataclasses.dataclass(frozen=True)
class Plate:
    """One drawn figure. `name` is its file name without ending; `alt` says what it shows."""

    name: str
    alt: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """The text of its SVG file."""
        return svg(self.figure)


DOMAIN_PLATES: dict[str, tuple[str, Callable[[AuditResult, DomainResult], Figure]]] = {
    "F1-waterfall": ("Waterfall of the loss gap from one unit to full depth", waterfall),
    "F2-depth": ("Loss above full depth against the number of units", depth_curves),
    "F3-temperature": ("Fitted temperature against the number of units", temperature),
    "F4-probes": ("Net share of the gap that each refitted readout removes", probe_gains),
    "F5-factorial": ("Loss by count of applications and number of indices on the first block", factorial),
    "F7-reliability": ("Accuracy against confidence in 15 bins, and how many tokens each holds", reliability),
    "F8-geometry": ("Cosine, CKA, effective rank and Fréchet distance to full depth against depth", geometry),
    "F9-updates": ("Relative update of the state by every application", updates),
    "F11-strata": ("Parts of the gap and refitted readouts on strata of the documents", strata),
    "F13-depth-value": ("Gain of every further step of depth against the depth it reaches", depth_value),
    "F10-dense": ("Net probe share against the gap, this model and its dense control", dense_control),
}
"""Name -> what is drawn, and the function, once per domain."""


def plates(result: AuditResult) -> dict[str, Plate]:
    """Every figure that has something to show, by name; those of a domain end in its name."""
    found = [
        _plate(f"{name}-{domain_slug(result, domain)}", alt, draw(result, domain))
        for domain in result.domains
        for name, (alt, draw) in DOMAIN_PLATES.items()
        if _applies(name, result, domain)
    ]
    if any(effect.nats or effect.bitwise for domain in result.domains for effect in effects(domain)):
        found.append(_plate("F6-equivalence", "Effects against the margin of equivalence to zero", equivalence(result)))
    found.append(_plate("F12-schedules", "Schedules as rows of applications", schedule_map(result)))
    return {plate.name: plate for plate in found}


def domain_slug(result: AuditResult, domain: DomainResult) -> str:
    """The domain's name as part of a file name, unique in the result."""
    slugs = [re.sub(r"[^A-Za-z0-9.-]+", "-", each.name).strip("-.") for each in result.domains]
    place = [each.name for each in result.domains].index(domain.name)
    unique = slugs[place] and slugs.count(slugs[place]) == 1
    return slugs[place] if unique else f"{slugs[place] or 'domain'}-{place}"


def _applies(name: str, result: AuditResult, domain: DomainResult) -> bool:
    """Whether there is something to draw; the waterfall and the depth curves stand on every page."""
    needs = {
        "F3-temperature": any(schedule.temperature for schedule in domain.schedules),
        "F4-probes": domain.gains,
        "F5-factorial": domain.factorials,
        "F7-reliability": columns(result.model, domain),
        "F8-geometry": any(schedule.geometry for schedule in domain.schedules),
        "F9-updates": components(result.model, domain),
        "F10-dense": domain.control is not None and domain.gains,
        "F11-strata": domain.strata,
        "F13-depth-value": domain.depth_value,
    }
    return bool(needs.get(name, True))


def _plate(name: str, alt: str, figure: Figure) -> Plate:
    return Plate(name, f"{alt}. {' '.join(figure.get_suptitle().split())}.", figure)
