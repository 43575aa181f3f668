"""What runs write and reports read: findings, run records, and JSON that round-trips exactly.

A finding is a value: a kind, a level, a number, a threshold and a reference. It is returned, never printed where it
arises.
"""

import dataclasses
import enum
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from looplab._config import LATER, from_dict

SCHEMA_VERSION = 1


class Level(enum.StrEnum):
    """How serious a finding is. UNIDENTIFIED: the quantity cannot be known here, with the reason in the message."""

    INFO = "info"
    WARNING = "warning"
    FAILURE = "failure"
    UNIDENTIFIED = "unidentified"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One observation with its evidence.

    `kind` is `<part>.<name>`, such as `audit.index_inert`. `low` and `high` bound the value's interval.
    """

    kind: str
    level: Level
    message: str
    remedy: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    reference: str = ""
    where: dict[str, str | int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        text = f"[{self.level}] {self.kind}: {self.message}"
        return f"{text} {self.remedy}" if self.remedy else text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; the level is its word."""
        return encode_json(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Finding":
        """The finding that `to_dict` or a JSON file holds."""
        return cls(**{**_numbers(data, "value", "low", "high", "threshold"), "level": Level(data["level"])})


def _numbers(data: dict[str, Any], *names: str) -> dict[str, Any]:
    """`data` with the words "nan", "inf" and "-inf" under `names` turned back into numbers."""
    return {**data, **{name: float(data[name]) for name in names if isinstance(data.get(name), str)}}


def encode_json(value: Any) -> Any:
    """Plain JSON values: non-finite numbers become the strings "nan", "inf", "-inf"; dataclasses become dicts.

    Raises:
        TypeError: A value or a mapping's key that JSON cannot hold.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        if len({str(key) for key in value}) < len(value):
            raise TypeError(f"records: keys of a mapping must differ as text. Got {list(value)!r}.")
        return {str(key): encode_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_json(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    if isinstance(value, (np.generic, np.ndarray)):
        return encode_json(value.tolist())
    raise TypeError(f"records: a value must be a number, string, list, mapping, array or dataclass. Got {value!r}.")


def dump_json(value: Any, *, indent: int | None = 1) -> str:
    """Deterministic JSON text: sorted keys, shortest float forms, a final newline."""
    return json.dumps(encode_json(value), sort_keys=True, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Writes to a temporary name beside `path`, flushes to disk, renames: a reader sees the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One finished training run, as scaling laws and studies read it."""

    run_id: str
    config_hash: str
    version: str
    status: str
    """finished, diverged or stopped."""
    seed: int
    num_steps: float
    """Mean iterations (or applications under PrefixDepth) drawn in training."""
    window: float
    """Mean trailing applications that carried gradient."""
    depth_law: str
    """JSON of the law, or "fixed"."""
    n_once: int
    n_rec: int
    width: int
    layers_once: int
    layers_core: int
    seq_len: int
    vocab_size: int
    tokens: int
    unique_tokens: int
    train_flops: int
    flops_pairs: str
    loss: float
    """Held-out nats per token at `eval_steps`."""
    loss_split: str
    tokenizer: str
    eval_steps: float
    seconds: float
    hardware: str
    schema: int = SCHEMA_VERSION

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RunRecord":
        """The record that a JSON line holds.

        Raises:
            ValueError: A schema that this version does not know.
            TypeError: Unknown or missing keys.
        """
        if data.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
            got = data["schema"]
            raise ValueError(
                f"RunRecord.schema must be {SCHEMA_VERSION}. Got {got}. Read it with the version that wrote it."
            )
        return cls(**_numbers(data, "num_steps", "window", "loss", "eval_steps", "seconds"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """How an interval becomes a word, fixed before anything runs; `looplab.studies.rules` applies it."""

    name: str
    """above, below, between, exact, law: a level; greater: a difference; equivalent, two_sided: around 0; spread."""
    numbers: tuple[float, ...] = ()
    """Thresholds; none for an equivalence within the audit's own margin."""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{number:g}' for number in self.numbers)})" if self.numbers else self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What a rule looks at: one quantity of one arm, or of several; built by the functions of `looplab.studies.parts`.

    The cells are pairs of an arm and a quantity, one after another.
    """

    label: str
    quantity: str
    """Name of the `StudyRow`."""
    arms: tuple[str, ...]
    rule: Rule
    statistic: str = dataclasses.field(default="", metadata=LATER)
    """contrast, effect, interaction, trend: a weighted sum of the cells; ratio, auc, time; empty: the value of one arm
    or the difference of two."""
    quantities: tuple[str, ...] = dataclasses.field(default=(), metadata=LATER)
    """Quantity of every cell, where they differ."""
    weights: tuple[float, ...] = dataclasses.field(default=(), metadata=LATER)
    """Of the weighted sum."""
    at: tuple[float, ...] = dataclasses.field(default=(), metadata=LATER)
    """Of a trend: where every cell stands on the axis."""
    axis: str = dataclasses.field(default="", metadata=LATER)
    """Of a trend: what is on the axis."""
    clusters: tuple[str, ...] = dataclasses.field(default=(), metadata=LATER)
    """Of an auc: the cluster of every arm."""

    @property
    def cells(self) -> tuple[tuple[str, str], ...]:
        """(arm, quantity) of every cell."""
        return tuple(zip(self.arms, self.quantities or (self.quantity,) * len(self.arms), strict=True))

    @property
    def decides(self) -> str:
        """The rule, with the statistic that it decides on."""
        axis = f" on {self.axis}" if self.axis else ""
        return f"{self.statistic}{axis}: {self.rule}" if self.statistic else str(self.rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """What must hold before a claim may be decided: a quantity reaches a level in all of some arms."""

    arms: tuple[str, ...]
    quantity: str
    at_least: float
    reason: str
    """Kind of the reason, where it does not: task not learned, control missing, ..."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of somebody else's, with its source; never an average of two."""

    figure: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence that a study decides: every word here is fixed before the first arm runs."""

    id: str
    origin: str
    """published, ours: a prediction of our own, question: no direction taken beforehand."""
    quote: str
    """The words of the source; empty for `ours`."""
    statement: str
    unit: str
    scope: str
    """recipe: needs training seeds; checkpoint: about these weights only."""
    parts: tuple[Part, ...]
    """Supported if every part is; not supported if one part is not."""
    where_identifiable: bool = False
    """Parts whose quantity cannot be told apart do not count, unless none is left."""
    guard: str = ""
    published: tuple[Published, ...] = ()
    contradicted_by: tuple[Published, ...] = ()
    some: bool = dataclasses.field(default=False, metadata=LATER)
    """Supported if one part is, at intervals of 1 - .05 / parts: "in some of m cells"."""
    needs: tuple[Need, ...] = dataclasses.field(default=(), metadata=LATER)
    """Guards that are checked before any comparison."""
    withheld: str = dataclasses.field(default="", metadata=LATER)
    """Why no scale offered here can test this, such as `size: 20B parameters`; such a claim has no parts."""
    only: str = dataclasses.field(default="", metadata=LATER)
    """What must be given before it is measured: --full, --model or --data; empty: nothing."""
    equal: tuple[str, ...] | None = dataclasses.field(default=None, metadata=LATER)
    """What its arms must share, where that is not what the study says."""

    @property
    def rule(self) -> str:
        """The rule of all parts, or of each, in words."""
        rules = list(dict.fromkeys(part.decides for part in self.parts))
        if not rules:
            return "not tested here"
        if self.some:
            return f"in some part, at 1 - .05/{len(self.parts)}: {'; '.join(rules)}"
        if len(rules) > 1:
            return "; ".join(f"{part.label}: {part.decides}" for part in self.parts)
        if len(self.parts) == 1:
            return rules[0] if len(self.parts[0].arms) == 1 else f"{rules[0]}: {self.parts[0].label}"
        return f"{rules[0]} in every {'identifiable part' if self.where_identifiable else 'part'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartResult:
    """What one part of a claim came to. `low` and `high` are at `level`; None where nothing can be told."""

    label: str
    value: float | None
    low: float | None
    high: float | None
    level: float
    seeds: tuple[float, ...]
    """The value for each training seed; empty where none was trained."""
    word: str
    note: str = ""
    """What is printed beside the number: the direction, a p value, how many runs diverged, counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim with its word: supported, not supported, undecided, or not identifiable at this scale; `-`: not run."""

    claim: Claim
    parts: tuple[PartResult, ...]
    word: str
    reason: str
    flags: tuple[str, ...] = ()
    """reversed: the opposite would be supported; one checkpoint: nothing about training runs; code changed; tuned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One quantity of one arm and seed, with its document intervals at 95 % and 90 %."""

    arm: str
    seed: int | None
    quantity: str
    unit: str
    """nats, share, factor or fact."""
    value: float | None
    low: float | None = None
    high: float | None = None
    low90: float | None = None
    high90: float | None = None
    margin: float | None = None
    """Of an equivalence to zero."""
    word: str = ""
    """The audit's own word."""
    reason: str = ""
    """Why there is no value."""
    chance: float | None = None
    """Value of the best blind guess, of an accuracy: both arms near it, or both near 1, compare nothing."""
    items: int | None = None
    """Items, events or repetitions behind the value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyArm:
    """One arm with one seed: what was run, and where its own report lies (relative to the study's folder)."""

    name: str
    title: str
    seed: int | None
    audit: str
    sentence: str
    """The audit's verdict."""
    facts: dict[str, str]
    """Hashes and counts, those that must be equal among them."""

    @property
    def label(self) -> str:
        """Name and seed."""
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matched:
    """One thing that all arms of a seed must share."""

    name: str
    equal: bool
    values: dict[str, str]
    """Arm -> what it had."""
    tolerance: float = 0.0
    """Largest allowed over smallest of a number, minus 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyPlot:
    """Quantities to draw side by side, arm by arm."""

    name: str
    title: str
    quantities: tuple[str, ...]
    line: float | None = None
    """A threshold, in the quantities' unit."""
    x: tuple[float, ...] = ()
    """Where each quantity stands on a logarithmic axis, for a line per arm; empty: side by side."""
    x_label: str = ""
    y_label: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A finished study, without times: equal inputs give equal bytes."""

    study: str
    version: int
    scale: str
    question: str
    references: tuple[str, ...]
    predictions: str
    """SHA-256 of predictions.json, which was written before the first arm ran."""
    arms: tuple[StudyArm, ...]
    rows: tuple[StudyRow, ...]
    claims: tuple[ClaimResult, ...]
    matched: tuple[Matched, ...]
    columns: tuple[str, ...]
    """Quantities of the table of arms, in order."""
    plots: tuple[StudyPlot, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    command: str
    code: str = ""
    """Hash of the source that measured it."""
    schema: int = SCHEMA_VERSION

    def row(self, arm: str, seed: int | None, quantity: str) -> StudyRow | None:
        """The row of one arm, or None where the arm has no such quantity."""
        found = (r for r in self.rows if (r.arm, r.seed, r.quantity) == (arm, seed, quantity))
        return next(found, None)

    def counts(self) -> str:
        """`3 supported, 1 undecided, 1 not run`."""
        words = ["not run" if claim.word == "-" else claim.word for claim in self.claims]
        return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))

    def __str__(self) -> str:
        lines = [f"study {self.study} at scale {self.scale}: {self.counts()}", ""]
        for result in self.claims:
            reason = f" ({result.reason})" if result.reason else ""
            flags = "".join(f", {flag}" for flag in result.flags)
            lines.append(f"{result.claim.id:<18} {result.word}{reason}{flags}")
            lines.append(f"{'':<18} {result.claim.statement} Rule: {result.claim.rule}.")
        return "\n".join([*lines, "", *self.notes])

    @classmethod
    def from_json(cls, text: str) -> "StudyResult":
        """The result that `dump_json` wrote.

        Raises:
            ValueError: A schema that this version does not know.
        """
        data = json.loads(text)
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"study: results.json must have schema {SCHEMA_VERSION}. Got {data.get('schema')!r}.")
        for claim in data["claims"]:
            claim["parts"] = [_numbers(part, "value", "low", "high") for part in claim["parts"]]
        return from_dict(cls, data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalScore:
    """One metric of one task, or group of tasks, at one depth."""

    task: str
    depth: int
    metric: str
    filter: str
    value: float | None
    stderr: float | None
    """None where lm-eval has none."""
    higher_is_better: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTask:
    """A task as it was run."""

    name: str
    origin: str
    """built in, local or lm-eval."""
    version: str
    output: str
    """multiple_choice, loglikelihood, loglikelihood_rolling or generate_until."""
    documents: int
    of: int
    """Documents that the task has."""
    num_fewshot: int
    settings: str
    """Hash of the task's settings and documents."""
    truncated: int
    """Inputs that lost tokens on the left."""
    lost_tokens: int
    steps: dict[str, float]
    """Depth -> mean exit step, under an exit rule."""
    counts: dict[str, int]
    """The ledger's counts of everything that ran for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalResult:
    """A model on tasks of lm-eval at several depths, without times: equal inputs give equal bytes."""

    model: str
    architecture: str
    weights: str
    """Hash of all parameters and buffers."""
    tokenizer: str
    dtype: str
    device: str
    parameters: int
    trained_depth: str
    default_depth: str
    depths: tuple[int, ...]
    unit: str
    """What a depth counts: steps or applications."""
    trained_units: tuple[int, int] | None
    """Depths at which the readout was trained."""
    shared: tuple[int, int]
    """Applications per input when log-likelihoods share a rollout, and when every depth is run alone."""
    exit_rule: str
    kv_rule: str
    init: str
    seeds: dict[str, int]
    """Of few-shot examples, noise, draws."""
    system_prompt: str
    chat_template: str
    """SHA-256 of the template; empty where none is applied."""
    fewshot_as_multiturn: bool
    gen_kwargs: str
    limit: int | None
    max_length: int
    batching: str
    tasks: tuple[EvalTask, ...]
    scores: tuple[EvalScore, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    command: str
    schema: int = SCHEMA_VERSION

    def curves(self) -> dict[tuple[str, str, str], list[EvalScore]]:
        """(task, metric, filter) -> its scores by depth, in the order of the tasks."""
        found: dict[tuple[str, str, str], list[EvalScore]] = {}
        for score in self.scores:
            found.setdefault((score.task, score.metric, score.filter), []).append(score)
        return {key: sorted(scores, key=lambda score: score.depth) for key, scores in found.items()}

    def __str__(self) -> str:
        unit = self.unit if len(self.depths) > 1 or self.depths[0] != 1 else self.unit.removesuffix("s")
        depths = ", ".join(map(str, self.depths))
        wide = max((len(f"{task} {metric}") for task, metric, _ in self.curves()), default=0)
        lines = [f"{self.model} at {depths} {unit}", " " * (wide + 1) + "".join(f"{d:>16}" for d in self.depths)]
        for (task, metric, name), scores in self.curves().items():
            label = f"{task} {metric}" + ("" if name == "none" else f" ({name})")
            lines.append(f"{label:<{wide}} " + "".join(f"{_figure(score):>16}" for score in scores))
        return "\n".join([*lines, *self.notes])

    @classmethod
    def from_json(cls, text: str) -> "EvalResult":
        """The result that `dump_json` wrote.

        Raises:
            ValueError: A schema that this version does not know.
        """
        data = json.loads(text)
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"eval: results.json must have schema {SCHEMA_VERSION}. Got {data.get('schema')!r}.")
        data["scores"] = [_numbers(score, "value", "stderr") for score in data["scores"]]
        return from_dict(cls, data)


def _figure(score: EvalScore) -> str:
    if score.value is None:
        return "-"
    return f"{score.value:.4f}" + ("" if score.stderr is None else f" ±{score.stderr:.4f}")
