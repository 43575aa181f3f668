"""Units: who reads what, and how often it is brought together."""

import pytest
import torch

from looplab.data.packing import Batch, Position
from looplab.models.base import PRESETS, build
from looplab.objectives import NextToken
from looplab.objectives.base import Pass
from looplab.objectives.every_iteration import EveryIteration
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.recurrence.state import standard_noise
from looplab.training.units import SplitModel, Unit, unit_parts


def some(model, rows=2, seq=5):
    tokens = torch.arange(rows * seq).view(rows, seq)
    places = torch.arange(seq).expand(rows, seq)
    batch = Batch(
        tokens=tokens,
        labels=tokens,
        positions=places,
        document_ids=None,
        rows=torch.arange(rows),
        start=Position(0, 0, 0),
        data_hash="",
    )
    width = model.spec.noise_width
    return batch, standard_noise(0, list(range(rows)), places, width) if width else None


def named(name):
    """Unit -> names of modules, and the parameters of the root."""
    model = build(PRESETS[name]())
    parts = unit_parts(model, *some(model))
    names = {id(module): name for name, module in model.named_modules()}
    mine = {id(p) for modules in parts.values() for module in modules for p in module.parameters()}
    root = [n for n, p in model.named_parameters() if id(p) not in mine]
    return {unit: [names[id(module)] for module in modules] for unit, modules in parts.items()}, root


def test_a_looped_core_is_one_unit_with_its_injection():
    units = {"prelude": ["prelude"], "loop": ["core", "injections"], "coda": ["coda_layers", "final_norm"]}
    assert named("tiny-core") == (units, ["embedding.weight"])  # exit_norm="final" stands in the coda too


def test_a_layer_loop_has_a_unit_per_stored_layer():
    units, root = named("tiny-layer-loop")
    assert [units[f"block {layer}"] for layer in range(3)] == [["core.0"], ["core.1"], ["core.2"]]
    assert root == ["embedding.weight"]


def test_blocks_that_take_turns_are_one_unit():
    assert named("tiny-two-level")[0]["loop"] == ["core"]


def test_an_untied_head_is_a_unit_and_the_root_has_nothing():
    units = {"prelude": ["embedding"], "loop": ["core", "final_norm"], "head": ["lm_head"]}
    assert named("tiny-no-envelope") == (units, [])


@pytest.mark.parametrize("name", ["tiny-ouro", "tiny-huginn", "tiny-parcae", "tiny-trm-attn", "tiny-hrm"])
def test_no_parameter_has_two_units(name):
    model = build(PRESETS[name]())
    parts = unit_parts(model, *some(model))
    owned = [id(p) for modules in parts.values() for module in modules for p in module.parameters()]
    assert len(owned) == len(set(owned))
    assert any(unit == "loop" or unit.startswith("block") for unit in parts)


class Counting(Unit):
    """A unit that counts its calls."""

    def __init__(self, parts):
        super().__init__(parts)
        self.calls = 0

    def forward(self, call, *args, **kwargs):
        self.calls += 1
        return super().forward(call, *args, **kwargs)


@pytest.mark.parametrize(
    ("name", "loops"), [("tiny-core", ["loop"]), ("tiny-layer-loop", ["block 0", "block 1", "block 2"])]
)
@pytest.mark.parametrize(("objective", "readouts"), [(NextToken(), 1), (EveryIteration(), None)], ids=str)
def test_a_step_enters_every_part_of_the_loop_once(name, loops, objective, readouts):
    model = build(PRESETS[name]())
    batch, noise = some(model)
    units = {unit: Counting(parts) for unit, parts in unit_parts(model, batch, noise).items()}
    plan = model.spec.plan()

    def loss(seen):
        given = Pass(model=seen, batch=batch, plan=plan, noise=noise, gradient=TruncatedBPTT(window=2))
        return objective.run(given).parts["ce"].sum

    assert torch.equal(loss(SplitModel(model, units)), loss(model))
    assert {unit: units[unit].calls for unit in (*loops, "prelude")} == dict.fromkeys((*loops, "prelude"), 1)
    assert units["coda"].calls == (readouts or len(plan))
    SplitModel(model, units).step(*_state(model, batch, noise), 0, torch.zeros(2, dtype=torch.long))
    assert units[loops[0]].calls == 2


def _state(model, batch, noise):
    context = model.encode(batch.tokens)
    return model.init_state(context, noise), context
