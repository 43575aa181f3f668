import dataclasses

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from looplab.data.documents import Document, DocumentSet
from looplab.data.packing import PackedLoader, Packing
from looplab.data.tokenizers import ByteTokenizer
from looplab.models.base import build
from looplab.objectives import Needs, NextToken
from looplab.recurrence import state as states
from looplab.recurrence.depth import FixedDepth, UniformDepth
from looplab.recurrence.gradient import CheckpointApplication, FullBPTT, TruncatedBPTT
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.philox import stream_key
from looplab.training.step import TrainingStep, draw_depth, draw_noise, split
from tolerances import BF16_LOSS, CHUNKED, TWIN
from training.tiny_run import TEXT, core, two_blocks


def loader(document_mask=False):
    packing = Packing(seq_len=12, rows=4, document_mask=document_mask)
    source = DocumentSet("text", (Document(TEXT[:900]), Document("ab"), Document(TEXT[900:])), "hash")
    return PackedLoader([source], ByteTokenizer(), packing, seed=0, vocab_size=259)


def one_step(model, batch, index=0, objective=None, gradient=None, **options):
    objective = objective or NextToken()
    _, plan = draw_depth(model.spec, 0, index)
    noise = draw_noise(model.spec, 0, index, batch)
    noise = None if noise is None else noise.to(next(model.parameters()).dtype)
    step = TrainingStep(model, objective, gradient or FullBPTT(), **options)
    return step, plan, step(batch, plan, noise, objective.counts(batch.labels))


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_the_law_of_the_draws_is_that_of_the_model():
    spec = build(core(trained_depth=UniformDepth(low=2, high=4))).spec
    drawn = [draw_depth(spec, 7, step) for step in range(400)]
    assert {depth for depth, _ in drawn} == {2, 3, 4}
    assert all(len(plan) == depth for depth, plan in drawn)
    law = UniformDepth(low=2, high=4)
    key = stream_key(7, "depth")
    assert [depth for depth, _ in drawn[:50]] == [int(law.draw(key, s, np.zeros(1, np.int64))[0]) for s in range(50)]


def test_another_seed_or_step_is_another_draw():
    spec = build(core()).spec
    first = [draw_depth(spec, 0, step)[0] for step in range(50)]
    assert first == [draw_depth(spec, 0, step)[0] for step in range(50)]
    assert first != [draw_depth(spec, 1, step)[0] for step in range(50)]
    assert len(set(first)) == 4


def test_a_prefix_draw_runs_the_first_applications_of_the_full_plan():
    spec = build(two_blocks()).spec
    plans = {depth: str(plan) for depth, plan in (draw_depth(spec, 0, step) for step in range(60))}
    assert plans == {1: "[0.0]", 2: "[0.0 0.1]", 3: "[0.0 0.1 1.0]", 4: "[0.0 0.1 1.0 1.1]"}


def test_a_draw_of_num_steps_runs_every_block_that_often():
    spec = build(two_blocks(trained_depth=FixedDepth(num_steps=1))).spec
    assert str(draw_depth(spec, 0, 3)[1]) == "[0.0 1.0]"


def test_noise_belongs_to_the_step_and_the_row():
    spec = build(core()).spec
    batch = loader().batch(5)
    noise = draw_noise(spec, 3, 5, batch)
    assert noise.shape == (4, 12, spec.noise_width)
    key = stream_key(3, "noise")
    places = torch.arange(12)[None]
    for row in range(4):
        own = states.standard_noise(key, [states.item_of(5, row)], places, spec.noise_width)
        assert_close(noise[row : row + 1], own, rtol=0, atol=0)
    pieces = torch.cat([draw_noise(spec, 3, 5, piece) for piece in split(batch, 2)])
    assert_close(pieces, noise, rtol=0, atol=0)
    assert draw_noise(build(two_blocks()).spec, 3, 5, batch) is None


