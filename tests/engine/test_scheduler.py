"""One tick after the other: what is launched, when, over which rows, and what is said of it.

Texts are checked by the world itself: every answer of the hash model is compared with the one written alone.
"""

import math

import pytest

from engine.hash_runner import HashRunner
from engine.hash_world import World
from looplab.engine.config import EngineConfig
from looplab.engine.lives import _reluctance
from looplab.engine.reports import Finished
from looplab.engine.request import ChoiceEnded, DepthParams, PromptRead, RefusedError, Request, RequestFailed, TokenSaid
from looplab.engine.scheduler import EngineStall, Scheduler
from looplab.engine.stages import Decision

# Annotations are checked where less is launched: in the tests of admission and integrity, and on recorded launches.
pytestmark = pytest.mark.usefixtures("unchecked")

SHALLOW, DEEP = {"rate": 100}, {"rate": 0}
LONG = {"limit": 40}


def world(**sizes):
    return World("last_exited", **{"prefix_cache": False, "stops": False, **sizes})


def stages(made):
    return [launch.stage for launch in made.launches if launch.stage != "encode"]


def ticks(made, count):
    for _ in range(count):
        made.tick()
        made.check()


# The order of launches.


def test_a_request_is_read_walked_and_read_out():
    made = world()
    made.submit([5], limit=2, **DEEP)
    made.drain()
    assert stages(made) == ["prefill", "core", "core", "core", "core", "coda"]
    assert [launch.iterations for launch in made.launches if launch.stage == "core"] == [(0,), (1,), (2,), (3,)]
    kinds = [type(report) for _, report in made.heard]
    assert kinds == [TokenSaid, TokenSaid, ChoiceEnded, Finished]


def test_a_readout_goes_before_a_prompt_and_a_prompt_before_the_core():
    made = world(min_coda_rows=1)
    made.submit([5], limit=3, **SHALLOW)
    made.submit([6], limit=3, **DEEP)
    ticks(made, 2)
    assert stages(made) == ["prefill", "core"] and len(made.scheduler.coda) == 1
    made.submit([7], limit=3)
    ticks(made, 3)
    assert stages(made)[2:] == ["coda", "prefill", "core"]


def test_a_small_readout_waits_while_the_core_has_work():
    made = world(min_coda_rows=2)
    made.submit([5], limit=2, **SHALLOW)
    made.submit([6], limit=2, **DEEP)
    made.drain()
    assert stages(made) == ["prefill", "core", "core", "core", "core", "coda"]
    assert len(made.launches[-1].seats) == 2


def test_a_small_readout_is_flushed_when_nothing_else_runs():
    made = world(min_coda_rows=5)
    made.submit([5], limit=2, **SHALLOW)
    made.drain()
    assert stages(made) == ["prefill", "core", "coda"]


def test_at_most_two_readouts_are_under_way_and_then_the_oldest_is_awaited():
    made, seen = world(delay=9, launch_rows=1, max_resident=4), set()
    for number in range(4):
        made.submit([number], limit=6, **SHALLOW)
    for _ in range(60):
        if not made.scheduler.idle:
            ticks(made, 1)
        seen.add(len(made.scheduler.codas))
    made.drain()
    assert seen == {0, 1, 2}


def test_survivors_go_to_the_head_and_successors_to_the_tail():
    made = world(launch_rows=2, max_resident=3, min_coda_rows=1)
    for token, depth in ((5, SHALLOW), (6, DEEP), (7, DEEP)):
        made.submit([token], limit=3, **depth)
    ticks(made, 4)  # prefill, core of rows 5 and 6, coda of 5, core
    assert stages(made) == ["prefill", "core", "coda", "core"]
    first, second = [launch for launch in made.launches if launch.stage == "core"]
    assert second.seats == (first.seats[1], 2) or second.iterations == (1, 0)
    assert first.seats[0] not in second.seats


def test_rows_of_one_launch_stand_at_different_iterations_unless_they_are_kept_apart():
    for apart, expected in ((False, True), (True, False)):
        made = world(homogeneous_steps=apart)
        for number in range(5):
            made.submit([number], limit=8, rate=40)
        made.drain()
        mixed = [len(set(launch.iterations)) > 1 for launch in made.launches if launch.stage == "core"]
        assert any(mixed) == expected


