import json

import pytest
import torch
from torch.testing import assert_close

from looplab.engine.gates import Gate, GateError, GateFacts, gate_width, load_gate, read_gate, save_gate
from looplab.models.base import build
from looplab.models.folder import weight_hash
from looplab.models.huginn import tiny_huginn
from looplab.models.ouro import tiny_ouro
from looplab.nn.linear import Init
from looplab.recurrence.exit import HazardExit, Seen, forward_until
from looplab.recurrence.halting import HazardGateModule, PreLoopGate


def facts(model, gate, teacher="hazard", **more):
    fields = {
        "gate": gate,
        "model": "tiny",
        "weights": weight_hash(model),
        "steps": 4,
        "width": gate_width(model, gate),
        "teacher": teacher,
        "trained": {"updates": "3"},
    }
    return GateFacts(**(fields | more))


def made(model, gate, teacher="hazard", seed=0, **more):
    width = gate_width(model, gate)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = PreLoopGate(width, 4) if gate == "preloop" else HazardGateModule(width, -0.5, Init(std=0.5))
        if gate == "preloop":
            torch.nn.init.normal_(module.weight)
    return Gate(facts(model, gate, teacher, **more), module.to(next(model.parameters()).dtype))


@pytest.fixture(scope="module")
def model():
    return build(tiny_ouro(), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["lookahead", "preloop", "same_step"])
def test_a_gate_comes_back_with_its_tensors_and_facts(model, kind, tmp_path):
    gate = made(model, kind)
    path = save_gate(tmp_path, gate)
    assert path == tmp_path / f"{kind}.json"
    before = torch.get_rng_state()
    for source in (path, tmp_path):
        found = load_gate(source, model)
        assert found.facts == gate.facts
        for name, tensor in gate.module.state_dict().items():
            assert torch.equal(found.module.state_dict()[name], tensor)
    assert torch.equal(before, torch.get_rng_state()), "loading a gate drew random numbers"
    assert not any(p.requires_grad for p in found.module.parameters())


def test_a_gate_of_another_checkpoint_is_refused_unless_it_is_named(model, tmp_path):
    other = build(tiny_ouro(), seed=1, dtype=torch.float64)
    path = save_gate(tmp_path, made(other, "lookahead"))
    with pytest.raises(GateError, match=f"beside this checkpoint, {weight_hash(model)}. Got one of tiny"):
        load_gate(path, model)
    with pytest.raises(GateError, match="accept the other by name: tiny"):
        load_gate(path, model, accept="else")
    assert load_gate(path, model, accept="tiny").facts.weights == weight_hash(other)
    assert load_gate(path, model, accept=weight_hash(other)).shift == 1
    wide = made(model, "lookahead", width=7)
    wide.module.weight = torch.nn.Parameter(torch.zeros(1, 7))
    with pytest.raises(GateError, match="must read vectors of width 32, as this model has. Got 7"):
        load_gate(save_gate(tmp_path / "wide", wide), model)


def test_files_that_are_no_gate_are_refused(model, tmp_path):
    with pytest.raises(GateError, match="must hold exactly one gate. Got none"):
        read_gate(tmp_path)
    with pytest.raises(GateError, match="must be the JSON of a gate. Got no such file. Run `looplab gate`"):
        read_gate(tmp_path / "lookahead.json")
    path = save_gate(tmp_path, made(model, "lookahead"))
    save_gate(tmp_path, made(model, "preloop"))
    with pytest.raises(GateError, match="must hold exactly one gate. Got lookahead, preloop. Name the JSON"):
        read_gate(tmp_path)
    assert read_gate(tmp_path, "preloop").facts.gate == "preloop"
    with pytest.raises(GateError, match="must hold same_step.json. Got lookahead, preloop"):
        read_gate(tmp_path, "same_step")
    text = path.read_text()
    path.write_text("{")
    with pytest.raises(GateError, match="must be JSON"):
        read_gate(path)
    path.write_text("{}")
    with pytest.raises(GateError, match="must have format 'looplab-gate' and schema 1"):
        read_gate(path)
    without = {name: value for name, value in json.loads(text).items() if name != "width"}
    path.write_text(json.dumps(without))
    with pytest.raises(GateError, match="Key 'width' of .*lookahead.json is missing"):
        read_gate(path)
    path.write_text(text.replace('"gate": "lookahead"', '"gate": "late"'))
    with pytest.raises(GateError, match="lookahead.json.gate must be .*'late'"):
        read_gate(path)
    path.write_text(text.replace('"width": 32', '"width": 31'))
    with pytest.raises(GateError, match="must hold the tensors of lookahead.json"):
        read_gate(path)
    path.write_text(text)
    path.with_suffix(".safetensors").write_bytes(b"short")
    with pytest.raises(GateError, match="must hold the tensors of lookahead.json"):
        read_gate(path)
    path.with_suffix(".safetensors").unlink()
    with pytest.raises(GateError, match="must lie beside lookahead.safetensors"):
        read_gate(path)


