import dataclasses

import pytest
import torch

from linear_core import Line, given, words
from looplab.objectives import NextToken
from looplab.objectives.base import Kept, LossParts, Part, needs_gate, read_points, roll, scored_mask
from looplab.recurrence.gradient import SegmentedDetach
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.trace import Recorder


def parts(*entries):
    return LossParts({name: Part(torch.tensor(total), count, weight) for name, total, count, weight in entries})


def test_the_total_is_the_weighted_sum_of_the_means():
    both = parts(("a", 6.0, 3, 1.0), ("b", 10.0, 5, 0.5))
    assert both.means() == {"a": 2.0, "b": 2.0}
    assert both.total == 3.0
    assert list(both) == ["a", "b"]
    assert len(both) == 2


def test_sums_and_counts_are_added_before_the_division():
    joined = parts(("a", 6.0, 3, 1.0)) + parts(("a", 2.0, 1, 1.0))
    assert joined.total == 2.0
    assert joined["a"].count == 4


def test_shares_of_micro_batches_sum_to_the_total():
    one, two = parts(("a", 6.0, 3, 2.0)), parts(("a", 2.0, 1, 2.0))
    counts = {"a": 4}
    assert float(one.share(counts) + two.share(counts)) == (one + two).total


def test_different_parts_cannot_be_added():
    with pytest.raises(ValueError, match=r"same parts to be added. Got \['a'\] and \['b'\]"):
        parts(("a", 1.0, 1, 1.0)) + parts(("b", 1.0, 1, 1.0))


def test_detached_parts_have_no_graph():
    leaf = torch.ones((), requires_grad=True)
    tied = LossParts({"a": Part(leaf * 2, 1, 1.0)})
    assert tied["a"].sum.requires_grad
    assert not tied.detach()["a"].sum.requires_grad


def test_a_rollout_keeps_the_states_that_are_read():
    model = Line()
    rollout, first, last = roll(given(model, words()), (1, 3))
    assert sorted(rollout.states) == [1, 3, 4] and rollout.states[4] is last
    whole, _, _ = roll(given(model, words(), recorder=Recorder()), range(5))
    assert sorted(whole.states) == [0, 1, 2, 3, 4] and torch.equal(whole.states[0], first)
    assert all(torch.equal(rollout.states[k], whole.states[k]) for k in (1, 3, 4))
    watched, _, _ = roll(given(model, words(), recorder=Recorder()), (1, 3))
    assert sorted(watched.states) == [1, 3, 4]
    assert read_points(rollout) == [1, 2, 3, 4]


def test_a_recorder_of_few_states_starts_again_and_keeps_the_graph():
    recorder = Kept((0, 2))
    for _ in range(2):
        recorder.start("s0")
        for k in (1, 2, 3):
            recorder.applied(f"s{k}", None)
        assert recorder.by_number == {0: "s0", 2: "s2"}
    rollout, _, _ = roll(given(Line(), words(), gradient=SegmentedDetach(every=2)), range(5))
    assert all(rollout.states[k].requires_grad for k in (1, 2, 3, 4))


def test_noise_of_a_row_does_not_depend_on_the_rows_beside_it():
    model, batch = Line(), words(rows=4)
    whole = given(model, batch)
    own = dataclasses.replace(
        batch, **{name: getattr(batch, name)[[3, 1]] for name in ("tokens", "labels", "positions", "rows")}
    )
    part = given(model, own, all_rows=4)
    drawn = whole.normal(whole.generator("augment"), 2, (4, 5, 3))
    assert drawn.shape == (2, 4, 5, 3) and drawn.std() > 0.5
    assert torch.equal(part.normal(part.generator("augment"), 2, (2, 5, 3)), drawn[:, [3, 1]])


def test_a_value_can_reach_one_state_alone():
    model = Line(halt="hazard")
    rollout, _, _ = roll(given(model, words()), range(5))
    state = rollout.states[2]
    plain = (rollout.model.halt(state) ** 2).sum()
    alone = rollout.to_state_alone(2, lambda r: (r.model.halt(r.states[2]) ** 2).sum())
    assert float(alone.detach()) == float(plain.detach())
    found, wanted = (torch.autograd.grad(value, state, retain_graph=True)[0] for value in (alone, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-15, atol=0)
    alone.backward()
    assert model.gate.weight.grad is None and model.a.grad is not None
    with torch.no_grad():
        assert not rollout.to_state_alone(2, lambda r: r.states[2].sum()).requires_grad


def test_laws_are_counted_and_cut_into_cells():
    ledger = Ledger()
    rollout, _, _ = roll(given(Line(), words(), ledger=ledger), (4,))
    before = ledger.head_tokens
    labels = words().labels
    assert rollout.laws(4, labels).shape == (4, 4, 3)
    assert rollout.laws(4, labels[..., None].expand(-1, -1, 3)).shape == (4, 4, 3, 1)
    assert ledger.head_tokens - before == 2 * labels.numel()


def test_a_position_is_scored_if_one_of_its_cells_is():
    labels = torch.tensor([[[1, -100], [-100, -100]], [[0, 0], [-100, 3]]])
    assert scored_mask(labels).tolist() == [[True, False], [True, True]]
    assert scored_mask(labels[..., 0]).tolist() == [[True, False], [True, False]]


def test_most_objectives_read_the_last_state_and_train_the_model():
    assert NextToken().reads(5) == (5,)
    assert NextToken().beside(Line()) is None
    NextToken().check(Line())
    with pytest.raises(ValueError, match="has no halt"):
        needs_gate(NextToken(), Line())
