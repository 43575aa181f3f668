"""`looplab scaling`: every action, its files, and how it refuses."""

import json

import pyarrow.parquet
import pytest

from looplab import cli
from looplab.cli import exit_codes
from looplab.cli.scaling import ACTIONS
from looplab.scaling import Fit
from looplab.scaling.laws import ForwardBackward, Power
from looplab.scaling.matching import SAME
from synthetic import rows_of


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    rows = rows_of(ForwardBackward(gain=Power()), gains={"phi_b": 0.459, "phi_f": 0.3})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_help_names_every_action(capsys):
    assert cli.main(["scaling", "--help"]) == exit_codes.DONE
    said = capsys.readouterr().out
    assert all(f"  {name}" in said for name in ACTIONS)
    assert cli.main(["scaling"]) == exit_codes.USAGE
    assert cli.main(["scaling", "fitt"]) == exit_codes.USAGE
    assert "Did you mean 'fit'?" in capsys.readouterr().err


def test_check_prints_the_design_and_refuses_with_4(table, tmp_path, capsys):
    assert cli.main(["scaling", "check", str(table)]) == exit_codes.DONE
    assert "144 runs, 36 cells" in capsys.readouterr().out
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    (tmp_path / "bad.jsonl").write_text("\n".join(json.dumps(row | {"loss": 20.0}) for row in rows))
    assert cli.main(["scaling", "check", str(tmp_path / "bad.jsonl")]) == exit_codes.DATA
    assert "look like perplexity" in capsys.readouterr().out
    assert cli.main(["scaling", "check", str(tmp_path / "none.csv")]) == exit_codes.DATA
    assert cli.main(["scaling", "check", str(table), "--only", "x"]) == exit_codes.USAGE
    assert cli.main(["scaling", "check"]) in (exit_codes.USAGE, 2)


@pytest.mark.slow
def test_fit_writes_a_folder_and_repeats_it_byte_for_byte(table, tmp_path, capsys):
    words = ["scaling", "fit", str(table), "--starts", "12", "--replicates", "10", "--quiet"]
    for name, more in (("a", ["--compare"]), ("b", [])):
        assert cli.main([*words, *more, "--out", str(tmp_path / name)]) == exit_codes.DONE
    said = capsys.readouterr().out
    assert "phi_f" in said and "Report:" in said
    for name in ("fit.json", "residuals.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert "verdict" in json.loads((tmp_path / "a" / "comparison.json").read_text())
    found = Fit.from_json((tmp_path / "a" / "fit.json").read_text())
    assert found.law == ForwardBackward(gain=Power()) and found.runs == 144
    assert pyarrow.parquet.read_table(tmp_path / "a" / "residuals.parquet").num_rows == 144
    page = (tmp_path / "a" / "report.html").read_text()
    assert "These runs are synthetic" in page and "Laws compared" in page
    assert json.loads((tmp_path / "a" / "timing.json").read_text())["seconds"]["starts"] > 0


def test_fit_refuses_what_the_runs_do_not_tell(table, tmp_path, capsys):
    out = ["--out", str(tmp_path / "fit"), "--quiet"]
    assert cli.main(["scaling", "fit", str(table), "--only", "num_steps=4.0", *out]) == exit_codes.DATA
    assert "phi is not identified: every run has num_steps = 4" in capsys.readouterr().err
    assert cli.main(["scaling", "fit", str(table), "--fix", "psi=1", *out]) == exit_codes.DATA
    assert cli.main(["scaling", "fit", str(table), "--fix", "phi_f=x", *out]) == exit_codes.USAGE
    assert cli.main(["scaling", "fit", str(table), "--starts", "0", *out]) == exit_codes.USAGE
    assert not (tmp_path / "fit").exists()


def test_cost_puts_depths_side_by_side(capsys):
    assert cli.main(["scaling", "cost", "--num-steps", "1", "4", "--window", "2"]) == exit_codes.DONE
    said = capsys.readouterr().out
    assert "20,480,000" in said and "estimate" not in said
    device = ["--flops-per-second", "1e14", "--bytes-per-second", "1e12", "--price-per-hour", "2"]
    assert cli.main(["scaling", "cost", *device]) == exit_codes.DONE
    assert "price/1M tokens (estimate)" in capsys.readouterr().out
    assert cli.main(["scaling", "cost", *device[:2]]) == exit_codes.USAGE
    assert cli.main(["scaling", "cost", "--num-steps", "3"]) == exit_codes.USAGE
    assert "Take one of 1, 2, 4, 8, 16" in capsys.readouterr().err


def test_match_prints_the_published_table_and_reads_measurements(tmp_path, capsys):
    assert cli.main(["scaling", "match"]) == exit_codes.DONE
    assert "cand. 2       2304      27      2    1.42    0.63" in capsys.readouterr().out
    assert cli.main(["scaling", "match", "--by", "step-time"]) == exit_codes.USAGE
    assert cli.main(["scaling", "match", "--reference", "2048"]) == exit_codes.USAGE
    shapes = ((2048, 48, 1, 1.0), (2176, 25, 2, 0.8), (2304, 27, 2, 0.99), (2432, 28, 2, 1.2))
    names = ("width", "layers", "loops", "step_seconds")
    more = {"quartiles": [0.9, 1.1], "peak_bytes": 10**9, "steps": 20, **dict.fromkeys(SAME, "a")}
    rows = [json.dumps(dict(zip(names, shape, strict=True)) | more) for shape in shapes]
    (tmp_path / "steps.jsonl").write_text("\n".join(rows))
    words = ["scaling", "match", "--by", "step-time", "--measurements", str(tmp_path / "steps.jsonl")]
    assert cli.main(words) == exit_codes.DONE
    assert "0.990           1.0  <- matched by step-time" in capsys.readouterr().out
    (tmp_path / "steps.jsonl").write_text(rows[0].replace('"hardware": "a", ', ""))
    assert cli.main(words) == exit_codes.DATA
    capsys.readouterr()