def steps_of(rule, scores, spec):
    """Depths under a rule whose gate says these scores, one row."""
    state = torch.zeros(1, 1, 1, dtype=torch.float64)
    memory, last = rule.start(spec, state), len(scores)
    for step, score in enumerate(scores, 1):
        stop, memory = rule.stops(memory, Seen(torch.tensor([step]), torch.full_like(state, score)), last)
        if bool(stop):
            return step
    raise AssertionError("a rule must stop at the last step")


def identity(model, kind, teacher="hazard"):
    """A gate that says the state itself."""
    module = HazardGateModule(1, 0.0, Init()).double()
    with torch.no_grad():
        module.weight.fill_(1.0)
    return Gate(facts(model, kind, teacher, width=1), module)


def test_hazards_add_up_by_hand(model):
    """Hazards .5, .5, .5: spent .5, .75, .875."""
    zero = [0.0] * 5
    for gate, first in (("same_step", 1), ("lookahead", 2)):
        gate = identity(model, gate)
        for threshold, step in ((0.5, 0), (0.75, 1), (0.8, 2), (0.875, 2)):
            assert steps_of(gate.rule(threshold), zero, model.spec) == first + step
        assert steps_of(gate.rule(1.0), zero, model.spec) == 5 and not gate.rule(1.0).early
        # A saturated gate never reaches 1 by rounding.
        assert steps_of(gate.rule(1.0), [60.0] * 5, model.spec) == 5
    assert steps_of(identity(model, "same_step").rule(0.5, min_steps=3), zero, model.spec) == 3


def test_log_scores_stop_below_the_threshold(model):
    scores = [0.0, -1.0, -2.0, -3.0, -4.0]
    for threshold, step in ((1.5, 1), (0.5, 2), (0.2, 3), (0.01, 5)):
        assert steps_of(identity(model, "same_step", "latent").rule(threshold), scores, model.spec) == step
        assert steps_of(identity(model, "lookahead", "latent").rule(threshold), scores, model.spec) == min(step + 1, 5)
    with pytest.raises(ValueError, match="threshold must be a finite number above 0"):
        identity(model, "lookahead", "latent").rule(0.0)


def test_a_preloop_gate_names_the_depth_before_the_loop(model):
    gate = made(model, "preloop")
    tokens = torch.arange(12)[None] % 64
    embeds = model.encode(tokens).embeds
    law = gate.law(embeds)
    assert_close(law.sum(-1), torch.ones(1, 12, dtype=torch.float64))
    found = set()
    for threshold in (0.2, 0.5, 0.9, 1.0):
        rule = gate.rule(threshold)
        reached = law.cumsum(-1) >= threshold
        wanted = [4 if threshold == 1 else min(4, 1 + row.tolist().index(True)) for row in reached[0]]
        assert rule.depths(embeds)[0].tolist() == wanted
        with torch.no_grad():
            assert forward_until(model, tokens, rule).steps[0].tolist() == wanted
        found |= set(wanted)
    assert len(found) > 2 and str(gate.rule(0.5)) == "preloop(0.5)"


def test_a_copy_of_the_models_gate_stops_where_the_model_does(model):
    gate = Gate(facts(model, "same_step"), model.gate)
    tokens = torch.arange(12)[None] % 64
    with torch.no_grad():
        for threshold in (0.3, 0.6):
            own = forward_until(model, tokens, HazardExit(threshold=threshold)).steps
            assert torch.equal(forward_until(model, tokens, gate.rule(threshold)).steps, own)


def test_wrong_uses_are_refused(model):
    with pytest.raises(GateError, match="a preloop gate reads the context. Got a state"):
        made(model, "preloop").score(torch.zeros(1, 1, 32, dtype=torch.float64))
    with pytest.raises(GateError, match="a lookahead gate reads states. Got a context"):
        made(model, "lookahead").law(torch.zeros(1, 1, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"threshold must be in \(0, 1\]. Got 1.5. It is a probability"):
        made(model, "lookahead").rule(1.5)
    with pytest.raises(ValueError, match=r"threshold must be in \(0, 1\]. Got 0"):
        made(model, "preloop").rule(0.0)


def test_widths_of_what_gates_read():
    huginn = build(tiny_huginn())
    assert gate_width(huginn, "lookahead") == huginn.spec.state["state"].width
    assert gate_width(huginn, "preloop") == huginn.encode(torch.zeros(1, 1, dtype=torch.long)).embeds.shape[-1]
