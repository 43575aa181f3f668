"""Gates trained beside a finished model: they learn to say early when the model's own stopping rule will fire.

    hazard teacher       losses of `objectives/{lookahead,same_step,pre_loop}_gate.py`
    threshold teacher    u_t = log of what the rule compares after step t
        lookahead        mean over tokens and t = 1 .. T - 2 of Huber(g(s_t), u_{t+1}); same_step: u_t, t = 1 .. T - 1
        preloop          mean over tokens of  -log p_d + mean_t |CDF_p(t) - [t >= d]|,   d the rule's depth

Models without a gate of their own (Huginn) have a threshold rule as teacher: a head that predicts its score leaves the
threshold free, and starts as the ridge regression of the first batch. The model is run once per update, without a
graph, for all gates. Reference: continuous depth batching, arXiv:2608.09444; threshold teachers are ours.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from looplab._types import Float, Int
from looplab.data.packing import Batch
from looplab.engine.gates import KINDS, Gate, GateFacts, Kind, gate_width
from looplab.intervals import Draws, Interval, percentile_interval
from looplab.models.folder import weight_hash
from looplab.nn.linear import Init
from looplab.objectives.base import Kept, LossParts, Objective, Pass, Rollout, read_points, roll, scored_mask
from looplab.objectives.lookahead_gate import LookaheadGateLoss
from looplab.objectives.pre_loop_gate import PreLoopGateLoss
from looplab.objectives.same_step_gate import SameStepGateLoss
from looplab.recurrence.exit import ExitRule, HazardExit, KLExit, LatentExit, Seen, exit_points
from looplab.recurrence.exit.base import readable
from looplab.recurrence.exit.latent import relative_change
from looplab.recurrence.exit.readout import divergence
from looplab.recurrence.halting import HazardGateModule
from looplab.recurrence.loop import run_plan
from looplab.recurrence.state import item_of, standard_noise
from looplab.training.schedule import Cosine
from looplab.training.step import draw_noise, to_device

Teacher = Literal["hazard", "latent", "kl"]
RULES: dict[str, type[HazardExit] | type[LatentExit] | type[KLExit]] = {
    "hazard": HazardExit,
    "latent": LatentExit,
    "kl": KLExit,
}
OBJECTIVES: dict[str, Objective] = {
    "lookahead": LookaheadGateLoss(),
    "same_step": SameStepGateLoss(),
    "preloop": PreLoopGateLoss(),
}
THRESHOLDS: dict[str, tuple[float, ...]] = {
    "hazard": (0.1, 0.2, 0.25, 0.3, 0.5, 0.7),
    "latent": (0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    "kl": (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2),
}
"""Thresholds at which depths are compared."""
SHARES = THRESHOLDS["hazard"]
"""Thresholds of a preloop gate, whoever its teacher."""


@dataclass(frozen=True, kw_only=True)
class GateTraining:
    """How gates are trained. The defaults are minutes on a CPU; published are 20,000 updates of 4,096 tokens."""

    gates: tuple[Kind, ...] = ("lookahead", "preloop")
    """What is trained; beside a lookahead gate its control, the same head about the same step, always is."""
    teacher: Teacher = "hazard"
    threshold: float | None = None
    """Of a threshold teacher's depths, which a preloop gate learns."""
    updates: int = 300
    lr: float = 1e-3
    """Peak learning rate of AdamW, after a warm-up of a tenth of the updates and 500 at most; a cosine falls to 5 %."""
    clip_norm: float = 1.0
    """Largest gradient norm of every gate by itself."""
    seed: int = 0
    """Of the noise that models start from."""

    def __post_init__(self) -> None:
        if not self.gates:
            raise ValueError(f"GateTraining.gates must be of {', '.join(KINDS)}. Got none. Name one at least.")
        if self.updates < 1 or self.lr <= 0 or self.clip_norm <= 0:
            raise ValueError(
                "GateTraining.updates must be at least 1, lr and clip_norm above 0. "
                f"Got {self.updates}, {self.lr} and {self.clip_norm}."
            )
        if (self.threshold is None) == ("preloop" in self.gates and self.teacher != "hazard"):
            raise ValueError(
                "GateTraining.threshold must be given for a preloop gate of a threshold teacher, whose depths it "
                f"learns, and for nothing else. Got {self.threshold}, gates {', '.join(self.gates)}, teacher "
                f"{self.teacher}."
            )
        if self.threshold is not None:
            RULES[self.teacher](threshold=self.threshold)  # type: ignore[arg-type]

    @property
    def trained(self) -> tuple[Kind, ...]:
        """All that is trained, the control included."""
        control: tuple[Kind, ...] = ("same_step",) if "lookahead" in self.gates else ()
        return tuple(dict.fromkeys((*self.gates, *control)))


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """A gate against its teacher at one threshold, on held-out text; intervals over documents."""

    gate: Kind
    threshold: float
    teacher_threshold: float
    agreement: Interval
    """Share of tokens with the teacher's depth."""
    mean_depth: Interval
    teacher_depth: Interval
    distance: Interval
    """Mean of |depth - teacher's depth|, in steps."""


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """Gates of one model, without times: equal inputs give equal bytes."""

    model: str
    weights: str
    teacher: str
    threshold: float | None
    steps: int
    text: str
    text_hash: str
    """Of what the gates were trained on."""
    held_out: str
    documents: int
    tokens: int
    updates: int
    losses: dict[str, tuple[float, ...]]
    """Gate -> mean loss of every tenth of its updates."""
    rows: tuple[GateRow, ...]
    command: str = ""
    schema: int = 1


