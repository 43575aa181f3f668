"""kill -9 at any moment: the command that follows goes on, and its files are those of an undisturbed run."""

import subprocess
import sys
from pathlib import Path

import pytest

ARGUMENTS = [
    "text-2x4-fixed", "--data", "text=text.jsonl", "--replicates", "1000", "--grid", "1,2", "--controls", "none",
    "--affine-tokens", "300", "--max-tokens", "40", "--batch-tokens", "600", "--control", "none", "--quiet",
]  # fmt: skip

DRIVER = '''
"""Forks one audit after another in one folder. The first ones kill themselves, at a rename or after some seconds."""
import os, random, signal, sys

os.environ["OMP_NUM_THREADS"] = "1"
import torch
torch.set_num_threads(1)
import looplab.audit.protocol, looplab.cli.audit, looplab.report, looplab.interop.checkpoint
from looplab.cli import main

folder, kills, seed, *arguments = sys.argv[1:]
os.chdir(folder)
draw = random.Random(int(seed))


def audit(moment):
    if os.fork() == 0:
        kind, when = moment
        replace = os.replace

        def counted(source, target):
            nonlocal when
            when -= 1
            if when < 0 and kind == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if when < 0 and kind == "after":
                os.kill(os.getpid(), signal.SIGKILL)

        if kind in ("before", "after"):
            os.replace = counted
        if kind == "timer":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            killer = os.fork()
            if killer == 0:
                import time
                time.sleep(when)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = main(["audit", *arguments])
        if kind == "timer":
            os.kill(killer, signal.SIGKILL)
        os._exit(code)
    _, status = os.wait()
    return os.waitstatus_to_exitcode(status)


codes = []
for _ in range(int(kills)):
    kind = draw.choice(["before", "after", "timer"])
    when = draw.uniform(0.05, 1.5) if kind == "timer" else draw.randrange(12)
    codes.append(audit((kind, when)))
codes.append(audit(("never", 0)))
print(*codes)
'''


@pytest.fixture
def place(tmp_path):
    """Makes a folder with a text in it."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        lines = [f"document {i} says {i * 7919 % 1013} and then {i * i % 97} again" for i in range(80)]
        (folder / "text.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
        return folder

    return make


def drive(folder: Path, kills: int, seed: int) -> list[int]:
    command = [sys.executable, "-c", DRIVER, str(folder), str(kills), str(seed), *ARGUMENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [int(code) for code in done.stdout.split()]


def files(folder: Path) -> dict[str, bytes]:
    out = folder / "audit-out"
    names = ["results.json", "tables.tex", "report.html", "documents.parquet", "tokens.parquet"]
    return {name: (out / name).read_bytes() for name in names}


def same_after(kills, seed, place):
    undisturbed, disturbed = place("undisturbed"), place("disturbed")
    assert drive(undisturbed, 0, 0) == [0]
    codes = drive(disturbed, kills, seed)
    assert codes[-1] == 0
    assert files(disturbed) == files(undisturbed)
    left = [path.name for path in (disturbed / "audit-out").rglob(".*") if path.name != ".lock"]
    assert left == []
    return codes.count(-9)


@pytest.mark.slow
def test_two_kills_change_no_byte(place):
    assert same_after(2, 1, place) >= 1


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2))
def test_twenty_kills_change_no_byte(place, seed):
    assert same_after(20, seed, place) >= 10
