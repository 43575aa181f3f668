"""What an audit found, as data: frozen, exact through JSON, without times.

`AuditResult` holds every number that the report page, the tables and `results.json` show. Losses are nats per scored
token. A quantity that this model cannot tell apart is `None` beside its reason, never a number. A schedule, domain or
probe is looked up by name; lists keep the order in which they are shown.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from looplab._config import from_dict
from looplab.audit.config import AuditConfig
from looplab.records import Finding, Level, dump_json, encode_json, write_atomic

RESULTS = "results.json"
SCHEMA = 2
RAW = "raw"
"""The name of the untouched readout among the probes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A point value (all documents once) with document intervals.

    `low`, `high`: expanded percentile interval at the configured level. `low90`, `high90`: the interval of the
    equivalence test. `plain_low`, `plain_high`: the unexpanded percentile interval, stored for comparison.
    """

    value: float
    low: float
    high: float
    low90: float
    high90: float
    plain_low: float
    plain_high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The audited checkpoint, as its LoopSpec and files declare it."""

    name: str
    source: str
    """Built-in name or folder name; never an absolute path."""
    architecture: str
    version: str
    parameters: dict[str, int]
    """Groups of `ParamCount`, with `total`."""
    dense: bool
    blocks: tuple[str, ...]
    """One line per block: what it holds, reads and writes."""
    default_steps: str
    trained_depth: str
    """The law in words, such as "fixed 4" or "uniform 1..8 of prefix length"."""
    trained_units: tuple[int, int] | None
    """Smallest and largest number of units whose readout was trained; None if unknown."""
    applications: int
    """K, applications of the full plan."""
    unit_applications: int
    units: int
    """M, units of the full plan."""
    kmid: int
    """Leading units with the block sequence of the first."""
    index_parts: tuple[str, ...]
    kv_rule: str
    noise_width: int
    vocabulary: int
    max_positions: int | None
    dtype: str
    weight_hash: str
    tokenizer: str
    notes: tuple[str, ...] = ()
    """What a reader of the numbers must know: what the original does otherwise, how this model is run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """One row of the schedule map. `word` is the plan in (block.operator class); equal words are one function."""

    name: str
    family: str
    """full, prefix, suffix, repeat, same, cyclic, repeat_first, permute, pinned, layer_major, pass_major, regrid,
    extend_last, extend_cycle, inner, explicit."""
    k: int | None
    plan: str
    word: str
    applications: int
    units: int
    distinct: int
    same_as: str | None
    """The earlier schedule with the same word; then nothing was run for this row."""
    reason: str | None
    """The fixed phrase printed after "not identifiable: "; None where the row was run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentCounts:
    """Documents and tokens of one domain, from reading to scoring."""

    source: str
    data_hash: str
    read: int
    duplicates: int
    empty: int
    unscored: int
    evaluation: int
    calibration: int
    evaluation_tokens: int
    calibration_tokens: int
    evaluation_bytes: int | None
    """None for grids."""
    affine_tokens: int
    longest: int
    cut: int
    """Documents longer than `max_tokens`."""
    overlap: float | None
    """Share of evaluation 13-grams that occur in calibration; None for grids."""
    padding: float
    """Share of padded positions in the evaluation batches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeLoss:
    """Token-weighted evaluation loss of one schedule under one readout."""

    probe: str
    loss: Estimate
    per_byte: float | None
    """None for grids."""
    seeds: tuple[float, ...]
    """The loss for each noise seed; one entry for a model without noise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemperatureFit:
    """Temperature of one schedule. `temperature` is None where beta = 0 (status `uniform`)."""

    beta: float
    temperature: float | None
    status: str
    """converged, flat, uniform, separable, sharp."""
    low: float | None
    high: float | None
    """Interval over refits on resampled calibration documents; None at a boundary, `high` also where it is infinite."""
    passes: int
    in_sample: float | None
    """T fitted on the evaluation tokens themselves."""
    cross: dict[str, float]
    """Loss of this schedule here under the T fitted on each other domain."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AffineFit:
    """Affine probe of one schedule. `penalty` None is the identity (infinite penalty)."""

    penalty: float | None
    converged: bool
    convex: bool
    iterations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullRankFit:
    """Full-rank probe of one schedule. `penalty` None is the identity (infinite penalty)."""

    objective: str
    """nll, or kl: divergence from the model's own full-depth output."""
    penalty: float | None
    converged: bool
    convex: bool
    iterations: int
    tokens: int
    """Training tokens, of documents that neither calibrate nor evaluate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """How the vectors of one schedule lie against those of the full plan, on the same scored tokens.

    A zero denominator gives None. No intervals: these are descriptions of one sample of tokens.
    """

    site: str
    """hidden: what the head reads; state: the component that the readout reads."""
    tokens: int
    zero_rows: int
    """Rows with norm below 1e-12, left out of the cosines."""
    norm: float
    norm_ratio: float | None
    cosine: float | None
    cka: float | None
    effective_rank: float | None
    rank_ratio: float | None
    """Effective rank over that of the full plan."""
    anisotropy: float | None
    frechet: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """What one application of one schedule does to one state component; means over documents of means over tokens."""

    application: int
    """Place in the plan, from 0."""
    block: int
    iteration: int
    component: str
    relative: float | None
    """|x_j - x_{j-1}| / |x_{j-1}|; None from a zero state."""
    low: float | None
    high: float | None
    """Quartiles over documents of `relative`."""
    state_cosine: float | None
    update_cosine: float | None
    """Cosine of this update with the one before; None for the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    """One bin of a reliability diagram, over (low, high] of top-1 confidence."""

    low: float
    high: float
    count: int
    accuracy: float
    confidence: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenMetrics:
    """Token statistics of one schedule under one readout (raw or temperature)."""

    probe: str
    accuracy: float
    confidence: float
    ece: float
    ece_equal_mass: float
    brier: float
    entropy: float
    logit_norm: float | None
    logit_norm_centred: float | None
    kl_to_full: float | None
    agreement_to_full: float | None
    bins: tuple[ReliabilityBin, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleResult:
    """One schedule that was run. Permutes appear one by one."""

    name: str
    k: int | None
    diverged_at: int | None
    """Index of the first application with a non-finite state; then the lists below are empty."""
    losses: tuple[ProbeLoss, ...]
    temperature: TemperatureFit | None
    affine: AffineFit | None
    metrics: tuple[TokenMetrics, ...]
    full_rank: FullRankFit | None = None
    geometry: tuple[Geometry, ...] = ()
    """One per site; empty where geometry was not measured."""
    updates: tuple[Update, ...] = ()
    """Application by application, for full, repeat(1) and repeat(kmid)."""

    def loss(self, probe: str = RAW) -> ProbeLoss:
        """The loss under `probe`; KeyError if it was not measured."""
        return _named(self.losses, "probe", probe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrast:
    """`loss(plus) - loss(minus)` in nats, under one readout."""

    name: str
    plus: str
    minus: str
    probe: str
    family: str
    """The two schedule families, such as prefix-full, prefix-repeat, prefix-suffix, prefix-regrid, permute-full,
    order-full (layer_major, pass_major), extend-full (extend_last, extend_cycle), inner-full."""
    k: int | None
    effect: Estimate | None
    spread: tuple[float, float] | None
    """Smallest and largest single effect where `effect` is a mean over draws (permutes)."""
    margin: float | None
    """delta of the equivalence test."""
    equivalent: bool | None
    bitwise_equal: bool
    """Every scored loss is the same number: printed "0 (bitwise equal)"."""
    reason: str | None
    """Why there is no number: "not identifiable: ..." or "not measured: ..."."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One term of a decomposition, with its verdict word."""

    name: str
    """application, distinct, composition or calibration."""
    plus: str
    minus: str
    nats: Estimate | None
    share: Estimate | None
    seed_deviation: float | None
    """Standard deviation of the share over noise seeds; None without noise."""
    equivalent: bool | None
    bitwise_equal: bool
    word: str
    """From the verdict vocabulary, such as "dominant" or "not identifiable (the block has no iteration index)"."""
    reason: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decomposition:
    """application + distinct + composition = gap, under one readout."""

    probe: str
    gap: Estimate
    gap_measurable: bool
    """The lower bound of the gap exceeds `gap_floor`; shares are withheld otherwise."""
    margin: float
    """delta = min(margin_nats, margin_share * gap)."""
    parts: tuple[Part, ...]

    def part(self, name: str) -> Part:
        """The part called `name`."""
        return _named(self.parts, "name", name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeGain:
    """What refitting the readout removes at prefix(k). Net = gain at prefix(k) minus gain at full."""

    probe: str
    schedule: str
    k: int
    gap: Estimate
    gross: Estimate
    gross_full: Estimate
    net: Estimate
    share: Estimate | None
    """net / gap; None where the gap is too small."""
    word: str
    """present, absent or inconclusive; "inconclusive (gap too small)"."""
    flattening: bool
    """Reached with T = inf: "by flattening a wrong answer"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """A named linear form of losses, in nats."""

    name: str
    formula: str
    """Such as "same(4) - prefix(4)"."""
    nats: Estimate
    equivalent: bool | None
    bitwise_equal: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordering:
    """One order in which the whole difference is taken apart; the terms add up to it."""

    name: str
    """Such as "count first, probe last"."""
    terms: dict[str, Estimate]
    """application, distinct, composition, and calibration where a probe takes part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FourWay:
    """Q(prefix(1)) - Q_probe(full) as application + distinct + composition + calibration, by every order.

    Structure and probe overlap, so what a term is worth depends on the order; none of the orders is the true one. A
    part that is zero because its two plans are one word is left out. Where fewer than two parts can be told apart, or
    one was not measured, a single term `structure` stands for all three.
    """

    probe: str
    whole: Estimate
    paths: tuple[Ordering, ...]
    """Two: structure first, probe first. Four where the factorial exists."""
    mean: dict[str, Estimate]
    spread: dict[str, tuple[float, float]]
    """Smallest and largest point value over the paths, by term."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factorial:
    """Count of applications (kmid, M) by indices (one, kmid) on the first run of units, under one readout."""

    probe: str
    cells: dict[str, Estimate]
    """Loss by schedule: same(kmid), prefix(kmid), same(M), repeat(kmid)."""
    effects: tuple[Effect, ...]
    """index effect at kmid and at M, count effect at one and at kmid indices, interaction, both Shapley values, and the
    two further orders repeat_first(M) and cyclic(M) against repeat(kmid) where they were measured."""
    orders: tuple[Ordering, ...]
    """count first, index first: the gap as application + distinct + composition; empty where the gap was not
    measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stratum:
    """The decomposition on a part of the documents, or of their positions. A description: it carries no verdict."""

    by: str
    """loss (terciles of full-depth document loss), length (terciles), position."""
    label: str
    documents: int
    tokens: int
    gap: Estimate
    parts: dict[str, Estimate | None]
    """application, distinct, composition in nats; None where not identifiable."""
    gains: dict[str, Estimate]
    """Probe -> net gain at prefix(1), in nats; every fit is that of the whole domain and held fixed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthStep:
    """One further step of depth: from one measured depth to the next."""

    before: str
    after: str
    """Schedule names: prefix(k), full, extend_last(a)."""
    units: int
    """Units run at `after`."""
    applications: int
    added: int
    """Applications that the step adds."""
    beyond: bool
    """Past the full plan."""
    loss: Estimate
    gain: Estimate
    """Q(before) - Q(after)."""
    net: dict[str, Estimate]
    """Probe -> the same gain with the readout refitted at both depths."""
    word: str
    """gains, harms, equivalent to zero, undecided."""
    margin: float | None
    more_documents: int | None
    """About how many more evaluation documents would decide, where undecided."""
    flops: int
    """Forward FLOPs per token up to `after`, prelude, readout and head included, at `context_tokens`."""
    added_flops: int
    kv_bytes: int
    """Key-value bytes per token at `after`, under the model's own rule."""
    milliseconds: float | None = None
    """Measured time per token of the applications up to `after`; only where the audit was asked to time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthStart:
    """The shallowest depth that was measured: where the steps begin."""

    schedule: str
    units: int
    applications: int
    loss: Estimate
    flops: int
    """Forward FLOPs per token, prelude, readout and head included, at `context_tokens`."""
    kv_bytes: int
    """Key-value bytes per token under the model's own rule."""
    milliseconds: float | None = None
    """Measured time per token; only where the audit was asked to time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthValue:
    """How many loops to pay for: gain against cost of every further step of depth."""

    start: DepthStart
    steps: tuple[DepthStep, ...]
    """At least one."""
    context_tokens: int
    """Length at which attention is counted."""
    itemsize: int
    """Bytes of one cached number."""
    enough: int | None
    """Units after which no further measured step up to full depth gains more than the margin; None if undecided."""
    safe_until: int | None
    """Largest measured number of units, trained depth on, up to which loss is not worse than at full by the margin."""
    trained: tuple[int, int] | None
    sentence: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlComparison:
    """Net probe share of the looped model minus the dense control's, on the same documents."""

    probe: str
    looped_k: int
    dense_k: int
    at: str
    """smallest k, or nearest gap."""
    looped_gap_per_byte: float
    dense_gap_per_byte: float
    difference: Estimate | None
    word: str
    """supported, not supported, not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseControl:
    """The dense model under the same interventions: contrasts and probe gains, no shares of parts."""

    model: ModelCard
    schedule_map: tuple[ScheduleEntry, ...]
    schedules: tuple[ScheduleResult, ...]
    contrasts: tuple[Contrast, ...]
    gains: tuple[ProbeGain, ...]
    gaps_per_byte: dict[str, Estimate]
    """Gap of prefix(k) in nats per byte, keyed by schedule name."""
    comparisons: tuple[ControlComparison, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """The task whose problems are the documents of a domain."""

    name: str
    version: int
    options: dict[str, Any]
    """The task as `looplab._config.to_dict` writes it."""
    difficulty: int
    chance: float
    """Exact match of the best guess that does not look at the problem."""
    cells: int
    """Symbols of one answering position."""
    num_steps: int
    """Iterations that a model of one operation per iteration needs."""
    sides: str
    """Where calibration and evaluation problems come from: "splits" (validation and test) or "halves" of one split."""
    trained: bool
    """The model may have been trained on these very problems."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerScore:
    """Answers of one schedule under one readout. Temperature changes no answer: its scores are those of raw."""

    schedule: str
    probe: str
    exact: Estimate
    """Share of problems with every cell of the answer right, with document intervals."""
    wilson: tuple[float, float] | None
    """Score interval of the same share; None with several noise seeds, which answer one problem several times."""
    cells: float
    """Share of all cells that are right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """How a model answers the problems of a domain."""

    task: TaskFacts
    scores: tuple[AnswerScore, ...]
    """Schedule after schedule, raw first."""

    def score(self, schedule: str, probe: str = RAW) -> AnswerScore:
        """The answers of `schedule` under `probe`."""
        return _named([score for score in self.scores if score.probe == probe], "schedule", schedule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer for one domain, in the fixed vocabulary."""

    sentence: str
    words: dict[str, str]
    """Part -> word, raw readout."""
    best_probe: str | None
    """The probe with the largest net share at prefix(1)."""
    probe_words: dict[str, str]
    recurrence: str
    """Is the readout part specific to recurrence? supported, not supported, not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DomainResult:
    """Everything measured on one named set of documents."""

    name: str
    documents: DocumentCounts
    schedules: tuple[ScheduleResult, ...]
    contrasts: tuple[Contrast, ...]
    decompositions: tuple[Decomposition, ...]
    """Raw first, then one per probe; empty for a dense model."""
    gains: tuple[ProbeGain, ...]
    gaps_per_byte: dict[str, Estimate]
    """Gap of prefix(k) in nats per byte, keyed by schedule name."""
    control: DenseControl | None
    verdict: Verdict
    four_way: tuple[FourWay, ...] = ()
    factorials: tuple[Factorial, ...] = ()
    """Raw first, then one per probe; empty where the factorial does not exist."""
    no_factorial: str | None = None
    """Why there is none, as printed."""
    strata: tuple[Stratum, ...] = ()
    depth_value: DepthValue | None = None
    answers: Answers | None = None
    """Where the documents are problems of a task."""

    def schedule(self, name: str) -> ScheduleResult:
        """The schedule called `name`."""
        return _named(self.schedules, "name", name)

    def decomposition(self, probe: str = RAW) -> Decomposition:
        """The telescoping decomposition under `probe`."""
        return _named(self.decompositions, "probe", probe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Whether a part's word is the same in every domain, and how far its shares lie apart."""

    part: str
    """application, distinct, composition, or readout: the net share of a refit at prefix(1)."""
    probe: str
    word: str
    """in every domain, differs by domain."""
    words: dict[str, str]
    differences: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    """"one - other" -> difference of the shares, for every pair of domains in which both have one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTest:
    """One check of 3.5. `margin` is max abs difference over max(1, max abs logit); None for tests without a number."""

    name: str
    title: str
    passed: bool
    margin: float | None
    limit: float | None
    note: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseCounts:
    """Exact counts of one phase: self-tests, calibration, fits, evaluation, control."""

    phase: str
    applications: int
    """Row-applications: one application of one document for one noise seed."""
    tokens: int
    readouts: int
    """Coda runs, per document and seed."""
    head_tokens: int
    flops: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditCounts:
    """Cost of the walk, against running every schedule alone."""

    minimal_applications: int
    """N_min per document and seed: nodes of the trie of requested words."""
    naive_applications: int
    """One by one, per document and seed."""
    readouts: int
    """Distinct words."""
    live_states: int
    """Most states held at once by the depth-first walk."""
    documents: int
    seeds: int
    applications: int
    """First-time applications of the ledger; equals minimal_applications * documents * seeds."""
    phases: tuple[PhaseCounts, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult:
    """A finished audit: `print(result)` for people, `save`/`load` for machines."""

    model: ModelCard
    config: AuditConfig
    config_hash: str
    schedule_map: tuple[ScheduleEntry, ...]
    domains: tuple[DomainResult, ...]
    agreements: tuple[Agreement, ...]
    self_tests: tuple[SelfTest, ...]
    findings: tuple[Finding, ...]
    counts: AuditCounts
    versions: dict[str, str]
    command: str
    schema: int = SCHEMA

    @property
    def probes(self) -> tuple[str, ...]:
        """Readouts that were measured, raw first."""
        return (RAW, *self.config.probes)

    @property
    def decomposition(self) -> Decomposition:
        """The raw decomposition of the first domain."""
        return self.domains[0].decomposition(RAW)

    def domain(self, name: str) -> DomainResult:
        """The domain called `name`."""
        return _named(self.domains, "name", name)

    def worst(self) -> Level | None:
        """WARNING or FAILURE if any finding has it, else None."""
        levels = {finding.level for finding in self.findings}
        return next((level for level in (Level.FAILURE, Level.WARNING) if level in levels), None)

    def table(self) -> str:
        """Decompositions of all domains as fixed-width text."""
        return "\n".join(line for domain in self.domains for line in _table_lines(domain, self.model.dense))

    def __str__(self) -> str:
        lines = [f"audit of {self.model.name}"]
        for domain in self.domains:
            lines.append(domain.verdict.sentence)
            lines += [domain.depth_value.sentence] if domain.depth_value else []
        lines += ["", self.table(), ""]
        lines += [str(finding) for finding in self.findings if finding.level is not Level.INFO]
        lines.append("Intervals cover documents, not training runs.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The text of `results.json`."""
        return dump_json(to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> "AuditResult":
        """The result that `to_json` wrote; ValueError for another schema version."""
        data: dict[str, Any] = json.loads(text)
        if data.get("schema") != SCHEMA:
            raise ValueError(f"audit: {RESULTS} must have schema {SCHEMA}. Got {data.get('schema')!r}. Audit again.")
        findings = tuple(Finding.from_dict(finding) for finding in data.pop("findings"))
        return dataclasses.replace(from_dict(cls, {**data, "findings": []}), findings=findings)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `results.json` into `folder`, which is made if missing; returns its path."""
        path = Path(folder) / RESULTS
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.to_json())
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "AuditResult":
        """The result saved in `folder`."""
        return cls.from_json((Path(folder) / RESULTS).read_text())


DENSE_MESSAGE = "This model has no repeated block; running the dense interventions only."


def _named(items: Sequence[Any], field: str, value: str) -> Any:
    for item in items:
        if getattr(item, field) == value:
            return item
    raise KeyError(f"no {field} {value!r}. Known: {', '.join(getattr(item, field) for item in items)}.")


def nats(estimate: Estimate | None) -> str:
    """`1.234 [1.100, 1.400]`, or a dash."""
    return "-" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def percent(estimate: Estimate | None) -> str:
    """`35.2 % [33.0, 37.4]`, or a dash."""
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _answer_lines(answers: Answers) -> Iterator[str]:
    """Exact match of full and of what the decomposition compares it with."""
    chance = f"chance {100 * answers.task.chance:.2g} %"
    yield f"  {'exact match':<14} {'readout':<12} {'share of problems':<26} {'Wilson':<26} {chance}"
    for score in answers.scores:
        if score.schedule.startswith(("full", "prefix", "repeat")):
            ends = "-" if score.wilson is None else "[{:.1f}, {:.1f}]".format(*(100 * end for end in score.wilson))
            yield f"  {score.schedule:<14} {score.probe:<12} {percent(score.exact):<26} {ends}"


def _table_lines(domain: DomainResult, dense: bool) -> Iterator[str]:
    yield f"{domain.name}: {domain.documents.evaluation} documents, {domain.documents.evaluation_tokens} scored tokens"
    if domain.answers is not None:
        yield from _answer_lines(domain.answers)
    if dense:
        for contrast in domain.contrasts:
            yield f"  {contrast.name:<28} {contrast.probe:<12} {contrast.reason or nats(contrast.effect)}"
        for gain in domain.gains:
            head = f"  {f'net gain at {gain.schedule}':<28} {gain.probe:<12}"
            yield f"{head} {nats(gain.net):<26} {percent(gain.share):<26} {gain.word}"
        return
    yield f"  {'part':<14} {'readout':<12} {'nats':<26} {'share of the gap':<26} word"
    for decomposition in domain.decompositions:
        yield f"  {'gap':<14} {decomposition.probe:<12} {nats(decomposition.gap)}"
        for part in decomposition.parts:
            effect = "0 (bitwise equal)" if part.bitwise_equal else nats(part.nats)
            yield f"  {part.name:<14} {decomposition.probe:<12} {effect:<26} {percent(part.share):<26} {part.word}"
    for gain in domain.gains:
        if gain.k == 1:
            yield f"  {'net gain':<14} {gain.probe:<12} {nats(gain.net):<26} {percent(gain.share):<26} {gain.word}"


def to_plain(result: AuditResult) -> Any:
    """The result as lists, dicts, numbers and strings: what `results.json` holds, for templates and tables.

    Domains of text say nothing of answers.
    """
    data = encode_json(result)
    for domain in data["domains"]:
        if domain["answers"] is None:
            del domain["answers"]
    return data
