"""What holds for every training objective: run on a linear core of two parameters, in float64."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from linear_core import TASK, Line, given, share, words
from looplab._config import from_dict, to_dict
from looplab.models.base import build
from looplab.models.looped import LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives import OBJECTIVES, NextToken
from looplab.objectives.base import Objective
from looplab.objectives.decoded_change import DecodedChange
from looplab.objectives.every_iteration import EveryIteration
from looplab.objectives.exit_gate import ExitGate
from looplab.objectives.expected_exit import ExpectedExit
from looplab.objectives.halting import Halting
from looplab.objectives.jacobian_penalty import JacobianPenalty
from looplab.objectives.latent_anchor import LatentAnchor
from looplab.objectives.lookahead_gate import LookaheadGateLoss
from looplab.objectives.pre_loop_gate import PreLoopGateLoss
from looplab.objectives.prefix_distillation import PrefixDistillation
from looplab.objectives.progress_aligned import ProgressAligned
from looplab.objectives.progressive import Progressive
from looplab.objectives.same_step_gate import SameStepGateLoss
from looplab.objectives.terminal_fixed_point import TerminalFixedPoint
from looplab.recurrence.depth import UniformDepth
from looplab.recurrence.gradient import CheckpointApplication, FullBPTT
from looplab.recurrence.halting import HazardGate, NoHalt, QHead
from looplab.recurrence.injection import Concat
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.state_init import Zeros
from looplab.training.step import At, TrainingStep, split
from reference import objectives as reference
from tolerances import BF16_LOSS, CHUNKED, DIFFERENCES, TWIN

CORE = {"a", "b"}
GATE = {"gate.weight", "gate.bias"}
BESIDE = {"weight", "bias"}


@dataclass(frozen=True)
class World:
    """Everything of one pass in plain Python numbers, for the twins."""

    model: Line
    one: Any
    beside: Any
    states: list
    readout: list
    gate: Any
    labels: list

    @property
    def own(self):
        return self.beside.weight.tolist()[0], self.beside.bias.item()


@dataclass(frozen=True)
class Case:
    """One objective under test."""

    objective: Objective
    twin: Callable[[World], float]
    halt: str | None = None
    trained: frozenset | set = frozenset(CORE)
    least: int = 1
    """Applications that it needs."""
    masked: bool = True
    """Whether it reads labels position by position."""


def progress(w):
    moves = [TASK.decode(row.numpy()).operations for row in w.one.batch.tokens]
    return reference.progress(w.states, w.readout, moves, len(w.one.plan) - 2, lambda value, move: (value + move) % 3)


def shorter(w):
    """Traces of the rows' shorter words alone."""
    found = []
    for r, tokens in enumerate(w.one.batch.tokens):
        begin = 1 + r % 2
        word = torch.cat([tokens[:1], tokens[begin + 1 :]])
        found.append(
            reference.trace(w.model.a.item(), w.model.b.item(), [w.model.table[word].tolist()], len(w.one.plan))
        )
    return found


def directions(w):
    return JacobianPenalty()._directions(w.one, [torch.zeros(4, 4, 3, dtype=torch.float64)])[0].tolist()


def stretch(w):
    return Progressive(alpha=0.3).stretch(w.one)


