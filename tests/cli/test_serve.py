"""`looplab serve`: what it says at the start, what it refuses, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from looplab.cli import exit_codes, main
from looplab.cli.serve import start_lines, url
from looplab.server.lifecycle import bind

CARD = {
    "architecture": "looped",
    "trained_steps": "4",
    "max_steps": 8,
    "exit_rules": ["full", "hazard"],
    "refused_rules": {"kl": "kl needs coda and head every step: bound 0.99x; start with --allow-costly-exit"},
    "launch_rows": 16,
    "max_resident": 24,
    "min_coda_rows": 8,
    "bound_at_half_depth": 1.625,
    "draft_steps": None,
    "predicted_realised": 0.97,
    "predicted_for": "if depths were spread evenly over 1..8",
    "kv_rule": "single",
    "kv_reason": "as trained",
    "pages": 400,
    "page_tokens": 16,
    "kv_tokens": 6400,
    "kv_bytes_per_token": 5120,
    "context": 256,
    "reuse": "unknown",
    "numerics": "fast",
    "noise": "none",
    "config": {"exit_rule": "hazard", "exit_threshold": 0.5},
}


def test_the_start_log_says_what_an_operator_has_to_know():
    said = "\n".join(start_lines(CARD, ("demo", "alias")))
    for words in (
        "demo, alias", "trained steps 4", "at most 8 steps", "exit rule hazard(0.5)", "kl is not loaded", "W 16 rows",
        "R 24 residents", "m 8 rows", "1.62x",
        "realised fraction 0.970 if depths were spread evenly over 1..8", "rule single", "400 pages of 16",
        "6,400 tokens", "context 256", "early exits: unknown", "numerics: fast",
    ):  # fmt: skip
        assert words in said, words
    assert "realised fraction not predicted" in "\n".join(start_lines(CARD | {"predicted_realised": None}, ("demo",)))
    plain = CARD | {"config": {"exit_rule": None, "exit_threshold": None}}
    assert "exit rule full, every token" in "\n".join(start_lines(plain, ("demo",)))


def test_addresses_are_written_as_a_browser_takes_them():
    assert url("127.0.0.1", 8000) == "http://127.0.0.1:8000" == url("0.0.0.0", 8000)
    assert url("::1", 80) == "http://[::1]:80"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--host 0.0.0.0", exit_codes.USAGE, "--host must be a local address where no API key is set. Got 0.0.0.0"),
        ("--keys none.txt", exit_codes.USAGE, "none.txt"),
        ("--send-timeout -1", exit_codes.USAGE, "send_timeout must be seconds, at least 0. Got -1.0"),
        ("--port 70000", exit_codes.USAGE, "--port must be in 0..65535. Got 70000. 0 takes a free one."),
        ("--port 0 --device abacus", exit_codes.USAGE, "--device must be one"),
        ("--port 0 --exit-threshold 0.5", exit_codes.USAGE, "--exit-threshold needs --exit-rule"),
    ],
)
def test_mistakes_end_as_one_line(options, code, message, capsys, monkeypatch):
    monkeypatch.delenv("LOOPLAB_API_KEYS", raising=False)
    assert main(["serve", "text-core", *options.split()]) == code
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and error.startswith("serve: ")


def test_a_port_in_use_is_refused_before_the_model_is_opened(capsys):
    with bind("127.0.0.1", 0) as taken:
        assert main(["serve", "no-such-model", "--port", str(taken.getsockname()[1])]) == exit_codes.BUSY
    assert "Choose another with --port" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused(capsys):
    assert main(["serve", "text-cor", "--port", "0"]) == exit_codes.MODEL
    assert "MODEL must be a checkpoint folder or a built-in name. Got 'text-cor'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_answers_and_ends_gently(tmp_path):
    command = [sys.executable, "-m", "looplab.cli", "serve", "text-core", "--port", "0", "--num-pages", "64"]
    process = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    with process:
        log = []
        for line in process.stderr:
            log.append(line)
            if line.startswith("Serving text-core at "):
                break
        assert any(line.startswith("KV cache: rule ") for line in log), log
        address = re.search(r"http://\S+", log[-1])[0]
        rest = threading.Thread(target=process.stderr.read)
        rest.start()
        asked = {"prompt": "def f(", "max_tokens": 100, "stream": True, "ignore_eos": True}
        lines = []
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 1:
                    process.send_signal(signal.SIGTERM)
        assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]", "an answer under way was cut off"
        assert process.wait(timeout=60) == exit_codes.DONE
        rest.join()
