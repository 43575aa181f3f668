import re

import pytest
import torch

from contract.zoo import encode, tiny, tokens
from looplab.audit.units import full_plan
from looplab.models.base import PRESETS, build
from looplab.models.published import PUBLISHED, assemble
from looplab.models.puzzle import PuzzlePrefix
from looplab.nn.rope import Learned, Rope
from tolerances import EXACT

FAMILY = PUBLISHED["hrm"]
SETTINGS = {
    "hidden_size": 32,
    "num_heads": 4,
    "H_cycles": 2,
    "L_cycles": 3,
    "H_layers": 1,
    "L_layers": 2,
    "halt_max_steps": 4,
    "expansion": 4,
    "pos_encodings": "rope",
    "puzzle_emb_ndim": 40,
    "num_puzzle_identifiers": 5,
    "seq_len": 16,
    "vocab_size": 6,
}


def config(**changes):
    return FAMILY.config({name: v for name, v in (SETTINGS | changes).items() if v is not None}, {})


def test_the_preset_has_the_published_number_of_parameters():
    model = build(PRESETS["hrm"](), device="meta")
    assert model.spec.params.total == 27_275_266
    assert full_plan(model.spec).M == 16
    assert len(model.spec.plan(1)) == 6


def test_every_block_has_layers_of_its_own():
    model = build(config())
    assert [block.layers for block in model.spec.blocks] == [(0, 1), (2,)]
    assert [block.params for block in model.spec.blocks] == [2 * 28672, 28672]  # 4 * 32 * 32 + 3 * 32 * 256 per layer
    with torch.no_grad():
        model.core[2].attn.o.weight.zero_()
    for block, changed in ((0, False), (1, True)):
        context = encode(model, tokens(model, 1, 4))
        state, index = model.init_state(context, None), torch.zeros(1, dtype=torch.long)
        intact = build(config())
        same = states_equal(model.step(state, context, block, index), intact.step(state, context, block, index))
        assert same != changed


def states_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_settings_become_a_configuration():
    found = config()
    assert (found.heads, found.high_layers, found.low_layers, found.h_cycles, found.l_cycles) == (4, 1, 2, 2, 3)
    assert (found.position, found.prefix) == (Rope(base=10000.0), PuzzlePrefix(entries=5, width=40, slots=2))
    assert config(pos_encodings="learned").position == Learned(max=18)
    assert config(puzzle_emb_ndim=0).prefix is None
    assert tiny("tiny-hrm").spec.halt.rule == "q_halt > q_continue"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"H_layers": None}, "load: hrm needs the settings H_layers."),
        ({"pos_encodings": "none"}, "HRMConfig.position must be Rope(...) or Learned(...). Got NoPE()."),
        ({"seq_len": None, "pos_encodings": "learned"}, "load: pos_encodings of hrm must be 'rope', 'learned' (with"),
    ],
    ids=["missing", "positions", "length"],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**changes)


@pytest.mark.parametrize("kind", ["rope", "learned"])
def test_every_tensor_goes_to_the_original_names_and_back(kind):
    made = config(pos_encodings=kind)
    model, key_map = build(made, seed=3), FAMILY.key_map(made)
    state = model.state_dict()
    assert sorted(name for rule in key_map.rules for name in rule.ours) == sorted(state)
    foreign = {f"_orig_mod.model.inner.{name}": tensor for name, tensor in key_map.export(state).items()}
    again = assemble(FAMILY, {"arch": SETTINGS | {"pos_encodings": kind}}, foreign)
    assert again.config == made
    torch.testing.assert_close(again.state_dict(), state, **EXACT)
    assert FAMILY.recognises(key_map.theirs) and not PUBLISHED["trm"].recognises(key_map.theirs)