CASES = {
    "next_token": Case(NextToken(), lambda w: reference.mean_ce(w.states[-1], w.readout, w.labels)),
    "every_iteration": Case(
        EveryIteration(weights="linear", chunk=5),
        lambda w: reference.every_iteration(w.states, w.readout, w.labels, range(1, len(w.states))),
    ),
    "expected_exit": Case(
        ExpectedExit(beta=0.3),
        lambda w: reference.expected_exit(w.states, w.readout, w.gate, w.labels, 0.3),
        halt="hazard",
        trained=CORE | GATE,
    ),
    "exit_gate": Case(
        ExitGate(),
        lambda w: reference.exit_gate(w.states, w.readout, w.gate, w.labels, len(w.states) - 1),
        halt="hazard",
        trained=GATE,
        least=2,
    ),
    "progressive": Case(
        Progressive(alpha=0.3), lambda w: reference.progressive(w.states, w.readout, w.labels, 0.3, *stretch(w))
    ),
    "terminal_fixed_point": Case(
        TerminalFixedPoint(weight=0.2), lambda w: reference.terminal_fixed_point(w.states, w.readout, w.labels, 0.2)
    ),
    "decoded_change": Case(
        DecodedChange(weight=0.2), lambda w: reference.decoded_change(w.states, w.readout, w.labels, 0.2)
    ),
    "jacobian_penalty": Case(
        JacobianPenalty(weight=0.2),
        lambda w: reference.jacobian_penalty(
            w.states, w.readout, w.labels, w.model.a.item(), w.model.b.item(), directions(w), 0.2
        ),
    ),
    "latent_anchor": Case(
        LatentAnchor(anchor=2, weight=0.7),
        lambda w: reference.latent_anchor(w.states, w.readout, w.labels, 2, 0.7),
        least=3,
    ),
    "prefix_distillation": Case(
        PrefixDistillation(layout="window", weight=0.4),
        lambda w: reference.prefix_distillation(w.states, w.readout, w.labels, 0.4, "window", shorter(w)),
        least=3,
    ),
    "progress_aligned": Case(ProgressAligned(iterations=2), progress, masked=False),
    "halting": Case(
        Halting(iterations=2, weight=0.6, hazard=True),
        lambda w: progress(w) + 0.6 * reference.halting(w.states, w.gate, len(w.one.plan) - 2, True),
        halt="hazard",
        trained=CORE | GATE,
        masked=False,
    ),
    "lookahead_gate": Case(
        LookaheadGateLoss(),
        lambda w: reference.step_gate(w.states, w.gate, w.own, w.labels, 1),
        halt="hazard",
        trained=BESIDE,
        least=3,
    ),
    "same_step_gate": Case(
        SameStepGateLoss(),
        lambda w: reference.step_gate(w.states, w.gate, w.own, w.labels, 0),
        halt="hazard",
        trained=BESIDE,
        least=2,
    ),
    "pre_loop_gate": Case(
        PreLoopGateLoss(),
        lambda w: reference.pre_loop_gate(
            w.states,
            w.model.table[w.one.batch.tokens].tolist(),
            w.gate,
            w.beside.weight.tolist(),
            w.beside.bias.tolist(),
            w.labels,
        ),
        halt="hazard",
        trained=BESIDE,
        least=2,
    ),
}
OF_THEIR_OWN = {"deep_supervision": "tests/objectives/test_deep_supervision.py"}
"""Objectives that need another model than the linear core -> where these properties are tested."""
ALL = pytest.mark.parametrize("name", CASES)


def made(case):
    """A fresh model, and the module beside it, moved away from where it starts."""
    model = Line(halt=case.halt)
    beside = case.objective.beside(model)
    if beside is not None:
        with torch.no_grad():
            for number, parameter in enumerate(beside.parameters()):
                shift = torch.linspace(-0.2, 0.3, parameter.numel(), dtype=parameter.dtype)
                parameter.add_(shift.view_as(parameter) * (number + 1))
    return model, beside


def trained(case, model, beside):
    """Name -> parameter of what the objective trains."""
    parameters = dict((model if beside is None else beside).named_parameters())
    return {name: parameters[name] for name in sorted(case.trained)}


def test_every_objective_is_here():
    assert set(CASES) | set(OF_THEIR_OWN) == set(OBJECTIVES)


@ALL
def test_it_equals_its_slow_twin(name):
    case = CASES[name]
    model, beside = made(case)
    batch = words()
    one = given(model, batch, beside=beside)
    gate = None if model.gate is None else (model.gate.weight.tolist()[0], model.gate.bias.item())
    states = reference.trace(model.a.item(), model.b.item(), model.table[batch.tokens].tolist(), len(one.plan))
    world = World(model, one, beside, states, model.readout.tolist(), gate, batch.labels.tolist())
    assert case.objective.run(one).parts.total == pytest.approx(case.twin(world), rel=TWIN["rtol"])


@ALL
def test_its_parts_sum_to_what_is_differentiated(name):
    case = CASES[name]
    model, beside = made(case)
    loss, outcome = share(case.objective, model, words(), beside=beside)
    parts = outcome.parts
    assert parts.total == sum(parts[part].weight * value for part, value in parts.means().items())
    assert_close(float(loss.detach()), parts.total, **CHUNKED)
    assert {part: parts[part].count for part in parts} == case.objective.counts(words().labels, 4)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"latent_anchor"}))  # it stops the gradient inside its graph
def test_its_gradient_is_that_of_finite_differences(name):
    case = CASES[name]
    model, beside = made(case)
    model.without_graph = (model.a.item(), model.b.item())
    share(case.objective, model, words(), beside=beside)[0].backward()
    for parameter in trained(case, model, beside).values():
        flat, analytic = parameter.data.view(-1), parameter.grad.flatten()
        for index in range(min(2, len(flat))):
            values = []
            for sign in (1, -1):
                flat[index] += sign * 1e-5
                values.append(float(share(case.objective, model, words(), beside=beside)[0].detach()))
                flat[index] -= sign * 1e-5
            numeric = torch.tensor((values[0] - values[1]) / 2e-5, dtype=torch.float64)
            assert_close(analytic[index], numeric, **DIFFERENCES)


