"""Our VERA against every tensor recorded from a transcription of the original, by name."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from looplab.models.base import build
from looplab.models.published import PUBLISHED, assemble
from looplab.recurrence.loop import forward
from looplab.recurrence.plan import Plan
from looplab.recurrence.trace import Recorder
from tolerances import EXACT, PUBLISHED_GRADIENTS, PUBLISHED_OUTPUTS

HERE = Path(__file__).parent / "vera"
IO = load_file(HERE / "io.safetensors")
WEIGHTS = load_file(HERE / "weights.safetensors")
FACTS = json.loads((HERE / "config.json").read_text())
FAMILY = PUBLISHED["vera"]
TOKENS = IO["tokens"].long()
PLANS = {
    "full": Plan.parse("[0.0 0.1 0.2 1.0 1.1 1.2]"),
    "prefix2": Plan.parse("[0.0 0.1]"),
    "repeat2": Plan.parse("[0.0 0.1 0.1 0.1 0.1 0.1]"),
    "suffix2": Plan.parse("[1.1 1.2]"),
}
RECORDED = sorted(name for name in IO if name.split(".")[0] in ("hard", "soft") and not name.endswith(".loss"))
NORMS = sorted(name.removeprefix("gradient_norm.") for name in IO if name.startswith("gradient_norm."))


@functools.cache
def model(routing):
    loaded = assemble(FAMILY, FACTS, WEIGHTS)
    made = build(replace(loaded.config, routing=routing))
    made.load_state_dict(loaded.state_dict())
    return made


@functools.cache
def rolled(routing, schedule):
    recorder = Recorder()
    with torch.no_grad():
        logits = forward(model(routing), TOKENS, plan=PLANS[schedule], recorder=recorder).logits
    return logits, recorder.states


def ours(name):
    """What a recorded tensor is called here."""
    routing, schedule, part, *count = name.split(".")
    logits, states = rolled(routing, schedule)
    if part == "logits":
        return logits
    if part == "verifier":
        return torch.stack([torch.sigmoid(model(routing).halt(state)) for state in states[1:]])
    state, block = states[int(count[0])], PLANS[schedule][int(count[0]) - 1].block
    if part == "stream":
        return torch.cat([state.thoughts, state.x], dim=1)
    return state.energy[..., 0] if part == "energy" else (state.gated0, state.gated1)[block]


def test_every_recorded_tensor_is_compared():
    norms = {f"gradient_norm.{name}" for name in NORMS}
    assert set(IO) == {"tokens", "stream_ids", "soft.full.loss", *RECORDED, *norms}
    assert len(RECORDED) == 8 + 4 * (1 + 3 * 6)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_tensor_is_ours(name):
    torch.testing.assert_close(ours(name), IO[name], **PUBLISHED_OUTPUTS)


def test_a_loaded_file_routes_as_the_original_evaluates_and_knows_its_operators():
    loaded = assemble(FAMILY, FACTS, WEIGHTS)
    assert loaded.config.routing == "hard"
    torch.testing.assert_close(loaded.operator_table[TOKENS], IO["stream_ids"].long(), **EXACT)


def test_loss_and_gradient_norms_are_the_recorded_ones():
    made = model("soft")
    out = forward(made, TOKENS, plan=PLANS["full"])
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    loss = loss + 0.3 * torch.sigmoid(made.halt(out.state)).mean()
    torch.testing.assert_close(loss[None], IO["soft.full.loss"], **PUBLISHED_OUTPUTS)
    gradients = torch.autograd.grad(loss, list(made.parameters()), allow_unused=True)
    named = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(made.named_parameters(), gradients, strict=True)
    }
    found = {name: gradient.norm() for name, gradient in FAMILY.key_map(made.config).export(named).items()}
    for name in NORMS:
        torch.testing.assert_close(found[name][None], IO[f"gradient_norm.{name}"], **PUBLISHED_GRADIENTS)
    idle = {name for name, norm in found.items() if norm == 0}
    assert idle == {f"reasoning_blocks.{b}.attention.w{x}.weight" for b in (0, 1) for x in "kv"}
    assert idle.isdisjoint(NORMS) and set(NORMS) | idle == set(found)


def test_export_gives_the_bytes_of_the_file_back():
    loaded = assemble(FAMILY, FACTS, WEIGHTS)
    written = FAMILY.key_map(loaded.config).export(loaded.state_dict())
    assert written.keys() == WEIGHTS.keys() - {"output.weight"}  # tied
    for name, tensor in written.items():
        assert tensor.numpy().tobytes() == WEIGHTS[name].numpy().tobytes(), name