def test_joining_rows_are_counted_as_refills():
    made = world()
    made.submit([5], limit=2, **DEEP)
    made.submit([6], limit=2, **DEEP)
    made.drain()
    assert made.scheduler.stats().refills == 1, "the first enters an empty queue"


def test_a_wave_takes_no_one_in_until_all_its_rows_are_read_out():
    made = world(refill=False, launch_rows=5, max_resident=5)
    for number in range(4):
        made.submit([number], limit=6, rate=40)
    made.submit([9], limit=6, rate=40)
    made.drain()
    kinds = [launch for launch in made.launches if launch.stage in ("core", "coda")]
    for before, after in zip(kinds, kinds[1:], strict=False):
        if before.stage == after.stage == "core":
            assert set(after.seats) <= set(before.seats) and set(after.iterations) == {before.iterations[0] + 1}
    assert made.scheduler.stats().refills == 0


def test_a_wave_wider_than_a_launch_is_read_out_whole_before_the_next():
    made = world(refill=False, launch_rows=2, max_resident=4)
    for number in range(4):
        made.submit([number], limit=3, **SHALLOW)
    made.drain()
    assert stages(made) == ["prefill", *["core", "core", "coda", "coda"] * 2]


def test_a_whole_plan_runs_in_one_launch():
    made = world(whole=True, max_steps=(3, 2))
    made.submit([5], limit=3, **DEEP)
    made.drain()
    stats = made.scheduler.stats()
    assert stats.launches["core"] == stats.decode_tokens and stats.applications == 5 * stats.decode_tokens


def test_a_row_enters_the_next_block_when_it_leaves_one():
    made = world(max_steps=(2, 3))
    made.submit([5], limit=2, **DEEP)
    made.drain()
    cores = [(launch.block, launch.iterations) for launch in made.launches if launch.stage == "core"]
    assert cores == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,)), (1, (2,))]


# Fairness, by the numbers.


def waits(made):
    """Core launches that a ready row sat out before it left for its readout, the longest."""
    since, longest = {}, 0
    for launch in made.launches:
        if launch.stage == "encode" or launch.stage == "coda":
            since |= dict.fromkeys(launch.seats, 0)
        elif launch.stage == "core":
            for seat in since:
                since[seat] = 0 if seat in launch.seats else since[seat] + 1
                longest = max(longest, since[seat])
    return longest


def crowd(made, depths, *, limit=10):
    for number, depth in enumerate(depths):
        made.submit([number], limit=limit, **depth)
    for _ in range(120):
        if made.scheduler.idle or made.scheduler.admission.line.groups:
            break
        made.tick()
    made.launches.clear()
    while len(made.scheduler.lives.groups) == len(depths):
        made.tick()
    made.launches.pop()  # made in the tick in which the first request ended
    return made


@pytest.mark.parametrize(("rows", "residents"), [(2, 2), (2, 4), (2, 5), (1, 4)])
@pytest.mark.parametrize("depths", [DEEP, SHALLOW, {"rate": 50}])
def test_a_ready_row_waits_no_longer_than_the_bound(rows, residents, depths):
    made = crowd(world(launch_rows=rows, max_resident=residents), [depths] * residents)
    bound = 4 * (math.ceil(residents / rows) - 1)
    longest = waits(made)
    assert longest <= bound
    if depths is DEEP and residents % rows == 0:
        assert longest == bound, "the bound is reached where every row is deep"


def test_at_the_head_successors_let_the_first_rows_keep_the_core():
    tail, head = (
        waits(crowd(world(launch_rows=2, max_resident=4, successors=end, max_steps=(2,)), [DEEP] * 4, limit=30))
        for end in ("tail", "head")
    )
    assert tail <= 2 < 8 <= head


def test_no_more_readouts_follow_each_other_than_residents_fill():
    made = world(launch_rows=2, max_resident=5)
    for number in range(9):
        made.submit([number], limit=12, rate=60)
    made.drain()
    runs = "".join("x" if stage == "coda" else " " for stage in stages(made)).split()
    assert max(map(len, runs)) <= 3


