import re

import pytest
import torch

from looplab.recurrence.kv import (
    Anchor,
    Average,
    CopyLast,
    DepthIndexed,
    First,
    Modulo,
    RefuseMissing,
    Single,
    Skip,
)
from looplab.recurrence.plan import CODA, PRELUDE, Plan
from reference.kv import Row
from tolerances import AVERAGED, EXACT

ROWS, HEADS, WIDTH, STEPS, CAPACITY = 3, 2, 4, 4, 16
RULES = {
    "copy": DepthIndexed(missing=CopyLast()),
    "skip": DepthIndexed(missing=Skip()),
    "refuse": DepthIndexed(missing=RefuseMissing()),
    "single": Single(),
    "first": First(),
    "average": Average(),
    "modulo": Modulo(m=2),
    "modulo-3": Modulo(m=3),
    "modulo-9": Modulo(m=9),
    "anchor": Anchor(n=1),
    "anchor-2": Anchor(n=2),
    "anchor-9": Anchor(n=9),
}
SLOTS = {"single": 1, "first": 1, "average": 1, "modulo": 2, "modulo-3": 3, "anchor": 2, "anchor-2": 3}
"""Slots per layer at `STEPS` iterations; all others have one per iteration."""
TWINS = {name: (name.split("-")[0], rule.size) for name, rule in RULES.items()}
every_rule = pytest.mark.parametrize("name", RULES)


def new(name="refuse", rows=ROWS, iterations=None, capacity=CAPACITY, **options):
    return RULES[name].cache(rows=rows, capacity=capacity, iterations=iterations or {0: STEPS}, **options)


def entries(rows, tokens, seed):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, HEADS, tokens, WIDTH, generator=draw) for _ in range(2))


def stage(cache, tokens, valid=None):
    cache.stage((cache.length + torch.arange(tokens)).expand(cache.rows, -1), valid)


def launches(counts, aligned):
    """(iteration of every row, which rows take part) of each launch; `aligned`: at the end, as when training."""
    deepest = int(counts.max())
    for launch in range(deepest):
        iteration = launch - (deepest - counts) if aligned else torch.full_like(counts, launch)
        active = (iteration >= 0) if aligned else counts > launch
        yield iteration.clamp(min=0), active


def call(cache, twins, tokens, counts, seed, *, aligned=False):
    """One forward of `tokens` tokens, checked at every launch against the twins."""
    stage(cache, tokens)
    start = cache.length
    for iteration, active in launches(counts, aligned):
        keys, values = entries(cache.rows, tokens, seed + 100 * int(iteration.max()) + 7 * int(active.sum()))
        uniform = None if len(iteration.unique()) > 1 else int(iteration[0])
        cache.launch(uniform, None if bool(active.all()) else active)
        seen = cache.view(0, 0, iteration).append(keys, values)
        for row in torch.nonzero(active).flatten().tolist():
            for offset in range(tokens):
                twins[row].write(start + offset, int(iteration[row]), (keys[row, :, offset], values[row, :, offset]))
            check(seen, twins[row], row, start, tokens, int(iteration[row]))
    cache.advance(tokens, {0: counts[:, None].expand(-1, tokens)})
    for row, twin in enumerate(twins):
        twin.executed += [int(counts[row])] * tokens


def check(seen, twin, row, start, tokens, iteration):
    keys, values, allowed = seen
    assert keys.shape[2] == start + tokens
    for query in range(tokens):
        for p in range(start + tokens):
            expected = twin.read(p, iteration) if p <= start + query else None
            assert (allowed is None or bool(allowed[row, 0, query, p])) == (expected is not None), (row, query, p)
            if expected is not None:
                bound = AVERAGED if twin.rule == "average" else EXACT
                torch.testing.assert_close(keys[row, :, p], expected[0], **bound)
                torch.testing.assert_close(values[row, :, p], expected[1], **bound)


@every_rule
@pytest.mark.parametrize("aligned", [False, True], ids=["same-iteration", "mixed-iterations"])
def test_a_query_reads_past_tokens_by_the_rule_and_its_own_call_at_its_own_iteration(name, aligned):
    cache, twins = new(name), [Row(*TWINS[name]) for _ in range(ROWS)]
    # Under Refuse a row keeps its depth; otherwise rows stop where they like, some at once.
    fixed = [torch.tensor([2, 4, 3])] * 4
    free = [torch.tensor(c) for c in ([2, 4, 3], [4, 1, 2], [1, 0, 4], [3, 2, 4])]
    for seed, (tokens, counts) in enumerate(zip((3, 1, 2, 1), fixed if name == "refuse" else free, strict=True)):
        call(cache, twins, tokens, counts, seed, aligned=aligned)
    assert cache.length == 7


