"""What a sweep varies: the values, the combinations, and what is refused."""

import json
import math
import re

import pytest

from looplab.objectives import NextToken
from looplab.recurrence.depth import UniformDepth
from looplab.recurrence.gradient import CheckpointApplication, FullBPTT, TruncatedBPTT
from looplab.training.sweep.points import (
    Axis,
    SweepError,
    changed,
    configurations,
    grid_points,
    label,
    parse_value,
    random_points,
    read_points,
    short_names,
    text_of,
    value_at,
    varied,
)
from training.tiny_run import core, tiny_run


def axes(*texts):
    return [Axis.parse(text) for text in texts]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=0..2", (0, 1, 2)),
        ("seed=0,4..5,9", (0, 4, 5, 9)),
        ("optimizer.lr=1e-3,3e-3", (0.001, 0.003)),
        ("optimizer.lr=.5", (0.5,)),
        ("seed=-2..-1", (-2, -1)),
        ("precision=fp32,bf16", ("fp32", "bf16")),
        ("data.sources=[a.jsonl,data/b.txt],[]", (["a.jsonl", "data/b.txt"], [])),
        ("clip_norm=none,1.0", (None, 1.0)),
        ("a=true,false", (True, False)),
        ("model.order.num-steps=[2,2],[4,4]", ([2, 2], [4, 4])),
        ("gradient=FullBPTT,TruncatedBPTT(window=2)", ("FullBPTT", {"kind": "TruncatedBPTT", "window": 2})),
        (
            "gradient=CheckpointApplication(inner=TruncatedBPTT(window=2))",
            ({"kind": "CheckpointApplication", "inner": {"kind": "TruncatedBPTT", "window": 2}},),
        ),
        ('schedule={"kind": "Cosine", "warmup_steps": 2}', ({"kind": "Cosine", "warmup_steps": 2},)),
        ("start='a,b'", ("a,b",)),
    ],
)
def test_values_are_read_as_they_are_meant(text, values):
    axis = Axis.parse(text)
    assert axis.values == values
    assert [type(value) for value in axis.values] == [type(value) for value in values]
    assert "-" not in axis.path


@pytest.mark.parametrize("word", ["__import__('os')", "[].append(1)", "f(1)", "a.b", "1 +", "x=1", "1 if 2 else 3"])
def test_nothing_is_evaluated(word):
    assert parse_value(word) == word


@pytest.mark.parametrize(
    "value", [0.001, 3, None, "fp32", [2, 2], {"kind": "TruncatedBPTT", "window": 2}, 0.1234567891, True]
)
def test_a_printed_value_may_be_typed(value):
    assert parse_value(text_of(value)) == value


def test_a_grid_is_every_combination_in_order():
    points = grid_points(axes("seed=0..1", "optimizer.lr=1e-3,3e-3"))
    assert [list(point.values()) for point in points] == [[0, 0.001], [0, 0.003], [1, 0.001], [1, 0.003]]


def test_zipped_axes_go_side_by_side_and_across_the_others():
    points = grid_points(axes("seed=0..1"), axes("optimizer.lr=1e-3,3e-3", "data.packing.rows=8,16"))
    found = [(p["seed"], p["optimizer.lr"], p["data.packing.rows"]) for p in points]
    assert found == [(0, 0.001, 8), (0, 0.003, 16), (1, 0.001, 8), (1, 0.003, 16)]


def test_listed_points_are_crossed_with_the_axes():
    points = grid_points(axes("seed=0..1"), listed=[{"clip_norm": 1.0}, {"clip_norm": None}])
    assert len(points) == 4 and {p["clip_norm"] for p in points} == {1.0, None}


def test_without_axes_there_is_one_point():
    assert grid_points([]) == [{}]


def test_draws_are_in_their_range_and_readable():
    drawn = random_points(axes("lr=log(1e-4..1e-2)", "clip=0.5..2.0", "seed=0..9"), [], 400, 0)
    rates = [point["lr"] for point in drawn]
    assert all(1e-4 <= rate <= 1e-2 and rate == float(f"{rate:.4g}") for rate in rates)
    assert all(0.5 <= point["clip"] <= 2.0 for point in drawn)
    assert {point["seed"] for point in drawn} == set(range(10))
    # Half of the draws of a log-uniform law are below the geometric mean: 400 draws, 4 standard errors.
    assert abs(sum(rate < 1e-3 for rate in rates) - 200) < 40
    assert math.isclose(sum(point["clip"] for point in drawn) / 400, 1.25, abs_tol=0.09)