def test_a_stream_of_short_requests_does_not_keep_the_core_from_running():
    made = world(max_resident=4, launch_rows=4, chunk=8, token_budget=16)
    made.submit([1], **LONG, **DEEP)
    ticks(made, 2)
    between, most = 0, 0
    for number in range(40):
        made.submit([2] * 8, limit=1)
        if number % 2:
            ticks(made, 1)
            last = made.launches[-1]
            between = 0 if last.stage == "core" else between + sum(last.iterations) * (last.stage == "prefill")
            most = max(most, between)
    assert most == 16, "one budget of prompt tokens between two launches of the core"
    made.drain()


# Ends.


def test_an_end_seen_late_costs_one_token_at_most():
    made = world(delay=3, stops=True)
    for number in range(12):
        made.submit([number], limit=30, rate=30)
    made.drain()
    stats = made.scheduler.stats()
    stopped = stats.finished["stop"]
    assert stopped and 0 < stats.wasted["late"] <= 4 * stopped


def test_an_end_that_is_seen_at_once_costs_nothing():
    made = world(stops=True)
    for number in range(12):
        made.submit([number], limit=30, rate=30)
    made.drain()
    stats = made.scheduler.stats()
    assert stats.finished["stop"] and not any(stats.wasted.values())


def test_the_last_token_of_a_limit_has_no_successor():
    made = world()
    made.submit([5], limit=3, **SHALLOW)
    made.drain()
    codas = [call[1] for call in made.runner.calls if call[0] == "coda"]
    assert [row.successor for rows in codas for row in rows] == [True, False]


def test_a_cancelled_request_leaves_when_its_launch_is_back():
    made = world(delay=4)
    name = made.submit([5, 6, 7, 8, 9], **LONG, **SHALLOW)
    ticks(made, 8)
    while not made.scheduler.codas:
        ticks(made, 1)
    pages = len(made.scheduler.lives.groups[name].choices[0].table)
    assert made.scheduler.cancel(name)
    made.check()
    stats = made.scheduler.stats()
    assert stats.quarantined_pages == pages and stats.residents == 1 and not stats.active_pages
    assert not made.scheduler.cancel(name), "once is enough"
    made.drain()
    stats = made.scheduler.stats()
    assert stats.discarded_tokens == 1 and stats.failed == {"cancelled": 1} and stats.wasted["cancelled"] > 0


def test_a_request_that_waits_can_be_cancelled():
    made = world(max_resident=3)
    names = [made.submit([number], limit=9) for number in range(5)]
    ticks(made, 1)
    assert made.scheduler.cancel(names[4]) and made.scheduler.waiting == (1, 1)
    made.drain()


def test_a_deadline_ends_a_request_with_what_it_has_said():
    made = world()
    name = made.submit([5], **LONG, **DEEP, timeout=30.0)
    ticks(made, 12)
    made.clock = 29.9
    ticks(made, 1)
    said = len(made.said[name][0])
    made.clock = 30.0
    ticks(made, 1)
    assert made.heard[-1] == (
        name,
        RequestFailed(code="deadline_exceeded", message=f"{said} of 40 tokens after 30 s"),
    )


def test_numbers_that_are_not_finite_end_their_request_alone_and_leave_no_pages():
    made = world(prefix_cache=True)
    names = [made.submit([number] * 9, limit=9, rate=50) for number in range(3)]
    ticks(made, 3)
    made.runner.broken.add(names[1])
    made.drain()
    assert [made.over[name] for name in names] == ["finished", "non_finite", "finished"]
    assert made.scheduler.stats().numeric_errors == 1
    again = made.submit([1] * 9, limit=2)
    made.drain()
    assert made.over[again] == "finished" and made.scheduler.stats().cached_tokens == 0


def test_numbers_that_are_not_finite_in_a_prompt_end_the_request():
    made = world()
    name = made.submit([1] * 20, limit=9)
    made.runner.broken.add(name)
    made.drain()
    assert made.over[name] == "non_finite" and not made.said[name][0]