def check_teacher(model: Any, config: GateTraining) -> None:
    """Refuses a model that the gates cannot be trained beside.

    Raises:
        ValueError: No way to stop early; no gate of its own; too few steps; another number of applications per step.
    """
    spec, name = model.spec, config.teacher
    if name == "hazard":
        if spec.halt is None:
            raise ValueError(
                f"gate: --teacher hazard needs a model with a gate of its own. {spec.name!r} has none. "
                "Use --teacher latent, with --threshold for a preloop gate"
            )
        for gate in config.trained:
            OBJECTIVES[gate].check(model)
    RULES[name](threshold=0.5).check(spec)  # type: ignore[arg-type]
    points = exit_points(spec)
    least = 3 if "lookahead" in config.trained else 2
    if len(points) < least:
        raise ValueError(
            f"gate: {', '.join(config.gates)} needs a model of {least} steps at least. {spec.name!r} runs "
            f"{len(points)}. Train --kind preloop, or a deeper model"
        )
    wrote = [n for n, (block, _) in enumerate(spec.plan(), 1) if block in spec.writes_readout]
    if name == "hazard" and wrote != list(points.values()):
        raise ValueError(
            f"gate: --teacher hazard needs a model whose steps are single applications. Those of {spec.name!r} end "
            f"after {list(points.values())}. Use --teacher latent"
        )


