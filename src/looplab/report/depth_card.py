"""The depth card: what an audit says about a checkpoint's depth, ready to paste into its model card.

`depth_card.json` is for machines (versioned, without times), `depth_card.md` the same facts as one section of Markdown
with a table, valid inside a Hugging Face model card. What this model cannot tell apart stands as words, never a number.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from looplab.audit.result import (
    DENSE_MESSAGE,
    RAW,
    AuditResult,
    DepthStart,
    DepthStep,
    DepthValue,
    DomainResult,
    Estimate,
    nats,
    percent,
)
from looplab.records import Level, dump_json, encode_json, write_atomic
from looplab.report.depth_table import magnitude
from looplab.report.figures.waterfall import whole_gap
from looplab.report.keyed import Keyed

MARKDOWN, JSON = "depth_card.md", "depth_card.json"
SCHEMA = 1
MOST_BLOCKS = 4
"""Blocks that the Markdown describes one by one."""
COVERAGE = "Intervals cover documents, not training runs."


def depth_card(result: AuditResult) -> dict[str, Any]:
    """The card as plain JSON values; equal results give equal cards."""
    model = result.model
    return encode_json(
        {
            "kind": "looplab.depth_card",
            "schema": SCHEMA,
            "model": {
                "name": model.name,
                "source": model.source,
                "architecture": model.architecture,
                "version": model.version,
                "weight_hash": model.weight_hash,
                "dtype": model.dtype,
                "dense": model.dense,
                "parameters": model.parameters,
                "blocks": model.blocks,
                "kv_rule": model.kv_rule,
            },
            "depth": {
                "trained": model.trained_depth,
                "trained_units": model.trained_units,
                "iterations_per_block": model.default_steps,
                "applications": model.applications,
                "units": model.units,
                "applications_per_unit": model.unit_applications,
                "index_parts": model.index_parts,
            },
            "cost_at_full": _cost(result),
            "domains": [_domain(domain) for domain in result.domains],
            "coverage": COVERAGE,
            "findings": [finding for finding in result.findings if finding.level in (Level.WARNING, Level.FAILURE)],
            "command": result.command,
            "config_hash": result.config_hash,
            "looplab": result.versions.get("looplab"),
        }
    )


def _cost(result: AuditResult) -> dict[str, int] | None:
    """What one token costs at full depth; None where no domain has a value of depth."""
    value = next((domain.depth_value for domain in result.domains if domain.depth_value is not None), None)
    if value is None:
        return None
    full = _full(value)
    return {
        "flops_per_token": full.flops,
        "kv_bytes_per_token": full.kv_bytes,
        "context_tokens": value.context_tokens,
        "itemsize": value.itemsize,
    }


def _full(value: DepthValue) -> DepthStart | DepthStep:
    return next((step for step in value.steps if step.after == "full"), value.start)


def _domain(domain: DomainResult) -> dict[str, Any]:
    value, gap = domain.depth_value, whole_gap(domain)
    first = min((gain.k for gain in domain.gains), default=0)
    raw = domain.decompositions[0] if domain.decompositions else None
    return {
        "name": domain.name,
        "documents": domain.documents.evaluation,
        "tokens": domain.documents.evaluation_tokens,
        "data_hash": domain.documents.data_hash,
        "gap_from": None if gap is None else gap[0],
        "gap": None if gap is None else gap[1],
        "verdict": domain.verdict.sentence,
        "parts_without_a_number": {part.name: part.reason for part in raw.parts if part.reason} if raw else {},
        "depth_sentence": None if value is None else value.sentence,
        "enough_units": None if value is None else value.enough,
        "safe_until_units": None if value is None else value.safe_until,
        "margin": None if value is None else value.steps[0].margin,
        "probes": [
            {
                "probe": gain.probe,
                "schedule": gain.schedule,
                "net": gain.net,
                "share": gain.share,
                "word": gain.word,
                "by_flattening": gain.flattening,
            }
            for gain in domain.gains
            if gain.k == first and gain.probe != RAW
        ],
    }


def depth_card_markdown(result: AuditResult) -> str:
    """The card as a section of Markdown: a table of the model, a table of the domains, sentences and the command."""
    names = [domain.name for domain in result.domains]
    lines = [
        "## Depth card",
        "",
        f"What the depth of **{escape(result.model.name)}** is worth, measured by a looplab audit.",
        "",
        *_table(("", "model"), _model_rows(result)),
        "",
        *_table(("", *names), _domain_rows(result)),
        "",
    ]
    if result.model.dense:
        lines += [DENSE_MESSAGE, ""]
    for domain in result.domains:
        said = [] if result.model.dense else [domain.verdict.sentence]
        said += [] if domain.depth_value is None else [domain.depth_value.sentence]
        lines += [f"- {escape(sentence)}" for sentence in said]
    lines += ["", f"{COVERAGE} Nats are per scored token; brackets hold {_level(result)} intervals."]
    serious = [finding for finding in result.findings if finding.level in (Level.WARNING, Level.FAILURE)]
    if serious:
        lines += ["", "Findings:", "", *(f"- {escape(str(finding))}" for finding in serious)]
    return "\n".join([*lines, "", *_code(result.command)]) + "\n"


def write_depth_card(result: AuditResult, folder: str | os.PathLike[str]) -> Path:
    """Writes `depth_card.json` and `depth_card.md` into `folder`, which is made if missing; returns the second path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / JSON, dump_json(depth_card(result)))
    write_atomic(folder / MARKDOWN, depth_card_markdown(result))
    return folder / MARKDOWN


