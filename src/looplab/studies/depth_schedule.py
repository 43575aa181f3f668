"""depth_schedule: is the readout part of the gap made by training at one depth only, and what does the cure cost?

Arms of `looplab.recipes.depth_schedule` are trained on equal data from equal weights and audited at every depth and
beyond. If a cut readout is off because its depth was never read in training, the part is large in A, gone in B, and
still there in C, which samples depths but never those at which it is cut; and where the temperature jumps follows the
trained depth, 8 in A and 4 in A4. What sampling costs is asked at equal steps, equal applications and equal FLOPs.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
Deviations: the size of one CPU thread; margins of claims without any in the source are ours.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

from looplab.audit.config import AuditConfig
from looplab.audit.result import AuditResult
from looplab.models.base import build
from looplab.models.looped import LoopedConfig
from looplab.recipes import depth_schedule as recipes
from looplab.records import Claim, Part, Published, Rule, StudyPlot, StudyRow
from looplab.recurrence.depth import FixedDepth, PrefixDepth
from looplab.recurrence.expected_cost import step_flops
from looplab.studies import curves, parts, rules
from looplab.studies.base import CPU, SMOKE, STUDIES, Arm, Study
from looplab.studies.claims import DIVERGED
from looplab.studies.drift import DriftRows
from looplab.studies.measured import NOT_MEASURED, Rows
from looplab.studies.trained import TrainedRun
from looplab.training.config import RunConfig
from looplab.training.memory import estimate

DEPTHS = (1, 2, 4)
"""Units at which the temperature share is read."""
FULL, HALF, BEYOND = recipes.DEPTH, recipes.DEPTH // 2, (9, 10, 11, 12)
SHARE = 0.05
LOSS_MARGIN = 0.02
STEP_SHARE = 0.5
MOVED = 0.05
"""Distance of T from that of the trained depth."""
RATIO_MARGIN = 0.1
RATE_MARGIN = 0.5
"""Of spikes per 100 steps, and of skipped steps."""
ARMS = {
    "A": "always all 8 applications",
    "B": "prefixes of U{1..8} applications",
    "C": "prefixes of U{5..8} applications",
    "A4": "always the first 4 applications; read up to 4",
    "B_app": "B until its applications are those of A",
    "B_flop": "B until its training FLOPs are those of A",
}
SMOKED = ("A", "B", "C")
SIZES = {SMOKE: recipes.SMOKE, CPU: recipes.CPU}
_SMOKE_AUDIT: dict[str, Any] = {
    "controls": (),
    "probes": ("temperature",),
    "documents": 20,
    "calibration_documents": 20,
    "max_tokens": 64,
    "replicates": 1000,
}
AUDITS = {
    SMOKE: AuditConfig(grid=DEPTHS, **_SMOKE_AUDIT),
    CPU: AuditConfig(
        grid=tuple(range(1, FULL + 1)),
        extend=BEYOND,
        controls=(),
        documents=200,
        calibration_documents=100,
        affine_tokens=6000,
    ),
}
HALF_AUDITS = {
    SMOKE: AuditConfig(grid=tuple(range(1, HALF + 1)), **_SMOKE_AUDIT),
    CPU: AuditConfig(
        grid=tuple(range(1, HALF + 1)),
        controls=(),
        probes=("temperature",),
        documents=100,
        calibration_documents=100,
    ),
}
"""Of A4, whose second block was never trained."""
LENGTH_AUDIT = AuditConfig(
    grid=(1,), controls=(), probes=("temperature",), documents=200, calibration_documents=100
)  # fmt: skip
"""Of B_app and B_flop, of which claims ask the loss at full depth, on the documents of the others."""
EARLIER = {
    SMOKE: AuditConfig(grid=(1,), **_SMOKE_AUDIT),
    CPU: AuditConfig(
        grid=(1,), controls=(), probes=("temperature",), documents=100, calibration_documents=100
    ),
}  # fmt: skip
"""In the course of training."""
QUARTERS = {SMOKE: (50,), CPU: (25, 50)}
"""Percent of the run."""
GRID = tuple(range(5, 180, 5))
"""Budgets in percent of A's whole run."""
DRAWN = (5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 120, 140, 160, 175)
TOKENS, FLOPS = "tokens", "FLOPs"
TO_HALF, TO_END = "to A's loss at half its run", "to A's final loss"
OUTSIDE = (
    Published(
        figure="-0.2, 0.3, 2.1 % fixed depth; -1.0 to 0.0 % sampled",
        source="IFM LoopedLM-P2, arXiv:2610.06833, r 1 against 5",
    ),
)
PAPER_WORDS = (Published(figure="in words only", source="arXiv:2609.19934"),)
NEVER = "B does not get there within its run"
STEP_TIME = "step time over that of A, at equal FLOPs"
UNTIMED = f"{NOT_MEASURED} here (a time: python -m benchmarks.cases.training_step --case sampled_depth)"


