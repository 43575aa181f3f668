"""Guesses change when tokens are said, and never which: the texts of full depth, its log-probabilities and its ledger.

Texts of the hash model are checked by the world itself, against those written one token at a time.
"""

import random
from dataclasses import replace

import pytest
import torch

from contract.zoo import tiny
from engine.hash_world import World, random_schedule
from engine.stage_driver import DelayedRunner
from letters import Characters
from looplab.engine.config import EngineConfig
from looplab.engine.drafts import check_drafts, guess_depths, lanes, refusal, with_drafts
from looplab.engine.engine import Engine
from looplab.engine.integrity import IntegrityError
from looplab.engine.request import DepthParams, RefusedError, Request, SamplingParams, TokenSaid
from looplab.engine.stats import check_ledger

pytestmark = pytest.mark.usefixtures("unchecked")

ALWAYS, NEVER = 100, 0


def world(right, rule="last_exited", **sizes):
    sizes = {"prefix_cache": False, "stops": False, "launch_rows": 8, "max_resident": 8} | sizes
    made = World(rule, **sizes)
    made.runner.right = right
    return made


def one(right, *, limit=11, drafts=(1, 4), steps=4, **sizes):
    """A single request, run to its end."""
    made = world(right, **sizes)
    made.submit([5, 6], limit=limit, steps=steps, drafts=drafts)
    made.drain()
    return made, made.scheduler.stats()


def test_right_guesses_save_launches_and_waste_nothing():
    made, stats = one(ALWAYS)
    _, alone = one(ALWAYS, drafts=None)
    assert stats.draft_rounds == 2 and stats.drafted_tokens == stats.accepted_tokens == 8
    assert stats.applications == alone.applications == 40 and stats.wasted["draft"] == 0
    assert (stats.launches["core"], alone.launches["core"]) == (16, 40), "2 rounds of 4 guesses and 4 steps"
    rows = [len(launch.seats) for launch in made.launches if launch.stage == "core"]
    assert rows[:8] == [1, 1, 1, 1, 5, 5, 5, 1], "guesses go on where they stood; the last one begins anew"


def test_wrong_guesses_cost_what_comes_after_them():
    _, stats = one(NEVER, limit=4)
    assert stats.accepted_tokens == 0 and stats.decode_tokens == 3
    assert stats.drafted_tokens == 2 + 1 and stats.draft_rounds == 2, "no more than may still be said"
    assert stats.applications - stats.chosen == stats.wasted["draft"] > 0


def test_a_round_yields_its_right_guesses_and_one_token_more():
    made = world(NEVER)
    made.submit([5], limit=20, steps=4, drafts=(2, 3))
    for guesses in range(4):
        before = made.scheduler.stats()
        made.runner.right = ALWAYS
        while made.scheduler.stats().drafted_tokens < before.drafted_tokens + guesses:
            made.tick()
        made.runner.right = NEVER
        while made.scheduler.stats().draft_rounds == before.draft_rounds:
            made.tick()
        while made.scheduler.lives.groups["r0"].choices[0].round.guesses:
            made.tick()
        after = made.scheduler.stats()
        assert after.accepted_tokens - before.accepted_tokens == guesses
        assert after.output_tokens - before.output_tokens == guesses + 1 + (guesses == 0)
    made.drain()


@pytest.mark.parametrize("sizes", [{"resumes": False}, {"whole": True}, {"max_steps": (3, 2)}])
def test_where_full_depth_begins_anew_the_steps_of_guesses_are_waste(sizes):
    steps = max(sizes.get("max_steps", (4,)))
    _, stats = one(ALWAYS, steps=steps, **sizes)
    blocks = len(sizes.get("max_steps", (4,)))
    assert stats.accepted_tokens == 8 and stats.wasted["draft"] == 8 * blocks


