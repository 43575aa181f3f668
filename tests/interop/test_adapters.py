"""Models of the transformers library behind the contract: the native bits, and the points of the contract."""

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from interop.adapters.families import ALBERTS, CACHED, CONFIGS, LOOPED, VOCAB, native
from looplab.interop import load
from looplab.interop.adapters import ADAPTERS
from looplab.interop.adapters.dory import Dory
from looplab.interop.adapters.hrm_text import HrmText
from looplab.interop.adapters.inkling2_loop import Inkling2Loop
from looplab.recurrence import state as states
from looplab.recurrence.kv import DepthIndexed, Single
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.plan import Plan
from tolerances import EXACT, ROWS_FLOAT32

pytestmark = [
    pytest.mark.filterwarnings("ignore:num_steps=:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
]
every_family = pytest.mark.parametrize("name", list(CONFIGS))
every_cached = pytest.mark.parametrize("name", CACHED)


@functools.cache
def adapter(name):
    with tempfile.TemporaryDirectory() as folder:
        native(name).save_pretrained(folder)
        return load(folder).model


def tokens(model, rows, seq, seed=0):
    return torch.randint(1, model.spec.vocab[0], (rows, seq), generator=torch.Generator().manual_seed(seed))


def padded(rows, seq):
    """Row 0 padded on the left, row 1 on the right."""
    valid = torch.ones(rows, seq, dtype=torch.bool)
    valid[0, :2] = False
    valid[1, -2:] = False
    return valid


def run(model, ids, **options):
    with torch.no_grad():
        return forward(model, ids, **options)


DEPTHS = {
    "dory": ("n_recurrent_loops", (1, 2, 5)),
    "dory-last": ("n_recurrent_loops", (1, 3)),
    "inkling2_loop": ("loop_num_passes", (1, 2, 4)),
    "albert": ("num_hidden_layers", (1, 4, 7)),
    "hrm_text": (("H_cycles", "L_cycles"), ((1, 1), (2, 1), (3, 2), (1, 4))),
}


@contextlib.contextmanager
def native_depth(model, name, steps):
    """The library's model at another depth than its own."""
    fields = DEPTHS[name][0]
    fields, steps = ((fields,), (steps,)) if isinstance(fields, str) else (fields, steps)
    before = [getattr(model.inner.config, field) for field in fields]
    try:
        for field, value in zip(fields, steps, strict=True):
            setattr(model.inner.config, field, value)
        yield
    finally:
        for field, value in zip(fields, before, strict=True):
            setattr(model.inner.config, field, value)


def test_every_registered_family_has_a_tiny_model():
    assert {adapter(name).inner.config.model_type for name in CONFIGS} == set(ADAPTERS) - {"inkling2_loop"}


@every_family
def test_the_rollout_has_the_bits_of_the_native_forward(name):
    model = adapter(name)
    ids = tokens(model, 3, 11)
    for valid in (None, padded(3, 11)):
        with torch.no_grad():
            expected = model.native(ids, valid)
        got = run(model, ids, valid=valid).logits
        keep = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
        assert torch.equal(got[keep], expected[keep])
        assert torch.isfinite(got[keep]).all() and float(got[keep].std()) > 0.01


@pytest.mark.parametrize(("name", "steps"), [(name, steps) for name, (_, all_) in DEPTHS.items() for steps in all_])
def test_the_rollout_has_the_bits_of_the_native_forward_at_other_depths(name, steps):
    model = adapter(name)
    ids = tokens(model, 3, 11)
    for valid in (None, padded(3, 11)):
        with torch.no_grad(), native_depth(model, name, steps):
            expected = model.native(ids, valid)
        keep = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
        assert torch.equal(run(model, ids, valid=valid, num_steps=steps).logits[keep], expected[keep])
        assert (
            not torch.equal(run(model, ids, valid=valid).logits[keep], expected[keep])
            or steps == model.spec.default_steps
        )


@every_family
def test_shapes_and_types_at_several_batches_lengths_and_depths(name):
    model = adapter(name)
    depths = (0, 1, 3) if name in (*LOOPED, *ALBERTS) else (1,)
    for steps in depths:
        for rows, seq in ((1, 1), (3, 9)):
            out = run(model, tokens(model, rows, seq), num_steps=steps)
            assert out.logits.shape == (rows, seq, model.spec.vocab[0])
            assert out.logits.dtype == torch.float32 and torch.isfinite(out.logits).all()
            assert out.hidden.shape[:2] == (rows, seq)


@every_family
def test_a_token_changes_nothing_before_it_unless_attention_goes_both_ways(name):
    model = adapter(name)
    ids = tokens(model, 2, 9)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % model.spec.vocab[0]
    before, after = run(model, ids).logits, run(model, changed).logits
    assert not torch.equal(before[:, 5:], after[:, 5:])
    if model.spec.causal:
        torch.testing.assert_close(before[:, :5], after[:, :5], **(ROWS_FLOAT32 if "inkling" in name else EXACT))
    else:
        assert not torch.equal(before[:, :5], after[:, :5])


@every_family
def test_each_entry_of_the_plan_runs_its_layers_once_and_encoding_runs_none(name):
    model = adapter(name)
    ids, plan, calls = tokens(model, 2, 5), model.spec.plan(), []
    handles = [
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
        for number, layer in enumerate(model.layers)
    ]
    before = len(getattr(model, "prelude_layers", ()))
    try:
        context = model.encode(ids)
        assert calls == list(range(before))
        calls.clear()
        model.step(model.init_state(context, None), context, *plan[0][:1], torch.zeros(2, dtype=torch.long))
        first = model.spec.blocks[0].layers if name not in ALBERTS else (0,)
        assert calls == list(first)
    finally:
        for handle in handles:
            handle.remove()
    assert not any("StandIn" in type(module).__name__ for module in model.inner.modules())


@every_family
def test_rows_do_not_see_each_other_nor_their_padding(name):
    model = adapter(name)
    ids, valid = tokens(model, 3, 7), padded(3, 7)
    logits = run(model, ids, valid=valid).logits
    for row in range(3):
        keep = valid[row]
        alone = run(model, ids[row : row + 1][:, keep]).logits[0]
        torch.testing.assert_close(logits[row][keep], alone, **ROWS_FLOAT32)
    turned = run(model, ids[[2, 0, 1]], valid=valid[[2, 0, 1]]).logits
    torch.testing.assert_close(turned[valid[[2, 0, 1]]], logits[[2, 0, 1]][valid[[2, 0, 1]]], **ROWS_FLOAT32)


@every_family
def test_a_context_can_be_cut_to_some_of_its_rows(name):
    model = adapter(name)
    ids, valid = tokens(model, 3, 7), padded(3, 7)
    with torch.no_grad():
        context = model.encode(ids, valid=valid)
        state = model.init_state(context, None)
        whole = model.step(state, context, 0, torch.tensor([0, 1, 0]))
        rows = [1, 2]
        part = model.step(states.select(state, rows), states.select(context, rows), 0, torch.tensor([1, 0]))
    for a, b in zip(states.leaves(states.select(whole, rows)), states.leaves(part), strict=True):
        torch.testing.assert_close(a[valid[rows]], b[valid[rows]], **ROWS_FLOAT32)


@every_family
def test_the_same_arguments_give_the_same_bits(name):
    model = adapter(name)
    ids = tokens(model, 2, 7)
    first = run(model, ids).logits
    run(model, tokens(model, 3, 4, seed=9))
    assert torch.equal(run(model, ids).logits, first)


@every_family
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_counted_flops_equal_pytorchs_counter(name, attention):
    model = adapter(name)
    before = model.inner.config._attn_implementation
    if attention == "sdpa" and before == "eager":
        pytest.skip("the family runs in eager attention only")
    model.inner.set_attn_implementation(attention)
    try:
        ids, shape = tokens(model, 2, 6), {"tokens": 6, "rows": 2, "pairs": "square"}
        cost, plan = model.spec.cost, model.spec.plan()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            counted = {}
            with FlopCounterMode(display=False) as counter:
                context = model.encode(ids)
            counted["encode"] = counter.get_total_flops()
            state = model.init_state(context, None)
            for block, iteration in plan:
                with FlopCounterMode(display=False) as counter:
                    state = model.step(state, context, block, torch.full((2,), iteration))
                counted[block, iteration] = counter.get_total_flops()
            with FlopCounterMode(display=False) as counter:
                hidden = model.coda(state, context)
            counted["coda"] = counter.get_total_flops()
            with FlopCounterMode(display=False) as counter:
                model.head(hidden)
            counted["head"] = counter.get_total_flops()
    finally:
        model.inner.set_attn_implementation(before)
    expected = {"encode": cost.prelude.forward(**shape), "coda": cost.coda.forward(**shape)}
    expected["head"] = cost.head.forward(tokens=6, rows=2)
    for block, iteration in plan:
        unheard = name == "inkling2_loop" and iteration == 0  # pass 0 makes no messages; see the adapter's docstring
        expected[block, iteration] = cost.blocks[block].forward(**shape)
        expected[block, iteration] -= model.messages.forward(**shape) if unheard else 0
    assert counted == expected


@every_family
def test_parameter_groups_hold_every_storage_once(name):
    model = adapter(name)
    assert model.spec.params.total == sum(p.numel() for p in model.parameters())
    assert [block.params for block in model.spec.blocks] == list(model.spec.params.core)
    if name == "llama-tied":
        assert model.spec.params.head == 0
        assert model.inner.lm_head.weight.data_ptr() == model.inner.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("name", ["llama", "gpt2", "dory"])
def test_gradients_equal_those_of_the_native_forward(name):
    model = adapter(name)
    ids, parameters = tokens(model, 2, 6), list(model.parameters())
    own = torch.autograd.grad(forward(model, ids).logits.square().mean(), parameters)
    expected = torch.autograd.grad(model.native(ids).square().mean(), parameters)
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@every_cached
def test_cached_decoding_equals_full_recomputation(name):
    model = adapter(name)
    ids = tokens(model, 2, 8)
    for steps in (1, 3) if name in LOOPED else (1,):
        full = run(model, ids, num_steps=steps).logits
        cache = new_cache(model.spec, rows=2, capacity=8, num_steps=steps)
        spans = ((0, 3), (3, 5), (5, 6), (6, 7), (7, 8))  # chunked prefill, then token by token
        pieces = [run(model, ids[:, a:b], num_steps=steps, cache=cache).logits for a, b in spans]
        torch.testing.assert_close(torch.cat(pieces, 1), full, **ROWS_FLOAT32)
        held = model.spec.cost.kv_bytes_per_token("DepthIndexed", model.spec.plan(steps).iterations(), itemsize=4)
        assert cache.nbytes == held * 8 * 2


@every_cached
def test_left_padded_rows_decode_like_rows_alone(name):
    model = adapter(name)
    ids = tokens(model, 2, 8)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, :3] = False
    cache = new_cache(model.spec, rows=2, capacity=8)
    pieces = [
        run(model, ids[:, a:b], cache=cache, valid=valid[:, a:b]).logits for a, b in ((0, 5), (5, 6), (6, 7), (7, 8))
    ]
    got = torch.cat(pieces, 1)
    torch.testing.assert_close(got[:1, 3:], run(model, ids[:1, 3:]).logits, **ROWS_FLOAT32)
    torch.testing.assert_close(got[1:], run(model, ids[1:]).logits, **ROWS_FLOAT32)


