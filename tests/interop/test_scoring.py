"""Log-likelihoods at several depths: one rollout, plain code as the reference, and independence of the batch."""

import dataclasses

import pytest
import torch

from contract.zoo import tiny
from looplab.audit.runner import Runner
from looplab.interop.scoring import Batching, Request, score, shared_applications
from looplab.recurrence.exit import FixedExit, LatentExit
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward
from looplab.recurrence.state import standard_noise
from tolerances import EVAL_SCORES

ALL = Batching()


def requests(model, count=9, seed=0):
    """Ragged requests over the model's vocabulary."""
    random = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (), generator=random))
        return tuple(torch.randint(0, model.spec.vocab[0], (length,), generator=random).tolist())

    return [Request(ids(1, 9), ids(1, 5), item=100 + i) for i in range(count)]


def plans(model, depths):
    return {depth: model.spec.plan(depth) for depth in depths}


def by_hand(model, request, depth, seed=0):
    """Log-likelihood of one continuation, from one row and the logits of all its tokens."""
    tokens = torch.tensor([request.context + request.continuation])
    noise = None
    if model.spec.noise_width:
        noise = standard_noise(seed, [request.item], torch.arange(tokens.shape[1])[None], model.spec.noise_width)
    with torch.no_grad():
        logits = forward(model, tokens, num_steps=depth, noise=noise).logits[0].double()
    logprobs, first = logits.log_softmax(-1), len(request.context) - 1
    places = range(first, first + len(request.continuation))
    total = sum(float(logprobs[p, t]) for p, t in zip(places, request.continuation, strict=True))
    return total, all(int(logits[p].argmax()) == t for p, t in zip(places, request.continuation, strict=True))


@pytest.mark.parametrize("name", ["tiny-core", "tiny-layer-loop", "tiny-loopformer", "tiny-two-level"])
def test_scores_are_those_of_one_row_at_one_depth(name):
    model = tiny(name, dtype=torch.float32)
    depths = (1, 2) if name in ("tiny-layer-loop", "tiny-two-level") else (1, 2, 4)
    asked = requests(model)
    found = score(Runner(model), asked, plans(model, depths), batching=ALL)
    for depth in depths:
        for request, got in zip(asked, found[depth], strict=True):
            logprob, greedy = by_hand(model, request, depth)
            assert got.logprob == pytest.approx(logprob, abs=EVAL_SCORES["atol"])
            assert got.greedy == greedy


def test_greedy_says_whether_every_token_is_the_likeliest():
    model = tiny("tiny-ouro", dtype=torch.float32)
    context, said = (5, 6, 7), []
    for _ in range(3):
        with torch.no_grad():
            said.append(int(forward(model, torch.tensor([[*context, *said]]), num_steps=2).logits[0, -1].argmax()))
    wrong = (*said[:2], (said[2] + 1) % 64)
    found = score(
        Runner(model), [Request(context, tuple(said)), Request(context, wrong)], plans(model, (2,)), batching=ALL
    )
    assert [one.greedy for one in found[2]] == [True, False]


def test_depths_1_2_4_8_cost_8_applications_and_read_scored_tokens_alone():
    model, ledger = tiny("tiny-core", dtype=torch.float32), Ledger()
    asked = requests(model)
    score(Runner(model), asked, plans(model, (1, 2, 4, 8)), batching=ALL, ledger=ledger)
    assert ledger.launches == 8
    assert ledger.row_applications == 8 * len(asked)
    assert ledger.head_tokens == 4 * sum(len(request.continuation) for request in asked)
    assert ledger.readouts == 4 * len(asked)
    assert shared_applications(plans(model, (1, 2, 4, 8))) == (8, 15)


def test_a_grid_of_steps_of_its_own_is_run_by_itself():
    """One, two and four equal steps to the same end share no application."""
    model, ledger = tiny("tiny-loopformer", dtype=torch.float32), Ledger()
    score(Runner(model), requests(model), plans(model, (1, 2, 4)), batching=ALL, ledger=ledger)
    assert ledger.launches == 7 == shared_applications(plans(model, (1, 2, 4)))[0]


@pytest.mark.parametrize("name", ["tiny-core", "tiny-loopformer"])
def test_a_list_of_depths_equals_separate_runs_bit_for_bit(name):
    model = tiny(name, dtype=torch.float32)
    asked = requests(model)
    together = score(Runner(model), asked, plans(model, (1, 3, 4)), batching=ALL)
    for depth in (1, 3, 4):
        assert score(Runner(model), asked, plans(model, (depth,)), batching=ALL)[depth] == together[depth]


