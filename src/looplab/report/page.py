"""report.html: the audit as one self-contained page, answer first; it depends on the result alone.

Every number carries the path it has in results.json, which is embedded in the page. Nothing is loaded from anywhere.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from looplab.audit.result import DENSE_MESSAGE, AuditResult
from looplab.report import answer, domains, measured, orders, provenance, states
from looplab.report import beside as side
from looplab.report.depth_table import depth_value_table
from looplab.report.figures.base import inline
from looplab.report.keyed import Keyed
from looplab.report.plates import Plate, domain_slug, plates
from looplab.report.strata import strata
from looplab.report.tables import Table, count, unbroken

CONTROL_CAPTION = "Refitted readouts of the dense control, nats"
COLUMN_INCHES = 5.4
"""Width of half a page; a wider schedule map gets a row of its own."""
CITATIONS = (
    "Depth Control Protocol: Dau, Khuat, Dung, “Beyond Depth Truncation”, arXiv:2609.19934.",
    "Temperature scaling: Guo, Pleiss, Sun, Weinberger, “On Calibration of Modern Neural Networks”, ICML 2017.",
    "Refitted readouts: Belrose et al., “Eliciting Latent Predictions with the Tuned Lens”, arXiv:2303.08112.",
    "Equivalence by two one-sided tests: Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987.",
)


def audit_page(
    result: AuditResult, beside: Sequence[AuditResult] = (), *, drawn: Mapping[str, Plate] | None = None
) -> str:
    """The HTML of one audit.

    Args:
        beside: Other audits, compared in one table and by their waterfalls.
        drawn: The figures of `plates(result)`, if they exist already.
    """
    found = plates(result) if drawn is None else drawn
    context = {
        "result": result,
        "keyed": Keyed(result),
        "dense_message": DENSE_MESSAGE if result.model.dense else "",
        "domains": [_domain(result, domain, found) for domain in Keyed(result).domains],
        "agreed": domains.sentences(Keyed(result)),
        "warnings": answer.warnings(Keyed(result)),
        "map": found["F12-schedules"],
        "wide_map": found["F12-schedules"].figure.get_figwidth() > COLUMN_INCHES,
        "equivalence": found.get("F6-equivalence"),
        "beside": side.comparison(result, beside) if beside else None,
        "waterfalls": side.waterfalls(result, beside) if beside else (),
        "records": [_embedded(each) for each in (result, *beside)],
        "steps": "layers" if result.model.dense else "loops",
        "saturation": orders.SATURATION,
        "citations": CITATIONS,
        "tables": _provenance(Keyed(result)),
        "css": _asset("audit.css"),
        "js": _asset("audit.js"),
    }
    return _environment().get_template("audit.html.jinja").render(context)


def _domain(result: AuditResult, domain: Keyed, found: Mapping[str, Plate]) -> dict[str, Any]:
    """What the template shows of one domain."""
    ending = f"-{domain_slug(result, domain.held)}"
    control = domain.held.control
    return {
        "keyed": domain,
        "slug": ending[1:],
        "depth_value": depth_value_table(domain),
        "tiles": answer.tiles(domain),
        "unidentified": answer.unidentified(domain),
        "plates": {name.removesuffix(ending): plate for name, plate in found.items() if name.endswith(ending)},
        "decomposition": measured.decomposition(domain) if domain.decompositions else None,
        "contrasts": measured.contrasts(domain),
        "losses": measured.losses(domain),
        "answers": measured.answers(domain),
        "gains": measured.gains(domain),
        "temperatures": measured.temperatures(domain),
        "affine": measured.affine_fits(domain),
        "full_rank": measured.full_rank_fits(domain),
        "metrics": measured.metrics(domain),
        "extensions": measured.extensions(domain),
        "orders": orders.structural(domain),
        "four_way": orders.four_way(domain),
        "cells": orders.cells(domain, result.model),
        "effects": orders.effects(domain),
        "geometry": states.geometry(domain),
        "updates": states.updates(domain),
        "strata": strata(domain, result.config.probes),
        "comparisons": measured.comparisons(domain) if control else None,
        "control": measured.gains(domain.control, "dense-probes", CONTROL_CAPTION) if control else None,
    }


def _provenance(result: Keyed) -> dict[str, Table]:
    makers = (
        provenance.model_card, provenance.documents, provenance.schedules, provenance.self_tests, provenance.findings,
        provenance.totals, provenance.phases, provenance.settings, provenance.versions, domains.agreements,
    )  # fmt: skip
    return {make.__name__: make(result) for make in makers}


def _embedded(result: AuditResult) -> Markup:
    """results.json inside a script element: the same data, with "<" written so that it cannot end the element."""
    text = json.dumps(json.loads(result.to_json()), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c"))


def _drawing(plate: Plate) -> Markup:
    return Markup(inline(plate.svg, plate.name))


def _asset(name: str) -> Markup:
    return Markup((files("looplab.report") / "templates" / name).read_text(encoding="utf-8"))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("looplab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"drawing": _drawing, "count": count, "unbroken": unbroken}
    return environment
