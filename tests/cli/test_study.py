import dataclasses
import errno
import fcntl
import sys

import pytest

from looplab.cli import exit_codes, main
from looplab.executors import WorkerDied
from looplab.studies.base import STUDIES
from looplab.studies.matching import StudyError


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
        *(
            (
                ["depth_schedule", "--seeds", text],
                f"study: seeds must be different whole numbers, 1000 is kept for tuning. Got {text}.",
            )
            for text in ("0", "0,0", "1000,", "2000", "a", "0,b", "1.5", ",")
        ),
        (["dcp", "--full"], "study: dcp has no further arms, so --full must be left out."),
        (["dcp", "--workers", "0"], "study: --workers must be at least 1, or auto. Got 0."),
        (["dcp", "--minutes", "0"], "study: --minutes must be above 0. Got 0."),
        (["dcp", "--scale", "gpu"], "study: scale gpu needs a CUDA device. Found cpu. Use --scale cpu."),
        (["par", "--model", "a=b"], "study: par cannot use --model, so it must be left out."),
        (["par", "--data", "a=b"], "study: par cannot use --data, so it must be left out."),
        (
            ["dcp", "--arms", "text-core,text-dens"],
            "study: dcp has no arm 'text-dens'. Did you mean 'text-dense'? Arms: text-2x4-fixed, text-2x4-sampled, "
            "text-core, text-dense.",
        ),
        (["dcp", "--claims", "1,9"], "study: dcp has no claim '9'. Claims: 1, 2, 3, 4, 5, 6, 7, 8."),
        (["dcp", "--explain", "x"], "study: dcp has no claim 'x'. Claims: 1, 2, 3, 4, 5, 6, 7, 8."),
        (["all", "--arms", "main"], "study: --arms must be left out with `all`. Name one study."),
        (["all", "--seeds", "2"], "study: --seeds must be left out with `all`. Name one study."),
    ],
)
def test_a_wrong_word_is_one_line_and_code_2(tmp_path, capsys, words, message):
    assert main(["study", *words, "--out", str(tmp_path)]) == exit_codes.USAGE
    assert capsys.readouterr().err == message + "\n"
    assert not list(tmp_path.iterdir())


def test_a_claim_is_explained_with_its_rule_guard_and_what_would_settle_it(tmp_path, capsys):
    assert main(["study", "par", "--explain", "8a", "--out", str(tmp_path)]) == exit_codes.DONE
    printed = capsys.readouterr().out
    for words in (
        "par.8a  With concat",
        "“both are indispensable”",
        "greater(0.2)",
        "below the ceiling",
        "3 seeds or more",
    ):
        assert words in printed
    assert main(["study", "dcp", "--explain", "dcp.2"]) == exit_codes.DONE
    assert "contradicted  1.54 math, 1.08 web" in capsys.readouterr().out


def test_a_dry_run_writes_nothing(tmp_path, capsys, monkeypatch):
    from looplab.cli import study as command
    from looplab.studies.forecast import Missing

    part = {"trained": 1, "applications": 1e6, "flops": 2e12, "memory": "3 MB", "seconds": 600.0}
    monkeypatch.setattr(command, "missing", lambda *given: (Missing(name="main", jobs=2, **part),))
    assert main(["study", "par", "--dry-run", "--workers", "2", "--out", str(tmp_path)]) == exit_codes.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "par, scale cpu: 42 jobs, 40 done, 2 missing"
    assert lines[3].split() == ["main", "2", "1", "1e+06", "2e+12", "3", "MB", "10.0"]
    assert "about 5 minutes on 2 workers" in lines[-1]
    assert not list(tmp_path.iterdir())


def test_few_seeds_are_noticed(tmp_path, capsys):
    words = ["study", "par", "--seeds", "2", "--predict-only", "--out", str(tmp_path)]
    assert main(words) == exit_codes.DONE
    assert capsys.readouterr().err == "2 seeds: 12 of 12 claims can only end as undecided (3 needed)\n"


