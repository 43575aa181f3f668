"""depth_schedule: is the readout part of the gap made by training at one depth only, and what does the cure cost?

Three arms of `looplab.recipes.depth_schedule` are trained on equal data from equal weights and audited. If a cut
readout is off because its depth was never read in training, the part is large in A, gone in B, and still there in C,
which samples depths but never those at which it is cut.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
Deviations: the size of one CPU thread; audited at the end of training only.
"""

from typing import Any

from looplab.audit.config import AuditConfig
from looplab.audit.result import AuditResult
from looplab.recipes import depth_schedule as recipes
from looplab.records import Claim, Part, Published, Rule, StudyPlot, StudyRow
from looplab.studies.base import CPU, SMOKE, STUDIES, Arm, Study
from looplab.studies.measured import Rows

DEPTHS = (1, 2, 4)
"""Units at which the temperature share is read."""
SHARE = 0.05
LOSS_MARGIN = 0.02
ARMS = {
    "A": "always all 8 applications",
    "B": "prefixes of U{1..8} applications",
    "C": "prefixes of U{5..8} applications",
}
SIZES = {SMOKE: recipes.SMOKE, CPU: recipes.CPU}
AUDITS = {
    SMOKE: AuditConfig(
        grid=DEPTHS,
        controls=(),
        probes=("temperature",),
        documents=20,
        calibration_documents=20,
        max_tokens=64,
        replicates=1000,
    ),
    CPU: AuditConfig(documents=200, calibration_documents=100, affine_tokens=6000),
}
OUTSIDE = (
    Published(
        figure="-0.2, 0.3, 2.1 % fixed depth; -1.0 to 0.0 % sampled",
        source="IFM LoopedLM-P2, arXiv:2610.06833, r 1 against 5",
    ),
)


def _share(arm: str, rule: Rule, *depths: int) -> tuple[Part, ...]:
    return tuple(
        Part(label=f"{arm}, k = {k}", quantity=f"temperature share, k = {k}", arms=(arm,), rule=rule) for k in depths
    )


def _recipe(number: int, origin: str, statement: str, unit: str, parts: tuple[Part, ...], **fields: Any) -> Claim:
    """A claim about the recipes, so it needs training seeds."""
    defaults: dict[str, Any] = {"quote": "", "guard": "the lower bound of each gap is above 0.01 nats", **fields}
    return Claim(
        id=f"depth_schedule.{number}",
        origin=origin,
        statement=statement,
        unit=unit,
        scope="recipe",
        parts=parts,
        **defaults,
    )


CLAIMS = (
    _recipe(
        1,
        "ours",
        "A, fixed depth: a temperature removes at least 5 % of the gap at k = 1.",
        "share",
        _share("A", Rule(name="above", numbers=(SHARE,)), 1),
        published=OUTSIDE,
    ),
    _recipe(
        2,
        "ours",
        "B, sampled depth: a temperature removes less than 5 % of the gap at k = 1.",
        "share",
        _share("B", Rule(name="below", numbers=(SHARE,)), 1),
        published=OUTSIDE,
    ),
    _recipe(
        3,
        "ours",
        "C, sampled but never shallow: a temperature removes at least 5 % of the gap at k = 1, 2 and 4.",
        "share",
        _share("C", Rule(name="above", numbers=(SHARE,)), *DEPTHS),
    ),
    _recipe(
        4,
        "ours",
        "The raw gap at k = 1 is larger in A than in B.",
        "nats",
        (Part(label="A - B", quantity="gap", arms=("A", "B"), rule=Rule(name="greater")),),
        guard="a worse full depth shrinks a gap too: read it beside the loss at full depth",
        published=(
            Published(
                figure="1.38-1.60 to 0.22-0.24 nats", source="IFM LoopedLM-P2, arXiv:2610.06833, fixed and sampled"
            ),
            Published(figure="0.945 to 0.845 bits per byte at r = 2", source="looped_nanochat log"),
        ),
    ),
    _recipe(
        5,
        "published",
        "At equal steps, B is as good as A at full depth.",
        "nats",
        (
            Part(
                label="B - A",
                quantity="loss at full depth",
                arms=("B", "A"),
                rule=Rule(name="equivalent", numbers=(LOSS_MARGIN,)),
            ),
        ),
        quote="zero-cost remedy",
        guard="equal steps and tokens; A runs more applications",
        published=(
            Published(figure="0.834 sampled, 0.831 fixed bits per byte at r = 4", source="looped_nanochat log"),
        ),
    ),
)


@STUDIES.register("depth_schedule")
class DepthSchedule(Study):
    """Three depth laws of training, each audited."""

    name = "depth_schedule"
    question = "Does sampling depth in training keep the readout of a cut model calibrated, and at what price?"
    references = ("Dau, Khuat, Dung, “Beyond Depth Truncation”, arXiv:2609.19934",)
    claims = CLAIMS
    columns = ("gap", "loss at full depth", *(f"temperature share, k = {k}" for k in DEPTHS), "affine share, k = 1",
               "application", "distinct", "composition", "O_app")  # fmt: skip
    plots = (
        StudyPlot(
            name="F1-temperature",
            title="Net temperature share of the gap at k units, arm by arm (line: 5 %)",
            quantities=tuple(f"temperature share, k = {k}" for k in DEPTHS),
            line=SHARE,
        ),
    )
    notes = (
        "Document intervals of single arms; the words of the claims use intervals over training seeds as well.",
        "A missed prediction is a result. All arms share one recipe and one learning rate.",
    )
    minutes = 120
    seeds = {SMOKE: 1, CPU: 3}  # noqa: RUF012

    def arms(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """A, B and C of seed 0, then of seed 1, and so on."""
        return tuple(
            Arm(name=name, title=title, source=recipes.depth_schedule(name, SIZES[scale], seed), audit=AUDITS[scale])
            for seed in range(seeds)
            for name, title in ARMS.items()
        )

    def measure(self, arm: Arm, result: AuditResult) -> tuple[StudyRow, ...]:
        """Gap, loss, shares of the readout and of the parts."""
        rows = Rows(arm, result)
        return (
            rows.gap(), rows.full_loss(), *(rows.gain("temperature", k) for k in DEPTHS), rows.gain("affine", 1),
            *rows.shares(), *rows.factors(),
        )  # fmt: skip
