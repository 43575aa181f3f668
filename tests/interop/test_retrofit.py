"""Retrofitting: the source's logits at one iteration, averages by hand, counts as announced, and refused ranges."""

import json

import pytest
import torch
from torch import nn

from interop.dense_sources import FAMILIES, LAYERS, saved
from looplab import load
from looplab.interop.dense_source import open_dense
from looplab.interop.layer_distance import LayerDistance
from looplab.interop.retrofit import (
    INJECTIONS,
    RECORD,
    Auto,
    Cut,
    Run,
    announced,
    cut_layers,
    looped_config,
    make_record,
    refuse_full,
    retrofit,
    save_retrofit,
)
from looplab.recurrence.boundary import EndNorm, OwnNorm
from looplab.recurrence.depth import FixedDepth, UniformDepth
from looplab.recurrence.halting import HazardGate
from looplab.recurrence.loop import forward
from looplab.recurrence.state import standard_noise
from looplab.recurrence.state_init import FromEmbeds, Normal, Zeros
from tolerances import EXACT, RETROFIT_LOGITS

pytestmark = pytest.mark.filterwarnings("ignore:num_steps=:UserWarning")
TOKENS = torch.randint(3, 90, (2, 21), generator=torch.Generator().manual_seed(0))
SHARED = {"prelude": 1, "coda": 2}


def logits(model, num_steps=1):
    noise = None
    if model.spec.noise_width:
        positions = torch.arange(TOKENS.shape[1]).expand(TOKENS.shape)
        noise = standard_noise(0, [1, 2], positions, model.spec.noise_width)
    with torch.no_grad():
        return forward(model, TOKENS, num_steps=num_steps, noise=noise).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_without_dropped_layers_one_iteration_is_the_source(family, tmp_path):
    native = saved(tmp_path, family)
    source = open_dense(str(tmp_path))
    cut = cut_layers(LAYERS, Run(start=1, stop=4))
    assert not cut.dropped
    with torch.no_grad():
        expected = native(TOKENS).logits
    for injection in ("concat-identity", "add-zero"):
        model = retrofit(source.tensors, cut, looped_config(source.config, cut, injection=INJECTIONS[injection]))
        torch.testing.assert_close(logits(model), expected, **RETROFIT_LOGITS)


@pytest.mark.parametrize("family", ["olmo2", "smollm3"])
def test_with_dropped_layers_it_is_the_source_without_them(family, tmp_path):
    native = saved(tmp_path, family)
    source = open_dense(str(tmp_path))
    cut = cut_layers(LAYERS, Run(start=2, stop=4), **SHARED)
    assert (cut.prelude, cut.core, cut.coda, cut.dropped) == ((0,), ((2,), (3,)), (4, 5), (1,))
    model = retrofit(source.tensors, cut, looped_config(source.config, cut))
    native.model.layers = nn.ModuleList(layer for i, layer in enumerate(native.model.layers) if i != 1)
    native.config.num_hidden_layers = LAYERS - 1
    with torch.no_grad():
        torch.testing.assert_close(logits(model), native(TOKENS, use_cache=False).logits, **RETROFIT_LOGITS)


def test_under_an_identity_every_iteration_gives_the_same_and_under_addition_not():
    source = open_dense("text-dense")
    cut = cut_layers(source.config.layers, Run(start=4, stop=6))
    for name, same in (("concat-identity", True), ("add-zero", False)):
        model = retrofit(source.tensors, cut, looped_config(source.config, cut, injection=INJECTIONS[name]))
        assert torch.equal(logits(model, 1), logits(model, 3)) is same


@pytest.mark.parametrize("start", [Zeros(), Normal(std="like_init"), FromEmbeds()])
def test_an_identity_makes_the_start_irrelevant(start):
    source = open_dense("text-dense")
    cut = cut_layers(source.config.layers, Run(start=4, stop=6))
    model = retrofit(source.tensors, cut, looped_config(source.config, cut, state_init=start))
    torch.testing.assert_close(logits(model), logits(source.model()), **RETROFIT_LOGITS)


def test_skipping_the_adapter_at_the_start_is_the_source_whatever_the_adapter_holds():
    source = open_dense("text-dense")
    cut = cut_layers(source.config.layers, Run(start=4, stop=6))
    config = looped_config(source.config, cut, injection=INJECTIONS["concat-normal"], skip_first=True)
    model = retrofit(source.tensors, cut, config)
    torch.testing.assert_close(logits(model), logits(source.model()), **RETROFIT_LOGITS)
    assert not torch.allclose(logits(model, 2), logits(model, 1), atol=1e-2)