@pytest.mark.parametrize("batching", [Batching(size=1), Batching(size=2), Batching(tokens=20)], ids=str)
def test_scores_do_not_depend_on_batches_or_on_order(batching):
    model = tiny("tiny-core", dtype=torch.float32)
    assert model.spec.noise_width, "the start must be random, or the test shows less"
    asked = requests(model)
    wanted = score(Runner(model, seed=3), asked, plans(model, (1, 4)), batching=ALL)
    order = [4, 0, 8, 2, 6, 1, 7, 3, 5]
    shuffled = score(Runner(model, seed=3), [asked[i] for i in order], plans(model, (1, 4)), batching=batching)
    for depth in (1, 4):
        for place, index in enumerate(order):
            assert shuffled[depth][place].logprob == pytest.approx(
                wanted[depth][index].logprob, abs=EVAL_SCORES["atol"]
            )
    other = score(Runner(model, seed=4), asked, plans(model, (4,)), batching=ALL)
    assert other[4][0].logprob != pytest.approx(wanted[4][0].logprob, abs=1e-3)


def test_batches_are_sorted_by_length_and_hold_what_they_may():
    assert list(Batching(size=2).split([3, 9, 5, 1], ragged=True)) == [[1, 2], [0, 3]]
    assert list(Batching(tokens=10).split([3, 9, 5, 1], ragged=True)) == [[1], [2, 0], [3]]
    assert list(Batching(tokens=2).split([3, 3], ragged=True)) == [[0], [1]], "a row longer than a launch runs alone"
    assert list(Batching().split([2, 3, 2], ragged=False)) == [[1], [0, 2]]


@pytest.mark.parametrize("option", ["size", "tokens"])
def test_a_batch_of_nothing_is_refused(option):
    with pytest.raises(ValueError, match=f"batch_{option} must be at least 1. Got 0"):
        Batching(**{option: 0})


@pytest.mark.parametrize("sides", [frozenset({"left"}), frozenset()], ids=["left", "none"])
def test_rows_are_padded_only_where_the_model_takes_it(sides):
    model = tiny("tiny-core", dtype=torch.float32)
    asked = requests(model)
    wanted = score(Runner(model), asked, plans(model, (2,)), batching=ALL)
    model.spec = dataclasses.replace(model.spec, padding=sides)
    found = score(Runner(model), asked, plans(model, (2,)), batching=ALL)
    assert [one.logprob for one in found[2]] == pytest.approx([one.logprob for one in wanted[2]], abs=1e-5)


def test_equal_inputs_are_run_once():
    model, ledger = tiny("tiny-ouro", dtype=torch.float32), Ledger()
    asked = [Request((1, 2, 3), (choice,), item=choice) for choice in (4, 5, 6, 7)]
    found = score(Runner(model), asked, plans(model, (4,)), batching=ALL, ledger=ledger)
    assert ledger.row_applications == 4, "one row of three tokens"
    for request, got in zip(asked, found[4], strict=True):
        assert got.logprob == pytest.approx(by_hand(model, request, 4)[0], abs=EVAL_SCORES["atol"])


def test_items_of_a_noisy_model_are_not_mixed_up():
    model = tiny("tiny-core", dtype=torch.float32)
    asked = [Request((1, 2, 3), (4,), item=item) for item in (7, 8)]
    first, second = score(Runner(model), asked, plans(model, (1,)), batching=ALL)[1]
    assert first.logprob != second.logprob


def test_zero_noise_starts_at_the_mean():
    model = tiny("tiny-core", dtype=torch.float32)
    request = Request((1, 2, 3), (4,), item=7)
    (found,) = score(Runner(model, zero_noise=True), [request], plans(model, (1,)), batching=ALL)[1]
    with torch.no_grad():
        logits = forward(model, torch.tensor([[1, 2, 3]]), num_steps=1, noise=torch.zeros(1, 3, 32)).logits[0, -1]
    assert found.logprob == pytest.approx(float(logits.double().log_softmax(-1)[4]), abs=EVAL_SCORES["atol"])


def test_under_an_exit_rule_every_token_is_read_at_its_own_step():
    model = tiny("tiny-core", dtype=torch.float32)
    asked = requests(model)
    wanted = score(Runner(model), asked, plans(model, (2,)), batching=ALL)[2]
    found = score(
        Runner(model), asked, plans(model, (4,)), batching=ALL, exit_rule=FixedExit(num_steps=2), num_steps=4
    )[4]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in wanted], abs=EVAL_SCORES["atol"])
    assert {one.steps for one in found} == {2.0}
    early = score(
        Runner(model), asked, plans(model, (4,)), batching=ALL, exit_rule=LatentExit(threshold=1e9), num_steps=4
    )
    assert all(one.steps is not None and one.steps < 4 for one in early[4])
