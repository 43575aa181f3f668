"""RunConfig: everything that decides the numbers of a training run, and what merely accompanies it.

The depth law is the model's `trained_depth`, so a model cannot say one thing and be trained by another. Fields marked
`may_change_on_resume` are steps, logging and evaluation; any other change makes it another run.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from looplab._config import KIND, from_dict, to_dict
from looplab._registry import did_you_mean
from looplab.data.packing import PackedText
from looplab.models.base import MODELS, LoopedLM, build, model_name
from looplab.objectives.base import Objective
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.gradient.base import GradientStrategy
from looplab.recurrence.gradient.full import FullBPTT
from looplab.recurrence.gradient.segmented import SegmentedDetach
from looplab.recurrence.gradient.truncated import TruncatedBPTT
from looplab.recurrence.injection import NoInjection
from looplab.training.optimizer import Optimizer
from looplab.training.schedule import Schedule

MAY_CHANGE = "may_change_on_resume"


def _free(default: Any) -> Any:
    """A field that a resumed run may change."""
    return field(default=default, metadata={MAY_CHANGE: True})


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
class RunConfig:
    """One training run."""

    recipe: str
    """Name of the recipe it came from."""
    model: Any
    """Configuration of a registered model; its `trained_depth` is the depth law, one draw per optimizer step."""
    data: PackedText
    """Text, tokenizer, and the shape of the global batch."""
    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    gradient: GradientStrategy = field(default_factory=FullBPTT)
    """Where the graph through the loop is cut."""
    allow_untrained_prelude: bool = False
    """Accept a gradient window on a core without injection, which cuts embeddings and prelude off from the loss."""
    steps: int = _free(1000)
    """Optimizer steps."""
    micro_batches: int = 1
    """Pieces of the global batch that run one after another, to save memory."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None: no clipping."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast; weights, optimizer state, norms and losses stay in float32."""
    seed: int = 0
    threads: int = 1
    """CPU threads of PyTorch; equal bits need an equal number."""
    max_skips: int = 3
    """Steps in a row with a loss or gradient that is not finite, after which the run stops."""
    evaluation: Evaluation = _free(Evaluation())
    log_every: int = _free(50)
    """Steps between printed lines; every step is in metrics.jsonl."""
    save_every: int = _free(250)
    """Steps between checkpoints."""
    keep: int = _free(2)
    """Checkpoints kept; older ones are deleted."""

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batches", "threads", "max_skips", "log_every", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"RunConfig.{name} must be at least 1. Got {getattr(self, name)}.")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"RunConfig.clip_norm must be positive, or None. Got {self.clip_norm}.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"RunConfig.seed must be from 0 to 2**63 - 1. Got {self.seed}.")
        rows = self.data.packing.rows
        if rows % self.micro_batches:
            raise ValueError(
                f"RunConfig.micro_batches must divide data.packing.rows ({rows}). Got {self.micro_batches}."
            )
        model_name(self.model)
        law = getattr(self.model, "trained_depth", None)
        if law is not None and not isinstance(law, DepthSampler):
            raise ValueError(f"RunConfig.model.trained_depth must be a law such as FixedDepth. Got {law}. Give one.")
        longest, seq_len = getattr(self.model, "max_positions", None), self.data.packing.seq_len
        if longest is not None and seq_len > longest:
            raise ValueError(
                f"RunConfig.data.packing.seq_len must be at most model.max_positions ({longest}). Got {seq_len}. "
                "Raise model.max_positions."
            )
        if isinstance(self.gradient, SegmentedDetach) and self.objective.needs.states == "last":
            raise ValueError(_segments(self.gradient.every, type(self.objective).__name__))
        window = _window(self.gradient)
        blind = isinstance(getattr(self.model, "injection", None), NoInjection)
        if window is not None and blind and window < self._deepest() and not self.allow_untrained_prelude:
            raise ValueError(
                f"TruncatedBPTT(window={window}) on a core without injection leaves 'embed' without gradient when "
                f"num_steps > {window}. Use FullBPTT, add an injection, or set allow_untrained_prelude=True."
            )

    def _deepest(self) -> int:
        """Most applications that a step may run."""
        law, model = self.model.trained_depth, build(self.model, device="meta")
        steps = max(law.support())
        return steps if law.of_prefix else len(model.spec.plan(steps))

    def build_model(self) -> LoopedLM:
        """The untrained model of this run."""
        return build(self.model, seed=self.seed)

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


def _window(gradient: GradientStrategy) -> int | None:
    inner = getattr(gradient, "inner", gradient)
    return inner.window if isinstance(inner, TruncatedBPTT) else None


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
