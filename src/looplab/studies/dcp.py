"""dcp: what truncation curves overstate, in every built-in checkpoint.

Nothing is trained. Each looped checkpoint is audited beside the dense control, and the dense control as a model of its
own; `--model` adds models, `--data` texts. The published figures stand beside ours; they are of other models, texts and
sizes.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934, and its public 542.8M checkpoint.
"""

from collections.abc import Mapping
from dataclasses import replace

from looplab.audit.config import AuditConfig
from looplab.audit.result import RAW, AuditResult
from looplab.records import Claim, Part, Published, Rule, StudyPlot, StudyRow
from looplab.studies.base import CPU, SMOKE, STUDIES, Arm, Study
from looplab.studies.measured import PARTS, Rows

PAPER = "arXiv:2609.19934 v1"
CHECKPOINT = "public 542.8M checkpoint, separate calibration documents"
CONTROL = "text-dense"
INDEXED = ("text-2x4-fixed", "text-2x4-sampled")
"""Two blocks of 4 iterations with iteration embeddings: `distinct` can be told apart."""
LOOPED = (*INDEXED, "text-core")
TITLES = {
    "text-2x4-fixed": "two blocks of 4 iterations, trained at all 8 applications",
    "text-2x4-sampled": "the same model, trained at prefixes of U{1..8}",
    "text-core": "one core of 8 iterations without an index",
    "text-dense": "the dense control: ten layers, none repeated",
}
AUDITS = {
    SMOKE: AuditConfig(
        grid=(1,),
        controls=(),
        probes=("temperature",),
        documents=20,
        calibration_documents=20,
        max_tokens=64,
        replicates=1000,
    ),
    CPU: AuditConfig(documents=200, calibration_documents=100, affine_tokens=6000),
}


def _each(quantity: str, rule: Rule, arms: tuple[str, ...] = LOOPED, label: str = "") -> tuple[Part, ...]:
    """The same question to several models."""
    return tuple(Part(label=f"{arm}{label}", quantity=quantity, arms=(arm,), rule=rule) for arm in arms)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="dcp.1",
        origin="published",
        quote="naive truncation substantially overestimates the value of recurrent depth",
        statement="Plain truncation overstates depth by more than a quarter, after both controls.",
        unit="factor",
        scope="checkpoint",
        parts=_each("O_temperature", Rule(name="above", numbers=(1.25,))),
        where_identifiable=True,
        guard="the lower bound of the gap is above 0.01 nats; 1.25 is our reading of “substantially”",
        published=(Published(figure="in words only", source=PAPER),),
    ),
    Claim(
        id="dcp.2",
        origin="published",
        quote="something like a factor of two",
        statement="Counting applications alone, truncation overstates depth about twofold.",
        unit="factor",
        scope="checkpoint",
        parts=_each("O_app", Rule(name="between", numbers=(1.5, 2.5))),
        where_identifiable=True,
        guard="the lower bound of the gap is above 0.01 nats",
        published=(Published(figure="1.92 (from its 48 %)", source=PAPER),),
        contradicted_by=(Published(figure="1.54 math, 1.08 web", source=CHECKPOINT),),
    ),
    Claim(
        id="dcp.3",
        origin="published",
        quote="nearly half of the apparent performance gap",
        statement="The number of applications carries nearly half of the gap.",
        unit="share",
        scope="checkpoint",
        parts=_each("application", Rule(name="between", numbers=(0.40, 0.55))),
        where_identifiable=True,
        guard="the lower bound of the gap is above 0.01 nats",
        published=(Published(figure="about 48 %", source=PAPER),),
        contradicted_by=(Published(figure="35.2 % [33.0, 37.4] math, 7.1 % web", source=CHECKPOINT),),
    ),
    Claim(
        id="dcp.4",
        origin="published",
        quote="roughly one-quarter arises from readout miscalibration",
        statement="A refitted temperature removes about a quarter of the gap, net of full depth.",
        unit="share",
        scope="checkpoint",
        parts=_each("temperature share, k = 1", Rule(name="between", numbers=(0.20, 0.30))),
        where_identifiable=True,
        guard="the lower bound of the gap is above 0.01 nats",
        published=(Published(figure="about 25 %", source=PAPER),),
        contradicted_by=(
            Published(figure="16.5 % math, 53.6 % web", source=CHECKPOINT),
            Published(figure="0.5 %", source="Huginn-0125, arXiv:2502.05171, r 1 against 32"),
            Published(figure="26.4 % and 18.2 %", source="Ouro 1.4B and 2.6B, arXiv:2510.25741, r 1 against 4"),
        ),
    ),
    Claim(
        id="dcp.5",
        origin="published",
        quote="contribute essentially zero",
        statement="That the iterations of the first block differ is equivalent to zero, raw and after a temperature.",
        unit="nats",
        scope="checkpoint",
        parts=(
            *_each(f"distinct, {RAW}", Rule(name="equivalent"), label=", raw"),
            *_each("distinct, temperature", Rule(name="equivalent"), label=", temperature"),
        ),
        where_identifiable=True,
        guard="margin: the smaller of 0.02 nats and 5 % of the gap",
        published=(Published(figure="about 0", source=PAPER),),
        contradicted_by=(
            Published(figure="0.008 nats math (equivalent, not zero), 0.044 nats web", source=CHECKPOINT),
        ),
    ),
    Claim(
        id="dcp.6",
        origin="published",
        quote="negative control",
        statement="A temperature removes more of a looped model's gap than of the dense control's, at the nearest gap.",
        unit="share",
        scope="checkpoint",
        parts=_each("temperature share minus dense", Rule(name="above", numbers=(0.0,))),
        where_identifiable=True,
        guard="same documents; both gaps above 0.01 nats",
        published=(
            Published(figure="0.0 to 39.2 %", source="five dense families of 24 to 28 layers, last 2 cut"),
        ),
    ),
    Claim(
        id="dcp.7",
        origin="published",
        quote="specific numbers will vary by architecture and task",
        statement="The overestimation by counting applications differs between models: deviation of log O_app.",
        unit="log factor",
        scope="checkpoint",
        parts=(Part(label="over models", quantity="O_app", arms=LOOPED, rule=Rule(name="spread")),),
        guard="at least two models with the factor; one text, so nothing is said about tasks",
        published=(Published(figure="in words only", source=PAPER),),
    ),
    Claim(
        id="dcp.8",
        origin="published",
        quote="strictly realizable only in depth-wise weight-sharing",
        statement="The distinct part can be told apart in exactly the models that index the iterations of a block.",
        unit="1 = identifiable",
        scope="checkpoint",
        parts=(
            *_each("distinct identifiable", Rule(name="exact", numbers=(1.0,)), INDEXED),
            *_each("distinct identifiable", Rule(name="exact", numbers=(0.0,)), ("text-core", CONTROL)),
        ),
        guard="predicted from the architectures",
        published=(Published(figure="in words only", source=PAPER),),
    ),
)  # fmt: skip


