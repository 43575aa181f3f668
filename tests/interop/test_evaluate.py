"""A whole evaluation: what lm-eval computes, at every depth, recorded; killed, gone on with, and finished."""

import dataclasses
import json
import logging

import pytest

from interop.eval_task_files import offline, write_group, write_task  # noqa: F401, a fixture
from interop.test_lm_eval import noisy
from looplab.audit.folder import FolderBusyError
from looplab.interop.eval_tasks import TaskError, load_tasks
from looplab.interop.evaluate import EvalConfig, _run, evaluate_tasks, trained_units
from looplab.interop.lm_eval import LooplabLM
from looplab.records import EvalResult, dump_json
from looplab.recurrence.depth import FixedDepth, Grid, PrefixDepth, UniformDepth
from looplab.recurrence.exit import LatentExit
from tiny import Mixing

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "tasks"
    write_task(folder)
    write_task(folder, "letters_said", "generate_until")
    write_task(folder, "letters_text", "loglikelihood_rolling")
    return folder


def run(files, out, *, depths=(1, 2, 4), config=None, tasks=None, lm=None, **options):
    out.mkdir(exist_ok=True)
    lm = lm or LooplabLM(noisy(), num_steps=list(depths), **options.pop("lm_options", {}))
    return evaluate_tasks(lm, load_tasks(tasks or [str(files)], [files]), config or EvalConfig(), out, **options)


def values(result):
    return {(s.task, s.metric, s.depth): s.value for s in result.scores}


def test_every_metric_of_every_task_has_a_row_for_every_depth(files, tmp_path):
    result = run(files, tmp_path / "out")
    wanted = {
        ("letters_choice", "acc"), ("letters_choice", "acc_norm"), ("letters_said", "exact_match"),
        ("letters_text", "word_perplexity"), ("letters_text", "byte_perplexity"), ("letters_text", "bits_per_byte"),
    }  # fmt: skip
    assert {(s.task, s.metric) for s in result.scores} == wanted
    assert len(result.scores) == 3 * len(wanted)
    assert [task.documents for task in result.tasks] == [6, 6, 6]
    assert (result.depths, result.unit, result.shared, result.trained_units) == ((1, 2, 4), "steps", (4, 7), (4, 4))
    choice = next(task for task in result.tasks if task.name == "letters_choice")
    assert choice.counts["launches"] == 4, "all depths of one rollout"
    text = next(s for s in result.scores if s.metric == "bits_per_byte")
    assert text.stderr is None and text.higher_is_better is False
    assert EvalResult.from_json(dump_json(result)) == result
    assert "letters_choice acc" in str(result)


def test_numbers_are_those_of_lm_evals_own_evaluator(files, tmp_path):
    from lm_eval.evaluator import evaluate

    result = values(run(files, tmp_path / "out"))
    for depth in (1, 4):
        tasks = load_tasks([str(files)])
        for task in tasks.tasks.values():
            task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=1234)
        lm = LooplabLM(noisy(), num_steps=depth)
        found = evaluate(lm=lm, task_dict={"tasks": tasks.tasks, "groups": {}, "group_map": {}}, bootstrap_iters=0)
        for name, metric in (
            ("letters_choice", "acc"),
            ("letters_said", "exact_match"),
            ("letters_text", "bits_per_byte"),
        ):
            assert result[name, metric, depth] == pytest.approx(found["results"][name][f"{metric},none"], rel=1e-6)


def test_a_list_of_depths_equals_separate_evaluations(files, tmp_path):
    together = values(run(files, tmp_path / "out"))
    for depth in (1, 2, 4):
        alone = values(run(files, tmp_path / f"out{depth}", depths=[depth]))
        assert alone == {key: value for key, value in together.items() if key[2] == depth}


def test_few_shot_examples_are_the_same_at_every_depth_and_follow_the_seed(files, tmp_path, monkeypatch):
    asked = {}
    ask = LooplabLM.loglikelihood

    def note(lm, requests):
        asked.setdefault((lm.seed, lm.depth), [request.args[0] for request in requests])
        return ask(lm, requests)

    monkeypatch.setattr(LooplabLM, "loglikelihood", note)
    for seed in (1234, 5):
        config = EvalConfig(num_fewshot=2)
        result = run(files, tmp_path / f"out{seed}", config=config, tasks=["letters_choice"], lm_options={"seed": seed})
        assert result.tasks[0].num_fewshot == 2
        assert result.seeds == {"fewshot": seed, "noise": seed, "draws": seed}
    assert asked[1234, 1] == asked[1234, 2] == asked[1234, 4] != asked[5, 1]
    assert all(len(text) > 8 for text in asked[5, 1])


