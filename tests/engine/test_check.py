"""Requests that no load can make right are refused, with the code and the words of the server's table."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.engine.check import CheckFacts, check
from looplab.engine.pages import pages_of_request
from looplab.engine.request import DepthParams, RefusedError, Request, SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")

FACTS = CheckFacts(
    vocab=4096,
    context=1024,
    pages=64,
    page_tokens=16,
    seats=16,
    max_steps=8,
    trained_steps="4",
    exit_rules=("full", "fixed", "hazard", "latent", "argmax"),
    refused_rules=(("kl", "kl needs coda and head every step: bound 0.99x; start with --allow-costly-exit"),),
)


def request(tokens=(1, 2, 3), n=1, depth=None, **sampling):
    return Request(tokens=tuple(tokens), n=n, sampling=SamplingParams(**sampling), depth=DepthParams(**(depth or {})))


def refusal(asked, facts=FACTS):
    with pytest.raises(RefusedError) as error:
        check(asked, facts)
    return error.value.code, str(error.value), error.value.param


SAMPLING = [
    ({"max_tokens": 0}, "invalid_value", "max_tokens must be an integer >= 1; got 0"),
    ({"max_tokens": -3}, "invalid_value", "max_tokens must be an integer >= 1; got -3"),
    ({"max_tokens": 1.5}, "invalid_type", "max_tokens must be an integer >= 1; got 1.5"),
    ({"max_tokens": "16"}, "invalid_type", 'max_tokens must be an integer >= 1; got "16"'),
    ({"max_tokens": True}, "invalid_type", "max_tokens must be an integer >= 1; got true"),
    ({"temperature": 3}, "invalid_value", "temperature must be in [0, 2]; got 3"),
    ({"temperature": math.nan}, "invalid_value", "temperature must be in [0, 2]; got NaN"),
    ({"temperature": 10**400}, "invalid_value", "temperature must be in [0, 2]; got 1000"),
    ({"top_p": 0}, "invalid_value", "top_p must be in (0, 1]; got 0"),
    ({"min_p": 2}, "invalid_value", "min_p must be in [0, 1]; got 2"),
    ({"top_k": -5}, "invalid_value", "top_k must be an integer >= 0; got -5"),
    ({"logprobs": 21}, "invalid_value", "logprobs must be an integer in 0..20; got 21"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty must be a finite number above 0; got 0"),
    ({"repetition_penalty": math.inf}, "invalid_value", "repetition_penalty must be a finite number above 0"),
    ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty must be in [-2, 2]; got 2.5"),
    ({"frequency_penalty": "x"}, "invalid_type", "frequency_penalty must be a number in [-2, 2]"),
    ({"min_tokens": 17}, "invalid_value", "min_tokens must be at most max_tokens, 16; got 17"),
    ({"seed": 2**63}, "invalid_value", "seed must be an integer in"),
    ({"stop": ("a",) * 17}, "invalid_value", "17 stop strings; limit 16"),
    ({"stop": ("a", "b", "")}, "invalid_value", "stop string 2 is empty"),
    ({"logit_bias": ((4096, 1.0),)}, "invalid_value", "logit_bias has token id 4096; vocabulary has 4096"),
    ({"logit_bias": ((5, 100.5),)}, "invalid_value", "logit_bias must be in [-100, 100]; got 100.5"),
    ({"stop_token_ids": (-1,)}, "invalid_value", "stop_token_ids has token id -1; vocabulary has 4096"),
]


@pytest.mark.parametrize(("sampling", "code", "message"), SAMPLING, ids=lambda value: str(value)[:40])
def test_sampling_out_of_range_is_refused(sampling, code, message):
    found, said, param = refusal(request(**sampling))
    assert (found, param) == (code, next(iter(sampling)))
    assert said.startswith(message)


def test_values_at_their_bounds_pass():
    check(request(temperature=0, top_p=1, min_p=1, top_k=0, logprobs=20, presence_penalty=-2, seed=-(2**63)), FACTS)
    check(request(temperature=2, min_p=0, logprobs=0, stop=("a",) * 16, logit_bias=((4095, -100.0),)), FACTS)
    check(request(n=16, max_tokens=8), FACTS)


def test_no_output_is_allowed_where_only_the_prompt_is_to_be_read():
    check(replace(request(max_tokens=0), prompt_logprobs=0), FACTS)
    assert refusal(replace(request(), prompt_logprobs=21))[:1] == ("invalid_value",)


@pytest.mark.parametrize(
    ("tokens", "code", "message"),
    [
        ((), "empty_prompt", "prompt is empty and no token begins a text"),
        ((1, 2, 3, 99999), "invalid_token", "token id 99999 at position 3; vocabulary has 4096"),
        ((-1,), "invalid_token", "token id -1 at position 0; vocabulary has 4096"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(tokens, code, message):
    assert refusal(request(tokens)) == (code, message, "prompt")


def test_what_is_longer_than_the_context_is_refused_with_the_length_that_fits():
    roomy = replace(FACTS, pages=1000)
    said = "500 prompt + 600 output tokens; context 1024; lower max_tokens to 524"
    assert refusal(request([1] * 500, max_tokens=600), roomy) == ("context_length_exceeded", said, "max_tokens")
    check(request([1] * 500, max_tokens=524), roomy)
    assert refusal(request([1] * 1024, max_tokens=1), roomy)[1].endswith("context 1024; shorten the prompt")


def test_what_never_fits_the_cache_is_refused():
    tight = replace(FACTS, context=4096)
    said = "needs 70 pages; cache has 64; raise --kv-fraction or --num-pages"
    assert refusal(request([1] * 100, max_tokens=1020), tight) == ("kv_too_small", said, "max_tokens")
    check(request([1] * 24, max_tokens=1000), tight)
    assert refusal(request([1] * 24, max_tokens=500, n=4), tight)[0] == "kv_too_small"


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_choices_share_the_full_pages_of_their_prompt(prompt, output, choices, page):
    """Slow twin: a set of pages, those of the prompt named alike for all choices; the last token is not kept."""
    pages = set()
    for choice in range(choices):
        for position in range(prompt + output - 1):
            number = position // page
            pages.add((number, None if (number + 1) * page <= prompt else choice))
    assert pages_of_request(prompt, output, choices, page) == len(pages)


def test_choices_and_priorities_are_bounded():
    assert refusal(request(n=17))[1] == "n must be an integer in 1..16; got 17"
    assert refusal(request(n=9), replace(FACTS, seats=8))[1] == "n must be at most 8, the seats; got 9"
    assert refusal(replace(request(), priority=10))[2] == "priority"
    assert refusal(replace(request(), timeout=0.0))[1] == "timeout must be a finite number above 0; got 0.0"
    assert refusal(replace(request(), timeout=math.nan))[2] == "timeout"


DEPTH = [
    ({"num_steps": 0}, "invalid_depth", "num_steps must be in 1..8; trained with 4; got 0"),
    ({"num_steps": 9}, "invalid_depth", "num_steps must be in 1..8; trained with 4; got 9"),
    ({"num_steps": True}, "invalid_depth", "num_steps must be in 1..8; trained with 4; got true"),
    ({"min_steps": 5, "max_steps": 4}, "invalid_depth", "min_steps must be at most max_steps, 4; got 5"),
    ({"num_steps": 3, "exit_rule": "hazard"}, "invalid_depth", "num_steps and exit_rule exclude each other"),
    ({"num_steps": 3, "min_steps": 1}, "invalid_depth", "num_steps and min_steps exclude each other"),
    ({"exit_threshold": 0.5}, "invalid_depth", "exit_threshold needs exit_rule; got none; name one"),
    ({"exit_delay": -1, "exit_rule": "full"}, "invalid_depth", "exit_delay must be an integer >= 0; got -1"),
    ({"num_steps": 3, "replay": ((1,),)}, "invalid_depth", "num_steps and replay exclude each other"),
    ({"replay": ((1,), (2,))}, "invalid_depth", "replay must have depths for every choice, 1; got 2"),
    ({"replay": ((8, 0),)}, "invalid_depth", "replay must be in 1..8; got 0 at token 2 of choice 0"),
    ({"replay": ((9,),)}, "invalid_depth", "replay must be in 1..8; got 9 at token 1 of choice 0"),
    ({"exit_rule": "hazzard"}, "exit_unavailable", "exit_rule hazzard is not loaded; loaded: full, fixed, hazard"),
    (
        {"exit_rule": "kl", "exit_threshold": 0.1},
        "exit_unavailable",
        "kl needs coda and head every step: bound 0.99x; start with --allow-costly-exit",
    ),
    ({"exit_rule": "hazard", "exit_threshold": 1.5}, "invalid_value", "threshold must be in (0, 1]; got 1.5"),
    ({"exit_rule": "hazard", "exit_threshold": 0}, "invalid_value", "threshold must be in (0, 1]; got 0"),
    ({"exit_rule": "hazard"}, "invalid_value", "threshold of hazard must be in (0, 1]; got none"),
    ({"exit_rule": "latent", "exit_threshold": math.inf}, "invalid_value", "threshold must be a finite number above 0"),
    ({"exit_rule": "latent", "exit_threshold": math.nan}, "invalid_value", "threshold must be a finite number above 0"),
    ({"exit_rule": "argmax", "exit_threshold": 1.5}, "invalid_value", "threshold must be an integer >= 1; got 1.5"),
    ({"exit_rule": "full", "exit_threshold": 1}, "invalid_value", "threshold must be left out for full; got 1"),
]


@pytest.mark.parametrize(("depth", "code", "message"), DEPTH, ids=lambda value: str(value)[:40])
def test_depths_that_the_engine_does_not_run_are_refused(depth, code, message):
    found, said, _ = refusal(request(depth=depth))
    assert found == code and said.startswith(message)


def test_depths_that_it_runs_pass():
    for depth in (
        {"num_steps": 8},
        {"exit_rule": "hazard", "exit_threshold": 1},
        {"exit_rule": "latent", "exit_threshold": 30.0, "min_steps": 2, "max_steps": 6, "exit_delay": 1},
        {"exit_rule": "full"},
        {"exit_rule": "argmax", "exit_threshold": 2.0},
        {"replay": ((1, 8),), "max_steps": 4},
    ):
        check(request(depth=depth), FACTS)
    check(request(depth={"exit_threshold": 0.3}), replace(FACTS, default_rule="hazard"))
    check(request(depth={"exit_rule": "hazard"}), replace(FACTS, default_rule="hazard"))


def test_exits_that_the_cache_rule_forbids_are_refused():
    strict = replace(FACTS, exits_refused="depth_indexed forbids exits; use last_exited")
    for depth in ({"exit_rule": "hazard", "exit_threshold": 0.5}, {"replay": ((1, 2),)}):
        said = ("exit_refused", "depth_indexed forbids exits; use last_exited", "exit_rule")
        assert refusal(request(depth=depth), strict) == said
    unloaded = replace(strict, exit_rules=("full",), refused_rules=(("hazard", strict.exits_refused),))
    assert refusal(request(depth={"exit_rule": "hazard", "exit_threshold": 0.5}), unloaded) == said
    check(request(depth={"exit_rule": "full"}), strict)
    check(request(depth={"num_steps": 2}), strict)