@pytest.mark.parametrize("name", ["dory", "hrm_text", "llama"])
def test_readonly_leaves_the_cache_as_it_was_and_crop_then_decode_is_exact(name):
    model = adapter(name)
    ids = tokens(model, 2, 6)
    cache = new_cache(model.spec, rows=2, capacity=6)
    run(model, ids[:, :4], cache=cache)
    with cache.readonly():
        peek = run(model, ids[:, 4:5], cache=cache).logits
    assert cache.length == 4
    again = run(model, ids[:, 4:], cache=cache).logits
    torch.testing.assert_close(peek, again[:, :1], **ROWS_FLOAT32)
    cache.crop(3)
    torch.testing.assert_close(run(model, ids[:, 3:], cache=cache).logits[:, 1:], again, **ROWS_FLOAT32)


def test_the_last_loop_cache_of_dory_decodes_as_the_librarys_own():
    model = adapter("dory-last")
    assert model.spec.kv_rule == Single()
    ids = tokens(model, 2, 7)
    cache, library = new_cache(model.spec, rows=2, capacity=7), transformers.DynamicCache(config=model.inner.config)
    for a, b in ((0, 4), (4, 5), (5, 6), (6, 7)):
        with torch.no_grad():
            expected = model.inner(input_ids=ids[:, a:b], cache=library, use_cache=True).logits
        got = run(model, ids[:, a:b], cache=cache).logits
        torch.testing.assert_close(got, expected, **ROWS_FLOAT32)
    full = run(model, ids).logits
    assert float((full[:, -1] - got[:, -1]).abs().max()) > 1e-3  # it does change the model