def test_a_killed_evaluation_goes_on_where_it_was(files, tmp_path, monkeypatch):
    wanted = run(files, tmp_path / "whole")
    ran = []

    def killed(lm, name, task, depths, *rest):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append((name, tuple(depths)))
        return _run(lm, name, task, depths, *rest)

    monkeypatch.setattr("looplab.interop.evaluate._run", killed)
    with pytest.raises(KeyboardInterrupt):
        run(files, tmp_path / "out")
    monkeypatch.setattr("looplab.interop.evaluate._run", lambda *a: (ran.append((a[1], tuple(a[3]))), _run(*a)))
    assert run(files, tmp_path / "out") == wanted
    assert ran == [(name, (1, 2, 4)) for name in ("letters_choice", "letters_said", "letters_text")]
    before = (tmp_path / "out" / "results.json").read_bytes()
    assert run(files, tmp_path / "out") == wanted
    assert len(ran) == 3, "finished: nothing is run"
    assert (tmp_path / "out" / "results.json").read_bytes() == before


def test_more_depths_and_tasks_follow_on_what_is_there(files, tmp_path, monkeypatch):
    run(files, tmp_path / "out", depths=[1, 4], tasks=["letters_choice"])
    ran = []
    monkeypatch.setattr("looplab.interop.evaluate._run", lambda *a: (ran.append((a[1], tuple(a[3]))), _run(*a)))
    more = run(files, tmp_path / "out", depths=[1, 2, 4], tasks=["letters_choice", "letters_text"])
    assert ran == [("letters_choice", (2,)), ("letters_text", (1, 2, 4))]
    assert values(more) == values(run(files, tmp_path / "new", tasks=["letters_choice", "letters_text"]))


def test_other_settings_and_other_runs_are_refused(files, tmp_path):
    run(files, tmp_path / "out", tasks=["letters_text"])
    with pytest.raises(FolderBusyError, match=r"other settings \(limit None -> 2\). Use another --out or --fresh"):
        run(files, tmp_path / "out", tasks=["letters_text"], config=EvalConfig(limit=2))
    with pytest.raises(FolderBusyError, match=r"seed 1234 -> 1"):
        run(files, tmp_path / "out", tasks=["letters_text"], lm_options={"seed": 1})
    fresh = run(files, tmp_path / "out", tasks=["letters_text"], config=EvalConfig(limit=2), fresh=True)
    assert (fresh.tasks[0].documents, fresh.tasks[0].of) == (2, 6)
    (tmp_path / "out" / "manifest.json").write_text(json.dumps({"kind": "audit"}), encoding="utf-8")
    with pytest.raises(FolderBusyError, match=r"holds another run \(audit\). Use another --out"):
        run(files, tmp_path / "out", tasks=["letters_text"])


def test_changed_documents_are_not_taken_for_the_old_ones(files, tmp_path):
    first = run(files, tmp_path / "out", tasks=["letters_text"])
    (files / "letters_text.jsonl").write_text('{"text": "hhhh"}\n', encoding="utf-8")
    (tmp_path / "out" / "results.json").unlink()
    second = run(files, tmp_path / "out", tasks=["letters_text"])
    assert first.tasks[0].settings != second.tasks[0].settings
    assert values(first) != values(second)


def test_a_group_reports_its_own_mean(tmp_path):
    for name in ("letters_one", "letters_two"):
        write_task(tmp_path / "tasks", name)
    write_group(tmp_path / "tasks", "letters_one", "letters_two")
    result = run(tmp_path / "tasks", tmp_path / "out", tasks=["letters_all"], depths=[1, 2])
    found = values(result)
    for depth in (1, 2):
        mean = (found["letters_one", "acc", depth] + found["letters_two", "acc", depth]) / 2
        assert found["letters_all", "acc", depth] == pytest.approx(mean)


