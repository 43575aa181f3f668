"""Two replicas on a Ray cluster of two nodes: one is killed under load, and every client gets its answer."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import psutil
import pytest

import looplab
from contract.two_node_server import SIZES
from looplab.engine.request import SamplingParams
from looplab.interop.serving import open_engine

pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

PROMPTS = [f"The {word} of" for word in ("name", "type", "value", "list", "class", "file")]
PROGRAM = Path(__file__).with_name("two_node_server.py")
TOKENS, ASKED, PATIENCE = 96, 24, 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def replicas_of(process: subprocess.Popen[str]) -> set[int]:
    """Process ids of the replicas that a server started."""
    children = psutil.Process(process.pid).children(recursive=True)
    return {child.pid for child in children if "ServeReplica:looplab" in " ".join(_words(child))}


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def eventually(say, seconds: float = PATIENCE):
    """What `say` returns once that is true."""
    end = time.monotonic() + seconds
    while not (found := say()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)
    return found


@pytest.mark.nightly
def test_a_replica_that_is_killed_under_load_loses_no_answer_and_is_replaced():
    engine = open_engine(looplab.load("text-core"), SIZES)
    wanted = [one.text for one in engine.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, temperature=0.0))]
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])},
    )  # fmt: skip
    try:
        assert server.stdout.readline() == f"Serving http://127.0.0.1:{port}\n"
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=8, timeout=60)
        before = replicas_of(server)
        assert len(before) == 2
        said: dict[int, str] = {}

        def ask(number: int) -> None:
            prompt = PROMPTS[number % len(PROMPTS)]
            answer = client.completions.create(model="text-core", prompt=prompt, max_tokens=TOKENS, temperature=0)
            said[number] = answer.choices[0].text

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(ASKED)]
        for thread in threads:
            thread.start()
        time.sleep(0.4)
        answered, victim = len(said), min(before)
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert answered < ASKED, "all answers were there before the kill"
        assert said == {i: wanted[i % len(PROMPTS)] for i in range(ASKED)}
        after = eventually(lambda: found if len(found := replicas_of(server) - {victim}) == 2 else None)
        assert after != before
        server.stdin.close()
        assert server.wait(timeout=PATIENCE) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
