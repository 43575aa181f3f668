"""Schedules, words, identifiability and counts, against the worked examples written out by hand."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.audit.schedules import (
    FORMS,
    FullPlan,
    Schedule,
    cyclic,
    default_schedules,
    extend_cycle,
    extend_last,
    full,
    inner,
    layer_major,
    live_states,
    minimal_applications,
    naive_applications,
    pass_major,
    permute,
    permutes,
    pinned,
    plan_words,
    prefix,
    regrid,
    repeat,
    repeat_first,
    same,
    schedule_map,
    suffix,
    trie,
)
from looplab.recurrence.plan import Blocks, LayerLoop, ModelLoop, Plan, Sequential, TwoLevel

LAW = settings(deadline=None, max_examples=60)


def exactly(message):
    return f"^{re.escape(message)}$"


def own(block, iteration):
    return iteration


def shared(block, iteration):
    return 0


def model(order, blocks=1, classes=own, **more):
    return FullPlan.of(order.plan(order.default_steps, blocks), classes, **more)


def two_by_four(classes=own):
    return model(Blocks(num_steps=(4, 4)), 2, classes)


def core(steps, classes=own):
    return model(ModelLoop(num_steps=steps), 1, classes)


def layer_loop(classes=own):
    return model(LayerLoop(num_steps=2), 3, classes)


def dense(layers, classes=own):
    return model(Sequential(), layers, classes)


def two_level(classes=own, h=2):
    return model(TwoLevel(h=h, l=2), 2, classes, writers=[1])


def text(schedule, full_plan):
    return " ".join(f"{block}{iteration}" for block, iteration in schedule.plan(full_plan))


def grid_of(full_plan, ks=None):
    """full, and prefix, suffix, repeat at every k below M."""
    ks = [k for k in (ks or range(1, full_plan.M)) if k < full_plan.M]
    return [full(), *map(prefix, ks), *map(suffix, ks), *map(repeat, ks)]


def counts(full_plan, schedules):
    words = plan_words(full_plan, schedules)
    return (
        minimal_applications(words.values()),
        naive_applications(schedule.plan(full_plan) for schedule in schedules),
        len(set(words.values())),
    )


TWO_BY_FOUR = {
    full(): "00 01 02 03 10 11 12 13",
    prefix(5): "00 01 02 03 10",
    suffix(5): "03 10 11 12 13",
    same(4): "00 00 00 00",
    cyclic(8): "00 01 02 03 00 01 02 03",
    pinned(0): "00 00 00 00 10 10 10 10",
    pass_major(): "00 10 01 11 02 12 03 13",
    layer_major(): "00 01 02 03 10 11 12 13",
    repeat(1): "00 00 00 00 00 00 00 00",
    repeat(2): "00 01 01 01 01 01 01 01",
    repeat(4): "00 01 02 03 03 03 03 03",
    repeat(6): "00 01 02 03 10 11 11 11",
    repeat_first(8): "00 00 00 00 00 01 02 03",
}


@pytest.mark.parametrize("schedule", TWO_BY_FOUR, ids=str)
def test_two_blocks_of_four_run_the_plans_of_the_paper(schedule):
    assert text(schedule, two_by_four()) == TWO_BY_FOUR[schedule]


def test_two_blocks_of_four_have_eight_units_and_kmid_four():
    anatomy = two_by_four()
    assert (anatomy.M, len(anatomy.plan), anatomy.kmid, anatomy.boundaries()) == (8, 8, 4, (4, 8))


def test_a_permutation_moves_units_only_inside_their_block():
    for seed in range(20):
        plan = permute(seed).plan(two_by_four())
        assert [block for block, _ in plan] == [0] * 4 + [1] * 4
        assert sorted(plan) == sorted(two_by_four().plan)
        assert plan[:4] != two_by_four().plan[:4]
        assert plan[4:] != two_by_four().plan[4:]


def rows(full_plan, schedules):
    return {row.name: row for row in schedule_map(full_plan, schedules)}


def test_without_an_index_two_blocks_keep_application_and_composition():
    anatomy = two_by_four(shared)
    table = rows(anatomy, default_schedules(anatomy))
    assert table["repeat(1)"].word == "[0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0]"
    assert table["repeat(2)"].same_as == table["repeat(4)"].same_as == "repeat(1)"
    assert table["permute(0)"].same_as == table["pinned(0)"].same_as == "full"
    assert table["pinned(0)"].reason == "the block has no iteration index"
    assert all(table[f"prefix({k})"].reason is None for k in range(1, 8))
    assert table["suffix(7)"].reason is None


def test_on_one_core_without_an_index_every_control_is_a_prefix_or_the_full_plan():
    anatomy = core(32, shared)
    table = rows(anatomy, default_schedules(anatomy))
    for row in table.values():
        if row.family in ("repeat", "permute", "pinned", "layer_major"):
            assert row.same_as == "full"
        elif row.family == "suffix":
            assert row.same_as == f"prefix({row.k})"
        else:
            assert row.reason is None
    assert table["repeat(1)"].reason == "the block has no iteration index"
    assert table["layer_major"].reason == "model offers no layer view"


def test_one_core_with_an_index_has_one_kind_of_unit():
    anatomy = core(8)
    assert anatomy.kmid == anatomy.M == 8
    assert rows(anatomy, grid_of(anatomy))["repeat(1)"].reason is None


def test_where_only_the_first_pass_differs_later_repeats_are_the_full_plan():
    anatomy = core(8, lambda block, iteration: min(iteration, 1))
    table = rows(anatomy, grid_of(anatomy))
    assert table["repeat(1)"].reason is None
    assert [table[f"repeat({k})"].reason for k in range(2, 8)] == ["same plan as full"] * 6


def test_a_layer_loop_runs_layer_by_layer():
    anatomy = layer_loop()
    assert text(full(), anatomy) == "00 01 10 11 20 21"
    assert anatomy.kmid == 2
    assert text(prefix(3), anatomy) == "00 01 10"
    assert text(suffix(3), anatomy) == "11 20 21"
    assert text(repeat(3), anatomy) == "00 01 10 10 10 10"
    assert text(pass_major(), anatomy) == "00 10 20 01 11 21"
    assert text(layer_major(), anatomy) == text(full(), anatomy)
    index_free = rows(layer_loop(shared), grid_of(layer_loop(shared)))
    assert index_free["repeat(1)"].word == "[0.0 0.0 0.0 0.0 0.0 0.0]"
    assert index_free["repeat(2)"].same_as == "repeat(1)"


def test_a_refined_core_sorts_its_layers_under_layer_major():
    plan = Plan.of([(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)])
    anatomy = FullPlan.of(plan, shared)
    assert anatomy.M == anatomy.kmid == 2
    assert [block for block, _ in layer_major().plan(anatomy)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_core_with_a_layer_view_is_audited_as_another_model_instead():
    anatomy = model(ModelLoop(num_steps=4), 1, shared, layer_view=True)
    assert rows(anatomy, [full(), layer_major()])["layer_major"].reason == "same plan as full"
    refined = FullPlan.of(Plan.of([(layer, step) for step in range(2) for layer in range(4)]), shared)
    (row,) = [row for row in schedule_map(refined, default_schedules(refined)) if row.family == "layer_major"]
    assert (row.reason, row.word) == (None, "[0.0 0.0 1.0 1.0 2.0 2.0 3.0 3.0]")


def test_a_dense_model_has_one_unit_per_layer():
    anatomy = dense(6)
    assert text(full(), anatomy) == "00 10 20 30 40 50"
    assert anatomy.kmid == 1
    assert text(prefix(4), anatomy) == "00 10 20 30"
    assert text(suffix(4), anatomy) == "20 30 40 50"
    assert text(repeat(4), anatomy) == "00 10 20 30 30 30"


def test_a_two_level_model_moves_whole_cycles():
    anatomy = two_level()
    assert text(full(), anatomy) == "00 01 10 02 03 11"
    assert (anatomy.M, anatomy.kmid) == (2, 2)
    assert text(prefix(1), anatomy) == "00 01 10"
    assert text(suffix(1), anatomy) == "02 03 11"
    assert text(repeat(1), anatomy) == "00 01 10 00 01 10"
    assert text(layer_major(), anatomy) == "00 01 02 03 10 11"
    assert text(inner(prefix(1)), anatomy) == "00 10 02 11"
    index_free = two_level(shared)
    assert index_free.word(repeat(1).plan(index_free)) == index_free.word(index_free.plan)
    table = rows(index_free, default_schedules(index_free))
    assert [name for name, row in table.items() if row.reason is None] == [
        "full",
        "prefix(1)",
        "layer_major",
        "inner(prefix(1))",
    ]


INNER_PLANS = {
    "inner(prefix(1))": "00 10 03 11",
    "inner(prefix(2))": "00 01 10 03 04 11",
    "inner(suffix(2))": "01 02 10 04 05 11",
    "inner(repeat(1))": "00 00 00 10 03 03 03 11",
    "inner(repeat(2))": "00 01 01 10 03 04 04 11",
    "inner(same(2))": "00 00 10 03 03 11",
    "inner(pinned(4))": "04 04 04 10 04 04 04 11",
}


@pytest.mark.parametrize("written", INNER_PLANS)
def test_inner_schedules_edit_the_low_steps_of_every_cycle(written):
    anatomy = model(TwoLevel(h=2, l=3), 2, own, writers=[1])
    assert text(Schedule.parse(written), anatomy) == INNER_PLANS[written]


def test_inner_permutations_turn_every_cycle_in_the_same_way():
    plan = inner(permute(0)).plan(model(TwoLevel(h=2, l=3), 2, own, writers=[1]))
    first, second = [[t for _, t in plan[i : i + 3]] for i in (0, 4)]
    assert sorted(first) == [0, 1, 2]
    assert first != [0, 1, 2]
    assert second == [t + 3 for t in first]


def test_inner_rows_count_the_steps_of_one_inner_run():
    anatomy = model(TwoLevel(h=2, l=4), 2, own, writers=[1])
    found = [row for row in schedule_map(anatomy, default_schedules(anatomy)) if row.family == "inner"]
    assert [(row.k, row.units, row.applications) for row in found] == [(1, 1, 4), (2, 2, 6), (3, 3, 8)]
    assert rows(anatomy, [inner(repeat(2))])["inner(repeat(2))"].units == 4


def test_a_model_conditioned_on_the_step_size_runs_coarser_grids():
    # Eight equal steps, then the ids of k = 1, 2, .. steps to the same end.
    def grid(k):
        first = 0 if k == 8 else 8 + sum(range(k))
        return tuple(range(first, first + k))

    anatomy = model(ModelLoop(num_steps=8), 1, own, grid=grid, max_iteration=36)
    assert text(regrid(2), anatomy) == "09 010"
    assert regrid(8).plan(anatomy) == anatomy.plan
    names = [str(row) for row in default_schedules(anatomy) if row.family == "regrid"]
    assert names == [f"regrid({k})" for k in range(1, 8)], "k = M is full"
    assert all(row.reason is None for row in schedule_map(anatomy, default_schedules(anatomy)) if row.k)
    shorter = model(ModelLoop(num_steps=4), 1, own, grid=grid, max_iteration=36)
    assert "regrid(4)" in map(str, default_schedules(shorter)), "four of eight steps end earlier than grid(4)"


def test_a_pass_of_several_blocks_is_regridded_pass_by_pass():
    passes = Plan.of([(block, step) for step in range(3) for block in range(2)])
    anatomy = FullPlan.of(passes, own, grid=lambda k: {1: (3,), 2: (4, 5), 3: (0, 1, 2)}[k])
    assert text(regrid(2), anatomy) == "04 14 05 15"


EXTENSIONS = {
    "extend_last(12)": "00 01 02 03 10 11 12 13 13 13 13 13",
    "extend_cycle(12)": "00 01 02 03 10 11 12 13 10 11 12 13",
    "extend_cycle(10)": "00 01 02 03 10 11 12 13 10 11",
}


@pytest.mark.parametrize("written", EXTENSIONS)
def test_extensions_go_on_with_trained_indices(written):
    anatomy = model(Blocks(num_steps=(4, 4)), 2, own, max_iteration=4)
    assert text(Schedule.parse(written), anatomy) == EXTENSIONS[written]


def test_extensions_of_cycles_are_whole_cycles():
    assert text(extend_last(3), two_level()) == "00 01 10 02 03 11 02 03 11"
    assert text(extend_cycle(3), two_level()) == "00 01 10 02 03 11 00 01 10"


def test_both_extensions_of_a_core_without_an_index_are_one_plan():
    anatomy = core(4, shared)
    table = rows(anatomy, default_schedules(anatomy, extend=(6, 5)))
    assert [name for name in table if name.startswith("extend")] == [
        "extend_last(5)",
        "extend_cycle(5)",
        "extend_last(6)",
        "extend_cycle(6)",
    ]
    assert table["extend_last(6)"].word == "[0.0 0.0 0.0 0.0 0.0 0.0]"
    assert (table["extend_last(6)"].reason, table["extend_last(6)"].units) == (None, 6)
    assert table["extend_cycle(6)"].same_as == "extend_last(6)"
    assert table["extend_cycle(6)"].reason == "the block has no iteration index"


@pytest.mark.parametrize("last", [True, False])
def test_an_extension_is_the_word_of_a_block_that_goes_on_counting(last):
    # Clamped indices go on as extend_last, indices that start over as extend_cycle.
    anatomy = core(4, lambda block, iteration: min(iteration, 3) if last else iteration % 4)
    longer = ModelLoop(num_steps=7).plan(7, 1)
    assert anatomy.word(longer) == anatomy.word((extend_last if last else extend_cycle)(7).plan(anatomy))


@pytest.mark.parametrize("extend", [(8,), (12, 3)])
def test_an_extension_that_is_none_is_refused(extend):
    written = ",".join(map(str, extend))
    message = f"--extend must be whole numbers above 8, the units of the full plan. Got {written!r}."
    with pytest.raises(ValueError, match=exactly(message)):
        default_schedules(two_by_four(), extend=extend)


def test_the_factorial_cells_are_run_where_the_first_run_is_not_everything():
    assert [str(s) for s in default_schedules(two_by_four(), grid=(2,), controls=("factorial",))] == [
        "full",
        "prefix(1)",
        "prefix(2)",
        "prefix(4)",
        "repeat(1)",
        "repeat(2)",
        "repeat(4)",
        "same(4)",
        "cyclic(8)",
        "repeat_first(8)",
    ]
    for anatomy in (core(8), dense(6), two_level()):
        assert not {"same", "cyclic", "repeat_first"} & {s.family for s in default_schedules(anatomy)}


def test_without_an_index_the_factorial_cells_are_other_schedules():
    anatomy = two_by_four(shared)
    table = rows(anatomy, default_schedules(anatomy, controls=("factorial",)))
    assert [table[name].same_as for name in ("same(4)", "cyclic(8)", "repeat_first(8)")] == [
        "prefix(4)",
        "repeat(1)",
        "repeat(1)",
    ]
    assert {table[name].reason for name in ("same(4)", "cyclic(8)", "repeat_first(8)")} == {
        "the block has no iteration index"
    }


def test_a_plan_that_writes_nothing_the_readout_reads_is_refused_by_name():
    message = "schedule [0.0 0.1] never runs block 1, which writes what the readout reads. End it with block 1."
    with pytest.raises(ValueError, match=exactly(message)):
        default_schedules(two_level(), extra=[Schedule.parse("[0.0 0.1]")])


ANATOMIES = st.sampled_from(
    [two_by_four(), two_by_four(shared), core(5), core(7, shared), layer_loop(), dense(6), two_level(), two_level(h=3)]
)


@LAW
@given(ANATOMIES)
def test_at_full_length_prefix_suffix_and_repeat_are_the_full_plan(anatomy):
    whole = full().plan(anatomy)
    assert (
        prefix(anatomy.M).plan(anatomy) == suffix(anatomy.M).plan(anatomy) == repeat(anatomy.M).plan(anatomy) == whole
    )


@LAW
@given(ANATOMIES)
def test_one_unit_repeated_is_same_and_the_first_run_is_a_prefix(anatomy):
    assert same(anatomy.M).plan(anatomy) == repeat(1).plan(anatomy)
    assert same(1).plan(anatomy) == prefix(1).plan(anatomy)
    assert repeat_first(anatomy.kmid).plan(anatomy) == prefix(anatomy.kmid).plan(anatomy)


@LAW
@given(ANATOMIES, st.integers(0, 10_000))
def test_every_schedule_has_the_units_it_promises(anatomy, seed):
    unit = len(anatomy.units[0])
    k = seed % anatomy.M + 1
    assert len(prefix(k).plan(anatomy)) == len(suffix(k).plan(anatomy)) == k * unit
    for schedule in (repeat(k), permute(seed), pinned(0), layer_major(), pass_major()):
        assert len(schedule.plan(anatomy)) == len(anatomy.plan)
    assert len(set(repeat(k).plan(anatomy))) == k * unit
    assert len(set(cyclic(k).plan(anatomy))) == min(k, anatomy.kmid) * unit
    a = max(k, anatomy.kmid)
    assert len(repeat_first(a).plan(anatomy)) == a * unit
    assert len(set(repeat_first(a).plan(anatomy))) == anatomy.kmid * unit


@LAW
@given(ANATOMIES, st.integers(1, 12))
def test_extensions_start_with_the_full_plan_and_reuse_its_indices(anatomy, more):
    a = anatomy.M + more
    last, cycle = extend_last(a).plan(anatomy), extend_cycle(a).plan(anatomy)
    for plan in (last, cycle):
        assert plan[: len(anatomy.plan)] == anatomy.plan
        assert len(plan) == a * len(anatomy.units[0])
        assert set(plan) == set(anatomy.plan)
    assert last[-len(anatomy.units[-1]) :] == anatomy.units[-1]
    assert extend_last(anatomy.M + 1).plan(anatomy)[:-1] == last[: len(last) - 1 - (more - 1) * len(anatomy.units[0])]
    run = anatomy.M - (anatomy.boundaries()[-2] if len(anatomy.boundaries()) > 1 else 0)
    unit = len(anatomy.units[0])
    assert all(cycle[i] == cycle[i - run * unit] for i in range(len(anatomy.plan), len(cycle)))


@LAW
@given(st.integers(1, 3), st.integers(2, 5), st.integers(0, 10_000))
def test_inner_laws(high, low, seed):
    anatomy = model(TwoLevel(h=high, l=low), 2, own, writers=[1])
    if high == 1:
        assert anatomy.inner is None, "one cycle: single applications are the units"
        return
    k = seed % low + 1
    whole = anatomy.plan
    assert inner(prefix(low)).plan(anatomy) == inner(suffix(low)).plan(anatomy) == inner(repeat(low)).plan(anatomy)
    assert inner(prefix(low)).plan(anatomy) == whole
    assert inner(same(low)).plan(anatomy) == inner(repeat(1)).plan(anatomy)
    assert inner(same(1)).plan(anatomy) == inner(prefix(1)).plan(anatomy)
    assert len(inner(prefix(k)).plan(anatomy)) == len(inner(suffix(k)).plan(anatomy)) == high * (k + 1)
    for schedule in (inner(repeat(k)), inner(permute(seed)), inner(pinned(0))):
        plan = schedule.plan(anatomy)
        assert [block for block, _ in plan] == [block for block, _ in whole]
        assert [a for a in plan if a.block == 1] == [a for a in whole if a.block == 1]


NUMBERS = st.integers(0, 40)
INSIDE = ("prefix", "suffix", "repeat", "same", "permute", "pinned")
NUMBERED = (*INSIDE, "cyclic", "repeat_first", "regrid", "extend_last", "extend_cycle")


@LAW
@given(st.sampled_from(NUMBERED), NUMBERS)
def test_text_forms_round_trip(family, number):
    schedule = Schedule(family, number)
    for each in (schedule, *([inner(schedule)] if family in INSIDE else ())):
        assert Schedule.parse(str(each)) == Schedule.parse(f" {each} ") == each


@LAW
@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6))
def test_explicit_plans_round_trip(pairs):
    schedule = Schedule("explicit", explicit=Plan.of(pairs))
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.parse(str(schedule)).plan(FullPlan.of(Plan.of([*pairs, (0, 0)]), own)) == Plan.of(pairs)


@pytest.mark.parametrize("name", ["full", "layer_major", "pass_major"])
def test_forms_without_a_number_round_trip(name):
    assert str(Schedule.parse(name)) == name


@LAW
@given(ANATOMIES)
def test_default_schedules_are_all_different_and_can_be_written(anatomy):
    schedules = default_schedules(anatomy, extend=(anatomy.M + 1, anatomy.M + 4))
    names = [str(schedule) for schedule in schedules]
    assert len(set(names)) == len(names)
    assert [Schedule.parse(name) for name in names] == list(schedules)
    assert names[0] == "full"


@LAW
@given(ANATOMIES)
def test_every_word_is_run_once_and_by_its_first_schedule(anatomy):
    table = schedule_map(anatomy, default_schedules(anatomy, extend=(anatomy.M + 2,)))
    run = [row for row in table if row.reason is None]
    assert len({row.word for row in run}) == len(run)
    unread = [row for row in table if row.reason == "readout component not written"]
    for row in table:
        if row.same_as:
            twin = next(r for r in table if r.name == row.same_as)
            assert twin.word == row.word
            assert twin.same_as is None
    assert not unread, "default schedules end where the readout reads"


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("repaet(2)", " Did you mean 'repeat(2)'?"),
        ("repeat", " Did you mean 'repeat(k)'?"),
        ("full(3)", " Did you mean 'full'?"),
        ("layer-major", " Did you mean 'layer_major'?"),
        ("zzz(1)", ""),
        ("[0.0 x]", ""),
        ("extend_lst(12)", " Did you mean 'extend_last(12)'?"),
        ("prefix(x)", " Did you mean 'prefix(k)'?"),
        ("prefix(²)", " Did you mean 'prefix(k)'?"),
        ("inner", " Did you mean 'inner(prefix(k))'?"),
        ("iner(prefix(1))", " Did you mean 'inner(prefix(1))'?"),
        ("inner(repaet(2))", " Did you mean 'inner(repeat(2))'?"),
        ("inner(full)", ""),
        ("inner([0.0])", ""),
    ],
)
def test_an_unreadable_schedule_is_answered_with_a_suggestion(written, hint):
    with pytest.raises(ValueError, match=exactly(f"cannot read schedule {written!r}.{hint} Forms: {FORMS}.")):
        Schedule.parse(written)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (prefix(9), "schedule prefix(9) needs 1 <= k <= 8. Got 9."),
        (repeat(0), "schedule repeat(0) needs 1 <= k <= 8. Got 0."),
        (repeat_first(3), "schedule repeat_first(3) needs 4 <= a <= 8. Got 3."),
        (Schedule.parse("[2.0]"), "schedule [2.0] names block 2, but the model has blocks 0..1."),
        (extend_last(8), "schedule extend_last(8) needs a > 8. Got 8."),
        (
            regrid(2),
            "schedule regrid(2) needs one kind of unit, conditioned on the step size. Got a model without such a grid. "
            "Use prefix(2).",
        ),
        (
            inner(repeat(2)),
            "schedule inner(repeat(2)) needs a model with two levels. Got one whose units hold no inner run. "
            "Use repeat(2).",
        ),
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_refused(schedule, message):
    with pytest.raises(ValueError, match=exactly(message)):
        schedule.plan(two_by_four())


def test_an_inner_argument_beyond_the_inner_run_is_refused():
    with pytest.raises(ValueError, match=exactly("schedule inner(prefix(3)) needs 1 <= k <= 2. Got 3.")):
        inner(prefix(3)).plan(two_level())


def test_inner_takes_only_rules_that_say_something_about_an_inner_run():
    message = (
        "inner: the schedule must be one of prefix, suffix, repeat, same, permute, pinned. Got layer_major. "
        "Use inner(prefix(1))."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        inner(layer_major())


def test_an_index_without_parameters_is_refused():
    anatomy = model(Blocks(num_steps=(4, 4)), 2, own, max_iteration=4)
    with pytest.raises(
        ValueError, match=r"pinned\(4\) needs iteration index 4, but the model has 4. Use indices below 4."
    ):
        pinned(4).plan(anatomy)


@pytest.mark.parametrize("grid", [(0, 4), (4, 9), ()])
def test_a_grid_outside_the_units_is_refused(grid):
    written = ",".join(map(str, grid))
    with pytest.raises(ValueError, match=exactly(f"--grid must be whole numbers from 1 to 8. Got {written!r}.")):
        default_schedules(two_by_four(), grid=grid)


def test_the_default_grid_is_every_k_up_to_sixteen_and_then_landmarks():
    assert core(16).default_grid() == tuple(range(1, 17))
    assert core(32).default_grid() == (1, 2, 4, 8, 16, 32)
    assert model(Blocks(num_steps=(11, 9)), 2).default_grid() == (1, 2, 4, 8, 11, 16, 20)


def test_the_decomposition_keeps_its_schedules_under_any_grid_and_controls():
    names = [str(s) for s in default_schedules(two_by_four(), grid=(2,), controls=())]
    assert names == ["full", "prefix(1)", "prefix(2)", "repeat(1)", "repeat(2)", "repeat(4)"]


def test_the_order_control_is_whichever_order_the_model_does_not_have():
    assert str(default_schedules(two_by_four(), controls=("order",))[-1]) == "pass_major"
    assert str(default_schedules(two_level(), controls=("order",))[-1]) == "layer_major"


def test_an_unknown_control_is_answered_with_a_suggestion():
    with pytest.raises(ValueError, match=re.escape("Got 'permutes'. Did you mean 'permute'?")):
        default_schedules(two_by_four(), controls=("permutes",))


def test_permutes_differ_from_the_full_plan_and_from_each_other():
    anatomy = two_by_four()
    draws = permutes(anatomy, 4)
    words = {anatomy.word(draw.plan(anatomy)) for draw in draws}
    assert len(draws) == len(words) == 4
    assert anatomy.word(anatomy.plan) not in words
    assert len(permutes(core(3), 10)) == 5, "three units have five orders besides their own"


TABLE = {
    "2 x 4 indexed": (two_by_four(), None, (), (64, 120, 22)),
    "2 x 4 indexed, grid 1 2 4": (two_by_four(), (1, 2, 4), (), (32, 46, 10)),
    "2 x 4 indexed, factorial": (two_by_four(), None, (same(4), cyclic(8), repeat_first(8)), (71, 140, 25)),
    "2 x 4 index-free": (two_by_four(shared), None, (), (28, 120, 16)),
    "core of 32, index-free": (core(32, shared), None, (), (32, 2016, 32)),
    "core of 32, indexed": (core(32), None, (), (1024, 2016, 94)),
    "layer-loop, index-free": (layer_loop(shared), None, (), (24, 66, 13)),
    "layer-loop, indexed": (layer_loop(), None, (), (36, 66, 16)),
    "dense 24": (dense(24), (6, 12, 18, 21, 22), (), (144, 302, 16)),
    "two-level, indexed": (two_level(h=4), None, (layer_major(),), (58, 96, 11)),
    "two-level, index-free": (two_level(shared, h=4), None, (layer_major(),), (22, 96, 5)),
}


def test_the_default_factorial_costs_seven_more_applications():
    anatomy = two_by_four()
    assert counts(anatomy, default_schedules(anatomy, controls=("suffix",))) == (64, 120, 22)
    assert counts(anatomy, default_schedules(anatomy, controls=("suffix", "factorial"))) == (71, 140, 25)


@pytest.mark.parametrize("case", TABLE)
def test_the_cost_table_is_counted(case):
    anatomy, ks, extra, expected = TABLE[case]
    assert counts(anatomy, [*grid_of(anatomy, ks), *extra]) == expected


@pytest.mark.parametrize("steps", [8, 32])
def test_a_depth_sweep_costs_one_full_run(steps):
    sweep = [full(), *map(prefix, range(1, steps))]
    for classes in (own, shared):
        assert counts(core(steps, classes), sweep) == (steps, steps * (steps + 1) // 2, steps)


@pytest.mark.parametrize("steps", range(1, 13))
def test_the_count_of_a_full_grid_is_the_square_of_the_depth(steps):
    assert counts(core(steps), grid_of(core(steps)))[:2] == (steps**2, 2 * steps**2 - steps)


def test_two_states_serve_the_grid_and_three_the_factorial():
    anatomy = two_by_four()

    def live(schedules):
        return live_states(trie({str(s): (s.plan(anatomy), anatomy.word(s.plan(anatomy))) for s in schedules}))

    assert live(grid_of(anatomy)) == 2
    assert live([*grid_of(anatomy), same(4), cyclic(8), repeat_first(8)]) == 3
