"""`looplab batch`: a file in, a file out, and what is refused."""

import json

import pytest

from looplab.cli import exit_codes, main


def write(path, *bodies):
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def run(*words, code=exit_codes.DONE):
    assert (
        main(["batch", "text-core", *map(str, words), "--num-pages", "64", "--min-coda-rows", "1", "--quiet"]) == code
    )


@pytest.mark.slow
def test_a_file_is_answered_once(tmp_path, capsys):
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "def f(", "max_tokens": 4, "ignore_eos": True},
        {"prompt": "a", "temperature": 9},
    )
    run(source, tmp_path / "out.jsonl")
    assert f"2 answers in {tmp_path / 'out.jsonl'}, 1 of them errors" in capsys.readouterr().out
    before = (tmp_path / "out.jsonl").read_bytes()
    first, second = map(json.loads, before.splitlines())
    assert first["response"]["body"]["usage"]["completion_tokens"] == 4 and second["response"]["status_code"] == 400
    run(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == before
    run(source, tmp_path / "out.jsonl", "--seed", 1, code=exit_codes.BUSY)
    assert "belongs to another run (seed 0 -> 1)" in capsys.readouterr().err


def test_wrong_lines_stop_the_command_before_the_model_is_opened(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"custom_id": 1}\n{\n', encoding="utf-8")
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", code=exit_codes.DATA)
    error = capsys.readouterr().err
    assert error.startswith("batch: line 1: fields must be") and "line 2: body is not valid JSON" in error
    run(tmp_path / "none.jsonl", tmp_path / "out.jsonl", code=exit_codes.DATA)
    assert not list(tmp_path.glob("out*"))
    run(tmp_path / "in.jsonl", tmp_path / "in.jsonl", code=exit_codes.USAGE)
    assert "must be different files" in capsys.readouterr().err