def _loss_at(percent: int, of: str) -> str:
    return f"loss at {percent} % of A's {of}"


def _share(arm: str, rule: Rule, *depths: int) -> tuple[Part, ...]:
    return tuple(parts.level(arm, f"temperature share, k = {k}", rule=rule, label=f"{arm}, k = {k}") for k in depths)


def _moved(arm: str, rule: Rule, depths: Sequence[int]) -> tuple[Part, ...]:
    return tuple(parts.level(arm, f"distance of T, k = {k}", rule=rule, label=f"{arm}, k = {k}") for k in depths)


def _kept(arm: str) -> Part:
    """Equivalence to A at full depth."""
    return parts.difference(arm, "A", "loss at full depth", rule=rules.equivalent(LOSS_MARGIN))


def _budgets(what: str) -> tuple[Part, ...]:
    """Budgets to a loss of A, of the long run of B over A."""
    rule = rules.two_sided(RATIO_MARGIN)
    return tuple(parts.ratio("B_app", "A", f"{of} {what}", rule=rule, label=f"B / A, {of}") for of in (TOKENS, FLOPS))


def _claim(number: str, origin: str, statement: str, unit: str, *found: Part, **fields: Any) -> Claim:
    """A claim about the recipes, so it needs training seeds."""
    defaults: dict[str, Any] = {"quote": "", **fields}
    return Claim(
        id=f"depth_schedule.{number}",
        origin=origin,
        statement=statement,
        unit=unit,
        scope="recipe",
        parts=found,
        **defaults,
    )


