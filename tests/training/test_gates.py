import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from looplab.data.packing import PackedLoader, Packing
from looplab.data.tokenizers import ByteTokenizer
from looplab.engine.gates import Gate
from looplab.intervals import document_draws
from looplab.models.base import Context, LoopedLM, build, prepare
from looplab.models.huginn import tiny_huginn
from looplab.models.ouro import tiny_ouro
from looplab.nn.linear import Init
from looplab.objectives.base import Pass, roll
from looplab.recurrence.exit import HazardExit, KLExit, LatentExit, exit_points, forward_until
from looplab.recurrence.halting import HazardGateModule
from looplab.recurrence.plan import Blocks, ModelLoop
from looplab.recurrence.spec import HaltSpec
from looplab.training.gates import (
    GateTraining,
    chosen,
    compare_gates,
    full_run,
    gate_loss,
    threshold_target,
    train_gates,
)
from reference.objectives import threshold_gate
from tiny import LETTERS, letters, tiny_spec
from tolerances import TWIN

SHRINK = torch.tensor([[0.9, 0.3, 0.0], [-0.3, 0.9, 0.0], [0.0, 0.0, 0.7]], dtype=torch.float64)
PUSH = torch.tensor([0.4, -0.2, 0.5], dtype=torch.float64)


class Affine(LoopedLM):
    """s <- A s + c from the token's embedding: the hazard of the next step is a linear map of the state."""

    def __init__(self, *, gate=True, steps=6, order=None):
        super().__init__()
        make = torch.Generator().manual_seed(3)
        self.register_buffer("table", torch.randn(LETTERS, 3, generator=make, dtype=torch.float64))
        self.gate = HazardGateModule(3, -4.0, Init()).double() if gate else None
        if gate:
            with torch.no_grad():
                self.gate.weight.copy_(torch.tensor([[1.5, -1.0, 1.0]]))
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64))
        halt = HaltSpec(layout="hazard", per="token", rule="of a test") if gate else None
        self.spec = tiny_spec(order or ModelLoop(num_steps=steps), 1 if order is None else 2, 3, halt=halt)

    def encode(self, tokens, cache=None, *, positions=None, valid=None, extras=None):
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        return Context(self.table[tokens] * self.frozen, positions, valid)

    def init_state(self, context, noise):
        return context.embeds

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        return state @ SHRINK.T + PUSH

    def coda(self, state, context, cache=None):
        return state

    def head(self, hidden):
        return hidden @ self.table.T

    def halt(self, state):
        return super().halt(state) if self.gate is None else self.gate(state)


class Ends(ByteTokenizer):
    """a..h as 0..7; h also ends a text."""

    def __init__(self):
        super().__init__()
        self.eos, self.vocab_size = 7, LETTERS

    def encode(self, text):
        return [ord(c) - 97 for c in text]

    def encode_all(self, texts):
        return [self.encode(text) for text in texts]


BATCH = PackedLoader([letters(20)], Ends(), Packing(seq_len=12, rows=4), seed=0, vocab_size=LETTERS).batch


def rollout(model, batch):
    noise = None
    if model.spec.noise_width:
        noise = torch.zeros(*batch.tokens.shape, model.spec.noise_width)
    given = Pass(model=model, batch=batch, plan=model.spec.plan(), noise=noise)
    return roll(given, [0, *exit_points(model.spec).values()])[0]