def test_rows_at_their_own_depth_decode_like_rows_alone():
    model = adapter("dory")
    ids, counts = tokens(model, 2, 5), torch.tensor([1, 3])
    cache = new_cache(model.spec, rows=2, capacity=5, num_steps=3)
    pieces = [run(model, ids[:, a:b], num_steps=counts, cache=cache).logits for a, b in ((0, 3), (3, 4), (4, 5))]
    for row, steps in enumerate((1, 3)):
        alone = run(model, ids[row : row + 1], num_steps=steps).logits
        torch.testing.assert_close(torch.cat(pieces, 1)[row : row + 1], alone, **ROWS_FLOAT32)


def test_passes_of_inkling_are_two_functions_and_rows_may_run_either():
    model = adapter("inkling2_loop")
    ids = tokens(model, 4, 7)
    with torch.no_grad():
        context = model.encode(ids)
        state = model.step(model.init_state(context, None), context, 0, torch.zeros(4, dtype=torch.long))
        apart = {t: model.step(state, context, 0, torch.full((4,), t)) for t in (0, 1, 2)}
        mixed = model.step(state, context, 0, torch.tensor([0, 1, 2, 0]))
    assert [model.spec.operator_class(0, t) for t in (0, 1, 2)] == [0, 1, 1]
    assert torch.equal(apart[1].hidden, apart[2].hidden) and not torch.equal(apart[0].hidden, apart[1].hidden)
    for row, t in enumerate((0, 1, 2, 0)):
        torch.testing.assert_close(mixed.hidden[row], apart[t].hidden[row], **ROWS_FLOAT32)
        torch.testing.assert_close(mixed.blocks[row], apart[t].blocks[row], **ROWS_FLOAT32)


