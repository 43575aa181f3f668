"""The engine as a caller sees it: the tokens of decoding alone, whatever else runs, from one thread or many."""

import threading
from dataclasses import replace

import pytest
import torch

from contract.zoo import tiny
from letters import Characters
from looplab.engine.config import EngineConfig
from looplab.engine.engine import Engine, depth_params
from looplab.engine.request import (
    BusyError,
    ChoiceEnded,
    DepthParams,
    RefusedError,
    Request,
    RequestEnded,
    RequestFailed,
    SamplingParams,
    TokenSaid,
)
from looplab.engine.stats import check_ledger
from looplab.models.base import PRESETS, build
from looplab.models.ouro import config_of
from looplab.recurrence.exit import HazardExit, LatentExit, forward_until
from looplab.recurrence.kv import CopyLast, DepthIndexed
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.state import standard_noise
from tolerances import FAST

PROMPTS = [(5, 6, 7), (9,), (3, 1, 4, 1, 5, 9, 2), (8, 8), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


def model_of(name):
    return tiny(name, dtype=torch.float32)


def engine_of(name="tiny-core", *, tokenizer=None, **options):
    sizes = {"launch_rows": 3, "num_pages": 64, "min_coda_rows": 1} | options
    return Engine(model_of(name), tokenizer or Characters(), EngineConfig(**sizes))


def logits_of(model, text, depth=None):
    """Of the whole text, from the first states that the engine draws."""
    ids, width = torch.tensor([text]), model.spec.noise_width
    noise = standard_noise(0, [0], torch.arange(len(text))[None], width) if width else None
    with torch.no_grad():
        return forward(model, ids, num_steps=depth, noise=noise).logits[0]


def by_hand(model, prompt, tokens=5, depth=None):
    """Greedy tokens by running the whole text again for each."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(int(logits_of(model, text, depth)[-1].argmax()))
    return tuple(text[len(prompt) :])


def drained(handle):
    events = list(handle)
    return events, [event.token for event in events if isinstance(event, TokenSaid)]


@pytest.mark.parametrize("name", ["tiny-core", "tiny-ouro", "tiny-layer-loop", "tiny-blocks", "tiny-dense"])
def test_greedy_answers_are_those_of_full_recomputation(name):
    engine = engine_of(name)
    found = engine.generate(PROMPTS, GREEDY)
    assert [one.tokens for one in found] == [by_hand(engine.model, prompt) for prompt in PROMPTS]
    check_ledger(engine.stats())
    assert engine.stats().active_pages == 0


@pytest.mark.parametrize("kv_rule", ["last_exited", "first", "single", "first_then_shared(2)"])
def test_a_cached_prefix_is_read_as_a_cold_run_reads_it(kv_rule):
    sizes = {"kv_rule": kv_rule, "page_tokens": 4, "prefill_chunk": 8}
    prompt = tuple(range(20, 35))
    sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)
    warm, colds = engine_of("tiny-ouro", **sizes), engine_of("tiny-ouro", prefix_cache=False, **sizes)
    (said,) = warm.generate([(*prompt[:13], 1)], GREEDY)
    # What another prompt left, and what the output of one left.
    for text in (prompt, (*prompt[:13], 1, *said.tokens[:4], 2)):
        (cold,) = colds.generate([text], sampling)
        (hit,) = warm.generate([text], sampling)
        assert hit.usage.cached_tokens >= 8
        assert hit.tokens == cold.tokens
        found, expected = ([one.logprob for one in each.logprobs] for each in (hit, cold))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **FAST)


def test_a_first_token_counts_the_steps_of_all_blocks():
    (one,) = engine_of("tiny-blocks").generate([PROMPTS[0]], GREEDY)
    assert one.depths == (8,) * 5


def sliding_ouro():
    """By the settings of a published file, all of whose layers see the last 5 positions."""
    facts = {
        "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24,
        "vocab_size": 61, "total_ut_steps": 3, "max_position_embeddings": 64,
        "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2,
    }  # fmt: skip
    return config_of(facts, {})


def sliding_core():
    config = PRESETS["tiny-core"]()
    return replace(config, attention=replace(config.attention, window=3))


@pytest.mark.parametrize("config", [sliding_ouro, sliding_core])
def test_layers_that_see_a_window_read_no_further_back(config):
    model, prompts = build(config(), seed=4, dtype=torch.float32), [PROMPTS[2], PROMPTS[4]]
    sizes = EngineConfig(launch_rows=2, num_pages=64, min_coda_rows=1, page_tokens=4, prefill_chunk=8)
    found = Engine(model, Characters(), sizes).generate(prompts, GREEDY)
    assert [one.tokens for one in found] == [by_hand(model, prompt) for prompt in prompts]


def test_a_model_that_the_transformers_library_runs_is_refused():
    model = model_of("tiny-dense")
    model.ragged_cache = False
    with pytest.raises(ValueError, match="is run by the transformers library.*Serve another model"):
        Engine(model, Characters(), EngineConfig(num_pages=8))


def test_requests_of_different_depths_share_launches():
    engine = engine_of("tiny-core", launch_rows=8)
    handles = [
        engine.submit(Request(tokens=prompt, sampling=GREEDY, depth=DepthParams(num_steps=depth)))
        for depth, prompt in zip((1, 2, 3, 4, 2), PROMPTS, strict=True)
    ]
    while engine._live or not engine._inbox.empty():
        engine.step()
    said = [tuple(drained(handle)[1]) for handle in handles]
    wanted = [by_hand(engine.model, p, depth=d) for d, p in zip((1, 2, 3, 4, 2), PROMPTS, strict=True)]
    assert said == wanted
    assert engine.stats().launches["core"] < sum((1, 2, 3, 4, 2)) * 4


def test_a_rule_stops_tokens_and_the_usage_says_where():
    engine = engine_of("tiny-ouro")
    (one,) = engine.generate(
        [PROMPTS[0]], SamplingParams(max_tokens=8, temperature=0.0), depth=HazardExit(threshold=0.5)
    )
    assert len(one.tokens) == 8
    depth = one.usage.depth
    assert depth.exit_rule == "hazard" and depth.threshold == 0.5 and depth.kv_rule == "last_exited"
    assert depth.decode_tokens == 7 and sum(count for _, count in depth.histogram) == 7
    assert depth.applications == sum(steps * count for steps, count in depth.histogram) == sum(one.depths[1:])
    assert depth.full_depth_applications == 7 * 4
    assert 0 < depth.saved_flops_fraction < 1
    assert any("looplab reuse" in text for text in depth.warnings)


def test_exits_are_those_of_one_row_alone():
    engine = engine_of("tiny-ouro", launch_rows=4)
    found = engine.generate(PROMPTS, GREEDY, depth=LatentExit(threshold=0.6))
    model, rule = engine.model, DepthIndexed(missing=CopyLast())
    for prompt, one in zip(PROMPTS, found, strict=True):
        with torch.no_grad(), pytest.warns(UserWarning, match="not the trained rule"):
            cache = new_cache(model.spec, rows=1, capacity=32, rule=rule)
        with torch.no_grad():
            token = int(forward(model, torch.tensor([prompt]), cache=cache).logits[0, -1].argmax())
            tokens, depths = [token], []
            for _ in range(4):
                out = forward_until(model, torch.tensor([[token]]), LatentExit(threshold=0.6), cache=cache)
                token = int(out.logits[0, -1].argmax())
                tokens.append(token)
                depths.append(int(out.steps[0, 0]))
        assert one.tokens == tuple(tokens)
        assert one.depths[1:] == tuple(depths)


def test_the_same_seed_says_the_same_alone_and_in_a_crowd():
    sampling = SamplingParams(max_tokens=6, temperature=1.0, seed=7)
    alone = engine_of().generate([PROMPTS[2]], sampling)[0]
    crowd = engine_of().generate(PROMPTS, sampling, n=2)
    assert crowd[4].tokens == alone.tokens
    assert crowd[4].choice == 0 and crowd[5].choice == 1
    assert crowd[5].tokens != alone.tokens


def test_a_seed_is_drawn_and_returned_where_none_is_given():
    first = engine_of().generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=1.0))[0]
    again = engine_of().generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=1.0, seed=first.usage.seed))[0]
    assert again.tokens == first.tokens


def test_stop_strings_end_the_text_before_them():
    engine = engine_of()
    whole = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=8, temperature=0.0))[0]
    stop = whole.text[3:5]
    cut = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=8, temperature=0.0, stop=(stop,)))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.reason == "stop" and whole.reason == "length"


def test_the_end_of_text_token_ends_a_text_unless_ignored():
    free = engine_of().generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0.0))[0]
    eos = free.tokens[2]
    engine = engine_of(tokenizer=Characters(eos=eos))
    ended = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0.0))[0]
    first = free.tokens.index(eos)
    assert ended.tokens == free.tokens[: first + 1] and ended.reason == "stop"
    ignored = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))[0]
    assert ignored.tokens == free.tokens and ignored.reason == "length"


def test_log_probabilities_are_of_the_model_for_prompt_and_output():
    engine = engine_of()
    sampling = SamplingParams(max_tokens=2, temperature=0.0, logprobs=2)
    (one,) = engine.generate([PROMPTS[2]], sampling, prompt_logprobs=1)
    text = [*PROMPTS[2], *one.tokens]
    wanted = logits_of(engine.model, text[:-1]).log_softmax(-1)
    assert one.prompt_logprobs[0] is None
    found = [entry.logprob for entry in (*one.prompt_logprobs[1:], *one.logprobs)]
    assert found == pytest.approx([float(wanted[i, token]) for i, token in enumerate(text[1:])], abs=1e-5)
    assert one.logprobs[0].top[0][1] == one.logprobs[0].logprob


def test_threads_submit_and_the_engine_answers_each():
    engine = engine_of(max_resident=4)
    engine.start()
    found = {}

    def ask(number):
        handle = engine.submit(Request(tokens=PROMPTS[number % 5], sampling=GREEDY))
        found[number] = drained(handle)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [by_hand(engine.model, prompt) for prompt in PROMPTS]
    assert all(tuple(found[i][1]) == wanted[i % 5] for i in range(10))
    assert all(
        isinstance(events[-1], RequestEnded) and isinstance(events[-2], ChoiceEnded) for events, _ in found.values()
    )
    assert engine.ready and engine.alive
    assert engine.stats().output_tokens == 50
    assert engine.drain(5.0)
    with pytest.raises(BusyError, match="shutting down"):
        engine.submit(Request(tokens=(1,)))
    engine.close()
    assert not engine.ready


def test_a_cancelled_request_ends_and_leaves_others_alone():
    engine = engine_of()
    first = engine.submit(Request(tokens=PROMPTS[0], sampling=SamplingParams(max_tokens=40, temperature=0.0)))
    second = engine.submit(Request(tokens=PROMPTS[1], sampling=GREEDY))
    for _ in range(8):
        engine.step()
    first.cancel()
    while engine._live:
        engine.step()
    events, _ = drained(first)
    assert events[-1] == RequestFailed(code="cancelled", message="cancelled by the client")
    assert tuple(drained(second)[1]) == by_hand(engine.model, PROMPTS[1])
    first.cancel()
    engine.step()
    assert engine.stats().active_pages == 0


def test_a_request_in_use_and_a_full_queue_are_refused():
    engine = engine_of(max_waiting=2)
    engine.submit(Request(tokens=(1,), id="a"))
    with pytest.raises(RefusedError, match="request id is in use") as error:
        engine.submit(Request(tokens=(1,), id="a"))
    assert error.value.code == "duplicate_request"
    engine.submit(Request(tokens=(1,), id="b"))
    with pytest.raises(BusyError, match="2 requests waiting; retry in 60 s") as busy:
        engine.submit(Request(tokens=(1,), id="c"))
    assert busy.value.code == "queue_full" and busy.value.retry_after == 60
    while engine._live or not engine._inbox.empty():
        engine.step()
    engine.submit(Request(tokens=(1,), id="a"))


def test_a_deadline_ends_a_request():
    now = [0.0]
    engine = Engine(
        model_of("tiny-core"),
        Characters(),
        EngineConfig(launch_rows=2, num_pages=32, min_coda_rows=1),
        clock=lambda: now[0],
    )
    handle = engine.submit(Request(tokens=(1, 2), sampling=SamplingParams(max_tokens=30, temperature=0.0), timeout=2.0))
    for _ in range(12):
        engine.step()
    now[0] = 3.0
    engine.step()
    events, said = drained(handle)
    assert events[-1].code == "deadline_exceeded"
    assert f"{len(said)} of 30 tokens" in events[-1].message


def test_where_the_thread_dies_open_requests_fail(monkeypatch):
    engine = engine_of()
    monkeypatch.setattr(engine.runner, "core", lambda block, rows: 1 / 0)
    engine.start()
    handle = engine.submit(Request(tokens=(1, 2), sampling=GREEDY))
    events, _ = drained(handle)
    assert events[-1].code == "internal" and "division" in events[-1].message
    engine._thread.join()
    assert not engine.alive and not engine.ready
    with pytest.raises(BusyError, match="has stopped"):
        engine.submit(Request(tokens=(1,)))


def test_closing_ends_what_is_open():
    engine = engine_of()
    handle = engine.submit(Request(tokens=(1, 2), sampling=GREEDY))
    engine.close()
    assert drained(handle)[0][-1].code == "not_ready"


@pytest.mark.parametrize(("dies", "code"), [(False, "not_ready"), (True, "internal")])
def test_a_request_taken_in_the_last_tick_of_the_thread_fails_too(dies, code):
    engine = engine_of()
    late = []

    def during_a_tick(event):
        if not late:
            late.append(engine.submit(Request(tokens=(3,), sampling=GREEDY)))
            if dies:
                raise ZeroDivisionError
            engine._stopping = True  # as `close` does from another thread

    engine.submit(Request(tokens=(1, 2), sampling=GREEDY), during_a_tick)
    engine.start()
    engine._thread.join()
    assert late[0]._events.get(timeout=1).code == code
    assert not engine._ids


def test_what_a_depth_may_be():
    assert depth_params(None) == DepthParams()
    assert depth_params(3) == DepthParams(num_steps=3)
    assert depth_params(HazardExit(threshold=0.3)) == DepthParams(exit_rule="hazard", exit_threshold=0.3, min_steps=1)
    with pytest.raises(RefusedError, match=r"num_steps must be in 1\.\.4"):
        engine_of().generate([PROMPTS[0]], GREEDY, depth=9)


def test_it_says_what_it_is():
    said = engine_of("tiny-ouro").describe()
    assert said["kv_rule"] == "last_exited" and "depth_indexed" in said["kv_reason"]
    assert said["launch_rows"] == 3 and said["pages"] == 63 and said["trained_steps"] == "4"
    assert "hazard" in said["exit_rules"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"launch_rows": 8, "max_resident": 4},
            "launch_rows must be at most max_resident, 4. Got 8. Lower it or raise",
        ),
        ({"min_steps": 3, "max_steps": 2}, "min_steps must be at most max_steps, 2. Got 3"),
        ({"max_model_len": 0}, "max_model_len must be at least 1. Got 0. Raise it"),
        ({"exit_delay": -1}, "exit_delay must be at least 0. Got -1"),
        ({"kv_fraction": 0.0}, "kv_fraction must be in \\(0, 1\\]. Got 0.0"),
    ],
)
def test_configurations_that_contradict_themselves_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**sizes)


def test_few_residents_make_narrow_launches():
    assert engine_of(launch_rows=None, max_resident=4).config.launch_rows == 4


def test_recorded_depths_of_several_blocks_are_refused_as_they_are_sums():
    engine = engine_of("tiny-blocks", kv_rule="last_exited")
    with pytest.raises(RefusedError, match="one looped block; got 2: recorded depths are sums"):
        engine.generate([PROMPTS[0]], GREEDY, depth=DepthParams(replay=((3, 1, 2, 2),)))


def test_completions_name_their_requests():
    one, other = engine_of("tiny-core").generate(PROMPTS[:2], GREEDY)
    assert one.request and other.request and one.request != other.request