def test_a_planted_lookahead_gate_is_recovered():
    model = Affine()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gates, losses = train_gates(model, BATCH, GateTraining(gates=("lookahead",), updates=250, lr=0.1), name="affine")
    assert set(gates) == {"lookahead", "same_step"}
    gate = gates["lookahead"].module
    wanted = SHRINK.T @ model.gate.weight[0].detach()
    assert_close(gate.weight[0], wanted, rtol=0, atol=0.1)
    assert losses["lookahead"][-1] < losses["lookahead"][0]
    # The control starts as the teacher, and stays there: its loss cannot be lowered.
    assert_close(gates["same_step"].module.weight, model.gate.weight.detach(), rtol=0, atol=0.15)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    texts = [[n % 8 for n in range(k, k + 12)] for k in range(12)]
    rows = compare_gates(
        model,
        texts,
        gates,
        GateTraining(gates=("lookahead",)),
        lambda count: document_draws(count, 200, seed=0, domain="t", split="held"),
    )
    found = {(row.gate, row.threshold): row for row in rows}
    agreed = {key: row.agreement.estimate for key, row in found.items()}
    assert min(share for (gate, _), share in agreed.items() if gate == "same_step") > 0.95, agreed
    # It cannot stop at step 1 and never hears the first score, so it is not the teacher; nor is the exact one.
    exact = copy.deepcopy(gates["lookahead"])
    with torch.no_grad():
        exact.module.weight.copy_(wanted[None])
        exact.module.bias.fill_(float(model.gate.weight[0] @ PUSH.to(wanted.dtype) + model.gate.bias))
    draws = lambda count: document_draws(count, 200, seed=0, domain="t", split="held")  # noqa: E731
    ideal = compare_gates(model, texts, {"lookahead": exact}, GateTraining(gates=("lookahead",)), draws)
    for row in ideal:
        if row.threshold >= 0.5:
            assert agreed["lookahead", row.threshold] == pytest.approx(row.agreement.estimate, abs=0.02), row.threshold
    assert found["same_step", 0.5].distance.estimate <= found["same_step", 0.5].mean_depth.estimate * 0.05
    assert all(row.agreement.low <= row.agreement.estimate <= row.agreement.high for row in rows)
    assert 1 < found["lookahead", 0.5].mean_depth.estimate < 6


def test_a_preloop_gate_learns_depths_that_the_context_decides():
    model = Affine()
    gates, _ = train_gates(model, BATCH, GateTraining(gates=("preloop",), updates=50, lr=0.1), name="affine")
    rows = compare_gates(
        model,
        [list(range(8))] * 3 + [[3, 1, 4, 1, 5]] * 3,
        gates,
        GateTraining(gates=("preloop",)),
        lambda count: document_draws(count, 200, seed=0, domain="t", split="held"),
    )
    assert {row.gate for row in rows} == {"preloop"} and len(rows) == 6
    assert max(row.distance.estimate for row in rows) < 0.8


@pytest.mark.parametrize("teacher", ["latent", "kl"])
def test_a_head_on_a_threshold_rule_says_its_next_score(teacher):
    """On the affine core the log of the score is no linear map, but close to one over a few steps."""
    model = Affine(gate=False)
    config = GateTraining(gates=("lookahead", "preloop"), teacher=teacher, threshold=0.1, updates=20, lr=0.01)
    gates, losses = train_gates(model, BATCH, config, name="affine")
    assert gates["lookahead"].facts.teacher == teacher and gates["lookahead"].facts.threshold is None
    assert gates["preloop"].facts.threshold == 0.1
    assert losses["preloop"][-1] < losses["preloop"][0]
    target = threshold_target(rollout(model, BATCH(99)), config)
    wanted = target.scores[1:-1].flatten(1)
    said = torch.stack([gates["lookahead"].score(s) for s in _states(model, BATCH(99))[1:5]]).flatten(1)
    error, spread = (said - wanted).abs().mean(), (wanted - wanted.mean()).abs().mean()
    assert error < 0.5 * spread


def _states(model, batch):
    states = [model.encode(batch.tokens).embeds.detach()]
    for _ in range(6):
        states.append(model.step(states[-1], None, 0, None))
    return states