def test_inkling_and_albert_refuse_a_cache():
    model = adapter("inkling2_loop")
    with pytest.raises(ValueError, match="cache: inkling2_loop is not decoded here"):
        model.encode(tokens(model, 1, 2), new_cache(model.spec, rows=1, capacity=2))
    with pytest.raises(ValueError, match="albert is not causal: no KV cache. Pass cache=None"):
        new_cache(adapter("albert").spec, rows=1, capacity=2)


def test_the_composite_inkling_opens_as_its_text_half(tmp_path):
    text = native("inkling2_loop")
    config = transformers.Inkling2LoopConfig(
        text_config=text.config.to_dict(),
        vision_config={"model_type": "inkling2_vision", "text_hidden_size": 32} | TINY_VISION,
    )
    whole = transformers.Inkling2LoopForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    model = load(tmp_path).model
    ids = tokens(model, 2, 6)
    assert torch.equal(run(model, ids).logits, run(adapter("inkling2_loop"), ids).logits)
    assert model.spec.params == adapter("inkling2_loop").spec.params


TINY_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_token_types_make_the_prompt_of_hrm_text_see_itself_whole():
    model = adapter("hrm_text")
    ids = tokens(model, 2, 7)
    kinds = torch.tensor([[1, 1, 1, 0, 0, 0, 0]] * 2)
    with torch.no_grad():
        expected = model.inner(input_ids=ids, token_type_ids=kinds, use_cache=False).logits
    assert torch.equal(run(model, ids, extras={"token_type": kinds}).logits, expected)
    assert not torch.equal(run(model, ids).logits[:, 0], expected[:, 0])
    assert "run causally without token types" in model.notes[0]
    with pytest.raises(ValueError, match="encode: valid has padding but hrm_text supports none with token_type"):
        model.encode(ids, valid=padded(2, 7), extras={"token_type": kinds})


