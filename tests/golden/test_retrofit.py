"""Our retrofitted models, and the dense one they are cut from, against every tensor recorded from the originals."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from looplab.models.base import build
from looplab.models.dense import DenseConfig
from looplab.models.folder import load_tensors
from looplab.models.huginn import key_map
from looplab.models.published import PUBLISHED, assemble
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import RMSNorm
from looplab.nn.rope import Rope
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.recurrence.loop import forward, new_cache, run_plan
from looplab.recurrence.trace import Recorder
from tolerances import EXACT, PUBLISHED_GRADIENTS, PUBLISHED_OUTPUTS

HERE = Path(__file__).parent / "retrofit"
CASES = {name: load_file(HERE / name / "io.safetensors") for name in ("llama", "olmo", "dense")}
WEIGHTS = {name: load_file(HERE / name / "weights.safetensors") for name in CASES}
FACTS = {name: json.loads((HERE / name / "config.json").read_text()) for name in CASES}
INPUTS = {"input_ids", "labels", "init_state_rand"}
RECORDED = [(case, name) for case, io in CASES.items() for name in sorted(set(io) - INPUTS)]
PROMPT, DEEPEST = 8, 6
STARTS = "zero|rand|embed_init|skip_adapter"
DENSE = {
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
    "input_layernorm": "attn_in",
    "post_attention_layernorm": "ffn_in",
}


@functools.cache
def model(case, mode="random"):
    return assemble(PUBLISHED["retrofit"], FACTS[case] | {"initial_state_mode": mode}, WEIGHTS[case])


@functools.cache
def dense():
    """The source as our dense model."""
    facts, tensors = FACTS["dense"], WEIGHTS["dense"]
    made = build(
        DenseConfig(
            dim=facts["hidden_size"],
            vocab=facts["vocab_size"],
            layers=facts["num_hidden_layers"],
            attention=Attention(
                heads=facts["num_attention_heads"],
                kv_heads=facts["num_key_value_heads"],
                head_dim=facts["hidden_size"] // facts["num_attention_heads"],
                position=Rope(base=facts["rope_theta"]),
            ),
            ffn=SwiGLU(hidden=facts["intermediate_size"]),
            norm=RMSNorm(eps=facts["rms_norm_eps"]),
            head=Head(tied=False),
        )
    )
    ours = {
        "embedding.weight": tensors["model.embed_tokens.weight"],
        "final_norm.weight": tensors["model.norm.weight"],
        "lm_head.own_weight": tensors["lm_head.weight"],
    }
    for layer in range(facts["num_hidden_layers"]):
        for theirs, name in DENSE.items():
            ours[f"layers.{layer}.{name}.weight"] = tensors[f"model.layers.{layer}.{theirs}.weight"]
    load_tensors(made, ours)
    return made


def of_start(case, start):
    """The model that starts so."""
    return model(case, start.replace("_", "-")) if start in ("embed_init", "skip_adapter") else model(case)


def encoded(case, start):
    """Context of the recorded tokens, and the state that the iterations start from."""
    io, made = CASES[case], of_start(case, start)
    context = made.encode(io["input_ids"])
    if start == "rand":
        return context, io["init_state_rand"]
    if start == "zero":
        return context, torch.zeros_like(context.embeds)
    return context, made.init_state(context, None)


@functools.cache
def states(case, start):
    """States after 0 .. 6 iterations."""
    made, recorder = of_start(case, start), Recorder()
    with torch.no_grad():
        run_plan(made, made.spec.plan(DEEPEST), *encoded(case, start), recorder=recorder)
    return recorder.states


def logits(case, start, steps):
    """Readout after some iterations."""
    made = of_start(case, start)
    with torch.no_grad():
        return made.head(made.coda(states(case, start)[steps], encoded(case, start)[0]))


def loss_of(case, read):
    return F.cross_entropy(read.flatten(0, 1), CASES[case]["labels"].flatten(), ignore_index=-100)


@functools.cache
def trained(case, free, window):
    """Loss and gradients by the original's names, after `free` iterations without and `window` with gradient."""
    made = model(case)
    context, state = encoded(case, "rand")
    state = run_plan(made, made.spec.plan(free + window), context, state, gradient=TruncatedBPTT(window=window))
    loss = loss_of(case, made.head(made.coda(state, context)))
    names, parameters = zip(*made.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    return loss.detach(), key_map(made.config).export(dict(zip(names, found, strict=True)))


@functools.cache
def decoded(case):
    """Greedy tokens after the prompt, and the logits of the last position at each of them."""
    made = model(case)
    cache = new_cache(made.spec, rows=2, capacity=PROMPT + 6, num_steps=4)
    tokens, read, fed = [], [], CASES[case]["input_ids"][:, :PROMPT]
    with torch.no_grad():
        for _ in range(7):
            zeros = torch.zeros(2, fed.shape[1], made.spec.noise_width)
            read.append(forward(made, fed, num_steps=4, noise=zeros, cache=cache).logits[:, -1])
            fed = read[-1].argmax(-1, keepdim=True)
            tokens.append(fed)
    return {"tokens": torch.cat(tokens[:-1], 1), "logits": torch.stack(read)}


def ours(case, name):
    """What we make of the tensor that was recorded under this name."""
    if name == "dense_logits":
        with torch.no_grad():
            return forward(dense(), CASES[case]["input_ids"]).logits
    if name == "prelude_out":
        return encoded(case, "zero")[0].injected
    if name == "loss_zero_r4":
        return loss_of(case, logits(case, "zero", 4))
    if name == "log_ppl_field_zero_r4":
        return loss_of(case, logits(case, "zero", 4)).exp()
    if match := re.fullmatch(rf"states_({STARTS})", name):
        return torch.stack(states(case, match[1])[1:])
    if match := re.fullmatch(rf"logits_({STARTS})_r(\d)", name):
        return logits(case, match[1], int(match[2]))
    if match := re.fullmatch(r"gradloss_(\d)_(\d)", name):
        return trained(case, int(match[1]), int(match[2]))[0]
    if match := re.fullmatch(r"gradnorm_(\d)_(\d)", name):
        gradients = trained(case, int(match[1]), int(match[2]))[1]
        return torch.stack([gradients[n].norm() for n in sorted(gradients)])
    return decoded(case)[name.removeprefix("decode_")]


@pytest.mark.parametrize(("case", "name"), RECORDED, ids=lambda x: x)
def test_every_recorded_tensor_is_ours(case, name):
    recorded = CASES[case][name]
    tolerance = PUBLISHED_GRADIENTS if name.startswith("gradnorm") else PUBLISHED_OUTPUTS
    if not recorded.is_floating_point():
        tolerance = EXACT
    torch.testing.assert_close(ours(case, name), recorded, **tolerance)


def test_gradients_are_listed_for_every_parameter_of_the_file():
    assert set(trained("llama", 2, 2)[1]) == set(WEIGHTS["llama"])
    assert len(CASES["llama"]["gradnorm_2_2"]) == len(WEIGHTS["llama"]) == 28


def test_the_start_modes_differ_far_beyond_the_tolerance():
    """The first iteration of skip-adapter is the core on e; of embed-init the adapter reads [e ; e]."""
    embed, skip = (states("olmo", mode) for mode in ("embed_init", "skip_adapter"))
    assert torch.equal(embed[0], skip[0])
    assert float((embed[1] - skip[1]).abs().max()) > 0.1
    spec = model("olmo", "skip-adapter").spec
    assert [spec.operator_class(0, t) for t in range(4)] == [0, 1, 1, 1]
    assert spec.noise_width == 0 and model("olmo").spec.noise_width == 32
    assert [model("olmo", "embed-init").spec.operator_class(0, t) for t in range(3)] == [0, 0, 0]


def test_the_retrofitted_model_holds_the_layers_that_the_mapping_keeps():
    """Tensor by tensor, through both name tables; only the adapter is new."""
    mapping, source, made = FACTS["dense"]["mapping"], dense().state_dict(), model("llama").state_dict()
    stacks = (("prelude", "prelude_idx"), ("core", "core_idx"), ("coda_layers", "coda_idx"))
    expected = {name: source[name] for name in ("embedding.weight", "final_norm.weight", "lm_head.own_weight")}
    for stack, kept in stacks:
        for index, layer in enumerate(mapping[kept]):
            for name in DENSE.values():
                expected[f"{stack}.{index}.{name}.weight"] = source[f"layers.{layer}.{name}.weight"]
    assert set(made) == {*expected, "injections.0.rule.w.weight"}
    torch.testing.assert_close({name: made[name] for name in expected}, expected, **EXACT)
