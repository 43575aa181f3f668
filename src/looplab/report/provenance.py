"""The tables of what was run and how: model, data, schedules, self-tests, findings, counts, settings."""

from collections.abc import Callable

from looplab._config import to_dict
from looplab.report.keyed import Keyed
from looplab.report.tables import NONE, Cell, Table, amount, count, percent_of, tiny, words

HASH = 16
"""Digits of a hash that the page shows."""


def _hash(part: Keyed) -> Cell:
    """The start of a long hash; the whole is in results.json."""
    text = part.held if len(part.held) <= HASH else f"{part.held[:HASH]}\N{HORIZONTAL ELLIPSIS}"
    return Cell(text, part.path, part.home, tone="code")


def model_card(result: Keyed) -> Table:
    """The checkpoint as it declares itself."""
    card = result.model
    rows = [
        ("architecture", words(card.architecture), Cell(f"version {card.held.version}", card.version.path, card.home)),
        (
            "iterations run, per block",
            words(card.default_steps),
            Cell(f"{card.held.units} units", card.units.path, card.home),
        ),
        ("trained depth", words(card.trained_depth), Cell("")),
        (
            "applications",
            count(card.applications),
            Cell(f"{card.held.unit_applications} per unit", card.unit_applications.path, card.home),
        ),
        ("units of the first run (kmid)", count(card.kmid), Cell("")),
        ("parameters", count(card.parameters["total"]), Cell("")),
        *_groups(card.parameters),
        ("depends on the iteration", words(", ".join(card.held.index_parts) or "nothing"), Cell("")),
        ("vocabulary", count(card.vocabulary), words(card.tokenizer)),
        ("positions", words("any") if card.held.max_positions is None else count(card.max_positions), Cell("")),
        ("KV rule in use", words(card.kv_rule), words("the audit runs without a cache")),
        ("number format", words(card.dtype), Cell("")),
        ("weights", _hash(card.weight_hash), Cell("")),
    ]
    rows += [(f"block {i}", words(line), Cell("")) for i, line in enumerate(card.blocks)]
    rows += [("note", words(line), Cell("")) for line in card.notes]
    cells = tuple((words(name), *rest) for name, *rest in rows)
    return Table("model", "Model", ("property", "value", "detail"), cells, text_columns=(0, 1, 2))


def _groups(parameters: Keyed) -> list[tuple[str, Cell, Cell]]:
    """A row for each group of parameters that is not empty, in the order of their names."""
    found = {name: parameters[name] for name in sorted(parameters.held) if name != "total"}
    return [(f"parameters, {name}", count(group), Cell("")) for name, group in found.items() if group.held]


DOCUMENTS: tuple[tuple[str, str, Callable[[Keyed], Cell]], ...] = (
    ("source", "source", words),
    ("documents read", "read", count),
    ("duplicates removed", "duplicates", count),
    ("empty ones removed", "empty", count),
    ("without a scored token, removed", "unscored", count),
    ("evaluation documents", "evaluation", count),
    ("calibration documents", "calibration", count),
    ("scored evaluation tokens", "evaluation_tokens", count),
    ("scored evaluation bytes", "evaluation_bytes", count),
    ("calibration tokens", "calibration_tokens", count),
    ("tokens of the affine fit", "affine_tokens", count),
    ("longest document, tokens", "longest", count),
    ("cut at the longest allowed", "cut", count),
    ("evaluation 13-grams also in calibration", "overlap", percent_of),
    ("padded positions", "padding", percent_of),
    ("hash of the documents", "data_hash", _hash),
)
"""Label, field of DocumentCounts, and how it is written."""


def documents(result: Keyed) -> Table:
    """Documents and tokens of each domain, from reading to scoring."""
    rows = tuple(
        (words(label), *(write(getattr(domain.documents, field)) for domain in result.domains))
        for label, field, write in DOCUMENTS
    )
    columns = ("quantity", *(domain.held.name for domain in result.domains))
    return Table("documents", "Data", columns, rows, "Calibration and evaluation documents are disjoint.")