def test_a_text_may_end_among_right_guesses():
    made = world(ALWAYS, stops=True)
    for number in range(12):
        made.submit([number], limit=40, steps=4, drafts=(1, 5))
    made.drain()
    stats = made.scheduler.stats()
    assert stats.finished["stop"] > 6 and stats.wasted["draft"] > 0 == stats.wasted["late"] == stats.wasted["cancelled"]


def test_guesses_of_some_mix_with_the_steps_of_others():
    made = world(60, launch_rows=4, max_resident=4, min_coda_rows=2)
    for number in range(4):
        made.submit([number], limit=12, steps=4 if number % 2 else 2, drafts=(1, 3) if number < 3 else None)
    made.drain()
    mixed = [launch for launch in made.launches if launch.stage == "core" and len(set(launch.iterations)) > 1]
    assert mixed and any(len(set(launch.seats)) < len(launch.seats) for launch in mixed)


def test_fewer_are_guessed_where_pages_are_short():
    made = world(ALWAYS, pages=5, free_page_margin=0.0)  # 16 tokens
    made.submit([1] * 12, limit=5, steps=4, drafts=(1, 4))
    made.drain()
    assert made.scheduler.stats().draft_rounds == 1
    tight = world(ALWAYS, pages=9, free_page_margin=0.0)
    for number in range(2):
        tight.submit([number] * 12, limit=8, steps=4, drafts=(1, 4))
    tight.drain()
    assert set(tight.over.values()) == {"finished"}
    assert max(tight.scheduler.stats().drafted_tokens, 1) < 2 * 8


def test_a_round_takes_pages_for_its_guesses_and_the_next_one_uses_them():
    made = world(NEVER)
    made.submit([5], limit=20, steps=4, drafts=(1, 5))
    pages = set()
    while not made.scheduler.idle:
        made.tick()
        made.check()
        for choice in made.scheduler.seats.taken.values():
            pages.add((len(choice.output), len(choice.table)))
    assert {(1, 2), (2, 2), (3, 3), (4, 3)} <= pages, "1 token of the prompt, those said, and 5 guesses; 4 to a page"
    assert max(table for _, table in pages) == 5, "20 tokens, as without guesses"


@pytest.mark.parametrize("delay", [0, 3])
def test_a_cancelled_round_leaves_nothing_behind(delay):
    for ticks in range(2 + 2 * delay, 24, 3):
        made = world(ALWAYS, delay=delay, chunk=4)
        name = made.submit([5], limit=40, steps=4, drafts=(2, 3))
        other = made.submit([6], limit=9, steps=4, drafts=(1, 3))
        for _ in range(ticks):
            made.tick()
            made.check()
        made.scheduler.cancel(name)
        made.check()
        made.drain()
        stats = made.scheduler.stats()
        assert made.over[other] == "finished" and stats.wasted["cancelled"] > 0 == stats.wasted["draft"]


def test_a_guess_that_is_not_finite_ends_its_request():
    made = world(ALWAYS)
    name = made.submit([5], limit=40, steps=4, drafts=(1, 3))
    while not made.scheduler.stats().drafted_tokens:
        made.tick()
    made.runner.broken.add(name)
    made.drain()
    assert made.over[name] == "non_finite"


def test_a_failure_takes_back_what_was_to_enter_the_loop_in_the_same_tick():
    made = world(ALWAYS)
    name = made.submit([5], limit=20, n=2, steps=4, drafts=(1, 1))
    poll = made.runner.poll

    def broken(ticket, *, wait):
        first, *others = poll(ticket, wait=wait)
        if made.scheduler.stats().output_tokens == 4:  # the first choice has ended a round, the other one fails
            others = [others[0]._replace(error="bad")]
        return first, *others

    made.runner.poll = broken
    made.drain()
    assert made.over[name] == "non_finite" and made.scheduler.stats().output_tokens == 5