@ALL
def test_it_gives_gradients_to_what_it_declares_and_to_nothing_else(name):
    case = CASES[name]
    model, beside = made(case)
    share(case.objective, model, words(), beside=beside)[0].backward()
    whole = {**dict(model.named_parameters()), **({} if beside is None else dict(beside.named_parameters()))}
    moved = {name for name, p in whole.items() if p.grad is not None and bool((p.grad != 0).any())}
    assert moved == set(case.trained)
    assert beside is None or all(p.grad is None for p in model.parameters())


@ALL
def test_a_batch_that_is_cut_gives_the_same_gradient(name):
    case = CASES[name]
    model, beside = made(case)
    batch = words()
    labels = batch.labels.clone()
    if case.masked:
        labels[0, :2] = -100
    batch = dataclasses.replace(batch, labels=labels)
    counts = case.objective.counts(batch.labels, 4)
    found, totals = [], []
    for pieces in (1, 2, 4):
        model.zero_grad()
        if beside is not None:
            beside.zero_grad()
        parts = None
        for piece in split(batch, pieces):
            loss, outcome = share(case.objective, model, piece, counts=counts, beside=beside)
            loss.backward()
            parts = outcome.parts.detach() if parts is None else parts + outcome.parts.detach()
        totals.append(parts.total)
        found.append([p.grad.clone() for p in trained(case, model, beside).values()])
    for other in (1, 2):
        assert totals[other] == pytest.approx(totals[0], rel=CHUNKED["rtol"])
        assert_close(found[other], found[0], **CHUNKED)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.masked])
def test_labels_of_minus_100_are_not_scored(name):
    case = CASES[name]
    model, beside = made(case)
    batch = words()
    labels = batch.labels.clone()
    labels[1:] = -100
    some = case.objective.run(given(model, dataclasses.replace(batch, labels=labels), beside=beside)).parts
    alone = case.objective.run(given(model, split(batch, 4)[0], beside=beside)).parts
    read = [part for part in some if part != "jacobian"]  # rows without labels have a Jacobian
    assert_close([some.means()[part] for part in read], [alone.means()[part] for part in read], **CHUNKED)
    with pytest.raises(ValueError, match=r"needs at least one label. Got a batch in which all are -100"):
        case.objective.counts(torch.full((2, 4), -100), 4)


@ALL
def test_one_application_is_scored_or_refused(name):
    case = CASES[name]
    model, beside = made(case)
    if case.least > 1:
        with pytest.raises(ValueError, match=f"Got {case.least - 1}|{case.least - 1} applications were drawn"):
            case.objective.counts(words().labels, case.least - 1)
    else:
        loss, _ = share(case.objective, model, words(), depth=1, beside=beside)
        loss.backward()
        assert float(model.b.grad) != 0


@ALL
def test_it_survives_the_round_trip(name):
    objective = CASES[name].objective
    assert from_dict(type(objective), to_dict(objective)) == objective


def looped(case):
    """A transformer of the same alphabet, with the gate that the objective asks for."""
    halt = {None: NoHalt(), "hazard": HazardGate(), "q_halt": QHead()}[case.halt]
    config = LoopedConfig(
        dim=16,
        vocab=len(TASK.tokens),
        attention=Attention(heads=2, kv_heads=1, head_dim=8, position=Rope(base=1e4)),
        ffn=SwiGLU(hidden=24),
        blocks=(1,),
        envelope=NoEnvelope(),
        order=ModelLoop(num_steps=4),
        trained_depth=UniformDepth(low=4, high=4),
        injection=Concat(order="state_first", init="normal", source="embeds"),
        state_init=Zeros(),
        head=Head(tied=False, outputs=len(TASK.symbols)),
        halt=halt,
        init=Init(std=0.3),
    )
    return build(config)


@ALL
def test_a_training_step_in_bfloat16_stays_near(name):
    case = CASES[name]
    model, batch = looped(case), words()
    counts = case.objective.counts(batch.labels, 4)
    totals = {}
    for precision in ("fp32", "bf16"):
        step = TrainingStep(model, case.objective, FullBPTT(), precision=precision)
        output = step(batch, model.spec.plan(4), None, counts, at=At())
        output.share.backward()
        totals[precision] = output.parts.total
    assert totals["bf16"] == pytest.approx(totals["fp32"], rel=BF16_LOSS)
    assert totals["bf16"] != totals["fp32"]


@ALL
def test_recomputed_applications_give_the_same_gradient(name):
    case = CASES[name]
    found = []
    for gradient in (FullBPTT(), CheckpointApplication()):
        model = looped(case).double()
        step = TrainingStep(model, case.objective, gradient)
        step(words(), model.spec.plan(4), None, case.objective.counts(words().labels, 4)).share.backward()
        found.append([p.grad for p in step.parameters() if p.grad is not None])
    assert_close(found[0], found[1], **CHUNKED)