@every_rule
def test_nothing_that_an_earlier_call_left_behind_is_read(name):
    cache, twins = new(name), [Row(*TWINS[name]) for _ in range(ROWS)]
    everything = torch.full((ROWS,), STEPS)
    call(cache, twins, 2, everything, 0)
    kept = [Row(*TWINS[name]) for _ in range(ROWS)]
    for twin, old in zip(kept, twins, strict=True):
        twin.entries = {(p, t): entry for (p, t), entry in old.entries.items() if p < 1}
        twin.executed = old.executed[:1]
    cache.crop(1)
    less = torch.tensor([STEPS, STEPS, STEPS] if name == "refuse" else [0, 1, 4])
    call(cache, kept, 1, less, 2)
    call(cache, kept, 2, everything, 3)


@every_rule
def test_room_that_is_added_changes_nothing(name):
    cache, twins = new(name), [Row(*TWINS[name]) for _ in range(ROWS)]
    everything, before = torch.full((ROWS,), STEPS), cache.capacity
    assert cache.slots_of(0, 0) is None
    call(cache, twins, 2, everything, 0)
    cache.grow(before + 5)
    call(cache, twins, 2, everything, 1)
    cache.fits(ROWS, before + 1)
    assert cache.capacity == before + 5 and cache.length == 4
    assert all(store.shape[3] == before + 5 for store in cache.slots_of(0, 0))
    with pytest.raises(ValueError, match=f"cache.grow: capacity must be at least {before + 5}. Got {before}."):
        cache.grow(before)


def test_refuse_names_the_token_that_stopped_before():
    cache = new("refuse")
    counts = torch.tensor([4, 2, 4])
    call(cache, [Row("refuse") for _ in range(ROWS)], 2, counts, 0)
    stage(cache, 1)
    cache.launch(2)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "cache: token 0 of row 1 ran 2 iterations; iteration 2 of block 0 is asked for. "
            "Use DepthIndexed(missing=CopyLast()) or Skip()."
        ),
    ):
        cache.view(0, 0, torch.full((ROWS,), 2)).append(*entries(ROWS, 1, 1))
    cache.launch(2, torch.tensor([True, False, True]))  # what an inactive row would read does not matter
    cache.view(0, 0, torch.full((ROWS,), 2)).append(*entries(ROWS, 1, 1))


@every_rule
def test_rows_are_copied_in_the_order_asked_for(name):
    cache, twins = new(name), [Row(*TWINS[name]) for _ in range(ROWS)]
    call(cache, twins, 2, torch.full((ROWS,), STEPS), 0)
    beams = cache.select([2, 0, 2, 1])
    assert (beams.rows, cache.rows) == (4, ROWS)
    copies = [twins[i] for i in (2, 0, 2, 1)]
    separate = []
    for twin in copies:
        separate.append(Row(*TWINS[name]))
        separate[-1].entries, separate[-1].executed = dict(twin.entries), list(twin.executed)
    call(beams, separate, 1, torch.full((4,), STEPS), 5)
    call(cache, twins, 1, torch.full((ROWS,), STEPS), 6)  # the copies share nothing with the original
    cache.reorder(torch.tensor([1, 2, 0]))
    call(cache, [twins[i] for i in (1, 2, 0)], 1, torch.full((ROWS,), STEPS), 7)


def test_reordering_inside_readonly_stays_readonly():
    cache = new()
    call(cache, [Row("refuse") for _ in range(ROWS)], 1, torch.full((ROWS,), STEPS), 0)
    with cache.readonly():
        cache.reorder(torch.tensor([1, 0, 2]))
        stage(cache, 1)
        cache.advance(1, {0: torch.full((ROWS, 1), STEPS)})
        assert cache.length == 1


def test_readonly_drops_the_call_and_forgets_its_padding():
    cache = new()
    call(cache, [Row("refuse") for _ in range(ROWS)], 2, torch.full((ROWS,), STEPS), 0)
    before = cache.nbytes
    with cache.readonly():
        stage(cache, 1, torch.tensor([[True], [False], [True]]))
        assert cache.padded
        cache.advance(1, {0: torch.full((ROWS, 1), STEPS)})
    assert (cache.length, cache.padded, cache.nbytes) == (2, False, before)


