"""The page of a sweep, from planted records."""

import json
import re

import pytest

from looplab.report.figures.sweep_losses import drawable, finding, sweep_losses
from looplab.report.keyed import Keyed
from looplab.report.sweep import plates, runs_table, settings_table, sweep_page, sweep_tex, write_sweep
from looplab.training.sweep.table import sweep_table
from training.sweep.test_table import planted

CHOICES = ("optimizer.lr=1e-3,1e-2", "gradient=FullBPTT,TruncatedBPTT(window=2)")


@pytest.fixture
def table(tmp_path):
    return sweep_table(planted(tmp_path), asked=["seed", "optimizer.lr"], command="looplab sweep tiny --over <seed>")


def test_everything_is_written_and_repeats_byte_for_byte(table, tmp_path):
    page = write_sweep(table, tmp_path / "one")
    write_sweep(table, tmp_path / "two")
    names = {str(path.relative_to(tmp_path / "one")) for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert names == {
        "report.html", "tables.tex", "figures/loss-optimizer.lr.svg", "figures/loss-optimizer.lr.pdf",
    }  # fmt: skip
    assert page == tmp_path / "one" / "report.html"
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


def test_the_page_says_the_least_loss_first_and_loads_nothing(table):
    html = sweep_page(table, plates(table))
    assert "Least loss: 2.1250 at lr=0.01." in html
    assert html.index("Least loss") < html.index("<table>") < html.index("<figure")
    assert "looplab sweep tiny --over &lt;seed&gt;" in html
    assert not re.search(r'(src|href)="(https?:)?//', html)
    (embedded,) = re.findall(r'<script type="application/json" class="results">(.*?)</script>', html, re.DOTALL)
    record = json.loads(embedded)
    for key in re.findall(r'data-key="([^"]+)"', html):
        value = record
        for part in re.findall(r"\w+", key):
            value = value[int(part)] if part.isdigit() else value[part]
        assert isinstance(value, (int, float)), key


def test_tables_join_seeds_and_list_runs(table):
    rows = [[cell.text for cell in row] for row in settings_table(table).rows]
    assert rows == [["0.001", "2", "3.2500", "3.0000", "3.5000"], ["0.01", "2", "2.1250", "2.0000", "2.2500"]]
    runs = runs_table(Keyed(table))
    assert [row[3].text for row in runs.rows] == ["3.0000", "2.0000", "3.5000", "2.2500"]
    assert runs.columns[:4] == ("seed", "lr", "status", "loss")
    assert "2.1250" in sweep_tex(table) and "booktabs" in sweep_tex(table)


def test_lost_runs_are_named_on_the_page(tmp_path):
    table = sweep_table(planted(tmp_path, lost=(0, 2)))
    html = sweep_page(table, plates(table))
    assert html.count("its worker died.") == 2 + 2, "said, and embedded"
    assert "0 of 2" in html and "Least loss" not in html


def test_a_figure_per_field_with_a_line_per_combination_of_the_others(tmp_path):
    table = sweep_table(planted(tmp_path, over=CHOICES))
    assert drawable(table) == ("optimizer.lr", "gradient")
    along = sweep_losses(table, "optimizer.lr").axes[0]
    assert [line.get_label() for line in along.lines] == ["gradient=FullBPTT()", "gradient=TruncatedBPTT(window=2)"]
    assert [list(line.get_ydata()) for line in along.lines] == [[3.0, 3.5], [2.0, 2.25]]
    assert along.get_xscale() == "log" and [t.get_text() for t in along.get_xticklabels()] == ["0.001", "0.01"]
    across = sweep_losses(table, "gradient").axes[0]
    assert across.get_xscale() == "linear" and list(across.lines[0].get_xdata()) == [1.0, 2.0]
    assert finding(table, "gradient") == "Loss against gradient: least 2.0000 at gradient = TruncatedBPTT(window=2)"


def test_seeds_are_a_mean_and_a_band(table):
    axes = sweep_losses(table, "optimizer.lr").axes[0]
    assert list(axes.lines[0].get_ydata()) == [3.25, 2.125] and len(axes.collections) == 1


def test_losses_that_do_not_compare_are_not_drawn(tmp_path):
    import dataclasses

    runs = planted(tmp_path)
    runs[0] = dataclasses.replace(runs[0], record=dataclasses.replace(runs[0].record, tokenizer="zz"))
    table = sweep_table(runs)
    assert drawable(table) == () and "do not compare" in sweep_page(table, plates(table))
