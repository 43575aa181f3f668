"""RunConfig: everything that decides the numbers of a training run, and what merely accompanies it.

The depth law is the model's `trained_depth`, so a model cannot say one thing and be trained by another. Fields marked
`may_change_on_resume` are steps, logging and evaluation; any other change makes it another run.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from looplab._config import KIND, LATER, from_dict, to_dict
from looplab._registry import did_you_mean
from looplab.data.packing import PackedText
from looplab.models.base import MODELS, LoopedLM, build, model_name
from looplab.models.folder import load_partly
from looplab.objectives.base import Objective
from looplab.objectives.jacobian_penalty import JacobianPenalty
from looplab.recurrence.aligned import check_aligned
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.gradient.base import GradientStrategy
from looplab.recurrence.gradient.full import FullBPTT
from looplab.recurrence.gradient.implicit import Implicit
from looplab.recurrence.gradient.segmented import SegmentedDetach
from looplab.recurrence.gradient.truncated import TruncatedBPTT
from looplab.recurrence.injection import NoInjection
from looplab.tasks.base import Progress
from looplab.tasks.rows import TaskRows
from looplab.training.optimizer import Optimizer
from looplab.training.schedule import Schedule

MAY_CHANGE = "may_change_on_resume"
_COUNTS = (
    *("steps", "micro_batches", "row_bucket", "threads", "max_skips", "log_every", "save_every", "keep"),
    "keep_every",
)
_WORDS: dict[str, tuple[Any, ...]] = {
    "depth_per": ("batch", "micro_batch", "sequence"),
    "precision": ("fp32", "bf16"),
    "compile": ("auto", True, False),
}


def _free(default: Any, *, later: bool = False) -> Any:
    """A field that a resumed run may change."""
    return field(default=default, metadata={MAY_CHANGE: True, **(LATER if later else {})})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out loss at several depths, from one rollout per batch."""

    sources: tuple[str, ...] = ("builtin:heldout",)
    """Files, or "builtin:heldout"."""
    every: int = 250
    """Optimizer steps between evaluations; the end of the run is always evaluated."""
    batches: int = 4
    """Batches of the training shape, the same in every evaluation."""
    depths: tuple[int, ...] | None = None
    """Applications after which the readout is scored; None: 1, 2, T/2, T, 2T, 4T, as far as the model has them."""

    def __post_init__(self) -> None:
        for name in ("every", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"Evaluation.{name} must be at least 1. Got {getattr(self, name)}.")
        if self.depths is not None and (not self.depths or min(self.depths) < 1):
            raise ValueError(f"Evaluation.depths must be at least 1 application each. Got {self.depths}.")


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """Answers graded at a grid of difficulty x num_steps."""

    every: int = 500
    """Optimizer steps between evaluations; the end of the run is always evaluated."""
    items: int = 256
    """Problems per difficulty, the same in every evaluation."""
    difficulties: tuple[int, ...] | None = None
    """None: those of training, and twice and four times as much where the task tests them."""
    depths: tuple[float, ...] = (1.0, 2.0)
    """num_steps, as multiples of the iterations that a difficulty takes; as far as the model has them."""

    def __post_init__(self) -> None:
        for name in ("every", "items"):
            if getattr(self, name) < 1:
                raise ValueError(f"TaskEvaluation.{name} must be at least 1. Got {getattr(self, name)}.")
        if not self.depths or min(self.depths) <= 0:
            raise ValueError(f"TaskEvaluation.depths must be positive multiples. Got {self.depths}.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    recipe: str
    """Name of the recipe it came from."""
    model: Any
    """Configuration of a registered model; its `trained_depth` is the depth law."""
    data: PackedText | TaskRows
    """Text and tokenizer, or a task; and the shape of the global batch."""
    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    depth_per: Literal["batch", "micro_batch", "sequence"] = "batch"
    """What has one draw of the depth: all rows of an optimizer step, those of a micro-batch, or every row."""
    row_bucket: int = 1
    """With depths per sequence, the rows of a launch are rounded up to a multiple of this (`recurrence.aligned`)."""
    gradient: GradientStrategy = field(default_factory=FullBPTT)
    """Where the graph through the loop is cut."""
    allow_untrained_prelude: bool = False
    """Accept a gradient window on a core without injection, which cuts embeddings and prelude off from the loss."""
    start: str | None = None
    """Folder of a model at whose weights the run begins; None: new ones. Parameters that the folder does not have are
    new, and `train_only` must name them. A resumed run does not read it again."""
    train_only: tuple[str, ...] = ()
    """Starts of the names of the parameters that are trained; all others stay as they are. None named: all train."""
    steps: int = _free(1000)
    """Optimizer steps."""
    micro_batches: int = 1
    """Pieces of the global batch that run one after another, to save memory."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None: no clipping."""
    ema: float | None = None
    """Decay of an exponential average of the trained parameters, which is evaluated and becomes the final model; None:
    no average."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast; weights, optimizer state, norms and losses stay in float32."""
    seed: int = 0
    threads: int | Literal["auto"] = 1
    """CPU threads of PyTorch; equal bits need an equal number. "auto": as many as are fastest when the run begins
    (`training.threads`), and as many again when it is resumed."""
    compile: Literal["auto"] | bool = field(default="auto", metadata=LATER)
    """Whether encode, step and readout are compiled; "auto": on accelerators."""
    deterministic: bool = field(default=False, metadata=LATER)
    """Refuse operations whose bits vary from run to run; CUDA has some, the CPU has none."""
    max_skips: int = 3
    """Steps in a row with a loss or gradient that is not finite, after which the run stops."""
    evaluation: Evaluation | TaskEvaluation = _free(Evaluation())
    log_every: int = _free(50)
    """Steps between printed lines; every step is in metrics.jsonl."""
    save_every: int = _free(250)
    """Steps between checkpoints."""
    keep: int = _free(2)
    """Checkpoints kept; older ones are deleted."""
    keep_every: int | None = _free(None, later=True)
    """Checkpoints at multiples of so many steps are kept too."""
    state_norms: bool = _free(False, later=True)
    """Whether metrics have the norm of dL/dh_k for every state of the loop; this keeps all states of a step."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"RunConfig.{name} must be at least 1. Got {value}.")
        if isinstance(self.threads, str) and self.threads != "auto":
            raise ValueError(f"RunConfig.threads must be a number or 'auto'. Got {self.threads!r}.")
        for name, known in _WORDS.items():
            if getattr(self, name) not in known:
                words = ", ".join(map(repr, known))
                raise ValueError(f"RunConfig.{name} must be one of {words}. Got {getattr(self, name)!r}.")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"RunConfig.clip_norm must be positive, or None. Got {self.clip_norm}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"RunConfig.ema must be between 0 and 1, or None. Got {self.ema}. 0.999 is usual.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"RunConfig.seed must be from 0 to 2**63 - 1. Got {self.seed}.")
        if self.data.rows % self.micro_batches:
            where = "data.packing.rows" if isinstance(self.data, PackedText) else "data.rows"
            raise ValueError(
                f"RunConfig.micro_batches must divide {where} ({self.data.rows}). Got {self.micro_batches}."
            )
        self._check_task()
        model_name(self.model)
        law = getattr(self.model, "trained_depth", None)
        if law is not None and not isinstance(law, DepthSampler):
            raise ValueError(f"RunConfig.model.trained_depth must be a law such as FixedDepth. Got {law}. Give one.")
        longest, seq_len = getattr(self.model, "max_positions", None), self.data.seq_len
        if longest is not None and seq_len > longest:
            raise ValueError(
                f"RunConfig.data.packing.seq_len must be at most model.max_positions ({longest}). Got {seq_len}. "
                "Raise model.max_positions."
            )
        if isinstance(self.gradient, SegmentedDetach) and self.objective.needs.states == "last":
            raise ValueError(_segments(self.gradient.every, type(self.objective).__name__))
        self._check_trained()
        if isinstance(self.gradient, Implicit) and self.objective.needs.states == "every":
            raise ValueError(
                f"Implicit is the gradient of the last state; {type(self.objective).__name__} scores others too. "
                "Use NextToken or FullBPTT."
            )
        self._check_depths()
        if self.compile is True and isinstance(self.objective, JacobianPenalty):
            raise ValueError(
                "JacobianPenalty differentiates twice; a compiled step cannot. Got compile=True. Set compile=False."
            )
        inner = getattr(self.gradient, "inner", self.gradient)
        blind = isinstance(getattr(self.model, "injection", None), NoInjection) and not self.allow_untrained_prelude
        deepest = self._deepest() if blind else 0
        window = inner.at(0).gradient_count(deepest)
        if window < deepest:
            kind = type(inner).__name__ if not isinstance(inner, TruncatedBPTT) else f"TruncatedBPTT(window={window})"
            raise ValueError(
                f"{kind} on a core without injection leaves 'embed' without gradient when "
                f"num_steps > {window}. Use FullBPTT, add an injection, or set allow_untrained_prelude=True."
            )

    def _check_depths(self) -> None:
        """What depths per micro-batch and per row ask of the objective and of the model."""
        name, law = type(self.objective).__name__, getattr(self.model, "trained_depth", None)
        if law is not None and law.learner() is not None and self.depth_per != "batch":
            raise ValueError(
                f"RunConfig.depth_per must be 'batch' for a learned law, which learns from one draw per step. "
                f"Got {self.depth_per!r}."
            )
        if self.depth_per != "sequence":
            if self.row_bucket > 1:
                raise ValueError(
                    f"RunConfig.row_bucket must be 1 with depth_per={self.depth_per!r}, where all rows run. "
                    f"Got {self.row_bucket}. Set depth_per='sequence'."
                )
            return
        kind = type(self.objective)
        if kind.run is not Objective.run or kind.reads is not Objective.reads or self.objective.needs.states != "last":
            raise ValueError(
                "RunConfig.depth_per='sequence' needs an objective of the last state alone, since rows reach theirs at "
                f"different iterations. Got {name}. Use NextToken or depth_per='batch'."
            )
        if self.state_norms:
            raise ValueError(
                "RunConfig.state_norms must be False with depth_per='sequence', where rows are at different iterations "
                "of one launch. Got True. Set depth_per='batch'."
            )
        check_aligned(build(self.model, device="meta").spec, self.gradient)

    def _check_task(self) -> None:
        """What objectives and evaluations ask of the data."""
        name, of_task = type(self.objective).__name__, isinstance(self.data, TaskRows)
        if self.objective.carries and self.micro_batches > 1:
            raise ValueError(
                f"RunConfig.micro_batches must be 1 for {name}, which keeps states of whole batches from step to step. "
                f"Got {self.micro_batches}. Lower the rows of the data."
            )
        if of_task != isinstance(self.evaluation, TaskEvaluation):
            wanted = "TaskEvaluation" if of_task else "Evaluation"
            raise ValueError(
                f"RunConfig.evaluation must be {wanted} for this data. Got {type(self.evaluation).__name__}."
            )
        task = self.data.task if isinstance(self.data, TaskRows) else None
        if self.objective.needs.targets and not isinstance(task, Progress):
            if task is not None and task.has_targets:
                raise ValueError(
                    f"{name} needs targets that advance by a rule of neighbours (tasks.base.Progress); those of task "
                    f"{task.name!r} do not. Use EveryIteration or TerminalFixedPoint."
                )
            got = "text has none" if task is None else f"task {task.name!r} has none"
            raise ValueError(f"{name} needs per-iteration targets; {got}. Use EveryIteration or TerminalFixedPoint.")

    def _check_trained(self) -> None:
        """What is trained, and what the objective asks of the model."""
        kind = type(self.objective)
        if kind.beside is not Objective.beside:
            raise ValueError(
                f"RunConfig.objective must train the model. Got {kind.__name__}, which trains a gate beside a finished "
                "one. Use TrainingStep(model, objective, gradient), and keep its `beside`."
            )
        if not self.train_only and kind.check is Objective.check:
            return
        model = build(self.model, device="meta")
        names = [name for name, _ in model.named_parameters()]
        for prefix in self.train_only:
            if not any(name.startswith(prefix) for name in names):
                known = sorted({name.split(".")[0] for name in names})
                raise ValueError(
                    f"RunConfig.train_only must name parameters of the model. Got {prefix!r}."
                    f"{did_you_mean(prefix, known)} Known: {', '.join(known)}."
                )
        self.objective.check(self._frozen(model))

    def _frozen(self, model: LoopedLM) -> LoopedLM:
        """The model, with `requires_grad` where `train_only` says so."""
        if self.train_only:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith(self.train_only))
        return model

    def _deepest(self) -> int:
        """Most applications that a step may run."""
        law, model = self.model.trained_depth, build(self.model, device="meta")
        steps = max(law.support())
        return steps if law.of_prefix else len(model.spec.plan(steps))

    def build_model(self, *, resumed: bool = False) -> LoopedLM:
        """The model that this run begins with; without the weights of `start` where they come from a checkpoint.

        Raises:
            FileNotFoundError, ValueError: `start` has no weights, or weights of another model.
        """
        model = build(self.model, seed=self.seed)
        if self.start is not None and not resumed:
            load_partly(model, self.start, missing=self.train_only)
        return self._frozen(model)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "RunConfig":
        """The configuration that `to_dict` wrote; errors as for `from_dict`."""
        written = data.get("model")
        if not isinstance(written, Mapping):
            return from_dict(cls, data)
        classes = {MODELS[name].config_class.__name__: MODELS[name].config_class for name in MODELS}
        kind = written.get(KIND)
        if kind not in classes:
            hint, known = did_you_mean(str(kind), classes), ", ".join(sorted(classes))
            raise KeyError(f"Unknown choice {kind!r} for RunConfig.model.{hint} Known: {known}.")
        return from_dict(cls, {**data, "model": from_dict(classes[kind], written, path="RunConfig.model")})


def _segments(every: int, objective: str) -> str:
    return (
        f"SegmentedDetach(every={every}) needs a loss at iterations {every}, {2 * every}, ..; {objective} scores only "
        f"the last. Use EveryIteration or TruncatedBPTT(window={every})."
    )


def differences(old: RunConfig, new: RunConfig) -> Iterator[str]:
    """`objective.beta was 0.1, is 0.05` for every changed field that may not change on resume."""
    return _differences(_fixed(old), _fixed(new), "")


def _fixed(config: RunConfig) -> dict[str, Any]:
    changeable = {f.name for f in dataclasses.fields(config) if f.metadata.get(MAY_CHANGE)}
    return {name: value for name, value in to_dict(config).items() if name not in changeable}


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old.get(KIND) == new.get(KIND):
        for name in [*old, *(n for n in new if n not in old)]:
            yield from _differences(old.get(name), new.get(name), f"{path}.{name}" if path else name)
    elif old != new:
        yield f"{path} was {_short(old)}, is {_short(new)}"


def _short(value: Any) -> str:
    if isinstance(value, dict) and KIND in value:
        inner = ", ".join(f"{k}={_short(v)}" for k, v in value.items() if k != KIND)
        return f"{value[KIND]}({inner})"
    return str(value)