def test_a_request_for_no_token_reads_its_prompt_only():
    made = world(prefix_cache=True)
    name = made.submit([1] * 9, limit=0, n=2, logprobs=0)
    made.drain()
    kinds = [type(report) for _, report in made.heard]
    assert made.over[name] == "finished" and kinds == [PromptRead, ChoiceEnded, ChoiceEnded, Finished]
    assert all(span.seats == () for _, spans in made.runner.calls if _ == "prefill" for span in spans)


# Choices, pages, preemption.


def test_choices_share_full_pages_and_copy_the_one_that_is_partly_filled():
    made = world()
    made.submit([3] * 6, limit=8, n=3, **DEEP)
    ticks(made, 2)
    tables = [choice.table for choice in made.scheduler.lives.groups["r0"].choices]
    assert len({table[0] for table in tables}) == 1 and len({table[1] for table in tables}) == 3
    assert made.scheduler.stats().active_pages == 4
    made.drain()
    assert len({tuple(said) for said in made.said["r0"]}) == 3, "choices are drawn independently"


def famine(*requests, **sizes):
    """Texts that need 7 pages each, where there are 8 but for the sink; the first is admitted alone."""
    made, made.given_up = world(pages=9, max_resident=4, launch_rows=4, free_page_margin=0.0, **sizes), []
    put_back = made.scheduler.lives._put_back
    made.put_back = []

    def give_up(choice):
        made.put_back.append(choice)
        made.given_up.append(choice.group.request.id)
        put_back(choice)

    made.scheduler.lives._put_back = give_up
    for number, request in enumerate(requests or [DEEP] * 4):
        made.submit([number, 1, 2], limit=24, **request)
        if not number:
            made.tick()
    made.drain()
    return made


@pytest.mark.parametrize(
    ("requests", "first"),
    [
        ([DEEP, DEEP | {"priority": 9}, SHALLOW], "r1"),
        ([DEEP, DEEP, SHALLOW], "r2"),
        ([DEEP, SHALLOW, DEEP], "r1"),
        ([DEEP, DEEP, DEEP], "r2"),
    ],
    ids=["the lowest class", "less to redo", "less to redo, again", "the youngest"],
)
def test_pages_are_taken_from(requests, first):
    made = famine(*requests)
    assert made.given_up[0] == first
    stats = made.scheduler.stats()
    assert stats.preemptions == len(made.given_up) and stats.wasted["replay"] > 0 and stats.replayed_tokens > 0
    assert set(made.over.values()) == {"finished"}


def test_a_choice_that_was_put_back_twice_is_spared_until_it_says_something():
    one, other = famine().put_back[:2]
    for often, first in (((1, 2), one), ((2, 1), other)):
        one.preempted, other.preempted = often
        assert min(one, other, key=_reluctance) is first


def test_pages_are_never_taken_from_the_oldest():
    made = famine(SHALLOW | {"priority": 9}, DEEP, DEEP)
    assert made.given_up and "r0" not in made.given_up


def test_without_preemption_the_youngest_fails_when_all_lack_pages():
    made = famine(preempt="never")
    failed = [name for name, code in made.over.items() if code == "kv_exhausted"]
    assert failed[0] == "r3" and "r0" not in failed and made.scheduler.stats().preemptions == 0


def test_reserved_pages_are_never_missing():
    made = famine(admit="reserve")
    stats = made.scheduler.stats()
    assert stats.preemptions == 0 and set(made.over.values()) == {"finished"}


def test_a_choice_that_came_back_draws_nothing_twice():
    made = famine()
    for name, said in made.said.items():
        assert said[0] == made.truth(name, 0)
    prompts = [span for call in made.runner.calls if call[0] == "prefill" for span in call[1]]
    assert any(span.seats == () for span in prompts), "on the return the first token is known"
    forced = [row for call in made.runner.calls if call[0] == "coda" for row in call[1] if row.forced is not None]
    assert len(forced) == made.scheduler.stats().replayed_tokens
    walked = [row for call in made.runner.calls if call[0] == "core" for row in call[2] if row.depths]
    assert len(walked) == made.scheduler.stats().wasted["replay"], "recorded depths take the place of the rule"
    assert all(choice.preempted == 0 for choice in made.put_back), "a new token ends what protects a choice"