GAP_GUARD = {"guard": "the lower bound of each gap is above 0.01 nats"}
CLAIMS = (
    _claim(
        "1",
        "ours",
        "A, fixed depth: a temperature removes at least 5 % of the gap at k = 1.",
        "share",
        *_share("A", rules.above(SHARE), 1),
        published=OUTSIDE,
        **GAP_GUARD,
    ),
    _claim(
        "2",
        "ours",
        "B, sampled depth: a temperature removes less than 5 % of the gap at k = 1.",
        "share",
        *_share("B", rules.below(SHARE), 1),
        published=OUTSIDE,
        **GAP_GUARD,
    ),
    _claim(
        "3",
        "ours",
        "C, sampled but never shallow: a temperature removes at least 5 % of the gap at k = 1, 2 and 4.",
        "share",
        *_share("C", rules.above(SHARE), *DEPTHS),
        **GAP_GUARD,
    ),
    _claim(
        "4",
        "ours",
        "The raw gap at k = 1 is larger in A than in B.",
        "nats",
        parts.difference("A", "B", "gap", rule=rules.greater()),
        guard="a worse full depth shrinks a gap too: read it beside the loss at full depth",
        published=(
            Published(
                figure="1.38-1.60 to 0.22-0.24 nats", source="IFM LoopedLM-P2, arXiv:2610.06833, fixed and sampled"
            ),
            Published(figure="0.945 to 0.845 bits per byte at r = 2", source="looped_nanochat log"),
        ),
    ),
    _claim(
        "5",
        "published",
        "At equal steps, B is as good as A at full depth.",
        "nats",
        _kept("B"),
        quote="zero-cost remedy",
        guard="equal steps and tokens; A runs more applications",
        published=(
            Published(figure="0.834 sampled, 0.831 fixed bits per byte at r = 4", source="looped_nanochat log"),
        ),
    ),
    _claim(
        "6",
        "published",
        "At equal applications, B is as good as A at full depth.",
        "nats",
        _kept("B_app"),
        quote="whether it degrades peak performance at the trained depth",
        guard="B sees about 16/9 of A's tokens",
        equal=("init", "parameters"),
    ),
    _claim(
        "7",
        "published",
        "At equal training FLOPs, B is as good as A at full depth.",
        "nats",
        _kept("B_flop"),
        quote="whether it degrades peak performance at the trained depth",
        guard="B sees about 1.5 times A's tokens",
        equal=("init", "parameters", "train_flops"),
    ),
    _claim(
        "8a",
        "question",
        "Sampling changes what it takes to reach A's loss at half its run.",
        "factor",
        *_budgets(TO_HALF),
        quote="or changes sample efficiency",
        guard="both at the constant rate, between evaluations on straight lines",
        published=PAPER_WORDS,
        equal=("init", "parameters"),
    ),
    _claim(
        "8b",
        "question",
        "Sampling changes what it takes to reach A's final loss.",
        "factor",
        *_budgets(TO_END),
        quote="or changes sample efficiency",
        guard="where B gets there; each run ends with a decay of its own, and B's is the later one",
        published=PAPER_WORDS,
        equal=("init", "parameters"),
    ),
    _claim(
        "9a",
        "ours",
        "A step of B needs no more memory than one of A: at most 10 %.",
        "factor",
        parts.ratio("B", "A", "peak bytes of a step", rule=rules.below(1 + RATIO_MARGIN)),
        guard="by the formula, at the deepest draw",
    ),
    _claim(
        "9b",
        "ours",
        "At equal training FLOPs the steps of B take at most 10 % longer.",
        "factor",
        parts.timing("B_flop", STEP_TIME, rule=rules.below(1 + RATIO_MARGIN)),
        guard="times are no part of this page: see ledger.json for both arms, and the benchmark",
        published=(Published(figure="46 to 55 % more wall time", source="looped_nanochat log"),),
        equal=("init", "parameters", "train_flops"),
    ),
    _claim(
        "10",
        "published",
        "The temperature jumps at the trained depth: most of its drift lies in the step next to it, it is off at every "
        "depth outside the trained ones, and nowhere inside.",
        "share and distance of T",
        *(
            parts.level("A", f"step share, {side}", rule=rules.above(STEP_SHARE), label=f"A, step share {side}")
            for side in ("below", "above")
        ),
        *_moved("A", rules.above(MOVED), (*range(1, FULL), *BEYOND)),
        *_moved("C", rules.above(MOVED), (*range(1, 5), *BEYOND)),
        *_moved("B", rules.below(MOVED), range(1, FULL)),
        quote="is a step function",
        guard="step share: (tau_7 - tau_8) / (tau_1 - tau_8) below, (tau_9 - tau_8) / (tau_12 - tau_8) above, with "
        "tau = log T; a scalar may miss the drift: the affine share stands beside it",
        published=(
            Published(figure="T 1.30, 1.36, 1.37 at k = 1, 2, 4; 0.92 at 8", source="arXiv:2609.19934"),
        ),
    ),
    _claim(
        "11",
        "published",
        "The jump follows the training: trained at 4 applications, it is at 4.",
        "share",
        parts.level("A4", "step share, below", rule=rules.above(STEP_SHARE)),
        quote="at depths other than their fixed training depth",
        guard="(tau_3 - tau_4) / (tau_1 - tau_4), tau = log T: read up to 4, since the second block is untrained",
        contradicted_by=(
            Published(figure="no larger drift outside trained depths", source="five models of other authors"),
        ),
    ),
    _claim(
        "12",
        "published",
        "What truncation overstates is larger in A than in B: the factor by counting applications, and the slope.",
        "factor, nats per plan",
        parts.difference("A", "B", "O_app", rule=rules.greater(), label="A - B, O_app"),
        parts.difference("A", "B", "naive slope", rule=rules.greater(), label="A - B, naive slope"),
        quote="inflated claims",
        guard="slope: least squares of -Q(prefix(k)) on k / 8",
        published=PAPER_WORDS,
    ),
    *(
        _claim(
            f"13{letter}",
            "question",
            f"Sampling changes {statement}.",
            unit,
            part,
            quote="training dynamics that aren't fully characterized",
            guard=guard,
            published=PAPER_WORDS,
        )
        for letter, statement, unit, guard, part in (
            ("a", "how much the gradient norm varies", "factor", "deviation over mean, at the constant rate",
             parts.ratio("B", "A", "variation of the gradient norm", rule=rules.two_sided(RATIO_MARGIN))),
            ("b", "how often loss or gradient spike", "per 100 steps", "compared with the steps before, of any depth",
             parts.difference("B", "A", "spikes per 100 steps", rule=rules.two_sided(RATE_MARGIN))),
            ("c", "how many steps are skipped", "steps", "a loss or gradient that is not finite",
             parts.difference("B", "A", "skipped steps", rule=rules.two_sided(RATE_MARGIN))),
            ("d", "the size of the last state", "factor", "root mean square at the drawn depth, last tenth of the run",
             parts.ratio("B", "A", "size of the last state", rule=rules.two_sided(RATIO_MARGIN))),
        )
    ),
)  # fmt: skip