def test_a_choice_that_gave_way_runs_what_it_said_and_guesses_on():
    made = world(80, pages=9, max_resident=4, launch_rows=4, free_page_margin=0.0, delay=1)
    for number in range(3):
        made.submit([number, 1, 2], limit=24, steps=4, drafts=(1, 3))
    made.drain()
    stats = made.scheduler.stats()
    assert stats.preemptions and stats.replayed_tokens and set(made.over.values()) == {"finished"}
    alone = stats.decode_tokens - stats.accepted_tokens - stats.draft_rounds
    assert alone <= 12, f"{alone} tokens were said without guesses"


def test_pages_of_a_text_that_was_guessed_serve_as_a_prefix():
    made = world(60, prefix_cache=True)
    name = made.submit([7] * 5, limit=16, steps=4, drafts=(1, 4))
    made.drain()
    said = [token for token, _ in made.said[name][0]]
    made.submit([7] * 5 + said, limit=6, steps=4, drafts=(1, 4))
    made.drain()
    assert made.scheduler.stats().cached_tokens == 20


@pytest.mark.parametrize("rule", ["depth_indexed", "last_exited", "first"])
def test_random_schedules_of_guesses_say_what_full_depth_says(rule):
    guessed = 0
    for seed in range(8):
        made = random_schedule(random.Random(f"{rule} {seed}").getrandbits(32), 50, rule=rule)
        guessed += made.scheduler.stats().drafted_tokens
    assert guessed > 100


def test_a_round_without_one_of_its_tokens_is_found():
    made = world(ALWAYS)
    made.submit([5], limit=20, steps=4, drafts=(1, 4))
    for _ in range(7):
        made.tick()
    made.scheduler.check_integrity()
    made.scheduler.held.rows.pop()
    with pytest.raises(IntegrityError, match="waits for tokens"):
        made.scheduler.check_integrity()


# What may be asked for.


def refused(depth, **facts):
    facts = {"rule": None, "full_steps": 4, "most_tokens": 4, "default_steps": None, "refused": ""} | facts
    with pytest.raises(RefusedError) as error:
        check_drafts(DepthParams(**depth), **facts)
    return error.value.code, str(error.value)


def test_what_cannot_be_guessed_is_refused():
    assert refused({"draft_steps": 4}) == (
        "invalid_depth",
        "draft_steps must be in 1..3, below the 4 steps of a token, or 0; got 4",
    )
    assert "or 0; got true" in refused({"draft_steps": True})[1]
    assert "must be 0, as a token runs 1 step" in refused({"draft_steps": 1}, full_steps=1)[1]
    assert "draft_tokens must be in 1..4" in refused({"draft_steps": 1, "draft_tokens": 5})[1]
    assert "draft_tokens needs draft_steps" in refused({"draft_tokens": 2})[1]
    assert "hazard may stop them" in refused({"draft_steps": 1}, rule="hazard")[1]
    why = refusal("single", looks_ahead=True, homogeneous_steps=False)
    assert refused({"draft_steps": 1}, refused=why)[0] == "exit_refused" and "use last_exited" in why
    check_drafts(
        DepthParams(draft_steps=0), rule="hazard", full_steps=4, most_tokens=4, default_steps=None, refused=why
    )
    with pytest.raises(ValueError, match="draft_tokens must be at least 1"):
        lanes(EngineConfig(draft_tokens=0))


def test_the_default_stands_back_where_a_request_asks_for_less_or_for_a_rule():
    config = EngineConfig(draft_steps=2)
    for depth, steps in (
        (DepthParams(num_steps=4), 2),
        (DepthParams(num_steps=2), None),
        (DepthParams(exit_rule="hazard", max_steps=4), None),
        (DepthParams(exit_rule="full", max_steps=4), 2),
        (DepthParams(replay=((1,),), max_steps=4), None),
    ):
        assert with_drafts(depth, DepthParams(), config, refused="").draft_steps == steps
    assert with_drafts(DepthParams(num_steps=4), DepthParams(draft_steps=0), config, refused="").draft_steps is None
    assert guess_depths(DepthParams(draft_steps=2), (4, 1)) == (2, 1)


# Real models.