def test_albert_declares_what_masked_scoring_needs(tmp_path):
    plan = adapter("albert").spec.plan()
    assert plan == Plan.of((0, i) for i in range(4)) and not adapter("albert").spec.causal
    assert str(adapter("albert-groups").spec.plan()) == "[0.0 0.1 0.2 1.0 1.1]"
    assert adapter("albert").mask_token is None
    native("albert").save_pretrained(tmp_path)
    _tokenizer({"a": 0, "[MASK]": 4, "b": 5}).save(str(tmp_path / "tokenizer.json"))
    loaded = load(tmp_path)
    assert loaded.model.mask_token == 4 and loaded.tokenizer.encode("b") == [5]


def _tokenizer(vocabulary):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def test_an_untied_bias_of_albert_is_tied_and_said(tmp_path):
    inner = native("albert")
    inner.predictions.decoder.bias = torch.nn.Parameter(inner.predictions.bias.detach() + 1.0)
    weights = {
        name: tensor.clone() for name, tensor in inner.state_dict().items() if name != "predictions.decoder.weight"
    }
    native("albert").save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"predictions\.decoder\.bias was not tied"):
        model = load(tmp_path).model
    assert torch.equal(run(model, tokens(model, 1, 5)).logits, run(adapter("albert"), tokens(model, 1, 5)).logits)
    assert model.notes


@pytest.mark.parametrize(
    ("wrap", "config", "model", "total"),
    [
        (Dory, "DoryConfig", "DoryForCausalLM", 3_975_229_440),
        (HrmText, "HrmTextConfig", "HrmTextForCausalLM", 1_447_822_848),
        (Inkling2Loop, "Inkling2LoopTextConfig", "Inkling2LoopForCausalLM", 26_068_156_416),
    ],
)
def test_published_sizes(wrap, config, model, total):
    with torch.device("meta"):
        inner = getattr(transformers, model)(getattr(transformers, config)())
    assert wrap.wrap(inner).spec.params.total == total


def test_key_value_bytes_of_the_published_sizes():
    def per_token(wrap, model, config, rule):
        with torch.device("meta"):
            spec = wrap.wrap(model(config)).spec
        return spec.cost.kv_bytes_per_token(rule, spec.plan().iterations(), itemsize=2)

    dory = transformers.DoryForCausalLM, transformers.DoryConfig()
    assert per_token(Dory, *dory, "DepthIndexed") == 229_376
    assert per_token(Dory, *dory, "Single") == 147_456
    hrm = transformers.HrmTextForCausalLM, transformers.HrmTextConfig()
    assert per_token(HrmText, *hrm, "DepthIndexed") == 786_432


def test_mixed_windows_are_counted_layer_by_layer():
    model = adapter("dory")  # layers 0 and 2 see 4 keys, layers 1 and 3 see all; the core is 1 and 2
    prelude, core = model.spec.cost.prelude, model.spec.cost.blocks[0]
    full, window = 9 * 10 // 2, 1 + 2 + 3 + 4 * 6
    assert prelude.forward(tokens=9) == 2 * prelude.matmul * 9 + 4 * 32 * window
    assert core.forward(tokens=9) == 2 * core.matmul * 9 + 4 * 32 * (full + window)


def test_a_rollout_that_differs_is_refused_with_its_first_layer(tmp_path):
    native("llama").save_pretrained(tmp_path)
    model, calls = load(tmp_path).model, []

    def every_second_call(module, args, output):
        calls.append(1)
        return output * 1.01 if len(calls) % 2 else output

    model.layers[1].register_forward_hook(every_second_call)
    with pytest.raises(
        ValueError,
        match=r"^adapter llama: rollout differs from the native forward at layer 1 \(max .*\)\. "
        r"Not audited\. Likely cause: attn_implementation or hooks$",
    ):
        model.verify()


def test_bfloat16_passes_the_self_test_within_its_bound(tmp_path):
    native("qwen3").save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = load(tmp_path, dtype="bfloat16").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.allowed == 3e-2