def test_averaged_layers_are_the_means_taken_by_hand(tmp_path):
    native = saved(tmp_path, "qwen2")
    source = open_dense(str(tmp_path))
    cut = cut_layers(LAYERS, Run(start=1, stop=5), average=2)
    assert cut.core == ((1, 3), (2, 4)) and cut.rounds == 2 and not cut.dropped
    config = looped_config(source.config, cut)
    assert config.order.default_steps == 2 and config.trained_depth == FixedDepth(num_steps=2)
    model = retrofit(source.tensors, cut, config)
    layers = native.model.layers
    for ours, theirs in (("attn.k.bias", "self_attn.k_proj.bias"), ("ffn.down.weight", "mlp.down_proj.weight")):
        for stored, pair in enumerate(cut.core):
            one, other = (layers[i].get_parameter(theirs).double() for i in pair)
            expected = ((one + other) / 2).float()
            torch.testing.assert_close(model.core[stored].get_parameter(ours), nn.Parameter(expected), **EXACT)


def test_averaged_layers_must_agree_in_their_positions(tmp_path):
    saved(tmp_path, "smollm3")
    config = open_dense(str(tmp_path)).config
    cut = cut_layers(LAYERS, Run(start=0, stop=6), average=3)
    assert looped_config(config, cut).unrotated_layers == (2,)
    with pytest.raises(
        ValueError, match=r"averaged layers must agree in positions. Got layers \[0, 2, 4\], of which \[2\]"
    ):
        looped_config(config, cut_layers(LAYERS, Run(start=0, stop=6), average=2))


def test_parameters_are_as_announced(tmp_path):
    saved(tmp_path, "llama")
    source = open_dense(str(tmp_path))
    cut = cut_layers(LAYERS, Run(start=2, stop=4), **SHARED)
    for changes in ({}, {"boundary": OwnNorm()}, {"boundary": EndNorm(learned_scale=True)}, {"halt": HazardGate()}):
        config = looped_config(source.config, cut, **changes)
        model = retrofit(source.tensors, cut, config)
        assert announced(config).total == sum(p.numel() for p in model.parameters()) == model.spec.params.total


def test_new_parameters_follow_the_seed_and_the_dtype():
    source = open_dense("text-dense")
    cut = cut_layers(source.config.layers, Run(start=4, stop=6))
    config = looped_config(source.config, cut, injection=INJECTIONS["concat-normal"])
    one, same, other = (retrofit(source.tensors, cut, config, seed=seed) for seed in (0, 0, 1))
    new = "injections.0.rule.w.weight"
    assert torch.equal(one.get_parameter(new), same.get_parameter(new))
    assert not torch.equal(one.get_parameter(new), other.get_parameter(new))
    assert one.get_parameter(new).std().item() == pytest.approx(source.config.init.std, rel=0.05)
    half = retrofit(source.tensors, cut, config, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_source_in_bfloat16_stays_so(tmp_path):
    native = saved(tmp_path, "llama")
    native.to(torch.bfloat16).save_pretrained(tmp_path)
    source = open_dense(str(tmp_path))
    cut = cut_layers(LAYERS, Run(start=1, stop=5), average=2)
    model = retrofit(source.tensors, cut, looped_config(source.config, cut))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_source_is_not_changed_by_training_the_model():
    source = open_dense("text-dense")
    tensors = source.model().state_dict()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    cut = cut_layers(source.config.layers, Run(start=4, stop=6))
    model = retrofit(tensors, cut, looped_config(source.config, cut))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_numbers_that_are_not_finite_are_refused():
    source = open_dense("text-dense")
    tensors = source.model().state_dict()
    tensors["layers.4.ffn.up.weight"][0, 0] = torch.nan
    cut = cut_layers(source.config.layers, Run(start=4, stop=6))
    with pytest.raises(ValueError, match=r"1 non-finite values in layers\.4\.ffn\.up\.weight"):
        retrofit(tensors, cut, looped_config(source.config, cut))


@pytest.mark.parametrize(
    ("core", "options", "said"),
    [
        (Run(start=10, stop=18), {"coda": 16}, "retrofit: core 10:18 and coda 16 overlap; the model has 22 layers"),
        (Run(start=10, stop=18), {"prelude": 11}, "prelude 11 and core 10:18 overlap; the model has 22 layers"),
        (Run(start=10, stop=10), {}, "retrofit: core 10:10 is empty; the model has 22 layers."),
        (Run(start=12, stop=10), {}, "retrofit: core 12:10 is empty"),
        (Run(start=10, stop=23), {}, "core 10:23 exceeds the layers; the model has 22 layers. Give A:B with B"),
        (Auto(length=0), {}, "retrofit: core auto:0 is empty"),
        (Auto(length=15), {"prelude": 4, "coda": 4}, "retrofit: prelude 4, core auto:15 and coda 4 overlap"),
        (Run(start=1, stop=2), {"prelude": -1}, "retrofit: prelude must be a number of layers from 0 on. Got -1"),
        (Run(start=4, stop=10), {"average": 4}, "average must divide the 6 layers of core 4:10. Got 4. .* 1, 2, 3, 6"),
        (Run(start=4, stop=10), {"average": 0}, "average must divide the 6 layers"),
    ],
)  # fmt: skip
def test_ranges_that_cannot_be_are_refused(core, options, said):
    with pytest.raises(ValueError, match=said):
        cut_layers(22, core, **options)


def test_published_cuts_are_reached_by_explicit_ranges():
    tinyllama = cut_layers(22, Run(start=10, stop=18), prelude=4, coda=4)
    assert tinyllama.prelude == (0, 1, 2, 3) and tinyllama.coda == (18, 19, 20, 21)
    assert [group[0] for group in tinyllama.core] == list(range(10, 18)) and tinyllama.dropped == tuple(range(4, 10))
    recurtrace = cut_layers(28, Run(start=12, stop=15))
    assert len(recurtrace.prelude) + 3 + len(recurtrace.coda) == 28


def planted(layers, angular):
    return LayerDistance(layers=layers, tokens=1, text="t", text_hash="h", angular=angular, influence=angular)


def test_the_least_run_is_taken_among_those_that_the_ends_leave():
    table = planted(4, ((0.1, 0.3, 0.2, 0.4), (0.1, 0.5, 0.6), (0.1, 0.2), (0.3,)))
    assert cut_layers(4, Auto(length=2), distance=table).core == ((0,), (1,))
    assert cut_layers(4, Auto(length=1), prelude=1, coda=1, distance=table).core == ((2,),)
    assert cut_layers(4, Auto(length=2), prelude=1, coda=1, distance=table).core == ((1,), (2,))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"injection": INJECTIONS["add-zero"], "state_init": Zeros()}, "state-init must be embeds .* Got Zeros"),
        ({"injection": INJECTIONS["add-zero"], "skip_first": True}, "skip-adapter needs a concat injection. Got Add"),
        ({"skip_first": True, "state_init": Zeros()}, "state-init must be embeds .* Got Zeros"),
    ],
)
def test_a_start_that_never_sees_the_tokens_is_refused(options, said):
    config = open_dense("text-dense").config
    with pytest.raises(ValueError, match=said):
        looped_config(config, cut_layers(config.layers, Run(start=2, stop=4)), **options)


