from dataclasses import replace

import pytest
import torch

from contract.axes import BASE
from contract.zoo import run, tiny, tokens
from looplab._config import from_dict, to_dict
from looplab.models.base import build
from looplab.nn.linear import Init
from looplab.recurrence.exit import EXIT_RULES
from looplab.recurrence.halting import Halt, HazardGate, LookaheadGate, NoHalt, PreLoopGate, QHead
from looplab.recurrence.plan import TwoLevel
from looplab.recurrence.spec import HaltSpec
from looplab.recurrence.state_init import Zeros
from tolerances import BLOCKS, EXACT


def test_no_halt_builds_nothing_and_the_model_says_that_it_has_no_gate():
    assert NoHalt().spec is None and NoHalt().build(4, Init()) is None
    model = build(BASE)
    assert model.spec.halt is None and model.spec.params.halt == 0
    rules = ", ".join(name for name in EXIT_RULES if not EXIT_RULES[name].reads_score)
    with pytest.raises(ValueError, match=f"^looped has no trained gate; exit rules available: {rules}$"):
        model.halt(torch.zeros(1, 2, 8))


def test_a_hazard_gate_is_one_logit_per_token():
    torch.manual_seed(0)
    gate = HazardGate(bias=-1.0).build(4, Init(std=1.0)).double()
    state = torch.randn(2, 3, 4, dtype=torch.float64)
    found = gate(state)
    assert found.shape == (2, 3)
    for row in range(2):
        for token in range(3):
            logit = sum(w * s for w, s in zip(gate.weight[0], state[row, token], strict=True)) - 1.0
            torch.testing.assert_close(found[row, token], logit, **BLOCKS)


def test_a_hazard_gate_declares_its_layout_and_answers_in_float32():
    halt = HazardGate().spec
    assert isinstance(halt, HaltSpec)
    assert (halt.layout, halt.per, halt.horizon) == ("hazard", "token", 0)
    score = HazardGate().build(4, Init()).bfloat16()(torch.ones(1, 2, 4, dtype=torch.bfloat16))
    assert score.dtype == torch.float32


def test_a_lookahead_gate_is_a_hazard_gate_about_the_next_step():
    gate, ahead = HazardGate(bias=0.5), LookaheadGate(bias=0.5)
    assert (ahead.spec.layout, ahead.spec.per, ahead.spec.horizon) == ("hazard", "token", 1)
    state = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    built = []
    for choice in (gate, ahead):
        torch.manual_seed(0)
        built.append(choice.build(4, Init(std=1.0))(state))
    assert torch.equal(*built)
    assert from_dict(LookaheadGate, to_dict(ahead)) == ahead
    with pytest.raises(ValueError, match="horizon 1"):
        EXIT_RULES["hazard"](threshold=0.5).check(build(replace(BASE, halt=ahead), device="meta").spec)


def test_a_q_head_is_one_logit_per_token_of_being_done():
    halt = QHead(bias=2.0)
    assert (halt.spec.layout, halt.spec.per, halt.spec.horizon) == ("q_halt", "token", 0)
    model = build(replace(BASE, halt=halt))
    assert model.spec.params.halt == BASE.dim + 1
    assert torch.equal(halt.build(4, Init(std=0.0))(torch.ones(1, 2, 4)), torch.full((1, 2), 2.0))


def test_a_pre_loop_gate_is_a_linear_map_that_starts_at_zero():
    gate = PreLoopGate(4, 3)
    embeds = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gate(embeds), torch.zeros(2, 5, 3))
    with torch.no_grad():
        gate.weight[1, 2], gate.bias[0] = 2.0, -1.0
    assert torch.equal(gate(embeds)[..., 1], 2 * embeds[..., 2])
    assert torch.equal(gate(embeds)[..., 0], torch.full((2, 5), -1.0))
    assert gate.bfloat16()(embeds.bfloat16()).dtype == torch.float32


def test_the_score_is_of_what_the_readout_starts_from():
    model = tiny("tiny-ouro")
    out = run(model, tokens(model, 2, 5))
    torch.testing.assert_close(model.halt(out.state), model.gate(out.hidden), **EXACT)
    two = build(
        type(BASE)(
            **{
                **vars(BASE),
                "order": TwoLevel(h=2, l=2),
                "blocks": (2,),
                "state_init": Zeros(),
                "halt": HazardGate(),
            }
        )
    )
    state = run(two, tokens(two, 2, 5)).state
    assert torch.equal(two.halt(state), two.gate(state.high))
    assert two.spec.params.halt == 8 + 1


@pytest.mark.parametrize("halt", [NoHalt(), HazardGate(bias=-0.5)], ids=lambda h: type(h).__name__)
def test_choices_round_trip(halt):
    assert from_dict(Halt, to_dict(halt)) == halt
