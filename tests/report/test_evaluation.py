"""The page of an evaluation, from planted scores."""

import dataclasses
import itertools
import json

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from looplab.records import EvalResult, EvalScore, EvalTask, dump_json
from looplab.report.evaluation import evaluation_page, evaluation_tex, plates, scores_table, write_evaluation
from looplab.report.figures import base
from looplab.report.figures.depth_scores import depth_scores, finding
from looplab.report.keyed import Keyed
from report.test_page import look, numbers_in
from report.test_study import Page

COUNTS = {"launches": 8, "row_applications": 64, "flops_forward": 123_456_789}


def task(name, **changes):
    fields = {
        "name": name, "origin": "local", "version": "1.0", "output": "multiple_choice", "documents": 60, "of": 100,
        "num_fewshot": 5, "settings": "ab" * 16, "truncated": 0, "lost_tokens": 0, "steps": {}, "counts": COUNTS,
    }  # fmt: skip
    return EvalTask(**{**fields, **changes})


def scores(name, depths):
    rows = []
    for i, depth in enumerate(depths):
        rows.append((name, depth, "acc", "none", 0.3 + 0.05 * i, 0.06, True))
        rows.append((name, depth, "exact_match", "strict-match", 0.1 * i, 0.04, True))
        rows.append((name, depth, "byte_perplexity", "none", 5.8 - 0.1 * i, None, False))
    names = ("task", "depth", "metric", "filter", "value", "stderr", "higher_is_better")
    return [EvalScore(**dict(zip(names, row, strict=True))) for row in rows]


def planted(depths=(1, 2, 4, 8), **changes):
    fields = {
        "model": "text <core>", "architecture": "looped 1", "weights": "cd" * 16, "tokenizer": "ef" * 16,
        "dtype": "float32", "device": "cpu", "parameters": 181_504, "trained_depth": "UniformDepth(1, 8)",
        "default_depth": "4", "depths": depths, "unit": "steps", "trained_units": (1, 8), "shared": (8, 15),
        "exit_rule": "", "kv_rule": "DepthIndexed(Refuse())", "init": "model",
        "seeds": {"fewshot": 1234, "noise": 1234, "draws": 1234}, "system_prompt": "", "chat_template": "",
        "fewshot_as_multiturn": False, "gen_kwargs": "", "limit": None, "max_length": 256,
        "batching": "Batching(size=None, tokens=8192)", "tasks": (task("words"), task("mmlu_a/b")),
        "scores": tuple(scores("words", depths) + scores("mmlu_a/b", depths)),
        "notes": ("words: 3 inputs are longer than 256 tokens and lost 40 tokens on the left.",),
        "versions": {"looplab": "0", "lm-eval": "0.4.13"}, "command": "looplab eval MODEL --tasks words",
    }  # fmt: skip
    return EvalResult(**{**fields, **changes})


CASES = {
    "several": planted(),
    "one": planted(depths=(4,), trained_units=None),
    "many": planted(depths=(1, 2, 4, 8, 16, 32, 64), trained_units=(1, 512)),
    "applications": planted(unit="applications", exit_rule="latent(0.5)"),
    "blank": planted(scores=tuple(dataclasses.replace(s, value=None, stderr=None) for s in scores("words", (1, 2)))),
    "infinite": planted(
        scores=tuple(dataclasses.replace(s, value=float("inf"), stderr=None) for s in scores("words", (1,)))
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_number_of_the_page_stands_in_its_record(case):
    page = Page(evaluation_page(CASES[case]))
    (record,) = page.results
    assert record == json.loads(dump_json(CASES[case]))
    checked = 0
    for key, text in page.numbers:
        value = look(key, record)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            shown = numbers_in(text)[0]
            assert shown == pytest.approx(value, abs=5e-5), key
            checked += 1
    assert checked >= len(COUNTS)
    assert [load for load in page.loads if not load.startswith("#")] == [], "the page loads nothing"


def test_the_page_says_what_the_numbers_depend_on():
    page = Page(evaluation_page(planted(exit_rule="latent(0.5)", system_prompt="Be brief.", limit=60)))
    for text in (
        "Evaluation of text <core>", "words: 3 inputs are longer", "Every token left the loop by the rule latent(0.5)",
        "Be brief.", "takes 8 applications per input; one depth at a time it is 15", "lm-eval",
        "looplab eval MODEL --tasks words", "DepthIndexed(Refuse())",
    ):  # fmt: skip
        assert text in page.text, text


def test_a_score_stands_in_the_column_of_its_depth_with_its_error():
    table = scores_table(Keyed(planted(depths=(1, 8))))
    assert table.columns == ("task", "metric", "filter", "better", "1 step", "8 steps")
    row = [cell.text for cell in table.rows[0]]
    assert row == ["words", "acc", "", "higher", "0.3000 ±0.0600", "0.3500 ±0.0600"]
    assert [cell.text for cell in table.rows[2]][2:] == ["", "lower", "5.8000", "5.7000"]


def test_tables_are_latex():
    text = evaluation_tex(planted())
    assert r"0.3000 $\pm$0.0600" in text
    assert r"exact\_match & strict-match" in text


def test_all_files_are_written_and_equal_results_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write_evaluation(planted(), tmp_path / name)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert {str(f) for f in files} == {
        "report.html", "tables.tex", "figures/depth-words.svg", "figures/depth-words.pdf",
        "figures/depth-mmlu-a-b.svg", "figures/depth-mmlu-a-b.pdf",
    }  # fmt: skip
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_tasks_of_like_names_get_files_of_their_own():
    like = planted(scores=tuple(scores("a/b", (1,)) + scores("a b", (1,))), depths=(1,))
    assert [plate.name for plate in plates(like)] == ["depth-a-b-0", "depth-a-b-1"]


def test_the_title_says_the_first_metric_at_both_ends():
    assert finding(planted(), "words") == "words: acc 0.300 at 1 step, 0.450 at 8 steps"
    assert finding(planted(depths=(4,)), "words") == "words: acc 0.300 at 4 steps"
    assert finding(CASES["blank"], "words") == "words: acc has no number"


@pytest.mark.parametrize("case", CASES)
def test_the_curve_goes_through_the_scores_and_texts_do_not_clash(case):
    result = CASES[case]
    figure = depth_scores(result, "words")
    canvas = FigureCanvasAgg(figure)
    with matplotlib.rc_context(base.STYLE):
        canvas.draw()
    if case == "several":
        line = figure.axes[0].get_lines()[0]
        assert list(zip(*line.get_data(), strict=True)) == [
            (1, 0.3),
            (2, 0.35),
            (4, pytest.approx(0.4)),
            (8, pytest.approx(0.45)),
        ]
    found = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    found = [t for t in found if not t.get_text().replace("−", "").replace(".", "").isdigit()]
    boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in found if t.get_fontsize() >= 9]
    assert len(boxes) == len(found), "smaller than 9 points"
    clashes = [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.padded(-1).overlaps(y.padded(-1))]
    assert not clashes