@pytest.mark.parametrize("make", [core, two_blocks])
@pytest.mark.parametrize("gradient", [FullBPTT(), TruncatedBPTT(window=2)], ids=str)
def test_it_equals_a_plain_loop(make, gradient):
    model, batch = build(make(), dtype=torch.float64), loader().batch(0)
    depth = next(index for index in range(50) if draw_depth(model.spec, 0, index)[0] == 4)
    _, plan, output = one_step(model, batch, depth, gradient=gradient)
    output.share.backward()
    ours = gradients(model)

    context = model.encode(batch.tokens)
    noise = draw_noise(model.spec, 0, depth, batch)
    state = model.init_state(context, None if noise is None else noise.double())
    for done, (block, iteration) in enumerate(plan):
        if isinstance(gradient, TruncatedBPTT) and done == len(plan) - gradient.window:
            state = state.detach()
        state = model.step(state, context, block, torch.full((4,), iteration))
    logits = model.head(model.coda(state, context))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    assert output.parts.total == pytest.approx(float(loss.detach()), rel=CHUNKED["rtol"])
    assert_close(ours, gradients(model), **TWIN)
    assert float(output.last_squares) / 4 == pytest.approx(float(state.detach().square().mean()))


def test_micro_batches_give_the_loss_and_gradient_of_the_whole():
    model, batch = build(core(), dtype=torch.float64), loader().batch(0)
    step, plan, whole = one_step(model, batch)
    whole.share.backward()
    expected = gradients(model)
    counts = NextToken().counts(batch.labels)
    parts = []
    for piece in split(batch, 4):
        output = step(piece, plan, draw_noise(model.spec, 0, 0, piece).double(), counts)
        output.share.backward()
        parts.append(output.parts)
    assert_close(gradients(model), expected, **CHUNKED)
    assert (parts[0] + parts[1] + parts[2] + parts[3]).total == pytest.approx(whole.parts.total, rel=CHUNKED["rtol"])


def test_the_ledger_counts_what_ran():
    model, batch = build(core(), dtype=torch.float64), loader().batch(0)
    index = next(index for index in range(50) if draw_depth(model.spec, 0, index)[0] == 4)
    depth, plan = draw_depth(model.spec, 0, index)
    ledger = Ledger()
    step = TrainingStep(model, NextToken(), CheckpointApplication(inner=TruncatedBPTT(window=1)))
    noise = draw_noise(model.spec, 0, index, batch).double()
    step(batch, plan, noise, NextToken().counts(batch.labels), ledger=ledger)
    cost, shape = model.spec.cost, {"tokens": 12, "rows": 4}
    assert ledger.applications == {0: 4 * depth}
    assert ledger.flops_forward == cost.forward({0: depth}, **shape)
    assert ledger.flops_backward == cost.backward({0: 1}, **shape)
    assert ledger.flops_recompute == cost.blocks[0].forward(**shape)
    assert (ledger.encoded_tokens, ledger.head_tokens, ledger.readouts) == (48, 48, 4)


def test_an_objective_of_every_state_gets_every_state():
    seen = {}

    class Everywhere(NextToken):
        needs = Needs(states="every")

        def loss(self, rollout, labels):
            seen.update(rollout.states)
            return super().loss(rollout, labels)

    model, batch = build(two_blocks()), loader().batch(0)
    _, plan, output = one_step(model, batch, objective=Everywhere())
    assert list(seen) == list(range(len(plan) + 1))
    assert all(state.requires_grad for state in seen.values())
    _, _, plain = one_step(model, batch)
    assert output.parts.total == plain.parts.total


def test_documents_of_a_row_do_not_see_each_other_if_masked():
    model = build(two_blocks(), dtype=torch.float64)
    batches = loader(document_mask=True)
    batch = next(b for b in map(batches.batch, range(40)) if b.document_ids.amax() > 0)
    row = int((batch.document_ids.amax(dim=1) > 0).nonzero()[0])
    inside = batch.document_ids[row] == 1
    step, plan, _ = one_step(model, batch)

    def loss_of_second(tokens):
        changed = split(batch, 4)[row]
        labels = torch.where(inside, changed.labels, -100)
        changed = dataclasses.replace(changed, tokens=tokens[row : row + 1], labels=labels)
        return step(changed, plan, None, {"ce": 1}).parts.total

    other = batch.tokens.clone()
    other[row][~inside] = 97
    assert (other != batch.tokens).any()
    assert loss_of_second(batch.tokens) == pytest.approx(loss_of_second(other), rel=CHUNKED["rtol"])


def test_bfloat16_stays_near_and_keeps_wide_gradients():
    model, batch = build(two_blocks()), loader().batch(0)
    _, _, wide = one_step(model, batch)
    _, _, narrow = one_step(model, batch, precision="bf16")
    narrow.share.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert narrow.parts.total == pytest.approx(wide.parts.total, rel=BF16_LOSS)
    assert narrow.parts.total != wide.parts.total
