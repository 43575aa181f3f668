"""Gates that were trained beside a finished model, and the exit rules that act on them.

    same_step   g(s_t)      the score of step t            stops where the model's own gate would
    lookahead   g(s_t)      the score of step t + 1        decided one step ahead, so never after step 1
    preloop     G(context)  logits of 1 .. T steps         known before the loop

    hazard score   l = sigmoid(g), c_t = c_{t-1} + l_t (1 - c_{t-1});  stop after the first t with c_t >= q
    log score      g = log of what a threshold rule compares;          stop after the first t with exp(g) < tau
    preloop        stop after the first t with cumulative softmax(G)_t >= q

A gate is two files, KIND.safetensors and KIND.json. The second names the weights that it was trained beside, and no
other model may use it. Reference: continuous depth batching, arXiv:2608.09444; log scores are ours.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from looplab._config import from_dict, to_dict
from looplab._types import Bool, Float
from looplab.models.folder import check_finite, read_tensors, save_tensors, weight_hash
from looplab.nn.linear import Init
from looplab.records import dump_json, write_atomic
from looplab.recurrence.exit.base import ExitRule, Seen, check_positive, precise
from looplab.recurrence.halting import HazardGateModule, PreLoopGate
from looplab.recurrence.spec import LoopSpec

FORMAT, SCHEMA, FOLDER = "looplab-gate", 1, "gates"
Kind = Literal["same_step", "lookahead", "preloop"]
KINDS: tuple[Kind, ...] = ("lookahead", "preloop", "same_step")


class GateError(ValueError):
    """A gate that cannot be read, or is not one of this model's."""


@dataclass(frozen=True, kw_only=True)
class GateFacts:
    """What a gate says about itself."""

    gate: Kind
    model: str
    """Name of the checkpoint that it was trained beside ..."""
    weights: str
    """... and its hash (`models.folder.weight_hash`)."""
    steps: int
    """T, the steps of its teacher."""
    width: int
    """Of the states, or of the context."""
    teacher: str
    """hazard: the model's own gate. Otherwise the threshold rule whose score the gate predicts."""
    threshold: float | None = None
    """Threshold of the teacher's depths, which a preloop gate of a threshold rule has learned."""
    trained: dict[str, str] = field(default_factory=dict)
    """How it was trained, in words."""