def test_padding_is_seen_by_nobody_but_itself():
    cache = new()
    valid = torch.tensor([[False, True, True], [True, True, False], [True, True, True]])
    stage(cache, 3, valid)
    cache.launch(0)
    allowed = cache.view(0, 0, torch.zeros(ROWS, dtype=torch.long)).append(*entries(ROWS, 3, 0))[2]
    assert allowed[0, 0].tolist() == [[True, False, False], [False, True, False], [False, True, True]]
    assert allowed[1, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_prelude_and_coda_have_one_slot_that_every_row_writes():
    cache = new("single", iterations={0: 2, 1: 3})
    stage(cache, 2)
    for block in (PRELUDE, CODA):
        cache.launch(1, torch.tensor([False, False, False]))
        keys, values = entries(ROWS, 2, block + 9)
        seen = cache.view(block, 0, None).append(keys, values)
        torch.testing.assert_close(seen[0], keys, **EXACT)
        torch.testing.assert_close(seen[1], values, **EXACT)


def test_one_new_token_needs_no_mask_and_several_get_a_lower_right_one():
    cache = new()
    call(cache, [Row("refuse") for _ in range(ROWS)], 2, torch.full((ROWS,), STEPS), 0)
    stage(cache, 1)
    cache.launch(0)
    assert cache.view(0, 0, torch.zeros(ROWS, dtype=torch.long)).append(*entries(ROWS, 1, 1))[2] is None
    stage(cache, 2)
    allowed = cache.view(0, 0, torch.zeros(ROWS, dtype=torch.long)).append(*entries(ROWS, 2, 1))[2]
    assert allowed[0, 0].tolist() == [[True, True, True, False], [True, True, True, True]]


def test_a_view_knows_the_positions_of_what_it_returned():
    cache = new()
    cache.stage(torch.tensor([[0, 1], [5, 6], [2, 3]]), None)
    cache.launch(0)
    view = cache.view(0, 0, torch.zeros(ROWS, dtype=torch.long))
    view.append(*entries(ROWS, 2, 0))
    assert view.positions.tolist() == [[0, 1], [5, 6], [2, 3]]


@every_rule
def test_bytes_are_those_of_the_tokens_held(name):
    cache = new(name, dtype=torch.bfloat16)
    call_bytes = ROWS * SLOTS.get(name, STEPS) * 2 * HEADS * WIDTH * 2
    assert cache.nbytes == 0
    stage(cache, 3)
    for t in range(STEPS):
        cache.launch(t)
        cache.view(0, 0, torch.full((ROWS,), t)).append(*entries(ROWS, 3, t))
    cache.advance(3, {0: torch.full((ROWS, 3), STEPS)})
    assert cache.nbytes == 3 * call_bytes
    cache.crop(2)
    assert cache.nbytes == 2 * call_bytes


def test_only_depth_indexed_without_missing_entries_is_exact():
    assert [name for name, rule in RULES.items() if rule.exact] == ["refuse"]
    assert str(Single()) == "Single()"
    assert str(DepthIndexed()) == "DepthIndexed(Refuse())"


@every_rule
def test_a_call_that_never_ended_leaves_nothing_behind(name):
    cache, twins = new(name), [Row(*TWINS[name]) for _ in range(ROWS)]
    call(cache, twins, 2, torch.full((ROWS,), STEPS), 0)
    with cache.readonly():
        stage(cache, 3)
        for t in range(2):
            cache.launch(t)
            cache.view(0, 0, torch.full((ROWS,), t)).append(*entries(ROWS, 3, 40 + t))
        cache.advance(3, {0: torch.full((ROWS, 3), 2)})
    call(cache, twins, 1, torch.full((ROWS,), STEPS), 1)
    call(cache, twins, 1, torch.full((ROWS,), STEPS), 2)


def test_means_are_summed_in_float32_whatever_the_cache_stores():
    cache = new("average", iterations={0: 64}, dtype=torch.bfloat16)
    stage(cache, 1)
    written = [entries(ROWS, 1, t)[0].bfloat16() for t in range(64)]
    for t, keys in enumerate(written):
        cache.launch(t)
        cache.view(0, 0, torch.full((ROWS,), t)).append(keys, keys)
    cache.advance(1, {0: torch.full((ROWS, 1), 64)})
    held, _ = cache.storage(0, 0, written[0])
    expected = torch.stack(written).float().mean(0).bfloat16()
    torch.testing.assert_close(held[0, :, :, :1], expected, **EXACT)


def test_a_rule_with_a_number_is_allowed_with_every_number():
    assert Modulo(m=1).allows(Modulo(m=4)) and Anchor(n=1).allows(Anchor(n=8))
    assert not Modulo(m=1).allows(Anchor(n=1))
    assert Single().allows(Single()) and not Single().allows(First())
    assert not DepthIndexed().allows(DepthIndexed(missing=Skip()))
    assert (str(Modulo(m=4)), str(Anchor(n=8))) == ("Modulo(4)", "Anchor(8)")
    for make, message in (
        (lambda: Modulo(m=0), "Modulo.m must be at least 1. Got 0. Use Single() for one slot."),
        (lambda: Anchor(n=0), "Anchor.n must be at least 1. Got 0. Use Single() for one slot."),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()


def test_calls_that_do_not_fit_are_refused():
    cache = new(rows=4, capacity=5)
    for rows, tokens, message in (
        (3, 1, "cache has 4 rows, tokens have 3. Use cache.select(rows)"),
        (4, 6, "cache: 6 tokens exceed capacity 5"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            cache.fits(rows, tokens)
    cache.fits(4, 5)
    for length in (-1, 1):
        with pytest.raises(ValueError, match=rf"cache.crop: length must be 0\.\.0\. Got {length}\."):
            cache.crop(length)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("[0.0 0.1 0.2 0.3 0.4]", "cache holds 4 iterations of block 0, the plan runs 5"),
        ("[0.0 1.0]", "cache holds 0 iterations of block 1, the plan runs 1"),
        ("[0.1 0.2]", r"must run the iterations 0, 1, \.\. of every block in order\. Got \[0\.1 0\.2\]"),
        ("[0.0 0.1 0.1]", "must run the iterations 0, 1"),
        ("[0.1 0.0]", "must run the iterations 0, 1"),
    ],
)
def test_plans_that_the_cache_cannot_follow_are_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        new().check(Plan.parse(plan))


def test_plans_that_it_can_follow_pass():
    for plan in ("[]", "[0.0]", "[0.0 0.1 0.2 0.3]"):
        new().check(Plan.parse(plan))
    new(iterations={0: 4, 1: 2}).check(Plan.parse("[0.0 0.1 1.0 0.2 0.3 1.1]"))


def test_iterations_may_count_from_another_first_one():
    cache = new(iterations={0: 2})
    cache.first = {0: 5}
    cache.check(Plan.parse("[0.5 0.6]"))
    for plan in ("[0.0 0.1]", "[0.6]", "[0.6 0.5]"):
        with pytest.raises(ValueError, match=r"must run the iterations 5, 6, \.\. of every block in order"):
            cache.check(Plan.parse(plan))
    stage(cache, 1)
    for iteration in (5, 6):
        cache.launch(cache.ordinal(0, iteration))
        cache.view(0, 0, torch.full((ROWS,), iteration)).append(*entries(ROWS, 1, iteration))
    cache.advance(1, {0: torch.full((ROWS, 1), 2)})
    keys, _ = cache.storage(0, 0, torch.zeros(ROWS, HEADS, 1, WIDTH))
    torch.testing.assert_close(keys[1, :, :, :1], entries(ROWS, 1, 6)[0], **EXACT)
    assert cache.select([1]).first == {0: 5}


def test_keys_with_a_graph_are_refused():
    cache = new()
    stage(cache, 1)
    cache.launch(0)
    keys, values = entries(ROWS, 1, 0)
    view = cache.view(0, 0, torch.zeros(ROWS, dtype=torch.long))
    with pytest.raises(ValueError, match=r"cache: keys must not carry a gradient\. Got a graph\. Decode under torch"):
        view.append(keys.requires_grad_(), values)


def test_a_block_that_did_not_run_leaves_nothing_to_read():
    cache = new("single", iterations={0: 2, 1: 2})
    stage(cache, 1)
    cache.advance(1, {0: torch.full((ROWS, 1), 2), 1: torch.full((ROWS, 1), 2)})
    cache.crop(0)
    stage(cache, 1)
    cache.advance(1, {0: torch.full((ROWS, 1), 2)})
    stage(cache, 1)
    cache.launch(0)
    allowed = cache.view(1, 0, torch.zeros(ROWS, dtype=torch.long)).append(*entries(ROWS, 1, 0))[2]
    assert allowed[:, 0].tolist() == [[[False, True]]] * ROWS
