"""Batch files: checked whole, answered once, complete after any number of kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from looplab.engine.config import EngineConfig
from looplab.server.batch import (
    Batch,
    BatchBusyError,
    BatchFolder,
    EngineDiedError,
    InputError,
    Line,
    batch_settings,
    read_lines,
)
from server.live import byte_tokenizer
from server.scripted_engine import ScriptedEngine, spelling
from source import ROOT

SETTINGS = {"input": "abc", "seed": 0}


def line(custom_id, url="/v1/completions", method="POST", **body):
    asked = {"prompt": f"say {custom_id}", "max_tokens": 6} if url == "/v1/completions" else {}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": {**asked, **body}})


def data(*lines):
    return "\n".join(lines).encode()


def answer_all(lines, out, *, errors=None, settings=SETTINGS, script=None, prepare=lambda engine: None, most=4):
    """Runs a batch to its end; returns what was counted and the answers by custom_id."""
    engine = ScriptedEngine(byte_tokenizer(), script or spelling("hello world"))
    prepare(engine)
    engine.start()
    folder = BatchFolder(out, errors)
    try:
        with folder.claimed(settings) as finished:
            if not finished:
                Batch(engine, engine.tokenizer, names=("m",), most=most).run(lines, folder)
                counted = folder.finish(lines)
            else:
                counted = folder.counted()
    finally:
        engine.close()
    return counted, engine


def answers(path):
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_answered_in_order_with_the_rules_of_the_server(tmp_path):
    chat = line("chat", url="/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    lines = read_lines(data(line("b"), chat, line("bad", temperature=3), "", line("a", n=2), line("s", stream=True)))
    counted, engine = answer_all(lines, tmp_path / "out.jsonl")
    found = answers(tmp_path / "out.jsonl")
    assert counted == (5, 2) and [one["custom_id"] for one in found] == ["b", "chat", "bad", "a", "s"]
    assert all(set(one) == {"id", "custom_id", "response", "error"} and one["error"] is None for one in found)
    body = found[0]["response"]["body"]
    assert (found[0]["response"]["status_code"], body["choices"][0]["text"]) == (200, "hello ")
    assert found[1]["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert found[2]["response"]["status_code"] == 400
    assert found[2]["response"]["body"]["error"]["message"] == "temperature must be in [0, 2]; got 3"
    assert found[4]["response"]["body"]["error"]["code"] == "unsupported_parameter"
    assert not (tmp_path / "out.jsonl.parts").exists() and (tmp_path / "out.jsonl.meta").exists()
    assert len({request.sampling.seed for request in engine.seen}) == 3, "a seed belongs to a line"


def test_errors_go_to_a_file_of_their_own(tmp_path):
    lines = read_lines(data(line("a"), line("bad", max_tokens=-1)))
    counted, _ = answer_all(lines, tmp_path / "out.jsonl", errors=tmp_path / "err.jsonl")
    assert counted == (2, 1)
    assert [one["custom_id"] for one in answers(tmp_path / "out.jsonl")] == ["a"]
    assert [one["custom_id"] for one in answers(tmp_path / "err.jsonl")] == ["bad"]


def test_a_finished_run_is_not_run_again_and_another_one_is_refused(tmp_path):
    lines, out = read_lines(data(line("a"), line("b"))), tmp_path / "out.jsonl"
    answer_all(lines, out)
    before = out.read_bytes()
    counted, engine = answer_all(lines, out)
    assert counted == (2, 0) and not engine.seen and out.read_bytes() == before
    with pytest.raises(BatchBusyError, match=r"belongs to another run \(seed 0 -> 1\)"):
        answer_all(lines, out, settings={**SETTINGS, "seed": 1})
    (tmp_path / "foreign.jsonl").write_text("x", encoding="utf-8")
    with pytest.raises(BatchBusyError, match="is there already, of no batch run"):
        answer_all(lines, tmp_path / "foreign.jsonl")


def test_two_processes_do_not_write_one_output(tmp_path):
    first, second = (BatchFolder(tmp_path / "out.jsonl") for _ in range(2))
    told = pytest.raises(BatchBusyError, match="being written by another process")
    with first.claimed(SETTINGS), told, second.claimed(SETTINGS):
        pass


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: body is not valid JSON at line 1 column 2"),
        ([line("a"), line("b"), line("a")], "line 3: custom_id 'a' is that of line 1"),
        ([line("a", url="/v1/embeddings")], "line 1: url must be /v1/completions or /v1/chat/completions"),
        ([line("a", method="GET")], "line 1: method must be POST; got GET"),
        (['{"custom_id": "a"}'], "line 1: fields must be custom_id, method, url, body; got custom_id"),
        ([line("")], "line 1: custom_id must be a text"),
        ([""], "the file holds no request"),
        (["{"] * 12, "and 2 more. Nothing was run."),
    ],
    ids=range(8),
)
def test_a_file_with_a_wrong_line_is_not_run(lines, message):
    with pytest.raises(InputError) as error:
        read_lines(data(*lines))
    assert message in str(error.value)


def test_draws_depend_on_the_seed_of_the_run_and_the_line():
    one, two = (Line(custom_id=name, url="", body={}) for name in "ab")
    assert len({one.seed(0), one.seed(1), two.seed(0)}) == 3
    assert one.seed(0) == Line(custom_id="a", url="x", body={"prompt": "y"}).seed(0) < 2**63


def test_what_was_answered_before_the_engine_died_is_kept(tmp_path):
    lines, out = read_lines(data(*(line(f"{i}") for i in range(6)))), tmp_path / "out.jsonl"

    def script(request, choice, index):
        if request.tokens[-1:] == b"4" or bytes(request.tokens).endswith(b"4"):
            engines[0].die()
        return 97

    engines = []
    with pytest.raises(EngineDiedError):
        answer_all(lines, out, script=script, prepare=engines.append, most=1)
    assert not out.exists() and len(BatchFolder(out).answers()) == 4
    counted, engine = answer_all(lines, out)
    assert counted == (6, 0) and len(engine.seen) == 2, "answers were asked for again"


def test_a_busy_engine_is_waited_for(tmp_path):
    lines = read_lines(data(*(line(f"{i}") for i in range(9))))
    counted, _ = answer_all(
        lines, tmp_path / "out.jsonl", most=9, prepare=lambda engine: setattr(engine, "max_waiting", 2)
    )
    assert counted == (9, 0)


def test_settings_name_what_tokens_depend_on():
    card = {"weights": "w", "kv_rule": "single", "numerics": "exact", "noise": "none", "pages": 7}
    config = asdict(EngineConfig())
    settings = batch_settings(card | {"config": config}, data=b"x", seed=3, names=("m",))
    assert settings["weights"] == "w" and settings["seed"] == 3 and len(settings["input"]) == 64
    assert "pages" not in settings, "how much memory is free today is no part of a run"


CHILD = """
import sys
from pathlib import Path
from server.scripted_engine import ScriptedEngine
from looplab.data.tokenizers import ByteTokenizer
from looplab.engine.tokenizer import PlainTokenizer
from looplab.server import batch
batch.PART_SECONDS = 0.02
source, out = map(Path, sys.argv[1:])
def script(request, choice, index):
    return 97 + (request.sampling.seed // (index + 1)) % 26
engine = ScriptedEngine(PlainTokenizer(ByteTokenizer()), script, tick_seconds=0.01)
engine.start()
lines = batch.read_lines(source.read_bytes())
folder = batch.BatchFolder(out)
with folder.claimed({"seed": 0}) as finished:
    if not finished:
        print("running", flush=True)
        batch.Batch(engine, engine.tokenizer, names=("m",), most=3).run(lines, folder)
        folder.finish(lines)
"""


def killed(tmp_path, kills):
    """Answers without ids and times, of a run that was killed so often and one that was not."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(data(*(line(f"id-{i}", temperature=1) for i in range(60))))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    command = [sys.executable, "-c", CHILD, str(source)]
    moments = random.Random(7)
    for _ in range(kills):
        child = subprocess.Popen(
            [*command, str(tmp_path / "killed.jsonl")], env=environment, stdout=subprocess.PIPE, cwd=tmp_path
        )
        with child:
            if child.stdout.readline():  # nothing, where the run before had finished
                time.sleep(moments.uniform(0.0, 1.5 / max(1, kills // 3)))
            child.send_signal(signal.SIGKILL)
    for name in ("killed.jsonl", "whole.jsonl"):
        subprocess.run([*command, str(tmp_path / name)], env=environment, check=True, cwd=tmp_path, capture_output=True)
    for name in ("killed.jsonl", "whole.jsonl"):
        found = answers(tmp_path / name)
        assert [one["custom_id"] for one in found] == [f"id-{i}" for i in range(60)], "a line is missing or twice"
        for one in found:
            del one["response"]["body"]["created"]
        yield found


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_output_of_an_undisturbed_one(tmp_path):
    disturbed, whole = killed(tmp_path, kills=3)
    assert disturbed == whole


@pytest.mark.nightly
def test_a_run_killed_twenty_times_goes_on_to_the_same_output(tmp_path):
    disturbed, whole = killed(tmp_path, kills=20)
    assert disturbed == whole
