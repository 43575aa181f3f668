"""What a client is told of a request: the scheduler's reports with their text, stops and ends."""

from letters import Characters
from looplab.engine.live import Handle, Live
from looplab.engine.reports import Finished
from looplab.engine.request import (
    ChoiceEnded,
    DepthParams,
    DepthUsage,
    Request,
    RequestEnded,
    RequestFailed,
    SamplingParams,
    TokenSaid,
    Usage,
)


def live(n=1, **sampling):
    request = Request(tokens=(1,), sampling=SamplingParams(**sampling), n=n, id="a")
    one = Live(request, DepthParams(), 4, 0, lambda event: None)
    one.open_texts(Characters(eos=63))
    return one


def said(choice, token):
    return TokenSaid(choice=choice, token=token, text="", steps=1)


def no_usage(live: Live, took: Finished) -> Usage:
    raise AssertionError("only Finished has a usage")


def test_a_token_is_told_with_the_text_it_adds():
    one = live()
    assert one.judge(0, 17, 63) is None
    assert one.event(said(0, 17), no_usage).text == "A"


def test_choices_have_texts_of_their_own():
    one = live(n=2)
    one.judge(0, 17, 63), one.judge(1, 18, 63)
    assert [one.event(said(c, 0), no_usage).text for c in (0, 1)] == ["A", "B"]


def test_what_may_become_a_stop_string_is_held_and_told_at_the_end():
    one = live(stop=("AB",))
    assert one.judge(0, 17, 63) is None
    assert one.event(said(0, 17), no_usage).text == ""
    assert one.event(ChoiceEnded(choice=0, reason="length"), no_usage).text == "A"
    two = live(stop=("AB",))
    two.judge(0, 17, 63)
    assert two.judge(0, 18, 63) == "stop"
    assert two.event(ChoiceEnded(choice=0, reason="stop"), no_usage).text == ""


def test_end_tokens_end_a_text_and_add_nothing_to_it():
    for sampling, token in (({}, 63), ({"stop_token_ids": (5,)}, 5), ({"stop_token_ids": (5,), "ignore_eos": True}, 5)):
        one = live(**sampling)
        assert one.judge(0, token, 63) == "stop"
        assert one.event(said(0, token), no_usage).text == ""
    assert live(ignore_eos=True).judge(0, 63, 63) is None


def test_the_piece_of_one_token_is_not_told_again_with_an_end_token():
    one = live()
    one.judge(0, 17, 63)
    one.judge(0, 63, 63)
    assert one.event(said(0, 63), no_usage).text == ""


def test_a_finished_request_is_told_with_its_usage():
    took = Finished(
        prompt_tokens=1, cached_tokens=0, output_tokens=1, decode_tokens=0, histogram=(), applications=0, preemptions=0
    )
    depth = DepthUsage(
        exit_rule="full", threshold=None, max_steps=4, prefill_steps=4, decode_tokens=0, histogram=(), applications=0,
        full_depth_applications=0, saved_flops_fraction=0.0, kv_rule="single", reuse="unknown",
    )  # fmt: skip
    usage = Usage(prompt_tokens=1, cached_tokens=0, output_tokens=1, depth=depth, seed=0)
    assert live().event(took, lambda one, finished: usage) == RequestEnded(usage=usage)
    assert depth.mean is None


def test_a_handle_waits_for_events_up_to_the_last():
    ended = []
    handle = Handle("a", 3, ended.append)
    events = [said(0, 1), RequestFailed(code="cancelled", message="")]
    for event in (*events, said(0, 2)):
        handle.put(event)
    assert list(handle) == events
    handle.cancel()
    assert ended == ["a"] and handle.seed == 3
