from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contract.zoo import tiny
from looplab.engine.exits import Exits, build_rule, loadable
from looplab.engine.gates import Gate, GateExit, GateFacts, PreLoopExit
from looplab.engine.request import DepthParams, SamplingParams
from looplab.engine.stages import Job, Row
from looplab.models.base import Context
from looplab.recurrence.exit import HazardExit, LatentExit

FIXTURE = load_file(Path(__file__).parents[1] / "golden" / "cdb" / "io.safetensors")
SPEC = tiny("tiny-ouro").spec


class Walk:
    """Rows that all start at once: states s_0 .. s_r and scores of steps 1 .. r, of one row per seat."""

    def __init__(self, states, scores=None, *, embeds=None, offset_one=False):
        self.states, self.scores, self.rows = states, scores, states.shape[1]
        self.embeds = torch.zeros(self.rows, 1, 1) if embeds is None else embeds
        self.most = len(states) - 1
        self.exits = Exits(SPEC, self.rows, [self.most], offset_one=offset_one, device="cpu")
        self.asked = 0

    def run(self, rules, **depth):
        """(chosen, ran) per row. `rules`: one, or one per row."""
        every = rules if isinstance(rules, list) else [rules] * self.rows
        for seat, rule in enumerate(every):
            params = DepthParams(**{"max_steps": self.most, **depth})
            job = Job(
                request="r", choice=0, tokens=(1,), sampling=SamplingParams(), seed=0, depth=params, prefill_steps=1
            )
            self.exits.open(seat, job, rule)
        found, alive = {}, list(range(self.rows))
        for step in range(1, self.most + 1):
            index = torch.tensor(alive)
            left = self.exits.after(
                0,
                [Row(seat, 1, step - 1, ()) for seat in alive],
                [step] * len(alive),
                index,
                self.states[step - 1][index],
                self.states[step][index],
                Context(self.embeds[index], index[:, None], None),
                score=lambda step=step, index=index: self.scores[index, step - 1][:, None],
                logits=lambda: None,
                late=self.exits.offset_one,
            )
            found |= {seat: (one.chosen, step) for seat, one in zip(alive, left, strict=True) if one.chosen}
            alive = [seat for seat in alive if seat not in found]
            if not alive:
                break
        return [found[seat] for seat in range(self.rows)]


def hazards(**options):
    return Walk(torch.zeros(6, 32, 1, 4), FIXTURE["gate_logits"], **options)


@pytest.mark.parametrize("q", [0.2, 0.4, 0.5, 0.7, 0.9, 1.0])
def test_hazard_exits_are_those_recorded(q):
    for least in (1, 2, 3):
        found = hazards().run(HazardExit(threshold=q), min_steps=least)
        assert [chosen - 1 for chosen, _ in found] == FIXTURE[f"hazard_exit_q{q}_min{least}"].tolist()
        assert all(chosen == ran for chosen, ran in found)


@pytest.mark.parametrize("q", [0.2, 0.4, 0.5, 0.7, 0.9, 1.0])
def test_exits_that_are_acted_on_a_step_late_are_those_recorded(q):
    found = hazards(offset_one=True).run(HazardExit(threshold=q))
    assert [ran - 1 for _, ran in found] == FIXTURE[f"hazard_exit_offset_one_q{q}_min1"].tolist()
    assert [chosen - 1 for chosen, _ in found] == FIXTURE[f"hazard_exit_q{q}_min1"].tolist()


@pytest.mark.parametrize("tau", [0.05, 0.1, 0.2, 0.4])
def test_latent_exits_are_those_recorded(tau):
    states = FIXTURE["latent_states"].flatten(1, 2)[:, :, None]
    found = Walk(states).run(LatentExit(threshold=tau))
    expected = FIXTURE[f"latent_exit_tau{tau}"].flatten().tolist()
    assert [chosen for chosen, _ in found] == [number + 1 if number < 7 else 7 for number in expected]