# What is refused.


def test_what_never_fits_is_refused():
    made = world(pages=9)
    with pytest.raises(RefusedError, match=r"needs 9 pages; cache has 8; raise --kv-fraction") as refused:
        made.submit([1], limit=36)
    assert refused.value.code == "kv_too_small"
    with pytest.raises(RefusedError, match="only 5 choices are resident"):
        made.submit([1], limit=1, n=6)


def test_an_id_is_used_once_at_a_time():
    made = world()
    made.submit([1], limit=4)
    made.named = 0
    with pytest.raises(ValueError, match="'r0' is in use"):
        made.submit([1], limit=4)
    made.drain()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"launch_rows": None}, "must be numbers for a scheduler"),
        ({"launch_rows": 6}, "launch_rows must be at most max_resident, 5. Got 6"),
        ({"min_coda_rows": 0}, "min_coda_rows must be at least 1. Got 0"),
        ({"token_budget": 4}, "prefill_chunk must be in 4..4. Got 8"),
        ({"chunk": 6}, "multiple of the page, 4 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        world(**sizes)


class EndlessRunner(HashRunner):
    def core(self, block, rows):
        return [Decision(0)] * len(rows)


def test_a_row_that_never_leaves_its_block_stops_the_engine_with_its_state():
    runner = EndlessRunner("single")
    config = EngineConfig(launch_rows=1, max_resident=1, min_coda_rows=1, page_tokens=4, prefill_chunk=8)
    scheduler = Scheduler(
        config, runner.facts, runner, on_event=lambda *_: None, judge=lambda request, choice, token: None
    )
    scheduler.add(Request(id="a", tokens=(1,)), depth=DepthParams(num_steps=4), seed=0, prefill_steps=4)
    for _ in range(4):
        scheduler.tick()
    with pytest.raises(EngineStall, match="most of block 0") as stall:
        scheduler.tick()
    assert "a/0: decode, seat 0" in str(stall.value)


def test_work_that_nothing_can_run_stops_the_engine_with_its_state():
    made = world()
    made.submit([1], limit=4)
    made.scheduler.seats.free.clear()
    with pytest.raises(EngineStall, match="waiting: \\['r0'\\]"):
        made.tick()


def test_prompt_passes_are_counted_by_computed_tokens_and_steps_of_all_blocks():
    made = World("last_exited", stops=False, max_steps=(4, 2))
    for _ in range(2):  # the second finds two pages of four tokens
        made.submit([1] * 9, limit=1, steps=3)
        made.drain()
    stats = made.scheduler.stats()
    assert stats.cached_tokens == 8 and stats.prefill_tokens == 9 + 1
    assert stats.prefill_applications == 10 * (3 + 2) and stats.applications == 0


def test_an_idle_scheduler_has_nothing_to_do():
    made = world()
    assert made.scheduler.idle and not made.scheduler.tick()
    made.submit([1], limit=1)
    assert not made.scheduler.idle and made.scheduler.tick()
    made.drain()


def test_ends_are_asked_of_the_judge_token_by_token():
    asked = []
    runner = HashRunner("single")
    config = EngineConfig(launch_rows=1, max_resident=2, min_coda_rows=1, page_tokens=4, prefill_chunk=8)
    heard = []
    scheduler = Scheduler(
        config,
        runner.facts,
        runner,
        on_event=lambda name, report: heard.append(report),
        judge=lambda request, choice, token: asked.append(token) or ("stop" if len(asked) == 3 else None),
    )
    scheduler.add(Request(id="a", tokens=(1,)), depth=DepthParams(num_steps=2), seed=0, prefill_steps=4)
    while scheduler.tick():
        pass
    assert [report.token for report in heard if isinstance(report, TokenSaid)] == asked
    assert heard[-2] == ChoiceEnded(choice=0, reason="stop") and heard[-1].histogram == ((2, 2),)