def _plot(name: str, title: str, quantities: Sequence[str], x: Sequence[int], x_label: str, y_label: str) -> StudyPlot:
    return StudyPlot(
        name=name,
        title=title,
        quantities=tuple(quantities),
        x=tuple(map(float, x)),
        x_label=x_label,
        y_label=y_label,
    )


@STUDIES.register("depth_schedule")
class DepthSchedule(Study):
    """Depth laws of training, each audited."""

    name = "depth_schedule"
    version = 2
    question = "Does sampling depth in training keep the readout of a cut model calibrated, and at what price?"
    references = ("Dau, Khuat, Dung, “Beyond Depth Truncation”, arXiv:2609.19934",)
    claims = CLAIMS
    columns = ("gap", "controlled gap", "loss at full depth", *(f"temperature share, k = {k}" for k in DEPTHS),
               "affine share, k = 1", "application", "distinct", "composition", "O_app", "naive slope",
               "step share, below", "step share, above", "variation of the gradient norm", "spikes per 100 steps",
               "skipped steps", "size of the last state")  # fmt: skip
    plots = (
        StudyPlot(
            name="F1-temperature",
            title="Net temperature share of the gap at k units, arm by arm (line: 5 %)",
            quantities=tuple(f"temperature share, k = {k}" for k in DEPTHS),
            line=SHARE,
        ),
        _plot(
            "F2-drift",
            "Temperature that a readout wants after k applications (trained: A 8, B 1 to 8, C 5 to 8, A4 4)",
            [f"T, k = {k}" for k in (*range(1, FULL + 1), *BEYOND)],
            (*range(1, FULL + 1), *BEYOND),
            "applications k; from 9 on the last one again",
            "T",
        ),
        *(
            _plot(
                name,
                f"Held-out loss at full depth against {of} (without A4)",
                [_loss_at(percent, of) for percent in DRAWN],
                DRAWN,
                f"{of}, percent of those of A",
                "nats per token",
            )
            for name, of in (("F3-tokens", TOKENS), ("F4-flops", FLOPS))
        ),
        StudyPlot(
            name="F5-gaps",
            title="Gap at one unit: raw, and with full count and refitted temperature",
            quantities=("gap", "controlled gap"),
        ),
        _plot(
            "F6-training",
            "Gap at one unit in the course of training",
            ["gap, 25 % of the run", "gap, 50 % of the run", "gap"],
            (25, 50, 100),
            "percent of the run",
            "nats",
        ),
    )
    notes = (
        "Document intervals of single arms; the words of the claims use intervals over training seeds as well.",
        "A missed prediction is a result. All arms share one recipe and one learning rate.",
        "B_app and B_flop see more tokens than A, so steps and data are not equal there: what is, their claims say. "
        "Until B's decay begins they are B.",
        "Spikes compare a step with those before it; under sampled depth these have other depths.",
        "Loss of the model at full depth; A4 is read at up to 4 applications only, and has no such loss.",
    )
    minutes = 60
    seeds = {SMOKE: 1, CPU: 3}  # noqa: RUF012

    def arms(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """All arms of seed 0, then of seed 1, and so on."""
        names = SMOKED if scale == SMOKE else tuple(ARMS)
        return tuple(_arm(name, scale, seed) for seed in range(seeds) for name in names)

    def measure(self, arm: Arm, result: AuditResult) -> tuple[StudyRow, ...]:
        """Gap, loss, shares of the readout and of the parts, and how its temperature drifts."""
        rows = DriftRows(arm, result)
        if arm.name == "A4":
            return (*(rows.temperature(k) for k in range(1, HALF + 1)), rows.step_share(HALF, 1))
        return (
            rows.gap(), rows.controlled_gap(), rows.full_loss(), rows.naive_slope(),
            *(rows.gain("temperature", k) for k in DEPTHS), rows.gain("affine", 1), *rows.shares(), *rows.factors(),
            *(rows.temperature(k) for k in (*range(1, FULL + 1), *BEYOND)),
            *(rows.shift(k, FULL) for k in (*range(1, FULL), *BEYOND)),
            rows.step_share(FULL, 1), rows.step_share(FULL, BEYOND[-1]),
        )  # fmt: skip

    def measure_earlier(self, arm: Arm, step: int, result: AuditResult) -> tuple[StudyRow, ...]:
        """Gap and temperature share."""
        rows, run = Rows(arm, result), arm.source
        assert isinstance(run, RunConfig)
        at = f"{100 * step // run.steps} % of the run"
        gain = rows.gain("temperature", 1)
        return (
            _named(rows.gap(), f"gap, {at}"),
            _named(gain, f"{gain.quantity}, {at}"),
        )

    def trained(self, arm: Arm, run: TrainedRun) -> tuple[StudyRow, ...]:
        """Held-out loss along the run, its memory, and how quietly it went."""
        if run.record is None:
            return ()
        steady = [line["grad_norm"] for line in run.steps if line["lr"] == run.config.optimizer.lr]
        last = run.steps[-max(1, len(run.steps) // 10) :]
        found = {
            "variation of the gradient norm": pstdev(steady) / fmean(steady),
            "spikes per 100 steps": 100 * len(run.spikes()) / len(run.steps),
            "skipped steps": float(sum(line["skipped"] for line in run.steps)),
            "size of the last state": fmean(line["rms_last"] for line in last),
            "peak bytes of a step": float(_peak(run.config)),
        }
        rows = [_row(arm, quantity, value) for quantity, value in found.items()]
        rows += [] if arm.name == "A4" else _losses(arm, run)
        if arm.name == "B_flop":
            rows.append(_row(arm, STEP_TIME, None, UNTIMED))
        return tuple(rows)

    def combined(self, rows: Sequence[StudyRow]) -> tuple[StudyRow, ...]:
        """Budgets that A and the long run of B take to two losses of A."""
        known = {(row.arm, row.seed, row.quantity): row.value for row in rows if row.value is not None}
        found = []
        for seed in dict.fromkeys(row.seed for row in rows if row.arm == "B_app"):
            for of in (TOKENS, FLOPS):
                a, b = (
                    [(float(p), loss) for p in GRID if (loss := known.get((name, seed, _loss_at(p, of)))) is not None]
                    for name in ("A", "B_app")
                )
                found += _budget_rows(seed, of, a, b)
        return tuple(found)


def _arm(name: str, scale: str, seed: int) -> Arm:
    run = recipes.depth_schedule(name, SIZES[scale], seed)
    audits = {"A4": HALF_AUDITS[scale], "B_app": LENGTH_AUDIT, "B_flop": LENGTH_AUDIT}
    quarters = tuple((percent * run.steps // 100, EARLIER[scale]) for percent in QUARTERS[scale])
    return Arm(
        name=name,
        title=ARMS[name],
        source=run,
        audit=audits.get(name, AUDITS[scale]),
        earlier=quarters if name in (SMOKED[:1] if scale == SMOKE else SMOKED) else (),
    )


def _losses(arm: Arm, run: TrainedRun) -> list[StudyRow]:
    """Loss at every twentieth of A's tokens and FLOPs."""
    config = run.config
    whole = 20 * config.evaluation.every
    flops = whole * _step_flops(config)
    found = []
    for of, curve, total in ((TOKENS, curves.by_steps(run), whole), (FLOPS, curves.by_flops(run), flops)):
        for percent in GRID:
            loss = curves.at(curve, percent / 100 * total)
            if loss is not None:
                found.append(_row(arm, _loss_at(percent, of), loss))
    return found


def _budget_rows(seed: int | None, of: str, a: curves.Curve, b: curves.Curve) -> list[StudyRow]:
    """In percent of A's run; of a run that diverged the study's own row says so."""
    losses = dict(a)
    found = []
    for what, percent in ((TO_HALF, 50), (TO_END, 100)):
        quantity, target = f"{of} {what}", losses.get(percent)
        if a:
            found.append(_budget("A", seed, quantity, float(percent)))
        if b:
            taken = None if target is None else curves.reached(b, target)
            found.append(_budget("B_app", seed, quantity, taken, NEVER if target is not None else DIVERGED))
    return found


def _budget(arm: str, seed: int | None, quantity: str, value: float | None, reason: str = "") -> StudyRow:
    return StudyRow(
        arm=arm,
        seed=seed,
        quantity=quantity,
        unit="percent of A's run",
        value=value,
        reason=reason if value is None else "",
    )


def _step_flops(config: RunConfig) -> int:
    """FLOPs of a step of A."""
    spec = build(config.model, device="meta").spec
    return step_flops(spec, spec.plan(), config.gradient, rows=config.data.rows, tokens=config.data.seq_len)


def _peak(config: RunConfig) -> int:
    """Bytes of a step at the deepest draw, by the formula; the law itself does not matter."""
    deepest = max(config.model.trained_depth.support())
    model = replace(config.model, trained_depth=PrefixDepth(law=FixedDepth(num_steps=deepest)))
    return _peak_of(model, deepest, config.data.rows, config.data.seq_len)


@functools.cache
def _peak_of(model: LoopedConfig, depth: int, rows: int, tokens: int) -> int:
    plan = build(model, device="meta").spec.plan()[:depth]
    return estimate(model, rows=rows, tokens=tokens, plan=plan).peak


def _named(row: StudyRow, quantity: str) -> StudyRow:
    return replace(row, quantity=quantity)


def _row(arm: Arm, quantity: str, value: float | None, reason: str = "") -> StudyRow:
    return StudyRow(arm=arm.name, seed=arm.seed, quantity=quantity, unit="number", value=value, reason=reason)