def train_gates(
    model: Any,
    batch: Callable[[int], Batch],
    config: GateTraining,
    *,
    name: str,
    advanced: Callable[[int, Mapping[str, float]], None] | None = None,
) -> tuple[dict[Kind, Gate], dict[str, tuple[float, ...]]]:
    """Trains the gates of `config` at once.

    Args:
        batch: Update (from 0) -> its rows.
        name: Name of the checkpoint.
        advanced: Told updates done and the losses, after every update.
    Returns:
        The gates, and of each the mean loss of every tenth of the updates.
    Raises:
        ValueError: As for `check_teacher`; a batch without labels.
    """
    check_teacher(model, config)
    device = str(next(model.parameters()).device)
    wanted = sorted({0, *exit_points(model.spec).values()})
    modules: dict[Kind, nn.Module] = {}
    optimizers: dict[Kind, torch.optim.Optimizer] = {}
    schedule = Cosine(warmup_steps=min(500, config.updates // 10), floor=0.05)
    told: dict[str, list[float]] = {gate: [] for gate in config.trained}
    for update in range(config.updates):
        rows = to_device(batch(update), device)
        with torch.no_grad():
            noise = draw_noise(model.spec, config.seed, update, rows)
            given = Pass(model=model, batch=rows, plan=model.spec.plan(), noise=noise)
            rollout, *_ = roll(given, wanted)
            target = None if config.teacher == "hazard" else threshold_target(rollout, config)
        for gate in config.trained:
            if gate not in modules:
                modules[gate] = _start(gate, model, rollout, rows.labels, target)
                optimizers[gate] = torch.optim.AdamW(modules[gate].parameters(), lr=config.lr)
            seen = replace(rollout, beside=modules[gate])
            loss = gate_loss(gate, seen, rows.labels, target)
            optimizers[gate].zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(modules[gate].parameters(), config.clip_norm)
            optimizers[gate].param_groups[0]["lr"] = config.lr * schedule.factor(update, config.updates)
            optimizers[gate].step()
            told[gate].append(float(loss.detach()))
        if advanced is not None:
            advanced(update + 1, {gate: losses[-1] for gate, losses in told.items()})
    weights, steps = weight_hash(model), len(exit_points(model.spec))
    trained = {"updates": str(config.updates), "lr": f"{config.lr:g}", "seed": str(config.seed)}
    gates = {
        gate: Gate(
            GateFacts(
                gate=gate,
                model=name,
                weights=weights,
                steps=steps,
                width=gate_width(model, gate),
                teacher=config.teacher,
                threshold=config.threshold if gate == "preloop" else None,
                trained=trained,
            ),
            module.requires_grad_(False).eval(),
        )
        for gate, module in modules.items()
    }
    return gates, {gate: tenths(losses) for gate, losses in told.items()}


@dataclass(frozen=True, eq=False)
class Target:
    """What a threshold rule made of a batch."""

    scores: Float[Tensor, "steps batch seq"]
    """Log scores after steps 1 .. T; where a rule has none yet, +inf."""
    depths: Int[Tensor, "batch seq"] | None
    """At the threshold of the configuration."""


def threshold_target(rollout: Rollout, config: GateTraining) -> Target:
    """Scores of every step, and depths where a threshold is set."""
    spec, points = rollout.model.spec, list(exit_points(rollout.model.spec).values())
    tokens = rollout.context.embeds.shape[1]
    read = [readable(spec, rollout.states[n], tokens) for n in (0, *points)]
    if config.teacher == "latent":
        scores = torch.stack([relative_change(now, before) for before, now in zip(read, read[1:], strict=False)])
    else:
        laws = [_law(rollout, n) for n in points]
        moves = [divergence(before, now) for before, now in zip(laws, laws[1:], strict=False)]
        scores = torch.stack([torch.full_like(moves[0], torch.inf), *moves])
    if config.threshold is None:
        return Target(scores.clamp(min=1e-30).log(), None)
    going = (~(scores[:-1] < config.threshold)).long()
    return Target(scores.clamp(min=1e-30).log(), 1 + going.cumprod(0).sum(0))


def gate_loss(
    gate: Kind, rollout: Rollout, labels: Int[Tensor, "batch seq"], target: Target | None = None
) -> Float[Tensor, ""]:
    """The loss of `rollout.beside`.

    Args:
        target: Of a threshold teacher; None: the model's own gate.
    """
    assert rollout.beside is not None
    if target is None:
        objective = OBJECTIVES[gate]
        parts: LossParts = objective.loss(rollout, labels)
        return parts.share(objective.counts(labels, len(read_points(rollout))))
    scored = scored_mask(labels)
    if not bool(scored.any()):
        raise ValueError("gate: a batch must have at least one label. Got none. Check the prompts of the text.")
    if gate == "preloop":
        log_p = rollout.beside(rollout.context.embeds).log_softmax(-1)
        assert target.depths is not None
        steps = torch.arange(1, log_p.shape[-1] + 1, device=labels.device)
        reached = (steps >= target.depths[..., None]).to(log_p.dtype)
        apart = (log_p.exp().cumsum(-1) - reached).abs().mean(-1)
        return (functional.nll_loss(log_p[scored], target.depths[scored] - 1) + apart[scored].mean()).float()
    read, wanted = _pairs(gate, rollout, target)
    terms = functional.smooth_l1_loss(rollout.beside(read), wanted, reduction="none")
    known = scored.repeat(len(wanted) // len(scored), 1) & wanted.isfinite()
    return terms[known].mean()


def _pairs(gate: Kind, rollout: Rollout, target: Target) -> tuple[Tensor, Tensor]:
    """States that a gate reads, and what it should say of them, step by step."""
    spec, points = rollout.model.spec, list(exit_points(rollout.model.spec).values())
    shift = 1 if gate == "lookahead" else 0
    # Nobody asks for the score of the last step.
    asked = points[: len(points) - 1 - shift]
    tokens = rollout.context.embeds.shape[1]
    read = torch.stack([readable(spec, rollout.states[n], tokens) for n in asked])
    return read.flatten(0, 1), target.scores[shift : len(asked) + shift].flatten(0, 1)


def _start(gate: Kind, model: Any, rollout: Rollout, labels: Tensor, target: Target | None) -> nn.Module:
    """A gate before its first update: the teacher's weights, or the ridge regression of the first batch."""
    if target is None or gate == "preloop":
        started = OBJECTIVES[gate].beside(model)
        assert started is not None
        return started
    read, wanted = _pairs(gate, rollout, target)
    known = (scored_mask(labels).repeat(len(read) // len(labels), 1) & wanted.isfinite()).flatten()
    x, y = read.flatten(0, 1)[known].double(), wanted.flatten()[known].double()
    module = HazardGateModule(x.shape[1], 0.0, Init()).to(read)
    centred = x - x.mean(0)
    ridge = centred.T @ centred
    ridge.diagonal().add_(1e-3 * ridge.diagonal().mean() + 1e-9)
    slope = torch.linalg.solve(ridge, centred.T @ (y - y.mean()))
    with torch.no_grad():
        module.weight.copy_(slope[None].to(module.weight))
        module.bias.copy_((y.mean() - x.mean(0) @ slope)[None].to(module.bias))
    return module


def _law(rollout: Rollout, applications: int) -> Float[Tensor, "batch seq cells symbols"]:
    logits = rollout.model.head(rollout.model.coda(rollout.states[applications], rollout.context))
    return logits.unflatten(-1, (rollout.model.spec.cells, -1)).log_softmax(-1)


def compare_gates(
    model: Any,
    documents: Iterable[Sequence[int]],
    gates: Mapping[Kind, Gate],
    config: GateTraining,
    draws: Callable[[int], Draws],
    *,
    advanced: Callable[[int], None] | None = None,
) -> tuple[GateRow, ...]:
    """Depths of the gates' rules beside those of their teacher, on held-out documents of token ids.

    Args:
        draws: Number of documents -> the bootstrap's draws.
        advanced: Told documents done.
    """
    teacher = RULES[config.teacher]
    asked = [
        (gate, threshold, config.threshold if gate == "preloop" and config.threshold is not None else threshold)
        for gate in gates
        for threshold in (SHARES if gate == "preloop" else THRESHOLDS[config.teacher])
    ]
    sums = []
    for number, tokens in enumerate(documents):
        rollout, scores = full_run(model, torch.tensor([list(tokens)]), item_of(config.seed, number))
        own = {t: chosen(teacher(threshold=t), rollout, scores) for t in {t for *_, t in asked}}  # type: ignore[arg-type]
        row = []
        for gate, threshold, of_teacher in asked:
            said, true = chosen(gates[gate].rule(threshold), rollout, scores), own[of_teacher]
            apart = (said - true).abs()
            row += [int((apart == 0).sum()), int(said.sum()), int(true.sum()), int(apart.sum())]
        sums.append([len(tokens), *row])
        if advanced is not None:
            advanced(number + 1)
    table = np.array(sums, dtype=np.float64)
    drawn = draws(len(table)).sums(table)
    replicates, estimates = drawn[:, 1:] / drawn[:, :1], table.sum(0)[1:] / table.sum(0)[0]
    rows = []
    for index, (gate, threshold, of_teacher) in enumerate(asked):
        four = [
            percentile_interval(float(estimates[c]), replicates[:, c], units=len(table))
            for c in range(4 * index, 4 * index + 4)
        ]
        rows.append(
            GateRow(
                gate=gate,
                threshold=threshold,
                teacher_threshold=of_teacher,
                agreement=four[0],
                mean_depth=four[1],
                teacher_depth=four[2],
                distance=four[3],
            )
        )
    return tuple(rows)


def full_run(model: Any, tokens: Int[Tensor, "batch seq"], item: int) -> tuple[Rollout, dict[int, Tensor]]:
    """A full run of one text, all of whose states are kept, and the model's own scores."""
    spec, points = model.spec, list(exit_points(model.spec).values())
    tokens = tokens.to(next(model.parameters()).device)
    noise = None
    if spec.noise_width:
        noise = standard_noise(0, [item], torch.arange(tokens.shape[1])[None], spec.noise_width).to(tokens.device)
    kept = Kept([0, *points])
    with torch.no_grad():
        context = model.encode(tokens)
        run_plan(model, spec.plan(), context, model.init_state(context, noise), recorder=kept)
        scores = {} if spec.halt is None else {n: model.halt(kept.by_number[n]) for n in points}
    return Rollout(model, context, spec.plan(), kept.by_number), scores


def chosen(rule: ExitRule, rollout: Rollout, scores: Mapping[int, Tensor]) -> Int[Tensor, "batch seq"]:
    """Depth of every token under a rule, from the states of a full run."""
    spec, points = rollout.model.spec, exit_points(rollout.model.spec)
    tokens, last = rollout.context.embeds.shape[1], max(points)
    with torch.no_grad():
        memory = rule.start(spec, readable(spec, rollout.states[0], tokens))
        steps = torch.zeros(rollout.context.embeds.shape[:2], dtype=torch.long, device=rollout.context.embeds.device)
        for step, applications in points.items():
            state = rollout.states[applications]
            age = torch.full(steps.shape[:1], step, device=steps.device)
            logits = _law(rollout, applications) if rule.reads_logits else None
            seen = Seen(age, readable(spec, state, tokens), scores.get(applications), logits, rollout.context.embeds)
            stop, memory = rule.stops(memory, seen, last)
            steps = torch.where((steps == 0) & stop, step, steps)
    return steps


def tenths(losses: Sequence[float]) -> tuple[float, ...]:
    """Mean of every tenth, as far as there are ten."""
    return tuple(float(part.mean()) for part in np.array_split(np.array(losses), min(10, len(losses))))
