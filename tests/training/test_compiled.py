"""Compiled parts: few graphs at all depths, the same numbers, and the model's own parts for a look inside.

What compiles runs in a process of its own, because run-time checks of annotations cannot be traced.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from looplab.models.base import build
from looplab.objectives.jacobian_penalty import JacobianPenalty
from looplab.training.compiled import PARTS, CompiledParts, wanted
from training.tiny_run import core, tiny_run

SCRIPT = """
import json, sys
import torch
sys.path.insert(0, sys.argv[1])
from looplab.models.base import build
from looplab.objectives import NextToken
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.training.compiled import CompiledParts
from looplab.training.step import TrainingStep
from training.test_step import loader
from training.tiny_run import two_blocks

graphs, runs = [], {}

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

for compiled in (False, True):
    model = build(two_blocks(), seed=0)
    if compiled:
        parts = CompiledParts(model, backend=backend)
    runs[compiled] = []
    for index, (depth, window) in enumerate([(1, 1), (4, 4), (3, 2), (2, 1), (4, 1), (3, 3), (4, 2), (4, 3)]):
        batch, objective = loader().batch(index), NextToken()
        step, counts = TrainingStep(model, objective, TruncatedBPTT(window=window)), objective.counts(batch.labels)
        loss = step(batch, model.spec.plan()[:depth], None, counts).share
        loss.backward()
        with torch.no_grad():
            held = step(batch, model.spec.plan()[:depth], None, counts).share
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        runs[compiled] += [float(loss.detach()), float(held)]
print(json.dumps({"graphs": len(graphs), "own": runs[False], "compiled": runs[True]}))
"""

RUN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from looplab.training.trainer import train
from training.tiny_run import broken_off, core, metrics, tiny_run

home = Path(sys.argv[2])
for name, choice in {"own": False, "compiled": True, "resumed": True}.items():
    config = tiny_run(home, model=core(), compile=choice)
    if name == "resumed":
        broken_off(config, home / name, steps=4)
    train(config, home / name)
print(json.dumps([[x["loss"] for x in metrics(home / n, "train")] for n in ("own", "compiled", "resumed")]))
"""


@pytest.mark.slow
def test_any_number_of_draws_makes_at_most_three_graphs_per_block():
    tests = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tests)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Two blocks; encode, coda and head have one graph with gradient and one without.
    assert found["graphs"] <= 3 * 2 + 6
    assert found["compiled"] == pytest.approx(found["own"], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_compiled_run_learns_as_its_own_parts_do_and_resumes_with_the_same_bits(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(Path(__file__).parent.parent), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=3500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    own, compiled, resumed = json.loads(done.stdout.splitlines()[-1])
    assert compiled == pytest.approx(own, rel=1e-4)
    assert resumed == compiled


def test_the_models_own_parts_are_there_for_a_look_inside():
    model = build(core())
    own = {name: getattr(model, name) for name in PARTS}
    compiled = CompiledParts(model, backend="eager")
    assert all(getattr(model, name) != own[name] for name in PARTS)
    with compiled.eager():
        assert all(getattr(model, name) == own[name] for name in PARTS)
    assert all(getattr(model, name) != own[name] for name in PARTS)


@pytest.mark.parametrize(
    ("choice", "device", "twice", "compiles"),
    [
        ("auto", "cpu", False, False),
        ("auto", "cuda", False, True),
        ("auto", "cuda:1", True, False),
        (True, "cpu", False, True),
        (False, "cuda", False, False),
    ],
)
def test_auto_is_for_accelerators_where_the_loss_allows_it(choice, device, twice, compiles):
    assert wanted(choice, device=device, twice=twice) is compiles


def test_a_penalty_on_the_jacobian_cannot_be_compiled(tmp_path):
    with pytest.raises(
        ValueError, match=r"JacobianPenalty differentiates twice; a compiled step cannot. Got compile=Tr"
    ):
        tiny_run(tmp_path, model=core(), objective=JacobianPenalty(), compile=True)
    assert tiny_run(tmp_path, model=core(), objective=JacobianPenalty()).compile == "auto"