def escape(text: str) -> str:
    """Text on one line that Markdown prints as it is, in a table cell too."""
    return re.sub(r"([\\`*_|<>\[\]~#$&])", r"\\\1", " ".join(text.split()))


def _level(result: AuditResult) -> str:
    return f"{100 * result.config.level:g} %"


def _model_rows(result: AuditResult) -> Iterator[tuple[str, ...]]:
    model = result.model
    units = "layers" if model.dense else "units"
    each = "" if model.unit_applications == 1 else f", {model.unit_applications} applications each"
    yield "architecture", f"{model.architecture}, version {model.version}, {model.dtype}"
    yield "parameters", f"{model.parameters['total']:,}"
    yield "weights", model.weight_hash
    for i, block in enumerate(model.blocks[:MOST_BLOCKS]):
        yield f"block {i}", block
    if len(model.blocks) > MOST_BLOCKS:
        yield f"further blocks, up to {len(model.blocks) - 1}", f"as in {JSON}"
    yield "trained depth", model.trained_depth
    yield "full depth", f"{model.units} {units}{each}; {model.applications} applications"
    yield "iterations per block", model.default_steps
    yield "depends on the iteration index", ", ".join(model.index_parts) or "nothing"
    yield "KV rule", model.kv_rule
    cost = _cost(result)
    if cost is None:
        yield "cost at full depth", "not measured"
        return
    yield (
        "FLOPs per token, full depth",
        f"{magnitude(Keyed(cost['flops_per_token'])).text} at {cost['context_tokens']:,} tokens",
    )
    yield (
        "KV bytes per token, full depth",
        f"{cost['kv_bytes_per_token']:,} at {cost['itemsize']} bytes a number",
    )


def _domain_rows(result: AuditResult) -> Iterator[tuple[str, ...]]:
    domains = result.domains
    yield "evaluation documents", *(f"{domain.documents.evaluation:,}" for domain in domains)
    yield "loss gap to full depth, nats", *(_gap(domain) for domain in domains)
    for name in ("application", "distinct", "composition"):
        if any(domain.decompositions for domain in domains):
            yield f"share of {name}", *(_part(domain, name) for domain in domains)
    for probe in result.config.probes:
        yield f"readout refitted ({probe}), net share", *(_probe(domain, probe) for domain in domains)
    yield "enough units", *(_enough(domain.depth_value) for domain in domains)
    if not result.model.dense:
        yield "safe up to, units", *(_safe(domain.depth_value) for domain in domains)


def _gap(domain: DomainResult) -> str:
    gap = whole_gap(domain)
    return "not measured" if gap is None else f"{nats(gap[1])}, from {gap[0]}"


def _part(domain: DomainResult, name: str) -> str:
    if not domain.decompositions:
        return "not measured"
    part = domain.decomposition().part(name)
    return part.word if part.reason else _share(part.share, part.word)


def _share(share: Estimate | None, word: str) -> str:
    return word if share is None else f"{percent(share)}, {word}"


def _probe(domain: DomainResult, probe: str) -> str:
    first = min((gain.k for gain in domain.gains), default=0)
    gain = next((gain for gain in domain.gains if (gain.probe, gain.k) == (probe, first)), None)
    if gain is None:
        return "not measured"
    return _share(gain.share, gain.word) + (" by flattening a wrong answer" if gain.flattening else "")


def _enough(value: DepthValue | None) -> str:
    if value is None:
        return "not measured"
    return "undecided" if value.enough is None else f"{value.enough} of {_full(value).units}"


def _safe(value: DepthValue | None) -> str:
    if value is None:
        return "not measured"
    return "nothing deeper was run (--extend)" if value.safe_until is None else str(value.safe_until)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    cells = [tuple(escape(cell) for cell in row) for row in (head, *rows)]
    cells.insert(1, ("---",) * len(head))
    return [f"| {' | '.join(row)} |" for row in cells]


def _code(command: str) -> list[str]:
    """A fenced block, with a fence longer than any that the command holds."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", command)), default=0))
    return [f"{fence}bash", command, fence]