def _on(model: str, text: str) -> str:
    return f"{model} on {text}"


def _of_text(arm: Arm, name: str, path: str) -> Arm:
    return replace(arm, name=_on(arm.name, name), title=f"{arm.title}; text {name}", documents=(name, path))


def _also(claim: Claim, arms: tuple[str, ...]) -> Claim:
    """The claim about further looped models too; the last claim is about the architectures of the built-in ones."""
    first = claim.parts[0]
    if first.rule.name == "exact":
        return claim
    if first.rule.name == "spread":
        return replace(claim, parts=(replace(first, arms=(*first.arms, *arms)),))
    of_first = [part for part in claim.parts if part.arms == LOOPED[:1]]
    more = (replace(p, label=p.label.replace(LOOPED[0], arm), arms=(arm,)) for p in of_first for arm in arms)
    return replace(claim, parts=(*claim.parts, *more))


@STUDIES.register("dcp")
class DCP(Study):
    """Audits of all built-in checkpoints, with one table of claims."""

    name = "dcp"
    question = "By how much does plain truncation overstate the worth of depth, and in which models?"
    references = (f"Dau, Khuat, Dung, “Beyond Depth Truncation”, {PAPER}",)
    claims = CLAIMS
    takes = ("--model", "--data")
    columns = ("gap", *PARTS, "best refit", "temperature share, k = 1", "O_app", "O_temperature",
               "specific to recurrence")  # fmt: skip
    plots = (
        StudyPlot(
            name="F1-shares",
            title="Shares of the gap between one unit and full depth",
            quantities=(*PARTS, "temperature share, k = 1"),
        ),
        StudyPlot(
            name="F2-factors",
            title="Overestimation of depth by plain truncation (1: none)",
            quantities=("O_app", "O_read", "O_temperature"),
            line=1.0,
        ),
    )
    notes = (
        "Intervals cover documents, not training runs: every word is about one checkpoint of a recipe.",
        "O_temperature is bounded by two intervals at once and covers at least 90 % (Bonferroni).",
        "One text: the held-out side of the built-in corpus.",
    )
    minutes = 15

    def __init__(self, models: Mapping[str, str] | None = None, data: Mapping[str, str] | None = None):
        self.models, self.data = dict(models or {}), dict(data or {})
        if self.models or self.data:
            self.given = {"--model": self.models, "--data": self.data}
        of_texts = (_on(name, text) for text in self.data for name in (*LOOPED, *self.models))
        further = (*self.models, *of_texts)
        self.claims = tuple(_also(claim, further) for claim in CLAIMS)

    def with_given(self, models: Mapping[str, str], data: Mapping[str, str]) -> "DCP":
        """With models of the user's, which have no dense control, and texts of theirs for every looped model."""
        taken = sorted({*models} & {*TITLES})
        if taken:
            raise ValueError(f"--model NAME must not be that of a built-in model. Got {taken[0]}. Choose another name.")
        return DCP(models, data)

    def arms(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """The four checkpoints, the user's models, and all looped ones on each text of the user's."""
        own = tuple(
            Arm(
                name=name,
                title=title,
                source=name,
                audit=AUDITS[scale],
                control=CONTROL if name != CONTROL else None,
            )
            for name, title in TITLES.items()
        )
        theirs = tuple(
            Arm(name=name, title=f"{path}, given", source=path, audit=AUDITS[scale], theirs=True)
            for name, path in self.models.items()
        )
        looped = (*(arm for arm in own if arm.name in LOOPED), *theirs)
        return (*own, *theirs, *(_of_text(arm, name, path) for name, path in self.data.items() for arm in looped))

    def measure(self, arm: Arm, result: AuditResult) -> tuple[StudyRow, ...]:
        """Shares, factors and the words of one audit."""
        rows = Rows(arm, result)
        return (
            rows.gap(), *rows.shares(), rows.best_gain(), rows.gain("temperature", 1), *rows.factors(),
            rows.recurrence(), rows.above_dense("temperature"), rows.distinct(), rows.distinct("temperature"),
            rows.distinct_identifiable(),
        )  # fmt: skip