def test_a_longer_random_sweep_begins_with_the_shorter():
    some = axes("lr=log(1e-4..1e-2)", "seed=0..1")
    assert random_points(some, [], 20, 3)[:7] == random_points(some, [], 7, 3)
    assert random_points(some, [], 7, 3) != random_points(some, [], 7, 4)
    assert [p["lr"] for p in random_points(axes("lr=log(1e-4..1e-2)"), [], 7, 3)] == [
        p["lr"] for p in random_points(some, [], 7, 3)
    ], "an axis more changes nothing of the others"


def test_random_draws_are_different_and_zipped_ones_stay_together():
    drawn = random_points(axes("seed=0..1"), axes("a=1,2", "b=10,20"), 4, 0)
    assert {(p["seed"], p["a"], p["b"]) for p in drawn} == {(0, 1, 10), (0, 2, 20), (1, 1, 10), (1, 2, 20)}


@pytest.mark.parametrize("name", ["points.json", "points.yaml"])
def test_a_file_holds_a_list_of_changes(tmp_path, name):
    (tmp_path / name).write_text('[{"seed": 1, "optimizer.lr": "1e-3"}, {"gradient": "TruncatedBPTT(window=2)"}]')
    assert read_points(tmp_path / name) == [
        {"seed": 1, "optimizer.lr": 0.001},
        {"gradient": {"kind": "TruncatedBPTT", "window": 2}},
    ]


def test_a_whole_configuration_is_a_list_of_changes_too(tmp_path):
    from looplab._config import to_dict

    other = tiny_run(tmp_path, model=core(), seed=5, gradient=TruncatedBPTT(window=2))
    (tmp_path / "all.json").write_text(json.dumps([to_dict(other)]))
    assert configurations(tiny_run(tmp_path), read_points(tmp_path / "all.json")) == [other]


def test_a_point_changes_its_fields_and_nothing_else(tmp_path):
    base = tiny_run(tmp_path, model=core())
    config = changed(base, {"optimizer.lr": 0.5, "gradient": "CheckpointApplication", "model.trained_depth.high": 3})
    assert config.optimizer.lr == 0.5 and config.gradient == CheckpointApplication(inner=FullBPTT())
    assert config.model.trained_depth == UniformDepth(low=1, high=3)
    assert (
        changed(config, {"optimizer.lr": base.optimizer.lr, "gradient": "FullBPTT", "model": value_at(base, "model")})
        == base
    )


def test_fields_of_a_choice_follow_the_choice(tmp_path):
    points = grid_points(axes("gradient=TruncatedBPTT(window=1)", "gradient.window=2,3"))
    assert [c.gradient.window for c in configurations(tiny_run(tmp_path, model=core()), points)] == [2, 3]


def test_what_differs_is_found_and_named_shortly(tmp_path):
    base = tiny_run(tmp_path, model=core())
    points = grid_points(axes("seed=0..1", "optimizer.lr=1e-3,3e-3", "gradient=FullBPTT,TruncatedBPTT(window=2)"))
    configs = configurations(base, points)
    assert varied(configs) == ("optimizer.lr", "gradient", "seed")
    assert short_names(varied(configs)) == {"optimizer.lr": "lr", "gradient": "gradient", "seed": "seed"}
    assert label(configs[1], varied(configs)) == "lr=0.001 gradient=TruncatedBPTT(window=2) seed=0"
    assert short_names(["a.lr", "b.lr", "rows"]) == {"a.lr": "a.lr", "b.lr": "b.lr", "rows": "rows"}
    assert label(base, ()) == "tiny" and varied([]) == varied([base]) == ()