def schedules(result: Keyed) -> Table:
    """Plans and words of every schedule."""
    rows = tuple(
        (
            words(row.name),
            words(row.plan, "code"),
            words(row.word, "code"),
            count(row.applications),
            count(row.distinct),
            words(row.reason, "unknown") if row.held.reason else words("run"),
        )
        for row in result.schedule_map
    )
    columns = ("schedule", "plan (block.iteration)", "word (block.class)", "applications", "distinct", "run?")
    note = "Two plans with one word are the same function, so their contrast says nothing and the later one is not run."
    return Table("schedules", "Schedules", columns, rows, note, (0, 1, 2, 5))


def self_tests(result: Keyed) -> Table:
    """What was checked before any number was printed."""
    rows = tuple(
        (
            words(test.name),
            words(test.title),
            Cell(
                "passed" if test.held.passed else "failed",
                test.passed.path,
                test.home,
                tone="" if test.held.passed else "warning",
            ),
            tiny(test.margin),
            tiny(test.limit),
            words(test.note) if test.held.note else Cell(""),
        )
        for test in result.self_tests
    )
    columns = ("test", "what it checks", "outcome", "difference", "limit", "note")
    return Table(
        "self-tests", "Self-tests", columns, rows, "Differences are relative to max(1, largest logit).", (0, 1, 2, 5)
    ).trimmed()


def findings(result: Keyed) -> Table:
    """Every finding with its evidence."""
    rows = []
    for found in result.findings:
        tone = "warning" if found.held.level in ("warning", "failure") else ""
        where = ", ".join(f"{key} {value}" for key, value in found.held.where.items())
        rows.append(
            (
                words(found.level, tone),
                words(found.kind),
                words(where),
                words(found.message),
                _evidence(found.value),
                _evidence(found.threshold),
                words(found.remedy) if found.held.remedy else Cell(""),
                words(found.reference) if found.held.reference else Cell(""),
            )
        )
    columns = ("level", "kind", "where", "what", "number", "threshold", "what to do", "reference")
    return Table("findings", "Findings", columns, tuple(rows), text_columns=(0, 1, 2, 3, 6, 7)).trimmed()


def _evidence(part: Keyed) -> Cell:
    """A finding's number: whole ones, such as counts, without digits after the point."""
    return count(part) if part.held is not None and float(part.held).is_integer() else amount(part)


def totals(result: Keyed) -> Table:
    """What the audit cost, against running each schedule alone."""
    found = result.counts
    rows = (
        (words("applications per document, shared walk"), count(found.minimal_applications)),
        (words("applications per document, one schedule at a time"), count(found.naive_applications)),
        (words("readouts per document"), count(found.readouts)),
        (words("most states held at once"), count(found.live_states)),
        (words("documents"), count(found.documents)),
        (words("noise seeds"), count(found.seeds)),
        (words("applications in all"), count(found.applications)),
    )
    return Table("counts", "Counts", ("quantity", "number"), rows)


def phases(result: Keyed) -> Table:
    """Exact counts of each phase."""
    rows = tuple(
        (words(p.phase), count(p.applications), count(p.tokens), count(p.readouts), count(p.head_tokens), tiny(p.flops))
        for p in result.counts.phases
    )
    columns = ("phase", "applications", "tokens", "readouts", "tokens through the head", "FLOPs")
    return Table(
        "phases", "Counts by phase", columns, rows, "Times are in ledger.json, so that equal inputs give equal pages."
    )


def settings(result: Keyed) -> Table:
    """The configuration that the numbers depend on."""
    rows = tuple(
        (words(name), Cell(_setting(value), f"config.{name}", result.home))
        for name, value in to_dict(result.config.held).items()
        if name != "kind"
    )
    return Table("settings", "Settings", ("setting", "value"), rows, text_columns=(0, 1))


def _setting(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or NONE
    return "default" if value is None else str(value)


def versions(result: Keyed) -> Table:
    """Software, and the hash of the settings."""
    rows = tuple((words(name), words(result.versions[name])) for name in sorted(result.versions.held))
    last = (words("settings hash"), words(result.config_hash, "code"))
    return Table("versions", "Versions", ("software", "version"), (*rows, last), text_columns=(0, 1))