def test_all_runs_every_study(tmp_path, capsys, monkeypatch):
    from looplab.cli import study as command
    from report.test_study import planted

    ran, result = [], planted()
    monkeypatch.setattr(command, "run_study", lambda study, *given, **more: ran.append(study.name) or result)
    assert main(["study", "all", "--scale", "smoke", "--quiet", "--out", str(tmp_path)]) == exit_codes.DONE
    assert sorted(ran) == sorted(STUDIES)


def test_an_edited_file_of_rows_is_code_4(tmp_path, capsys):
    folder = tmp_path / "dcp/smoke/rows"
    assert main(["study", "dcp", "--scale", "smoke", "--predict-only", "--out", str(tmp_path)]) == exit_codes.DONE
    folder.mkdir()
    (folder / "text-core.json").write_text("{}")
    assert main(["study", "dcp", "--scale", "smoke", "--out", str(tmp_path)]) == exit_codes.DATA
    assert "rows/text-core.json must hold rows of a study" in capsys.readouterr().err


def test_an_unknown_scale_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["study", "dcp", "--scale", "huge"])
    assert caught.value.code == exit_codes.USAGE
    assert "smoke" in capsys.readouterr().err


def test_predictions_alone_are_written_and_hashed(tmp_path, capsys):
    words = ["study", "par", "--scale", "cpu", "--predict-only", "--out", str(tmp_path)]
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
    assert "The same command goes on with what is missing." in (said := capsys.readouterr().err)
    assert f"Go on with: looplab study dcp --scale cpu --out {tmp_path}\n" in said


def test_a_worker_that_dies_and_a_full_disk_leave_the_command_that_goes_on(tmp_path, capsys, monkeypatch):
    from looplab.cli import study as command

    def run(error):
        def fail(*args, **more):
            raise error

        monkeypatch.setattr(command, "run_study", fail)
        return main(["study", "dcp", "--out", str(tmp_path)])

    assert run(WorkerDied("text-core: its worker died 3 times")) == exit_codes.UNEXPECTED
    first, second = capsys.readouterr().err.splitlines()
    assert first == "study: text-core: its worker died 3 times"
    assert second == f"Finished arms are safe. Go on with: looplab study dcp --scale cpu --out {tmp_path}"
    with pytest.raises(OSError, match="No space left"):
        run(OSError(errno.ENOSPC, "No space left on device"))
    assert f"Go on with: looplab study dcp --scale cpu --out {tmp_path}\n" in capsys.readouterr().err


def test_where_no_model_is_left_the_code_is_3(tmp_path, monkeypatch):
    from looplab.cli import study as command
    from report.test_study import planted

    result = planted()
    lost = [dataclasses.replace(arm, facts={"refused": "no such folder"}) for arm in result.arms]
    for arms, code in ((lost, exit_codes.MODEL), ((*lost[1:], result.arms[0]), exit_codes.DONE)):
        found = dataclasses.replace(result, arms=tuple(arms))
        monkeypatch.setattr(command, "run_study", lambda *args, found=found, **more: found)
        assert main(["study", "dcp", "--out", str(tmp_path)]) == code


def test_without_ray_the_error_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["study", "dcp", "--executor", "ray", "--out", str(tmp_path)]) == exit_codes.USAGE
    assert "pip install 'looplab[cluster]'" in capsys.readouterr().err


def test_arms_that_differ_in_more_than_is_declared_are_code_4(tmp_path, capsys, monkeypatch):
    from looplab.cli import study as command

    def differ(*given, **more):
        raise StudyError("dcp: arms a and b differ in lr (1, 2), not declared.")

    monkeypatch.setattr(command, "study_arms", differ)
    for words in (["--arms", "text-core"], []):
        assert main(["study", "dcp", *words, "--out", str(tmp_path)]) == exit_codes.DATA
        assert capsys.readouterr().err == "study: dcp: arms a and b differ in lr (1, 2), not declared.\n"
