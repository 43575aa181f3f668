"""Our HRM against every tensor recorded from the original, by name."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from golden.supervised_puzzles import INPUTS, agree, evaluate, train
from looplab.models.published import PUBLISHED, assemble
from looplab.objectives.deep_supervision import DeepSupervision
from tolerances import EXACT

HERE = Path(__file__).parent / "hrm"
FAMILY = PUBLISHED["hrm"]
WEIGHTS = load_file(HERE / "weights.safetensors")
IO = load_file(HERE / "io.safetensors")


@functools.cache
def model():
    return assemble(FAMILY, json.loads((HERE / "config.json").read_text()), WEIGHTS)


@functools.cache
def ours():
    """Everything that was recorded, by name; gradient goes through the last low and the last high application."""
    rules = FAMILY.key_map(model().config).rules
    return evaluate(model(), IO) | train(
        model(), IO, window=2, objective=DeepSupervision(continue_loss=True), rules=rules
    )


@pytest.mark.parametrize("name", sorted(set(IO) - INPUTS))
def test_every_recorded_tensor_is_ours(name):
    agree(name, ours()[name], IO[name])


def test_export_gives_the_file_back():
    found = FAMILY.key_map(model().config).export(model().state_dict())
    torch.testing.assert_close({f"inner.{name}": tensor for name, tensor in found.items()}, WEIGHTS, **EXACT)