def test_generation_options_replace_those_of_the_task(files, tmp_path):
    config = EvalConfig(gen_kwargs="max_gen_toks=1,temperature=0.5")
    result = run(files, tmp_path / "out", tasks=["letters_said"], config=config, depths=[1])
    assert result.gen_kwargs == "max_gen_toks=1,temperature=0.5"
    assert result.tasks[0].counts["head_tokens"] == 6, "one token for each of six documents"


def test_what_the_reader_has_to_know_is_noted(files, tmp_path):
    with pytest.warns(UserWarning, match="are longer than 5 tokens"):
        result = run(files, tmp_path / "out", tasks=["letters_choice"], lm_options={"max_length": 5}, depths=[1])
    assert result.tasks[0].truncated == 12
    assert any("12 inputs are longer than 5 tokens and lost" in note for note in result.notes)
    plain = noisy()
    plain.model.spec = dataclasses.replace(plain.model.spec, noise_width=0)
    zero = LooplabLM(plain, num_steps=1, init="zero")
    assert any(
        "init=zero changes nothing" in n for n in run(files, tmp_path / "z", lm=zero, tasks=["letters_text"]).notes
    )


def test_a_task_that_says_no_examples_keeps_none(tmp_path):
    path = write_task(tmp_path / "tasks", num_fewshot=0)
    result = run(tmp_path / "tasks", tmp_path / "out", tasks=[str(path)], config=EvalConfig(num_fewshot=2), depths=[1])
    assert result.tasks[0].num_fewshot == 0
    assert "letters_choice: its own file says 0 examples, which 2 do not replace." in result.notes


def test_what_lm_eval_warned_of_is_kept_with_the_part(files, tmp_path, monkeypatch):
    ask = LooplabLM.loglikelihood

    def warning(lm, requests):
        logging.getLogger("lm_eval").warning("something odd")
        return ask(lm, requests)

    monkeypatch.setattr(LooplabLM, "loglikelihood", warning)
    first = run(files, tmp_path / "out", tasks=["letters_choice"])
    assert first.notes == ("letters_choice, lm-eval: something odd",)
    (tmp_path / "out" / "results.json").unlink()
    assert run(files, tmp_path / "out", tasks=["letters_choice"]) == first


def test_depths_that_share_no_prefix_are_noted(files, tmp_path):
    loaded = dataclasses.replace(noisy(), model=Mixing(steps=4, blocks=2).eval())
    lm = LooplabLM(loaded, num_steps=[1, 2])
    result = run(files, tmp_path / "out", tasks=["letters_text"], lm=lm)
    assert result.shared == (5, 6)
    assert any(
        "no prefixes of the deepest: a rollout of all takes 5 applications (4 the deepest, 6" in n for n in result.notes
    )


def test_an_exit_rule_is_recorded_with_the_mean_step(files, tmp_path):
    lm = LooplabLM(noisy(indexed=False), exit_rule=LatentExit(threshold=1e9))
    result = run(files, tmp_path / "out", lm=lm, tasks=["letters_choice"])
    assert result.exit_rule.startswith("latent(")
    assert 1 <= result.tasks[0].steps["4"] < 4


def test_tasks_that_run_code_are_refused(files, tmp_path):
    path = write_task(files, "letters_unsafe", unsafe_code=True)
    with pytest.raises(
        TaskError, match="must be text alone and run nothing. Got a task with code that the model wrote"
    ):
        run(files, tmp_path / "out", tasks=[str(path)])


@pytest.mark.parametrize(
    ("options", "message"), [({"limit": 0}, "limit must be at least 1"), ({"num_fewshot": -1}, "num_fewshot")]
)
def test_impossible_counts_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**options)


@pytest.mark.parametrize(
    ("law", "steps", "applications"),
    [
        (FixedDepth(num_steps=4), (4, 4), None),
        (UniformDepth(low=2, high=6), (2, 6), None),
        (PrefixDepth(law=UniformDepth(low=1, high=8)), None, (1, 8)),
        (Grid(sizes=(0.5, 0.5)), None, None),
    ],
)
def test_trained_depths_are_told_in_the_unit_of_the_curve(law, steps, applications):
    spec = dataclasses.replace(noisy().model.spec, trained_depth=law)
    assert trained_units(spec, "steps") == steps
    assert trained_units(spec, "applications") == applications
