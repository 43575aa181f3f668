"""Weighted exits against what the original code of Ouro recorded."""

import pytest
import torch
from safetensors.torch import load_file

from looplab.interop import LoopCache, LooplabForCausalLM, load
from looplab.interop.citizen.weighted import weighted_logits
from looplab.models.base import PRESETS, build
from looplab.models.looped import Envelope, LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.halting import HazardGate
from looplab.recurrence.plan import ModelLoop
from source import ROOT
from tolerances import CACHED, EXACT, ROWS

GOLDEN = ROOT / "tests" / "golden" / "ouro" / "full"
CONDITIONED = {"rtol": 1e-4, "atol": 3.2e-3}
"""Float32 against the original's float32: 20 times what a relative change of 1e-6 in the weights moves (README)."""


def test_weighted_logits_and_their_loss_are_those_of_the_original():
    model, io = LooplabForCausalLM.from_looplab(load(GOLDEN)), load_file(GOLDEN / "io.safetensors")
    out = model(io["input_ids"], labels=io["labels"], weighted_exit=True)
    torch.testing.assert_close(out.logits, io["weighted_logits"], **CONDITIONED)
    torch.testing.assert_close(out.loss, io["loss_weighted"].reshape(()), rtol=1e-4, atol=2e-5)
    assert not torch.allclose(out.logits, model(io["input_ids"]).logits, atol=0.1)
    out.loss.backward()
    gate = model.model.gate.weight.grad
    torch.testing.assert_close(gate, io["grad_gate_weight"].reshape(gate.shape), rtol=1e-3, atol=1e-5)


def ouro():
    return build(PRESETS["tiny-ouro"](), seed=1, dtype=torch.float64)


def test_a_gate_that_is_sure_reads_one_exit():
    model, ids = ouro(), torch.arange(10).view(2, 5)
    with torch.no_grad():
        model.gate.weight.zero_()
        for bias, steps in ((50.0, 1), (-50.0, 4)):
            model.gate.bias.fill_(bias)
            expected = LooplabForCausalLM.wrap(model)(ids, num_steps=steps).logits
            torch.testing.assert_close(weighted_logits(model, ids), expected, **ROWS)


@torch.no_grad()
def test_decoding_with_a_cache_weights_the_same_exits():
    model, ids = LooplabForCausalLM.wrap(ouro()), torch.arange(12).view(2, 6)
    whole, cache = model(ids, weighted_exit=True).logits, LoopCache()
    model(ids[:, :4], weighted_exit=True, cache=cache)
    torch.testing.assert_close(model(ids[:, 4:], weighted_exit=True, cache=cache).logits, whole[:, 4:], **CACHED)
    torch.testing.assert_close(model(ids, weighted_exit=True, logits_to_keep=2).logits, whole[:, -2:], **ROWS)
    decoded = model.generate(ids, weighted_exit=True, max_new_tokens=2, do_sample=False, pad_token_id=63)
    torch.testing.assert_close(decoded[:, 6], whole[:, -1].argmax(-1), **EXACT)


def test_what_has_no_weights_is_refused():
    ids = torch.arange(10).view(2, 5)
    with pytest.raises(ValueError, match="weighted_exit needs a gate of exit probabilities. looped has none"):
        weighted_logits(build(PRESETS["tiny-core"]()), ids)
    with pytest.raises(ValueError, match="num_steps must be an int with weighted_exit"):
        LooplabForCausalLM.wrap(ouro())(ids, weighted_exit=True, num_steps=torch.tensor([1, 2]))
    config = LoopedConfig(
        dim=32,
        vocab=64,
        attention=Attention(heads=2, kv_heads=2, head_dim=16, position=Rope(base=1e4)),
        ffn=SwiGLU(hidden=32),
        order=ModelLoop(num_steps=2),
        trained_depth=FixedDepth(num_steps=2),
        blocks=(1,),
        envelope=Envelope(prelude=1, coda=1),
        halt=HazardGate(),
    )
    with torch.no_grad(), pytest.raises(ValueError, match="needs a readout without attention under a cache"):
        LooplabForCausalLM.wrap(build(config))(ids, weighted_exit=True, use_cache=True)