@pytest.mark.parametrize(("gate", "shift"), [("lookahead", 1), ("same_step", 0), ("preloop", None)])
def test_losses_under_a_threshold_rule_equal_the_written_out_ones(gate, shift):
    model, batch = Affine(gate=False), BATCH(1)
    config = GateTraining(gates=("lookahead", "preloop"), teacher="latent", threshold=0.3)
    seen = rollout(model, batch)
    target = threshold_target(seen, config)
    make = torch.Generator().manual_seed(0)
    shape = (6, 3) if gate == "preloop" else (1, 3)
    weight = torch.randn(shape, generator=make, dtype=torch.float64)
    bias = torch.randn(shape[0], generator=make, dtype=torch.float64)

    def loss_and_slopes(loss, *leaves):
        return loss, torch.autograd.grad(loss, leaves)

    module = nn.Linear(3, shape[0], dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    seen.beside = module if gate == "preloop" else lambda s: module(s)[..., 0]
    fast = loss_and_slopes(gate_loss(gate, seen, batch.labels, target).double(), module.weight, module.bias)
    twin = threshold_gate(
        [state.tolist() for state in _states(model, batch)], weight.tolist(), bias.tolist(), 0.3, shift
    )
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if gate == "preloop" else TWIN
    assert_close(float(fast[0].detach()), twin, **tolerance)
    step = 1e-6
    for index in ((0, 0), (shape[0] - 1, 2)):
        moved = [
            threshold_gate(
                [state.tolist() for state in _states(model, batch)],
                (weight + sign * step * torch.eye(shape[0])[index[0]][:, None] * torch.eye(3)[index[1]]).tolist(),
                bias.tolist(),
                0.3,
                shift,
            )
            for sign in (1, -1)
        ]
        assert float(fast[1][0][index]) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-5, abs=1e-7)


def test_depths_from_kept_states_are_those_of_a_run_with_exits():
    model = build(tiny_ouro(), dtype=torch.float64)
    tokens = torch.arange(9)[None] % 8
    seen, scores = full_run(model, tokens, 0)
    gates, _ = train_gates(model, BATCH, GateTraining(gates=("lookahead", "preloop"), updates=2), name="tiny")
    rules = [HazardExit(threshold=0.5), LatentExit(threshold=0.5), KLExit(threshold=0.01)]
    rules += [gates[kind].rule(q) for kind in gates for q in (0.3, 0.6, 1.0)]
    found = set()
    for rule in rules:
        with torch.no_grad():
            steps = forward_until(model, tokens, rule).steps
        assert torch.equal(chosen(rule, seen, scores), steps), rule
        found.add(tuple(steps.flatten().tolist()))
    assert len(found) > 3


def test_training_a_gate_of_a_model_that_starts_from_noise():
    model = build(tiny_huginn(), dtype=torch.float64)
    config = GateTraining(gates=("lookahead",), teacher="latent", updates=2)
    gates, losses = train_gates(model, BATCH, config, name="tiny")
    assert isinstance(gates["lookahead"], Gate) and all(math.isfinite(x) for x in losses["lookahead"])
    again, _ = train_gates(model, BATCH, config, name="tiny")
    assert torch.equal(gates["lookahead"].module.weight, again["lookahead"].module.weight)


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="--teacher hazard needs a model with a gate of its own. 'tiny' has none. Use"):
        train_gates(Affine(gate=False), BATCH, GateTraining(), name="x")
    with pytest.raises(ValueError, match="needs a model of 3 steps at least. 'tiny' runs 2. Train --kind preloop"):
        train_gates(Affine(steps=2), BATCH, GateTraining(), name="x")
    with pytest.raises(ValueError, match="no shorter run of tiny lies on the way"):
        train_gates(Affine(order=Blocks(num_steps=(3, 3))), BATCH, GateTraining(), name="x")
    with pytest.raises(ValueError, match="must be given for a preloop gate of a threshold teacher.* Got None"):
        GateTraining(teacher="latent")
    with pytest.raises(ValueError, match="and for nothing else. Got 0.1, gates lookahead, teacher kl"):
        GateTraining(gates=("lookahead",), teacher="kl", threshold=0.1)
    with pytest.raises(ValueError, match="updates must be at least 1, lr and clip_norm above 0. Got 0"):
        GateTraining(updates=0)
    with pytest.raises(ValueError, match="gates must be of lookahead, preloop, same_step. Got none"):
        GateTraining(gates=())


def test_intervals_of_a_comparison_come_from_documents():
    """Two kinds of documents: resampling them moves the share, resampling tokens hardly would."""
    model = Affine()
    gates, _ = train_gates(model, BATCH, GateTraining(gates=("preloop",), updates=1), name="affine")
    rows = compare_gates(
        model,
        [[0] * 50] * 4 + [[5] * 50] * 4,
        gates,
        GateTraining(gates=("preloop",)),
        lambda count: document_draws(count, 400, seed=0, domain="t", split="held"),
    )
    spread = np.array([row.teacher_depth.high - row.teacher_depth.low for row in rows])
    assert spread.max() > 0.5