NIGHTLY, MORE = pytest.mark.nightly, ("tiny-layer-loop", "tiny-two-level", "tiny-loopformer", "tiny-huginn")
PROMPTS = [(5, 6, 7), (9,), tuple(range(1, 18))]
SAMPLING = [
    SamplingParams(max_tokens=7, temperature=0.0, logprobs=1, repetition_penalty=1.3),
    SamplingParams(max_tokens=7, temperature=0.7, seed=3, logprobs=1),
    SamplingParams(max_tokens=7, temperature=1.0, seed=4, logprobs=1, frequency_penalty=0.5, min_tokens=4),
]


def engine_of(model, **options):
    sizes = {"launch_rows": 4, "num_pages": 40, "page_tokens": 4, "prefill_chunk": 8, "min_coda_rows": 1} | options
    return Engine(model, Characters(), EngineConfig(**sizes))


def says_the_same(name, *, drafts, **options):
    """Both engines' answers are equal but for rounding; returns the one that guesses, and the largest difference."""
    model = tiny(name, dtype=torch.float32)
    plain, made = (
        engine_of(model, **options),
        engine_of(model, draft_steps=drafts[0], draft_tokens=drafts[1], **options),
    )
    before, after = (engine.generate(PROMPTS, SAMPLING) for engine in (plain, made))
    for a, b in zip(before, after, strict=True):
        assert (a.tokens, a.depths, a.text, a.reason) == (b.tokens, b.depths, b.text, b.reason)
        assert a.usage.depth.drafted_tokens is None and b.usage.depth.drafted_tokens > 0
    check_ledger(made.stats())
    assert made.stats().chosen == plain.stats().chosen
    pairs = [(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True)]
    return made, max(abs(x.logprob - y.logprob) for a, b in pairs for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "kv_rule", ["last_exited", *(pytest.param(r, marks=NIGHTLY) for r in ("first", "depth_indexed"))]
)
def test_under_exact_numerics_guesses_change_no_bit(kv_rule):
    made, difference = says_the_same("tiny-ouro", drafts=(2, 3), numerics="exact", kv_rule=kv_rule)
    assert difference == 0.0 and made.stats().accepted_tokens > 0


@pytest.mark.parametrize("name", ["tiny-blocks", *(pytest.param(name, marks=NIGHTLY) for name in MORE)])
def test_models_of_every_order_say_what_full_depth_says(name):
    _, difference = says_the_same(name, drafts=(1, 3))
    assert difference < 1e-4


@pytest.mark.nightly
def test_late_results_change_nothing():
    model = tiny("tiny-core", dtype=torch.float32)
    asked = replace(SAMPLING[1], max_tokens=8)
    (alone,) = engine_of(model).generate([PROMPTS[0]], asked)
    made = engine_of(model, draft_steps=3)
    made.scheduler.runner = DelayedRunner(made.runner, 2)
    (late,) = made.generate([PROMPTS[0]], asked)
    assert late.tokens == alone.tokens and made.scheduler.runner.refused


def test_an_engine_refuses_guesses_that_it_cannot_confirm():
    model = tiny("tiny-ouro", dtype=torch.float32)
    with pytest.raises(ValueError, match="under single it reads later ones"):
        engine_of(model, draft_steps=1, kv_rule="single")
    with pytest.raises(ValueError, match="hazard may stop them"):
        engine_of(model, draft_steps=1, exit_rule="hazard", exit_threshold=0.5)
    engine = engine_of(model, draft_steps=1)
    with pytest.raises(RefusedError, match=r"draft_steps must be in 1\.\.2"):
        engine.generate([PROMPTS[0]], depth=DepthParams(num_steps=3, draft_steps=3))
    handle = engine.submit(Request(tokens=(5,), sampling=SAMPLING[0], depth=DepthParams(draft_steps=0)))
    while engine._live or not engine._inbox.empty():
        engine.step()
    events = list(handle)
    assert events[-1].usage.depth.drafted_tokens is None and engine.stats().drafted_tokens == 0
    assert sum(isinstance(event, TokenSaid) for event in events) == 7