@pytest.mark.parametrize("offset_one", [False, True])
def test_a_delay_adds_steps_after_the_rule_has_fired(offset_one):
    plain = [chosen for chosen, _ in hazards().run(HazardExit(threshold=0.5))]
    found = hazards(offset_one=offset_one).run(HazardExit(threshold=0.5), exit_delay=2)
    assert found == [(min(chosen + 2, 5), min(chosen + 2, 5)) for chosen in plain]


def test_rows_of_different_rules_share_a_launch():
    rules = [HazardExit(threshold=q) for q in (0.2, 0.9)]
    mixed = hazards().run([rules[row % 2] for row in range(32)])
    alone = [hazards().run(rule) for rule in rules]
    assert mixed == [alone[row % 2][row] for row in range(32)]
    assert alone[0] != alone[1]


def facts(kind):
    return GateFacts(gate=kind, model="m", weights="w", steps=5, width=4, teacher="hazard")


class Column(torch.nn.Module):
    """A gate whose score is the first number of a state."""

    def forward(self, state):
        return state[..., 0]


def test_a_gate_that_looks_ahead_loses_no_step_when_it_is_read_late():
    states = torch.zeros(6, 32, 1, 4)
    states[1:, :, 0, 0] = FIXTURE["gate_logits"].T  # of the state after step t: the score of step t + 1
    rule = GateExit(gate=Gate(facts("lookahead"), Column()), threshold=0.5)
    now = Walk(states).run(rule)
    late = Walk(states, offset_one=True).run(rule)
    assert now == late
    spent = [min(exit_ + 2, 5) for exit_ in FIXTURE["hazard_exit_q0.5_min1"].tolist()]
    assert [chosen for chosen, _ in now] == spent
    assert min(spent) == 2


@pytest.mark.parametrize(("q", "offset_one"), [(0.3, False), (0.6, False), (0.9, False), (0.6, True)])
def test_depths_of_a_gate_before_the_loop_are_those_recorded(q, offset_one):
    rule = PreLoopExit(gate=Gate(facts("preloop"), torch.nn.Identity()), threshold=q)
    embeds = FIXTURE["preloop_pdf"].log()[:, None]
    found = Walk(torch.zeros(6, 32, 1, 4), embeds=embeds, offset_one=offset_one).run(rule)
    expected = [depth + 1 for depth in FIXTURE[f"preloop_exit_q{q}_min1_max5"].tolist()]
    assert [chosen for chosen, _ in found] == (expected if not offset_one else [max(depth, 2) for depth in expected])
    assert all(chosen == ran for chosen, ran in found)


def test_the_memory_of_a_seat_starts_anew_with_every_token():
    walk = hazards()
    assert walk.run(HazardExit(threshold=0.5)) == walk.run(HazardExit(threshold=0.5))


def test_depths_known_before_never_come_late():
    walk = Walk(torch.zeros(5, 3, 1, 4), offset_one=True)
    assert walk.run(None, replay=((2,),)) == [(2, 2)] * 3
    assert walk.run(None, replay=((),)) == [(4, 4)] * 3  # past the recorded ones: all steps
    assert walk.run(None, num_steps=3, max_steps=None) == [(3, 3)] * 3


def test_rules_that_no_model_of_several_blocks_answers_are_not_loaded():
    spec = tiny("tiny-blocks").spec
    loaded, refused = loadable(spec, [4, 4], gates={}, refuses_exits=False, allow_costly=True)
    assert set(loaded) == {"full", "fixed", "latent", "acceleration"}
    assert "runs 2 blocks in turn" in refused["kl"]
    assert "runs 2 blocks in turn" in refused["hazard"]


def test_a_gate_becomes_a_rule_of_the_threshold_asked_for():
    rule = GateExit(gate=Gate(facts("lookahead"), Column()), threshold=0.5)
    loaded, refused = loadable(SPEC, [5], gates={"lookahead": rule}, refuses_exits=False, allow_costly=False)
    built = build_rule(DepthParams(exit_rule="lookahead", exit_threshold=0.25), loaded, refused)
    assert (built.gate, built.threshold) == (rule.gate, 0.25)
    assert build_rule(DepthParams(exit_rule="lookahead"), loaded, refused) is rule