WRONG_AXES = [
    (["seed"], [], "an axis must be FIELD=VALUES. Got 'seed'. Write, for instance, seed=0..2"),
    (["seed="], [], "seed: an axis must have at least one value. Got 'seed='. Give values: seed=A,B."),
    (["seed=3..1"], [], "seed: a range must go up, by at most 10,000 values. Got '3..1'."),
    (["lr=1e-2..1e-4"], [], "lr: a range must have a beginning before its end. Got 'lr=1e-2..1e-4'."),
    (["lr=log(0..1)"], [], "lr: a range must have a beginning above 0 and before its end. Got 'lr=log(0..1)'."),
    (["lr=0.1..0.2,3"], [], "lr: a range of numbers that are not whole must stand alone. Got 'lr=0.1..0.2,3'."),
    (
        ["lr=0.1..0.2"],
        [],
        "lr: values between 0.1 and 0.2 must be drawn. Got a grid. Give the number of runs with --random",
    ),
    (["seed=0", "seed=1"], [], "a field must be varied once. Got seed 2 times."),
    (["seed=0"], ["seed=1"], "a field must be varied once. Got seed 2 times."),
    ([], ["a=1,2", "b=1"], "--zip must have equally many values for every field. Got a 2, b 1."),
    (["a=0..199", "b=0..199"], [], "a sweep must have from 1 to 10,000 runs. Got 40,000. Give fewer values."),
]


@pytest.mark.parametrize(("over", "zipped", "message"), WRONG_AXES)
def test_axes_that_span_nothing_are_refused(over, zipped, message):
    with pytest.raises(SweepError, match=re.escape(message)):
        grid_points(axes(*over), axes(*zipped))


@pytest.mark.parametrize(
    ("over", "number", "message"),
    [
        (["seed=0..1"], 3, "--random must be at most the number of different draws. Got 3, and 100 times as many"),
        (["seed=0..1"], 0, "--random must be from 1 to 10,000. Got 0. Give the number of runs."),
        ([], 3, "--random must have axes to draw from. Got none. Add --over FIELD=VALUES."),
    ],
)
def test_draws_that_cannot_be_made_are_refused(over, number, message):
    with pytest.raises(SweepError, match=re.escape(message)):
        random_points(axes(*over), [], number, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Got no such file. Check the path."),
        (b"\xff", "Got 'utf-8' codec can't decode byte 0xff"),
        (b"[", "Got what cannot be parsed ("),
        (b"{}", "Got dict. Put every run into a list."),
        (b"[3]", "Got list. Put every run into a list."),
        (b"[]", "Got an empty list. Add runs."),
    ],
)
@pytest.mark.parametrize("name", ["points.json", "points.yaml"])
def test_a_file_that_is_no_list_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SweepError, match=re.escape(f"--from {path} must be a JSON or YAML list of mappings")) as caught:
        read_points(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            [{"optimizer.lrr": 1.0}],
            "optimizer.lrr=1: Unknown config key 'lrr' for RunConfig.optimizer. Did you mean 'lr'? Known: lr, ",
        ),
        ([{"sead": 1}], "sead=1: Unknown config key 'sead' for RunConfig. Did you mean 'seed'? Known: recipe, model, "),
        ([{"seed.x": 1}], "seed.x=1: RunConfig.seed must be a group of fields, to vary 'x' of it. Got 0. Vary "),
        ([{"seed": 0}, {"steps": 0}], "steps=0: RunConfig.steps must be at least 1. Got 0."),
        ([{"seed": "many"}], "seed=many: RunConfig.seed must be int. Got 'many'."),
        ([{"gradient": "FullBPT"}], "gradient=FullBPT: Unknown choice 'FullBPT' for RunConfig.gradient. Did you mean"),
        ([{"seed": 3}, {"seed": 0}, {}], "runs must differ. Got equal configurations for seed=0 and the recipe as it"),
        ([{"clip_norm": 1}, {"clip_norm": 1.0}], "runs must differ. Got equal configurations for clip_norm=1 and"),
        ([{"optimizer.lr": math.nan}], "optimizer.lr=nan: config: a number must be finite. Got nan."),
    ],
)  # fmt: skip
def test_points_that_make_no_run_are_refused_by_name(tmp_path, points, message):
    with pytest.raises(SweepError, match=re.escape(message)):
        configurations(tiny_run(tmp_path, model=core(), objective=NextToken()), points)
