"""Which prompts are read, in which pieces, and who waits for what."""

import pytest

from engine.hash_world import World


def world(rule="last_exited", **sizes):
    return World(rule, **{"prefix_cache": False, "stops": False, **sizes})


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    """Worlds note what is read."""
    plain = World.__init__

    def noting(made, *args, **sizes):
        plain(made, *args, **sizes)
        made.pieces, read = [], made.runner.prefill

        def prefill(launch):
            made.pieces.append([(made.runner.seats[s.seat][0].job.request, s.start, s.stop) for s in launch])
            return read(launch)

        made.runner.prefill = prefill

    monkeypatch.setattr(World, "__init__", noting)


def first_admitted(made):
    return [name for launch in made.pieces for name, start, _ in launch if start == 0]


def test_prompts_are_cut_on_a_grid_whatever_the_load():
    for others in (0, 3):
        made = world(chunk=8, token_budget=16)
        made.submit([1] * 19, limit=1)
        for _ in range(others):
            made.submit([2] * 5, limit=1)
        made.drain()
        assert [piece[1:] for launch in made.pieces for piece in launch if piece[0] == "r0"] == [
            (0, 8),
            (8, 16),
            (16, 19),
        ]


def test_a_launch_packs_pieces_up_to_the_budget_and_one_of_each_prompt():
    made = world(chunk=8, token_budget=16)
    for length in (20, 6, 6):
        made.submit([length] * length, limit=1)
    made.drain()
    assert made.pieces[0] == [("r0", 0, 8), ("r1", 0, 6)]
    assert made.pieces[1] == [("r0", 8, 16), ("r2", 0, 6)]


def test_a_prompt_under_way_waits_for_its_last_piece():
    made = world(chunk=8, token_budget=16, delay=3)
    made.submit([1] * 16, limit=1)
    made.tick()
    assert len(made.pieces) == 1 and made.scheduler.admission.pieces(decoding=0, stalled=0, rows_ready=False) == []
    made.drain()


def test_the_line_goes_by_class_then_by_arrival():
    made = world(max_resident=1, launch_rows=1)
    for priority in (5, 9, 0, 5):
        made.submit([1], limit=1, priority=priority)
    made.drain()
    assert first_admitted(made) == ["r2", "r0", "r3", "r1"]


def test_a_prompt_waits_for_free_seats_while_others_decode():
    for least, expected in ((1, ["prefill", "core"]), (2, ["core", "core"])):
        made = world(max_resident=3, launch_rows=3, min_free_seats=least)
        for _ in range(2):
            made.submit([1], limit=9, rate=0)
        made.tick()
        made.tick()
        made.submit([2], limit=1)
        made.launches.clear()
        made.tick()
        made.tick()
        assert [launch.stage for launch in made.launches if launch.stage != "encode"] == expected
        made.drain()


def test_a_prompt_waits_while_few_pages_are_left_for_those_that_decode():
    for margin, expected in ((0.0, 1), (0.9, 0)):
        made = world(pages=12, free_page_margin=margin)
        made.submit([1] * 8, limit=9, rate=0)
        made.tick()
        made.tick()
        made.submit([2], limit=1)
        made.tick()
        assert len(made.pieces) - 1 == expected
        made.drain()


def crowded(bypass):
    """One that decodes, a large one that lacks pages, small ones behind it."""
    made = world(pages=10, max_bypass=bypass, free_page_margin=0.0, max_resident=5)
    made.submit([1] * 4, limit=13, rate=0)
    made.tick()
    made.submit([2] * 34, limit=1)
    for _ in range(3):
        made.submit([3], limit=1)
    made.drain()
    return first_admitted(made)


def test_smaller_requests_overtake_one_that_lacks_pages_but_not_too_many():
    assert crowded(2) == ["r0", "r2", "r3", "r1", "r4"]
    assert crowded(0) == ["r0", "r1", "r2", "r3", "r4"]


def test_nobody_new_is_admitted_between_a_preemption_and_the_next_end():
    made = world(pages=9, max_resident=4, launch_rows=4, free_page_margin=0.0)
    for number in range(3):
        made.submit([number, 1, 2], limit=24, rate=0)
    while not made.scheduler.admission.preempted:
        made.tick()
    made.submit([7], limit=1)
    while made.scheduler.admission.preempted:
        assert "r3" not in first_admitted(made)
        made.tick()
    made.drain()
    names = first_admitted(made)
    assert names.index("r3") > names.index("r2", names.index("r2") + 1), "a choice on its return goes first"


# Prefixes.


def hits(made, prompt, **request):
    before = made.scheduler.stats().cached_tokens
    made.submit(prompt, **{"limit": 1, **request})
    made.drain()
    return made.scheduler.stats().cached_tokens - before


@pytest.mark.parametrize(
    ("rule", "numerics", "expected"),
    [("last_exited", "fast", 12), ("last_exited", "exact", 8), ("first", "fast", 8), ("single", "fast", 8)],
)
def test_a_prefix_is_used_up_to_a_page_or_to_a_line_of_the_grid(rule, numerics, expected):
    made = world(rule, prefix_cache=True, numerics=numerics, chunk=8)
    assert hits(made, [1] * 15) == 0
    assert hits(made, [1] * 15) == expected
    assert hits(made, [1] * 12 + [2] * 3) == expected


def test_one_token_at_least_is_computed():
    made = world(prefix_cache=True)
    hits(made, [1] * 8)
    assert hits(made, [1] * 8) == 4


def test_another_salt_or_depth_shares_nothing():
    made = world(prefix_cache=True)
    hits(made, [1] * 9, steps=4)
    assert hits(made, [1] * 9, salt="other", steps=4) == 0
    assert hits(made, [1] * 9, steps=3) == 0
    assert hits(made, [1] * 9, steps=4) == 8


def test_a_prompt_that_is_read_out_is_computed_whole():
    made = world(prefix_cache=True)
    hits(made, [1] * 9)
    assert hits(made, [1] * 9, logprobs=1) == 0


@pytest.mark.parametrize(("rate", "expected"), [(0, 16), (100, 4)])
def test_what_was_said_at_full_depth_is_a_prefix_for_the_next_turn(rate, expected):
    made = world(prefix_cache=True)
    made.submit([1] * 6, limit=12, rate=rate)
    made.drain()
    said = [token for token, _ in made.said["r0"][0]]
    assert hits(made, [1] * 6 + said) == expected


def test_without_the_cache_nothing_is_kept():
    made = world(prefix_cache=False)
    hits(made, [1] * 9)
    assert hits(made, [1] * 9) == 0 and made.scheduler.stats().cached_pages == 0
