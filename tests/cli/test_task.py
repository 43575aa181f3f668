import json

import pytest

from looplab.cli import exit_codes, main
from looplab.cli import task as command
from looplab.tasks import TASKS
from looplab.tasks.pointer_chase import PointerChase


def printed(capsys, *words):
    assert main(["task", *words]) == exit_codes.DONE
    return capsys.readouterr().out


def test_without_a_name_all_tasks_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    text = printed(capsys)
    for name in TASKS:
        assert f" {name} " in text
    found = {entry["name"]: entry for entry in json.loads(printed(capsys, "--json"))["tasks"]}
    assert list(found) == list(TASKS)
    assert (found["pointer_chase"]["train"], found["pointer_chase"]["targets"]) == ([4], True)
    assert found["pointer_chase"]["about"] == "The node that n pointers lead to."
    assert not found["capo"]["targets"]


def test_help_names_the_tasks_and_the_help_of_a_task_its_options(capsys):
    text = printed(capsys, "--help")
    for name in TASKS:
        assert f"  {name} " in text
    with pytest.raises(SystemExit) as stopped:
        main(["task", "pointer_chase", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--difficulty", "--show", "--split", "--check", "--nodes", "--map", "--train"):
        assert flag in text


def test_a_problem_is_shown_with_answer_values_split_and_chance(capsys):
    task = PointerChase(nodes=5, train=(3,))
    problem = task.sample(3, 7, 2)
    lines = printed(
        capsys, "pointer_chase", "--nodes", "5", "--train", "3", "--seed", "7", "--first", "2", "--show", "1"
    ).splitlines()
    values = task.reference(problem).values
    assert lines == [
        "pointer_chase version 1  nodes=5  map=function  train=[3]",
        "",
        f"difficulty 3  item 2 of seed 7  split {task.split(3, problem)}  chance 0.2  steps 3",
        *(f"  {line}" for line in task.show(problem).splitlines()),
        *(f"  {k:>4}  {value}" for k, value in enumerate(values)),
    ]


def test_a_long_trace_is_cut_in_the_middle_and_whole_in_json(capsys):
    lines = printed(capsys, "prefix_sum", "--difficulty", "40", "--show", "1").splitlines()
    assert "        .. 31 more" in lines
    assert len([line for line in lines if line.startswith("    ")]) == command.SHOWN + 1
    assert lines[-1].split()[0] == "40"
    found = json.loads(printed(capsys, "prefix_sum", "--difficulty", "40", "--show", "1", "--json"))
    assert len(found["items"][0]["values"]) == 41


def test_json_has_names_and_numbers_of_every_difficulty(capsys):
    words = ("reachability", "--difficulty", "2", "5", "--show", "2", "--split", "test", "--json")
    found = json.loads(printed(capsys, *words))
    assert found["task"]["options"]["kind"] == "Reachability"
    assert [(item["difficulty"], item["index"]) for item in found["items"]] == [(2, 0), (2, 1), (5, 0), (5, 1)]
    for item in found["items"]:
        task = TASKS["reachability"]()
        problem = task.sample(item["difficulty"], 0, item["index"], "test")
        assert item["token_ids"] == task.example(problem).tokens.tolist()
        assert item["tokens"] == [task.tokens[token] for token in item["token_ids"]]
        assert item["answer"] == [("no", "yes")[task.reference(problem).answer]]
        assert item["values"] == [sorted(reached) for reached in task.reference(problem).values]
        assert item["split"] == "test"


def test_a_check_grades_all_difficulties_twice(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    found = json.loads(printed(capsys, "multi_hop", "--check", "5", "--json"))["check"]
    assert [(one["difficulty"], one["items"], one["verified"], one["alone"]) for one in found] == [
        *((1, 5, 5, 5), (2, 5, 5, 5), (3, 5, 5, 5))
    ]
    text = printed(capsys, "multi_hop", "--check", "5", "--difficulty", "2")
    assert text.splitlines()[-2].split() == ["2", *["5"] * 6, "0.01"]


def test_a_check_that_fails_has_its_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(PointerChase, "verify", lambda self, problem, predicted: True)
    assert main(["task", "pointer_chase", "--check", "3", "--difficulty", "4"]) == exit_codes.SELF_TEST
    assert "pointer_chase" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pointer_chse"], "task: Unknown task 'pointer_chse'. Did you mean 'pointer_chase'? Known: "),
        (["pointer_chase", "--nodes", "1"], "task: PointerChase.nodes must be at least 2. Got 1."),
        (["pointer_chase", "--difficulty", "0"], "task: difficulty must be at least 1 for pointer_chase. Got 0."),
        (["pointer_chase", "--show", "0"], "task: --show must be at least 1. Got 0."),
        (["pointer_chase", "--check", "-1"], "task: --check must be at least 0. Got -1."),
        (["--show", "3"], "usage: looplab task [NAME]"),
    ],
)
def test_bad_input_is_one_line_and_a_usage_error(words, message, capsys):
    assert main(["task", *words]) == exit_codes.USAGE
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith(message)


def test_an_unknown_option_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["task", "pointer_chase", "--colour", "red"])
    assert stopped.value.code == exit_codes.USAGE
    assert "--colour" in capsys.readouterr().err
