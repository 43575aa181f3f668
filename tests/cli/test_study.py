import fcntl

import pytest

from looplab.cli import exit_codes, main
from looplab.studies.base import STUDIES


def test_help_says_what_a_study_is_and_which_words_there_are(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["study", "--help"])
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "not identifiable at this scale",
        "written and hashed",
        "A missed prediction is a result",
        "--predict-only",
    ):
        assert words in printed


def test_list_names_every_study_with_its_question(capsys):
    assert main(["study", "--list"]) == exit_codes.DONE
    printed = capsys.readouterr().out
    for name in STUDIES:
        assert name in printed
        assert STUDIES[name].question in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["depht_schedule"],
            "study: no study 'depht_schedule'. Did you mean 'depth_schedule'? See: looplab study --list",
        ),
        ([], "study: no study ''. See: looplab study --list"),
        (["dcp", "--seeds", "2"], "study: dcp trains nothing, so --seeds must be left out."),
        (["depth_schedule", "--seeds", "0"], "study: --seeds must be from 1 to 1000. Got 0."),
        (["dcp", "--full"], "study: dcp has no further arms, so --full must be left out."),
        (["dcp", "--workers", "0"], "study: --workers must be at least 1. Got 0."),
    ],
)
def test_a_wrong_word_is_one_line_and_code_2(tmp_path, capsys, words, message):
    assert main(["study", *words, "--out", str(tmp_path)]) == exit_codes.USAGE
    assert capsys.readouterr().err == message + "\n"
    assert not list(tmp_path.iterdir())


def test_an_unknown_scale_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["study", "dcp", "--scale", "huge"])
    assert caught.value.code == exit_codes.USAGE
    assert "smoke" in capsys.readouterr().err


def test_predictions_alone_are_written_and_hashed(tmp_path, capsys):
    words = ["study", "depth_schedule", "--scale", "cpu", "--predict-only", "--out", str(tmp_path)]
    assert main(words) == exit_codes.DONE
    first = capsys.readouterr().out
    assert first.startswith("predictions.json  SHA-256 ")
    assert main(words) == exit_codes.DONE
    assert capsys.readouterr().out == first
    assert main([*words, "--seeds", "4"]) == exit_codes.BUSY
    assert "holds other predictions (seeds" in capsys.readouterr().err
    assert main([*words, "--seeds", "4", "--fresh"]) == exit_codes.DONE
    assert capsys.readouterr().out != first


def test_a_folder_in_use_is_code_7(tmp_path, capsys):
    (tmp_path / "dcp/smoke").mkdir(parents=True)
    with (tmp_path / "dcp/smoke/.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["study", "dcp", "--scale", "smoke", "--out", str(tmp_path)]) == exit_codes.BUSY
    assert "in use by another process" in capsys.readouterr().err


def test_a_folder_of_another_kind_is_code_7(tmp_path, capsys):
    (tmp_path / "results.json").touch()
    assert main(["study", "dcp", "--scale", "smoke", "--out", str(tmp_path)]) == exit_codes.BUSY
    assert "holds something else (results.json)" in capsys.readouterr().err


def test_the_result_is_printed_with_the_place_of_its_page(tmp_path, capsys, monkeypatch):
    from looplab.cli import study as command
    from report.test_study import planted

    monkeypatch.setattr(command, "run_study", lambda *args, say, **more: say("[1/4] text-core") or planted())
    assert main(["study", "dcp", "--out", str(tmp_path)]) == exit_codes.DONE
    printed = capsys.readouterr()
    assert printed.err == "[1/4] text-core\n"
    assert f"Report: {tmp_path}/dcp/cpu/report.html" in printed.out
    assert "dcp.8              supported" in printed.out
    assert main(["study", "dcp", "--quiet", "--out", str(tmp_path)]) == exit_codes.DONE
    assert capsys.readouterr().err == ""


def test_an_interrupt_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    from looplab.cli import study as command

    def interrupt(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_study", interrupt)
    assert main(["study", "dcp", "--out", str(tmp_path)]) == exit_codes.INTERRUPTED
    assert "The same command goes on with what is missing." in capsys.readouterr().err
