import json
import re

import pytest

from looplab._config import to_dict
from looplab.cli import exit_codes, main
from looplab.models.folder import load_folder
from looplab.recipes import RECIPES
from looplab.training.trackers import TRACKERS
from training.tiny_run import tiny_run
from training.trackers.recorded import logged, register


@pytest.fixture
def tiny(tmp_path):
    """The words of a command that trains a run of seconds."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(to_dict(tiny_run(tmp_path))))
    return ["train", str(path), "--out", str(tmp_path / "run")]


def test_help_names_every_recipe_and_says_how_to_go_on(capsys):
    assert main(["train", "--help"]) == exit_codes.DONE
    printed = capsys.readouterr().out
    for name in RECIPES:
        assert f"  {name} " in printed
    assert "The same command in the same folder goes on" in printed


def test_without_a_recipe_the_help_goes_to_stderr(capsys):
    assert main(["train"]) == exit_codes.USAGE
    printed = capsys.readouterr()
    assert (printed.out, printed.err.startswith("usage: looplab train RECIPE")) == ("", True)


def test_the_help_of_a_recipe_lists_its_fields(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "text-core", "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for flag in (
        "--out",
        "--optimizer.lr",
        "--model.order.num-steps",
        "--schedule.warmup-steps",
        "--data.packing.rows",
    ):
        assert flag in printed


def test_it_trains_and_the_model_opens(tiny, tmp_path, capsys):
    assert main([*tiny, "--steps", "3", "--log-every", "1", "--model.dim", "8"]) == exit_codes.DONE
    printed = capsys.readouterr()
    assert printed.out.startswith("Held-out loss ")
    assert printed.out.endswith(f"Model: {tmp_path / 'run' / 'model'}\n")
    assert printed.err.count("tokens/s") == 3
    model, facts = load_folder(tmp_path / "run" / "model")
    assert (model.config.dim, facts["trained"]["steps"]) == (8, 3)


def test_the_same_command_goes_on(tiny, capsys):
    main([*tiny, "--steps", "2"])
    capsys.readouterr()
    assert main([*tiny, "--steps", "4"]) == exit_codes.DONE
    assert "at step 2." in capsys.readouterr().err


def test_quiet_says_the_result_only(tiny, capsys):
    main([*tiny, "--steps", "1", "--quiet"])
    printed = capsys.readouterr()
    assert "tokens/s" not in printed.err
    assert printed.out.startswith("Held-out loss ")


def test_trackers_are_told_when_named(tiny, tmp_path, monkeypatch):
    told = register(monkeypatch)
    assert main([*tiny, "--steps", "2", "--log-every", "1", "--quiet"]) == exit_codes.DONE
    assert told == []
    assert main([*tiny, "--steps", "4", "--log-every", "1", "--quiet", "--track", " kept,"]) == exit_codes.DONE
    assert [step for step, numbers in logged(told) if "train/loss" in numbers] == [3, 4]


@pytest.mark.parametrize(
    ("track", "message"),
    [
        ("trakio", "train: Unknown tracker 'trakio'. Did you mean 'trackio'? Known: trackio, wandb."),
        ("trackio,trackio", "train: track must name every tracker once. Got trackio, trackio. Leave"),
    ],
)
def test_trackers_that_cannot_be_had_are_refused_before_anything_is_made(
    tiny, tmp_path, capsys, monkeypatch, track, message
):
    monkeypatch.setattr(TRACKERS["trackio"], "package", "json")
    code, line = refused([*tiny, "--track", track], capsys)
    assert (code, line.startswith(message)) == (exit_codes.USAGE, True)
    assert not (tmp_path / "run").exists()


def refused(words, capsys):
    code = main(words)
    printed = capsys.readouterr()
    assert printed.out == ""
    return code, printed.err.splitlines()[-1]


def test_a_changed_configuration_is_refused(tiny, capsys):
    main([*tiny, "--steps", "1"])
    capsys.readouterr()
    code, line = refused([*tiny, "--optimizer.lr", "0.5"], capsys)
    assert code == exit_codes.BUSY
    assert line == "train: Cannot resume run: optimizer.lr was 0.01, is 0.5. Start a new run or restore the value."


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--optimizer.lr", "nan"], exit_codes.USAGE, "train: config: a number must be finite. Got nan."),
        (["--steps", "0"], exit_codes.USAGE, "train: RunConfig.steps must be at least 1. Got 0."),
        (["--evaluation.depths", "9"], exit_codes.USAGE, "train: Evaluation.depths must be at most 4 for this model."),
        (["--data.sources", "gone.txt"], exit_codes.DATA, "train: gone.txt: no such file."),
        (["--model.vocab", "100"], exit_codes.DATA, "train: token id "),
        (
            ["--device", "abacus"],
            exit_codes.USAGE,
            "train: --device must be one that this PyTorch can use, such as cpu.",
        ),
    ],
)
def test_a_mistake_is_one_line_and_its_code_and_leaves_nothing(tiny, tmp_path, capsys, extra, code, message):
    got, line = refused([*tiny, *extra], capsys)
    assert got == code
    assert line.startswith(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file."),
        ("{", "which is not JSON ("),
        ("[]", "which holds no configuration."),
        ('{"config": 3}', "which holds no configuration."),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path, capsys, content, message):
    file = tmp_path / "old.json"
    if content is not None:
        file.write_text(content)
    code, line = refused(["train", str(file), "--out", str(tmp_path / "run")], capsys)
    assert code == exit_codes.USAGE
    assert line.startswith("train: RECIPE must be ")
    assert message in line


def test_a_file_in_place_of_the_folder_is_refused(tiny, tmp_path, capsys):
    (tmp_path / "run").write_text("precious")
    code, line = refused(tiny, capsys)
    assert (code, line) == (
        exit_codes.BUSY,
        f"train: {tmp_path / 'run'} must be a folder. Got a file. Choose another folder.",
    )
    assert (tmp_path / "run").read_text() == "precious"


def test_after_a_mistake_the_corrected_command_runs(tiny, tmp_path, capsys):
    refused([*tiny, "--data.sources", "gone.txt"], capsys)
    assert main([*tiny, "--steps", "1"]) == exit_codes.DONE


def test_a_mistake_inside_a_field_is_named(tiny, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*tiny, "--data.packing.seq-len", "0"])
    assert caught.value.code == exit_codes.USAGE
    assert "Packing.seq_len must be at least 1. Got 0." in capsys.readouterr().err


def test_an_unknown_recipe_gets_a_suggestion(tmp_path, capsys):
    code, line = refused(["train", "text-cor", "--out", str(tmp_path / "run")], capsys)
    assert code == exit_codes.USAGE
    assert line.startswith("train: Unknown recipe 'text-cor'. Did you mean 'text-core'? Known: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data.jsonl", b'{"text": "a"}\n{"body": "b", "url": "c"}\n', r"data.jsonl line 2 .*'body', 'url'"),
        ("data.txt", b"caf\xe9", "data.txt must be UTF-8. Byte 0xe9 at offset 3"),
        ("data.txt", b"", "data.txt must hold at least one document. Got an empty file"),
    ],
)
def test_data_that_cannot_be_used_is_named(tiny, tmp_path, capsys, file, content, message):
    (tmp_path / file).write_bytes(content)
    code, line = refused([*tiny, "--data.sources", str(tmp_path / file)], capsys)
    assert code == exit_codes.DATA
    assert re.search(message, line)


def test_lines_that_are_left_out_are_counted(tiny, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"text": "so many words, and more"}\n{"body": "b"}\n3\n')
    words = ["--data.sources", str(tmp_path / "data.jsonl"), "--data.on-bad-line", "skip", "--steps", "1"]
    assert main([*tiny, *words]) == exit_codes.DONE
    assert "2 lines of the data left out (on_bad_line='skip').\n" in capsys.readouterr().err


def test_a_run_that_diverges_ends_with_a_line(tiny, capsys):
    words = ["--optimizer.lr", "1e30", "--clip-norm", "None", "--steps", "6", "--schedule.warmup-steps", "0"]
    code, line = refused([*tiny, *words], capsys)
    assert code == exit_codes.MODEL
    assert line.startswith("train: step ")
    assert "(3 of 3)" in line


def test_an_interrupt_says_how_to_go_on(tiny, capsys, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("looplab.cli.train.train", interrupt)
    assert main(tiny) == exit_codes.INTERRUPTED
    assert "The same command goes on from the newest checkpoint." in capsys.readouterr().err