def saved(tmp_path, name="llama", change=None, **facts):
    native(name).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change is not None:
        change(weights)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if facts:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | facts))
    return tmp_path


def test_missing_unexpected_and_misshapen_tensors_are_listed(tmp_path):
    def change(weights):
        del weights["model.norm.weight"]
        weights["model.extra.weight"] = torch.zeros(2)
        weights["lm_head.weight"] = weights["lm_head.weight"][:90].clone()

    with pytest.raises(ValueError, match="load:") as caught:
        load(saved(tmp_path, change=change))
    assert str(caught.value) == (
        "load: 1 tensor missing (model.norm.weight), 1 unexpected (model.extra.weight), "
        f"1 of wrong shape (lm_head.weight: file [90, 32], model [{VOCAB}, 32])"
    )


def test_tensors_that_a_masked_head_does_not_read_are_no_error(tmp_path):
    def change(weights):
        weights["albert.pooler.weight"] = torch.zeros(32, 32)
        weights["sop_classifier.classifier.bias"] = torch.zeros(2)

    assert load(saved(tmp_path, "albert", change)).model.spec.name == "albert"


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    def change(weights):
        weights["model.layers.1.mlp.up_proj.weight"][0, :3] = float("nan")

    with pytest.raises(ValueError, match=r"load: 3 non-finite values in model\.layers\.1\.mlp\.up_proj\.weight"):
        load(saved(tmp_path, change=change))


def test_pickles_and_absent_weights_are_refused(tmp_path):
    folder = saved(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin is a pickle; looplab does not unpickle\. Convert it once"
    ):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has no \*\.safetensors\. Found: config\.json, generation_config\.json"
    ):
        load(folder)


def test_truncated_weights_are_refused(tmp_path):
    folder = saved(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match="is truncated"):
        load(folder)


def test_unknown_families_list_the_known_ones(tmp_path):
    with pytest.raises(
        ValueError, match=r"model_type 'foo' has no native .* Known model types: looplab, albert, dory,"
    ):
        load(saved(tmp_path, model_type="foo"))


def test_a_family_that_the_installed_library_lacks_names_the_version(tmp_path, monkeypatch):
    from looplab.interop.adapters import folder as opening

    monkeypatch.setattr(opening, "CONFIG_MAPPING", {})
    monkeypatch.setattr(opening.transformers, "__version__", "5.20")
    with pytest.raises(ValueError, match=r"^dory needs transformers >= 5\.24 \(installed 5\.20\)$"):
        load(saved(tmp_path, "dory"))


def test_bidirectional_gemma_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use_bidirectional_attention must be off"):
        load(saved(tmp_path, "gemma3", use_bidirectional_attention=True))


def test_a_sharded_folder_opens(tmp_path):
    native("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(Path(tmp_path).glob("*.safetensors"))) > 1
    model = load(tmp_path).model
    assert torch.equal(run(model, tokens(model, 1, 5)).logits, run(adapter("llama"), tokens(model, 1, 5)).logits)


def test_too_long_and_foreign_tokens_are_refused():
    model = adapter("gpt2")
    with pytest.raises(ValueError, match="encode: 65 tokens, but gpt2 has 64 learned positions"):
        model.encode(tokens(model, 1, 65))
    model = adapter("inkling2_loop")
    with pytest.raises(ValueError, match=r"is outside the vocabulary \(90\)"):
        model.encode(torch.tensor([[92]]))
    with pytest.raises(ValueError, match="this model draws no noise"):
        model.init_state(model.encode(tokens(model, 1, 2)), torch.zeros(1, 2, 3))


def test_the_library_is_loaded_when_a_foreign_folder_is_opened_and_not_before(tmp_path):
    code = (
        "import sys, looplab.interop; assert 'transformers' not in sys.modules; "
        f"model = looplab.interop.load({str(saved(tmp_path))!r}); assert 'transformers' in sys.modules; "
        "assert model.tokenizer is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load(saved(tmp_path)).tokenizer is None


def test_the_rule_of_the_cache_is_the_checkpoints_own():
    assert adapter("dory").spec.kv_rule == DepthIndexed()
