"""Our TRM, in both variants, against every tensor recorded from the original, by name."""

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

HERE = Path(__file__).parent / "trm"
FAMILY = PUBLISHED["trm"]
CASES = {name: load_file(HERE / name / "io.safetensors") for name in ("attention", "token_mlp")}
WEIGHTS = {name: load_file(HERE / name / "weights.safetensors") for name in CASES}
RECORDED = [(case, name) for case, io in CASES.items() for name in sorted(set(io) - INPUTS)]


@functools.cache
def model(case):
    return assemble(FAMILY, json.loads((HERE / case / "config.json").read_text()), WEIGHTS[case])


@functools.cache
def ours(case):
    """Everything that was recorded, by name; gradient goes through the last high cycle of a supervision step."""
    made, io = model(case), CASES[case]
    rules = FAMILY.key_map(made.config).rules
    return evaluate(made, io) | train(
        made, io, window=made.config.l_cycles + 1, objective=DeepSupervision(), rules=rules
    )


@pytest.mark.parametrize(("case", "name"), RECORDED)
def test_every_recorded_tensor_is_ours(case, name):
    agree(name, ours(case)[name], CASES[case][name])


@pytest.mark.parametrize("case", CASES)
def test_export_gives_the_file_back(case):
    found = FAMILY.key_map(model(case).config).export(model(case).state_dict())
    torch.testing.assert_close({f"inner.{name}": tensor for name, tensor in found.items()}, WEIGHTS[case], **EXACT)
