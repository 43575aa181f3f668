"""Findings of an audit about its schedules, documents and fits. Those of statistics arise beside the numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from looplab._types import Float
from looplab.audit.documents import Domain
from looplab.audit.geometry import bias_findings
from looplab.audit.measure import Fits
from looplab.audit.result import Part, ScheduleEntry
from looplab.audit.schedules import FullPlan
from looplab.records import Finding, Level

NOT_IDENTIFIABLE = "not identifiable: "
FEW_EVALUATION, FEW_CALIBRATION, MUCH_OVERLAP = 100, 50, 0.05


def domain_findings(
    domain: Domain, fits: Mapping[str, Fits], diverged: Mapping[str, int], statistical: Sequence[Finding]
) -> list[Finding]:
    """What a reader must know about the data and the fits of one domain, grouped by kind."""
    found = []
    sizes = (
        ("evaluation", len(domain.evaluation.documents), FEW_EVALUATION),
        ("calibration", len(domain.calibration.documents), FEW_CALIBRATION),
    )
    more = "Add text." if domain.task is None else "Raise --documents and --calibration-documents."
    found += [_few_documents(domain.name, side, count, least, more) for side, count, least in sizes if count < least]
    if domain.overlap is not None and domain.overlap > MUCH_OVERLAP:
        found.append(_split_overlap(domain.name, domain.overlap))
    found += [_diverges(domain.name, name, j) for name, j in diverged.items()]
    for name, fit in fits.items():
        where: dict[str, str | int] = {"domain": domain.name, "schedule": name}
        for probe in (fit.affine, fit.full_rank):
            found += [replace(f, where=where) for f in (probe.findings if probe else ())]
    for finding in statistical:
        value = finding.value if finding.value is not None and math.isfinite(finding.value) else None
        found.append(replace(finding, value=value, where={"domain": domain.name, **finding.where}))
    return grouped(found)


def geometry_findings(samples: Mapping[str, Float[Tensor, "tokens dim"]], domain: str) -> list[Finding]:
    """What a reader must know about the geometry of one domain. `samples`: site -> vectors of the full plan."""
    return [
        finding
        for site, vectors in samples.items()
        for finding in bias_findings(*vectors.shape, domain=domain, site=site)
    ]


def not_identifiable(rows: Sequence[ScheduleEntry], parts: Sequence[Part]) -> list[Finding]:
    """One finding per reason for which schedules or parts of the decomposition have no number."""
    by_reason: dict[str, list[str]] = {}
    for part in parts:
        if part.reason is not None and part.reason.startswith(NOT_IDENTIFIABLE):
            by_reason.setdefault(part.reason.removeprefix(NOT_IDENTIFIABLE), []).append(part.name)
    for row in rows:
        if row.reason is not None:
            by_reason.setdefault(row.reason, []).append(row.name)
    return [
        Finding(
            kind="audit.not_identifiable",
            level=Level.UNIDENTIFIED,
            message=f"{', '.join(names)}: {reason}.",
            where={"reason": reason},
        )
        for reason, names in by_reason.items()
    ]


def grouped(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per kind: of several that differ by schedule, the first, which then names the others."""
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    result = []
    for same in by_kind.values():
        names = [str(f.where["schedule"]) for f in same if "schedule" in f.where]
        first = same[0]
        if len(names) > 1:
            where = {k: v for k, v in first.where.items() if k != "schedule"} | {"schedules": ", ".join(names)}
            also = f" The same for {', '.join(names[1:])}." if names[0] in first.message else ""
            which = "" if also else f" Schedules: {', '.join(names)}."
            result.append(replace(first, message=f"{first.message}{also}{which}", where=where))
        elif names and names[0] not in first.message:
            result.append(replace(first, message=f"{first.message} Schedule: {names[0]}."))
        else:
            result += same
    return result


def byte_tokens() -> Finding:
    """The model came without a tokenizer."""
    return Finding(
        kind="audit.byte_tokens",
        level=Level.WARNING,
        message="The model has no tokenizer; text is read as raw bytes, without bos.",
        remedy="Pass --tokenizer if the model was trained otherwise.",
    )


def task_findings(domain: Domain, full: FullPlan) -> list[Finding]:
    """What a reader must know about problems of a task."""
    task, found = domain.task, []
    if task is None:
        return []
    where: dict[str, str | int] = {"domain": domain.name, "difficulty": task.difficulty}
    if task.trained:
        found.append(
            Finding(
                kind="audit.trained_problems",
                level=Level.WARNING,
                message=f"{task.name} has few problems of difficulty {task.difficulty}; all of them are for training.",
                remedy="Claim nothing about new problems, or give a larger difficulty.",
                where=where,
            )
        )
    if task.num_steps > full.M:
        found.append(
            Finding(
                kind="audit.few_iterations",
                level=Level.INFO,
                message=f"Problems of {domain.name} take {task.num_steps} iterations of one operation each; "
                f"full has {full.M}.",
                remedy=f"For a model of one operation per iteration, pass --num-steps {task.num_steps}.",
                value=float(full.M),
                threshold=float(task.num_steps),
                where=where,
            )
        )
    return found


def other_task(task: str, trained: str) -> Finding:
    """The model was trained on something else."""
    return Finding(
        kind="audit.other_task",
        level=Level.WARNING,
        message=f"The model was trained on {trained} and is audited on {task}.",
        remedy="Leave out --task to audit it on its own.",
    )


def _few_documents(domain: str, side: str, count: int, least: int, more: str) -> Finding:
    return Finding(
        kind="audit.few_documents",
        level=Level.WARNING,
        message=f"{domain} has {count} {side} documents; below {least} intervals are rough.",
        remedy=more,
        value=float(count),
        threshold=float(least),
        where={"domain": domain, "split": side},
    )


def _split_overlap(domain: str, overlap: float) -> Finding:
    return Finding(
        kind="audit.split_overlap",
        level=Level.WARNING,
        message=f"{100 * overlap:.1f} % of the evaluation 13-grams of {domain} occur in calibration.",
        remedy="Remove repeated passages, or give documents that share them one group.",
        value=overlap,
        threshold=MUCH_OVERLAP,
        where={"domain": domain},
    )


def _diverges(domain: str, schedule: str, j: int) -> Finding:
    return Finding(
        kind="audit.diverged",
        level=Level.WARNING,
        message=f"{schedule} on {domain} diverged at application {j}; its contrasts are not measured.",
        remedy="Try --dtype float32.",
        value=float(j),
        where={"domain": domain, "schedule": schedule},
    )
