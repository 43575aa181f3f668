"""On a GPU everything says what it says on the CPU: models, cached decoding, engine, training. Run with -m gpu."""

import dataclasses
import json
import math

import pytest
import torch
from benchmarks.cases.training_device import ARMS, config

from contract.zoo import NAMES, encode, noise, tiny, tokens
from letters import Characters
from looplab.engine.config import EngineConfig
from looplab.engine.engine import Engine
from looplab.engine.request import DepthParams, SamplingParams
from looplab.engine.stats import check_ledger
from looplab.recurrence.loop import run_plan
from looplab.training.folder import METRICS
from looplab.training.trainer import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA device"),
]
PROMPTS = [(5, 6, 7), (9,), (3, 1, 4, 1, 5, 9, 2), (8, 8)]


def logits(model, ids):
    with torch.no_grad():
        context = encode(model, ids)
        drawn = noise(model, context.positions.cpu(), dtype=torch.float32)
        state = model.init_state(context, None if drawn is None else drawn.to(ids.device))
        return model.head(model.coda(run_plan(model, model.spec.plan(), context, state), context)).cpu()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_cpu(name):
    model = tiny(name, dtype=torch.float32)
    ids = tokens(model, 2, 8)
    wanted = logits(model, ids)
    assert (logits(model.cuda(), ids.cuda()) - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("depth", [DepthParams(), DepthParams(exit_rule="latent", exit_threshold=0.6)], ids=str)
@pytest.mark.parametrize("offset_one", [False, True])
def test_the_engine_says_the_tokens_of_the_cpu(depth, offset_one):
    said = []
    for device in ("cpu", "cuda"):
        model = tiny("tiny-ouro", dtype=torch.float32).to(device)
        sizes = EngineConfig(launch_rows=3, num_pages=64, min_coda_rows=1, offset_one=offset_one)
        engine = Engine(model, Characters(), sizes)
        found = engine.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0.0), depth=depth)
        check_ledger(engine.stats())
        said.append([(one.tokens, one.depths) for one in found])
    assert said[0] == said[1]


def test_the_engine_runs_in_bfloat16_and_frees_everything():
    model = tiny("tiny-ouro", dtype=torch.bfloat16).cuda()
    engine = Engine(model, Characters(), EngineConfig(launch_rows=4, num_pages=64, min_coda_rows=1))
    found = engine.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=1.0, seed=1))
    assert all(len(one.tokens) == 6 for one in found)
    check_ledger(engine.stats())
    assert engine.stats().active_pages == 0


def test_training_follows_the_losses_of_the_cpu_and_of_float32(tmp_path):
    base = config(128, 4, 64, 12)

    def losses(name, device, **changes):
        train(dataclasses.replace(base, **changes), tmp_path / name, device=device)
        lines = [json.loads(line) for line in (tmp_path / name / METRICS).read_text().splitlines()]
        return [line["loss"] for line in lines if line["kind"] == "train"]

    wanted = losses("cpu", "cpu", compile=False)
    for name in ("float32", "bf16"):
        found = losses(name, "cuda", **ARMS[name])
        assert all(math.isfinite(loss) for loss in found)
        assert found == pytest.approx(wanted, rel=1e-3 if name == "float32" else 2e-2)