def test_a_saved_retrofit_opens_with_its_tokenizer_and_says_where_it_came_from(tmp_path):
    saved(tmp_path / "source", "smollm3", shards=True)
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    source = open_dense(str(tmp_path / "source"))
    cut = cut_layers(LAYERS, Run(start=2, stop=4), **SHARED)
    config = looped_config(source.config, cut, num_steps=3, trained_depth=UniformDepth(low=1, high=4))
    model = retrofit(source.tensors, cut, config)
    record = make_record(
        source, cut, config, injection="concat-identity", seed=0, dtype=None, distance=None, sha256=source.hashes()
    )
    file, ids = source.tokenizer()
    save_retrofit(tmp_path / "out", model, record, tokenizer=file, token_ids=ids)
    loaded = load(str(tmp_path / "out"))
    assert torch.equal(logits(loaded.model), logits(model))
    assert (loaded.tokenizer.bos, loaded.tokenizer.starts_with_bos) == (1, True)
    told = loaded.facts["trained"]["retrofit"]
    assert told["source"] == str(tmp_path / "source") and told["sha256"] == source.hashes()
    assert told["cut"]["core"] == [[2], [3]]
    written = json.loads((tmp_path / "out" / RECORD).read_bytes())
    assert written["parameters"] == model.spec.params.total and written["family"] == "smollm3"
    with pytest.raises(FileExistsError, match="OUT must be a new or empty folder"):
        refuse_full(tmp_path / "out")


def test_memory_is_the_model_or_the_measured_source_and_a_shard(tmp_path):
    saved(tmp_path, "qwen3", shards=True)
    source = open_dense(str(tmp_path))
    cut = Cut(layers=LAYERS, prelude=(0,), core=((1,),), coda=(5,))
    config = looped_config(source.config, cut)
    args = {"injection": "concat-identity", "seed": 0, "dtype": None}
    unmeasured = make_record(source, cut, config, distance=None, **args)
    assert unmeasured.model_bytes == 4 * announced(config).total == 4 * sum(unmeasured.groups.values())
    assert unmeasured.peak_bytes == unmeasured.model_bytes + source.largest_shard
    table = planted(LAYERS, tuple((0.1,) * (LAYERS - n) for n in range(LAYERS)))
    assert make_record(source, cut, config, distance=table, **args).peak_bytes == source.nbytes + source.largest_shard