@dataclass(frozen=True, eq=False)
class Gate:
    """A trained gate with its module."""

    facts: GateFacts
    module: nn.Module

    @property
    def shift(self) -> int:
        """Steps that a score looks ahead."""
        return 1 if self.facts.gate == "lookahead" else 0

    def score(self, state: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq"]:
        """Of the state after step t, the score of step t + `shift`: logit of a hazard, or log score of a rule."""
        if self.facts.gate == "preloop":
            raise GateError("Gate.score: a preloop gate reads the context. Got a state. Call law(context.embeds).")
        return self.module(state)

    def law(self, embeds: Float[Tensor, "batch seq width"]) -> Float[Tensor, "batch seq steps"]:
        """Of `context.embeds`, the probability of every number of steps 1 .. T."""
        if self.facts.gate != "preloop":
            raise GateError(f"Gate.law: a {self.facts.gate} gate reads states. Got a context. Call score(state).")
        return self.module(embeds).softmax(-1)

    def rule(self, threshold: float, *, min_steps: int = 1) -> "GateExit | PreLoopExit":
        """The exit rule that acts on this gate."""
        kind = PreLoopExit if self.facts.gate == "preloop" else GateExit
        return kind(gate=self, threshold=threshold, min_steps=min_steps)


def save_gate(folder: str | os.PathLike[str], gate: Gate) -> Path:
    """Writes the two files of a gate and returns the path of its JSON."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / f"{gate.facts.gate}.safetensors", gate.module.state_dict())
    path = folder / f"{gate.facts.gate}.json"
    facts = {name: value for name, value in to_dict(gate.facts).items() if name != "kind"}
    write_atomic(path, dump_json({"format": FORMAT, "schema": SCHEMA, **facts}))
    return path


def read_gate(path: str | os.PathLike[str], kind: Kind | None = None) -> Gate:
    """The gate of a JSON file, or of this kind in a folder, for whichever model.

    Raises:
        GateError: No such file, or not a gate.
    """
    file = Path(path)
    if file.is_dir():
        found = [k for k in KINDS if (file / f"{k}.json").is_file()]
        if kind not in (*found, None) or (len(found) != 1 and kind is None):
            wanted = "exactly one gate" if kind is None else f"{kind}.json"
            raise GateError(f"gate: {file} must hold {wanted}. Got {', '.join(found) or 'none'}. Name the JSON file.")
        file = file / f"{kind or found[0]}.json"
    facts = _facts(file)
    weights = file.with_suffix(".safetensors")
    if not weights.is_file():
        raise GateError(f"gate: {file} must lie beside {weights.name}. Got no such file. Copy both.")
    module = _module(facts)
    try:
        tensors = read_tensors(weights)
        own = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
        if {name: list(tensor.shape) for name, tensor in tensors.items()} != own:
            raise ValueError(f"its tensors are not {own}")
        for name, tensor in tensors.items():
            check_finite(name, tensor)
    except ValueError as error:
        raise GateError(
            f"gate: {weights} must hold the tensors of {file.name}. Got: {error}. Train it again."
        ) from None
    module.load_state_dict(tensors, assign=True)
    return Gate(facts, module.requires_grad_(False).eval())


def load_gate(
    path: str | os.PathLike[str], model: Any, kind: Kind | None = None, *, accept: str = "", weights: str = ""
) -> Gate:
    """The gate for a model, on its device and in its dtype.

    Args:
        accept: Name or hash of another checkpoint whose gate is taken nevertheless.
        weights: Hash of the model, where it is known already.
    Raises:
        GateError: As for `read_gate`; the gate was trained beside other weights, or reads states of another width.
    """
    gate = read_gate(path, kind)
    facts, own = gate.facts, weights or weight_hash(model)
    if facts.weights != own and (not accept or accept not in (facts.model, facts.weights)):
        raise GateError(
            f"gate: {facts.gate} must be trained beside this checkpoint, {own}. Got one of {facts.model}, "
            f"{facts.weights}. Run `looplab gate` on this checkpoint, or accept the other by name: {facts.model}."
        )
    width = gate_width(model, facts.gate)
    if facts.width != width:
        raise GateError(
            f"gate: {facts.gate} must read vectors of width {width}, as this model has. Got {facts.width}. "
            "Train one for this model."
        )
    parameter = next(model.parameters())
    return Gate(facts, gate.module.to(device=parameter.device, dtype=parameter.dtype))


def gates_of(folder: str | os.PathLike[str], model: Any, *, weights: str = "") -> dict[str, Gate]:
    """The gates that lie in the folder `gates` of a checkpoint, by kind.

    Raises:
        GateError: As for `load_gate`.
    """
    home = Path(folder) / FOLDER
    found = [kind for kind in KINDS if (home / f"{kind}.json").is_file()]
    known = weights or (weight_hash(model) if found else "")
    return {kind: load_gate(home, model, kind, weights=known) for kind in found}


def gate_width(model: Any, kind: Kind) -> int:
    """Width of what a gate of this kind reads."""
    if kind == "preloop":
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
            return int(model.encode(token).embeds.shape[-1])
    return sum(part.width for part in model.spec.state.values() if part.read_by_coda and part.per == "token")


class Decided(NamedTuple):
    """What a rule on a gate remembers of a row."""

    spent: Float[Tensor, "batch seq"]
    """Exit probability of the steps spoken of so far; of log scores unused."""
    due: Bool[Tensor, "batch seq"]
    """Whether the token stops after the next step, at the latest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GateExit(ExitRule):
    """After the first step that a same-step or lookahead gate names."""

    gate: Gate
    threshold: float
    """q in (0, 1] of hazards, where 1 is full depth; tau > 0 of log scores."""
    number: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate.facts.teacher != "hazard":
            check_positive(self, self.threshold)
        else:
            check_share(self, self.threshold)

    @property
    def early(self) -> bool:
        return self.gate.facts.teacher != "hazard" or self.threshold < 1

    @property
    def name(self) -> str:
        return self.gate.facts.gate

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> Decided:
        none = torch.zeros_like(precise(state[..., 0]))
        return Decided(none, torch.zeros_like(none, dtype=torch.bool))

    def observe(self, memory: Decided, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Decided]:
        score, spent = precise(self.gate.score(seen.state)), memory.spent
        if self.gate.facts.teacher == "hazard":
            spent = spent + torch.sigmoid(score) * (1 - spent)
            fires = spent >= self.threshold if self.early else torch.zeros_like(memory.due)
        else:
            fires = score.exp() < self.threshold
        if self.gate.shift:
            return memory.due, Decided(spent, memory.due | fires)
        return fires, Decided(spent, fires)


@dataclass(frozen=True, kw_only=True, eq=False)
class PreLoopExit(ExitRule):
    """After the number of steps that the context names."""

    gate: Gate
    threshold: float
    """q in (0, 1]; 1 is full depth."""
    number: ClassVar[str] = "threshold"
    reads_context: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, self.threshold)

    @property
    def early(self) -> bool:
        return self.threshold < 1

    @property
    def name(self) -> str:
        return self.gate.facts.gate

    def depths(self, embeds: Float[Tensor, "batch seq width"]) -> Tensor:
        """Steps of every token, Int[batch seq], before anything has run."""
        reached = self.gate.law(embeds)[..., :-1].cumsum(-1) >= (self.threshold if self.early else torch.inf)
        return 1 + (~reached).long().cumprod(-1).sum(-1)

    def observe(self, memory: Any, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Any]:
        assert seen.context is not None
        return seen.steps[:, None] >= self.depths(seen.context), memory


def check_share(rule: ExitRule, threshold: float) -> None:
    """Refuses a threshold outside (0, 1]."""
    if not 0 < threshold <= 1:
        raise ValueError(
            f"{type(rule).__name__}.threshold must be in (0, 1]. Got {threshold}. It is a probability; 1 is full depth"
        )


def _facts(file: Path) -> GateFacts:
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise GateError(f"gate: {file} must be the JSON of a gate. Got no such file. Run `looplab gate`.") from None
    except ValueError as error:
        raise GateError(f"gate: {file} must be JSON. Got: {error}. Copy it again.") from None
    if not isinstance(data, Mapping) or (data.get("format"), data.get("schema")) != (FORMAT, SCHEMA):
        got = (data.get("format"), data.get("schema")) if isinstance(data, Mapping) else type(data).__name__
        raise GateError(f"gate: {file} must have format {FORMAT!r} and schema {SCHEMA}. Got {got}. Train it again.")
    try:
        inside = {name: value for name, value in data.items() if name not in ("format", "schema")}
        return from_dict(GateFacts, inside, path=str(file))
    except (KeyError, TypeError, ValueError) as error:
        message = error.args[0] if error.args else error
        raise GateError(f"gate: {message}. Train it again.") from None


def _module(facts: GateFacts) -> nn.Module:
    with torch.device("meta"):  # draws nothing
        if facts.gate == "preloop":
            return PreLoopGate(facts.width, facts.steps)
        return HazardGateModule(facts.width, 0.0, Init())
