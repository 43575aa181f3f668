"""Batched decoding: equal to running the whole text again for every token, whatever else is in the batch."""

import collections
import dataclasses

import numpy as np
import pytest
import torch

from contract.zoo import tiny
from looplab.audit.runner import Runner
from looplab.interop.decoding import Prompt, Sampling, choose, decode
from looplab.interop.scoring import Batching
from looplab.recurrence.exit import FixedExit, LatentExit
from looplab.recurrence.kv import CopyLast, DepthIndexed, Single
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward
from looplab.recurrence.state import standard_noise

PROMPTS = [Prompt((5, 6, 7), 1, 11), Prompt((9,), 2, 12), Prompt((3, 1, 4, 1, 5, 9, 2), 3, 13), Prompt((8, 8), 4, 14)]


def never(tokens):
    return False


def said(model, prompts=PROMPTS, depth=3, *, tokens=6, batching=None, runner=None, **options):
    sampling = options.pop("sampling", Sampling(max_tokens=tokens))
    found = decode(
        runner or Runner(model),
        prompts,
        model.spec.plan(depth),
        num_steps=depth,
        sampling=sampling,
        ended=options.pop("ended", never),
        batching=batching or Batching(),
        **options,
    )
    return [list(one.tokens) for one in found]


def by_hand(model, prompt, depth, tokens=6, seed=0):
    text = list(prompt.tokens)
    for _ in range(tokens):
        ids, noise = torch.tensor([text]), None
        if model.spec.noise_width:
            noise = standard_noise(seed, [prompt.item], torch.arange(len(text))[None], model.spec.noise_width)
        with torch.no_grad():
            text.append(int(forward(model, ids, num_steps=depth, noise=noise).logits[0, -1].argmax()))
    return text[len(prompt.tokens) :]


@pytest.mark.parametrize("name", ["tiny-core", "tiny-loopformer", "tiny-ouro"])
@pytest.mark.parametrize("depth", [1, 3])
def test_greedy_text_is_that_of_full_recomputation(name, depth):
    model = tiny(name)
    assert said(model, depth=depth) == [by_hand(model, prompt, depth) for prompt in PROMPTS]


@pytest.mark.parametrize("batching", [Batching(size=1), Batching(size=3), Batching(tokens=24)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_what_a_row_says_does_not_depend_on_its_batch(batching, temperature):
    model = tiny("tiny-core")
    sampling = Sampling(max_tokens=6, temperature=temperature)
    wanted = said(model, sampling=sampling)
    order = [2, 0, 3, 1]
    found = said(model, [PROMPTS[i] for i in order], sampling=sampling, batching=batching)
    assert found == [wanted[i] for i in order]


def test_draws_follow_their_seed():
    model, hot = tiny("tiny-ouro"), Sampling(max_tokens=8, temperature=2.0)
    prompts = [Prompt((5, 6, 7), 1, draws) for draws in (1, 2, 1)]
    first, second, third = said(model, prompts, sampling=hot)
    assert first == third != second


def test_a_row_that_has_ended_leaves_the_batch():
    model, ledger = tiny("tiny-ouro"), Ledger()
    whole = said(model, tokens=6)
    stop = whole[0][1]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in whole]
    assert said(model, ended=lambda tokens: tokens[-1] == stop, ledger=ledger) == cut
    assert any(len(row) < 6 for row in cut)
    launched = sum(max(0, len(row) - 1) for row in cut) + len(PROMPTS)
    assert ledger.applications == {0: 3 * launched}


def test_the_end_of_text_ends_a_row_and_is_not_said():
    model = tiny("tiny-ouro")
    whole = said(model)
    eos = whole[1][2]
    assert said(model, eos=eos)[1] == whole[1][: whole[1].index(eos)]


def test_a_model_without_a_cache_runs_its_text_again():
    model = tiny("tiny-core")
    wanted = said(model)
    model.spec = dataclasses.replace(model.spec, kv_rules=())
    assert said(model) == wanted


def test_a_model_that_takes_no_padding_says_the_same():
    model = tiny("tiny-core")
    wanted = said(model)
    model.spec = dataclasses.replace(model.spec, padding=frozenset())
    assert said(model) == wanted


def test_another_cache_rule_is_followed():
    model = tiny("tiny-ouro", seed=3)
    kept, ledger, own = said(model, kv_rule=Single(), tokens=12), Ledger(), Ledger()
    assert len(kept) == len(PROMPTS)
    said(model, kv_rule=Single(), ledger=ledger)
    said(model, ledger=own)
    assert ledger.kv_bytes * 3 == own.kv_bytes, "one slot for three iterations"


def test_a_prefix_of_the_plan_can_be_decoded():
    """Of two blocks: the first three applications, with the cache of the whole plan."""
    model = tiny("tiny-blocks")
    plan = model.spec.plan()[:3]
    found = decode(Runner(model), PROMPTS, plan, sampling=Sampling(max_tokens=4), ended=never, batching=Batching())
    text = list(PROMPTS[0].tokens)
    for _ in range(4):
        with torch.no_grad():
            text.append(int(forward(model, torch.tensor([text]), plan=plan).logits[0, -1].argmax()))
    assert list(found[0].tokens) == text[3:]


def test_under_an_exit_rule_tokens_stop_early_after_a_full_prompt():
    model = tiny("tiny-core")
    rule = DepthIndexed(missing=CopyLast())
    runner, given = Runner(model), {"sampling": Sampling(max_tokens=5), "ended": never, "batching": Batching()}
    plan = model.spec.plan(4)
    full = decode(runner, PROMPTS, plan, num_steps=4, exit_rule=FixedExit(num_steps=4), kv_rule=rule, **given)
    assert [list(one.tokens) for one in full] == said(model, depth=4, tokens=5)
    assert {one.steps for one in full} == {4.0}
    early = decode(runner, PROMPTS, plan, num_steps=4, exit_rule=LatentExit(threshold=1e9), kv_rule=rule, **given)
    assert all(1.0 <= one.steps < 4.0 for one in early)


def test_the_next_token_is_drawn_from_the_softmax():
    logits, random = torch.tensor([1.0, 3.0, 2.0, -1.0]), np.random.default_rng(0)
    drawn = collections.Counter(choose(logits, Sampling(temperature=0.7), random) for _ in range(4000))
    wanted = torch.softmax(logits.double() / 0.7, 0)
    for token in range(4):
        assert drawn[token] / 4000 == pytest.approx(float(wanted[token]), abs=0.03)


@pytest.mark.parametrize(
    ("options", "kept"), [({"top_k": 2}, {1, 2}), ({"top_p": 0.5}, {1}), ({"top_p": 0.85}, {1, 2}), ({"top_k": 1}, {1})]
)
def test_unlikely_tokens_can_be_left_out(options, kept):
    logits, random = torch.tensor([1.0, 3.0, 2.0, -1.0]), np.random.default_rng(0)
    assert {choose(logits, Sampling(temperature=1.0, **options), random) for _ in range(300)} == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_gen_toks must be at least 1. Got 0"),
        ({"temperature": -1.0}, "temperature must be a number >= 0. Got -1.0"),
        ({"top_k": -1}, "top_k must be at least 0. Got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1. Got 0.0"),
    ],
)
def test_impossible_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
