import json

import pytest

from looplab.cli import exit_codes, main
from report.test_claims import result, write


def test_claims_of_a_folder_are_printed(tmp_path, capsys):
    write(tmp_path / "x/cpu", result())
    assert main(["claims", str(tmp_path)]) == exit_codes.DONE
    printed = capsys.readouterr().out
    assert printed.startswith("1 supported: 1 claim of 1 study\n")
    assert "x.1                     supported (cpu)" in printed


def test_the_default_folder_is_that_of_studies(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "study-out/x/cpu", result())
    assert main(["claims", "--format", "json"]) == exit_codes.DONE
    assert json.loads(capsys.readouterr().out)["claims"][0]["id"] == "x.1"


@pytest.mark.parametrize(("word", "code"), [("supported", exit_codes.DONE), ("-", exit_codes.FINDING)])
def test_a_check_ends_with_6_while_a_claim_has_no_word(tmp_path, word, code):
    write(tmp_path / "x/cpu", result(word, reason="not measured (--arms)" if word == "-" else ""))
    assert main(["claims", str(tmp_path)]) == exit_codes.DONE
    assert main(["claims", str(tmp_path), "--check"]) == code


def test_a_folder_without_results_is_code_4(tmp_path, capsys):
    assert main(["claims", str(tmp_path)]) == exit_codes.DATA
    assert capsys.readouterr().err == (
        f"claims: DIR must be a folder with results of studies. Got {tmp_path}. Run `looplab study` first.\n"
    )
    write(tmp_path / "x/cpu", result())
    assert main(["claims", str(tmp_path), "--scale", "gpu"]) == exit_codes.DATA
    assert "no study has results at scale gpu" in capsys.readouterr().err
