import dataclasses
import json
import subprocess
import sys

import pytest

from looplab.records import Claim, ClaimResult, Part, PartResult, Published, Rule, StudyResult, dump_json
from looplab.report.claims import FORMATS, ClaimsError, merge, number

WORD = "supported"


def claim(number, **more):
    part = Part(label="a", quantity="share", arms=("a",), rule=Rule(name="above", numbers=(0.05,)))
    fields = {"origin": "ours", "quote": "", "statement": "It holds.", "unit": "share", "scope": "recipe"}
    return Claim(**{"id": f"x.{number}", "parts": (part,), **fields, **more})


def result(word=WORD, *, study="x", scale="cpu", reason="", claims=None, **more):
    part = PartResult(label="a", value=0.25, low=0.2, high=0.3, level=0.95, seeds=(), word=word, note="n = 3")
    made = claims or (claim(1, published=(Published(figure="24 %", source="S1"),), quote="a | b_c"),)
    found = tuple(
        ClaimResult(claim=c, parts=(part,) * len(c.parts), word=word, reason=reason, flags=("reversed",)) for c in made
    )
    fields = {"version": 1, "question": "Does it?", "references": (), "predictions": "abc", "arms": (), "rows": ()}
    fields |= {"matched": (), "columns": (), "plots": (), "notes": (), "versions": {}, "command": "looplab study x"}
    return StudyResult(study=study, scale=scale, claims=found, **{**fields, **more})


def write(folder, found, written=""):
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(dump_json(found))
    if written:
        (folder / "ledger.json").write_text(
            json.dumps({"predictions_written": "", "arms": {"a": {"finished": written}}})
        )
    return folder


def test_studies_of_several_folders_are_one_table(tmp_path):
    write(tmp_path / "one/x/cpu", result())
    write(tmp_path / "two", result("undecided", study="y", claims=(claim(2),)))
    merged = merge([tmp_path / "one", tmp_path / "two"])
    assert [(row.id, row.said, row.folder) for row in merged.rows] == [
        ("x.1", "supported (cpu)", "x/cpu"),
        ("x.2", "undecided (cpu)", "."),
    ]
    assert merged.counts() == "1 supported, 1 undecided: 2 claims of 2 studies"
    assert merged.older == ()


@pytest.mark.parametrize("dates", [("2026-01-02", "2026-01-01"), ("2026-01-01", "2026-01-02"), ("", "2026-01-02")])
def test_the_newest_run_counts_and_older_ones_are_listed(tmp_path, dates):
    for name, word, date in zip("ab", ("supported", "undecided"), dates, strict=True):
        write(tmp_path / name / "cpu", result(word), date)
    merged = merge([tmp_path])
    newest = "supported" if dates[0] > dates[1] else "undecided"
    assert [row.word for row in merged.rows] == [newest]
    assert [row.word for row in merged.older] == [{"supported": "undecided", "undecided": "supported"}[newest]]


def test_scales_do_not_replace_each_other_and_can_be_chosen(tmp_path):
    write(tmp_path / "x/cpu", result(), "2026-01-01")
    write(tmp_path / "x/smoke", result("not identifiable at this scale", scale="smoke", reason="smoke"), "2026-01-02")
    assert len(merge([tmp_path]).rows) == 2
    assert [row.scale for row in merge([tmp_path], "cpu").rows] == ["cpu"]


def test_every_format_has_every_claim_and_its_word(tmp_path):
    untested = claim(3, parts=(), withheld="size: 20B parameters")
    write(tmp_path / "x/cpu", result("not supported", claims=(claim(1, quote="a | b_c"), untested)))
    merged = merge([tmp_path])
    told = {name: form(merged) for name, form in FORMATS.items()}
    for text in told.values():
        assert all(part in text for part in ("x.1", "x.3", "not supported", "reversed"))
    assert "not supported (cpu): reversed | 25.0 [20.0, 30.0] % (n = 3) | It holds. (“a &#124; b_c”)" in told["md"]
    assert "## Not tested here" in told["md"]
    assert r"a | b\_c" in told["tex"]
    assert told == {name: form(merge([tmp_path])) for name, form in FORMATS.items()}


def test_what_was_not_run_has_no_number(tmp_path):
    write(tmp_path / "x/cpu", result("-", reason="not measured (--full)"))
    merged = merge([tmp_path])
    assert (merged.rows[0].said, merged.rows[0].ours) == ("-", "")
    assert merged.counts().startswith("1 not run")


def test_numbers_wear_the_unit_of_their_claim():
    part = PartResult(label="a", value=-0.5, low=-0.5, high=-0.5, level=0.95, seeds=(), word=WORD)
    assert number(part, "nats") == "\N{MINUS SIGN}0.500"
    assert number(part, "share") == "\N{MINUS SIGN}50.0 %"
    assert number(dataclasses.replace(part, value=1.0, low=None), "1 = identifiable") == "1"


def test_folders_without_results_are_refused(tmp_path):
    with pytest.raises(ClaimsError, match=r"must be a folder with results of studies. Got .*none"):
        merge([tmp_path / "none"])
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit/results.json").write_text('{"schema": 2}')
    with pytest.raises(ClaimsError, match="must be a folder with results of studies"):
        merge([tmp_path])
    path = write(tmp_path / "x/cpu", result()) / "results.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(ClaimsError, match=r"results\.json cannot be read: study: results.json must have schema"):
        merge([tmp_path])


def test_the_table_needs_no_pytorch():
    code = "import sys, looplab.cli.claims; assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
