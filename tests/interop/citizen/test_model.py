"""A looplab model as a model of the transformers library: decoding, loss, saving, and what is refused."""

import inspect
import json
import subprocess
import sys

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import looplab
from looplab.interop import LoopCache, LooplabForCausalLM
from looplab.interop.adapters import ADAPTERS
from looplab.interop.citizen.model import CACHE_NAME
from looplab.models.base import PRESETS, build
from looplab.models.folder import save_folder
from looplab.recurrence.exit import FixedExit, HazardExit, forward_until
from looplab.recurrence.gradient import CheckpointApplication, SegmentedDetach, TruncatedBPTT
from looplab.recurrence.kv import CopyLast, DepthIndexed, Single
from looplab.recurrence.loop import forward
from looplab.recurrence.state import item_of, standard_noise
from tolerances import CACHED, EXACT, ROWS

PAD, NEW = 63, 4
SHAPES = [
    "tiny-no-envelope",
    "tiny-core",
    "tiny-ouro",
    "tiny-layer-loop",
    "tiny-two-level",
    "tiny-blocks",
    "tiny-dense",
]
DEEPER = {"tiny-no-envelope": 8, "tiny-core": 7, "tiny-ouro": 4, "tiny-layer-loop": 2, "tiny-two-level": 2}
"""The deepest run within the trained law; other shapes run at their own depth."""

every_shape = pytest.mark.parametrize("shape", SHAPES)
long = pytest.mark.usefixtures("unchecked")
"""Decoding many tokens, where most time would go into the checking of annotations."""

pytestmark = pytest.mark.filterwarnings("ignore:kv_rule=:UserWarning")


def wrapped(shape, *, seed=1):
    return LooplabForCausalLM.wrap(build(PRESETS[shape](), seed=seed, dtype=torch.float64))


def prompts(rows=2, length=5, seed=3):
    return torch.randint(0, PAD, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **options):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, **options)


def recomputed(model, ids, items=None, num_steps=None, new=NEW):
    """Greedy decoding with neither cache nor wrapper."""
    looped, width = model.model, model.model.spec.noise_width
    items = [item_of(*row.tolist()) for row in ids] if items is None else items
    for _ in range(new):
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        noise = standard_noise(0, items, places, width).double() if width else None
        with torch.no_grad():
            logits = forward(looped, ids, num_steps=num_steps, noise=noise).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


def padded(ids, lengths):
    """Rows cut to their last tokens, padded on the left, and their mask."""
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]
    return ids.where(mask, PAD), mask.long()


@long
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_generate_is_the_argmax_loop_over_full_recomputation_at_every_depth(steps):
    model, ids = wrapped("tiny-no-envelope"), prompts()
    decoded = generate(model, ids, num_steps=steps)
    torch.testing.assert_close(decoded, recomputed(model, ids, num_steps=steps), **EXACT)
    torch.testing.assert_close(generate(model, ids, num_steps=steps, use_cache=False), decoded, **EXACT)


@long
@every_shape
def test_generate_is_the_argmax_loop_for_every_shape(shape):
    model, ids = wrapped(shape), prompts()
    for steps in {None, DEEPER.get(shape, 1)}:
        expected = recomputed(model, ids, num_steps=steps)
        torch.testing.assert_close(generate(model, ids, num_steps=steps), expected, **EXACT)
    torch.testing.assert_close(generate(model, ids, num_steps=steps, use_cache=False), expected, **EXACT)


@long
@every_shape
def test_a_left_padded_batch_gives_what_its_rows_give_alone(shape):
    model = wrapped(shape)
    ids, mask = padded(prompts(3, 7), [7, 4, 2])
    together = generate(model, ids, attention_mask=mask)
    for row, keep in enumerate(mask.bool()):
        alone = generate(model, ids[row : row + 1, keep])
        torch.testing.assert_close(together[row, -NEW:], alone[0, -NEW:], **EXACT)
    whole = model(ids, attention_mask=mask).logits
    for row, keep in enumerate(mask.bool()):
        torch.testing.assert_close(whole[row, keep], model(ids[row : row + 1, keep]).logits[0], **ROWS)


def test_right_padding_is_accepted_in_a_forward_pass():
    model, ids = wrapped("tiny-core"), prompts(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    logits = model(ids.where(mask.bool(), PAD), attention_mask=mask).logits
    torch.testing.assert_close(logits[0, :4], model(ids[:1, :4]).logits[0], **ROWS)
    torch.testing.assert_close(logits[1], model(ids[1:]).logits[0], **ROWS)


@long
@pytest.mark.parametrize("shape", ["tiny-no-envelope", "tiny-core", "tiny-ouro"])
def test_beams_of_one_row_are_what_the_row_has_alone(shape):
    model = wrapped(shape)
    ids, mask = padded(prompts(2, 6), [6, 3])
    options = {"num_beams": 3, "num_return_sequences": 2}
    together = generate(model, ids, attention_mask=mask, **options)
    assert together.shape == (4, 6 + NEW)
    torch.testing.assert_close(generate(model, ids, attention_mask=mask, use_cache=False, **options), together, **EXACT)
    for row, keep in enumerate(mask.bool()):
        alone = generate(model, ids[row : row + 1, keep], **options)
        torch.testing.assert_close(together[2 * row : 2 * row + 2, -NEW:], alone[:, -NEW:], **EXACT)


@long
def test_what_has_one_entry_per_prompt_is_repeated_for_beams_and_for_several_answers():
    model, ids = wrapped("tiny-no-envelope"), prompts(2)
    depths = torch.tensor([1, 5])
    for options in ({"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}):
        together = generate(model, ids, num_steps=depths, **options)
        for row in (0, 1):
            alone = generate(model, ids[row : row + 1], num_steps=int(depths[row]), **options)
            rows = slice(row * len(alone), (row + 1) * len(alone))
            torch.testing.assert_close(together[rows], alone, **EXACT)
    model = wrapped("tiny-core")
    items = torch.tensor([7, 8])
    several = model.generate(
        ids, item_ids=items, num_return_sequences=2, do_sample=True, max_new_tokens=2, top_k=1, pad_token_id=PAD
    )
    expected = recomputed(model, ids, items=[7, 8], new=2)
    torch.testing.assert_close(several, expected.repeat_interleave(2, dim=0), **EXACT)
    with pytest.raises(ValueError, match=r"num_steps must have one entry per prompt \(2\)\. Got shape \[3\]"):
        generate(model, ids, num_steps=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"num_steps must have one entry per prompt \(2\)\. Got shape \[\]"):
        generate(model, ids, num_steps=torch.tensor(1))


@long
def test_sampling_depends_on_nothing_but_the_logits():
    model, ids = wrapped("tiny-core"), prompts(1)
    torch.manual_seed(5)
    cached = model.generate(ids, max_new_tokens=NEW, do_sample=True, pad_token_id=PAD)
    torch.manual_seed(5)
    fresh = model.generate(ids, max_new_tokens=NEW, do_sample=True, pad_token_id=PAD, use_cache=False)
    torch.testing.assert_close(cached, fresh, **EXACT)
    torch.manual_seed(6)
    assert not torch.equal(cached, model.generate(ids, max_new_tokens=NEW, do_sample=True, pad_token_id=PAD))


@long
@pytest.mark.parametrize("shape", ["tiny-no-envelope", "tiny-core", "tiny-layer-loop"])
def test_assisted_decoding_gives_what_greedy_decoding_gives(shape):
    model, ids = wrapped(shape), prompts(1)
    greedy = generate(model, ids)
    torch.testing.assert_close(generate(model, ids, assistant_model=wrapped(shape, seed=2)), greedy, **EXACT)
    torch.testing.assert_close(generate(model, ids, assistant_model=model), greedy, **EXACT)
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).double()
    torch.testing.assert_close(generate(model, ids, assistant_model=llama, noise_seed=0), greedy, **EXACT)
    looped_words = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]])
    greedy = generate(model, looped_words)
    torch.testing.assert_close(generate(model, looped_words, prompt_lookup_num_tokens=3), greedy, **EXACT)


def test_exits_cannot_be_had_in_assisted_decoding():
    model = wrapped("tiny-no-envelope")
    with pytest.raises(ValueError, match="exit_rule must be None in assisted decoding"):
        generate(model, prompts(1), assistant_model=model, exit_rule="latent", exit_threshold=0.5)


@long
@pytest.mark.parametrize("shape", ["tiny-core", "tiny-blocks"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_prompt_in_pieces_gives_what_it_gives_at_once(shape, chunk):
    model = wrapped(shape)
    ids, mask = padded(prompts(2, 7), [7, 2])
    whole = generate(model, ids, attention_mask=mask)
    torch.testing.assert_close(generate(model, ids, attention_mask=mask, prefill_chunk_size=chunk), whole, **EXACT)


def test_noise_depends_on_the_prompt_and_the_seed_and_on_nothing_else():
    model, ids = wrapped("tiny-core"), prompts(3)
    logits = model(ids).logits
    torch.testing.assert_close(model(ids[[2]]).logits, logits[[2]], **ROWS)
    torch.testing.assert_close(model(ids.flip(0)).logits, logits.flip(0), **ROWS)
    assert not torch.allclose(model(ids, noise_seed=1).logits, logits)
    hashes = [item_of(*row.tolist()) for row in ids]
    torch.testing.assert_close(model(ids, item_ids=hashes).logits, logits, **EXACT)
    assert not torch.allclose(model(ids, item_ids=[1, 2, 3]).logits, logits)
    with pytest.raises(ValueError, match=r"item_ids must have one number per row \(3\)\. Got 2"):
        model(ids, item_ids=[1, 2])


def test_a_cache_keeps_the_items_of_its_first_call():
    model, ids = wrapped("tiny-core"), prompts(2, 8)
    with torch.no_grad():
        first = model(ids[:, :5], use_cache=True)
        cache = first[CACHE_NAME]
        rest = model(ids[:, 5:], **{CACHE_NAME: cache}).logits
        items = [item_of(*row[:5].tolist()) for row in ids]
        whole = model(ids, item_ids=items).logits
    assert cache.items == items
    torch.testing.assert_close(torch.cat([first.logits, rest], dim=1), whole, **CACHED)


@long
def test_talk_goes_on_from_a_returned_cache():
    model, ids = wrapped("tiny-core"), prompts(2)
    output = generate(model, ids, return_dict_in_generate=True)
    told = torch.cat([output.sequences, prompts(2, 3, seed=9)], dim=1)
    items = [item_of(*row.tolist()) for row in ids]
    expected = recomputed(model, told, items=items)
    torch.testing.assert_close(generate(model, told, **{CACHE_NAME: output[CACHE_NAME]}), expected, **EXACT)


def test_both_names_of_the_cache_are_understood():
    model, ids = wrapped("tiny-dense"), prompts(1)
    with torch.no_grad():
        one, other = LoopCache(), LoopCache()
        torch.testing.assert_close(model(ids, cache=one).logits, model(ids, past_key_values=other).logits, **EXACT)
    assert one.get_seq_length() == other.get_seq_length() == 5


def test_a_cache_is_returned_where_it_was_asked_for():
    model, ids = wrapped("tiny-no-envelope"), prompts(1)
    assert CACHE_NAME not in model(ids)
    with torch.no_grad():
        assert CACHE_NAME not in model(ids, cache=DynamicCache(), use_cache=False)
        assert isinstance(model(ids, cache=DynamicCache())[CACHE_NAME], LoopCache)


def test_a_foreign_cache_with_tokens_is_refused():
    model, ids = wrapped("tiny-no-envelope"), prompts(1)
    foreign = DynamicCache()
    foreign.update(torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16), 0)
    with pytest.raises(ValueError, match="cache of type DynamicCache holds 5 tokens; start from an empty cache"):
        model(ids, cache=foreign)
    with pytest.raises(ValueError, match="cache must be a LoopCache, or an empty DynamicCache.*Got StaticCache"):
        model(ids, cache=StaticCache(config=model.config, max_cache_len=9))
    with pytest.raises(ValueError, match="cache must be a LoopCache, or an empty DynamicCache.*Got dict"):
        model(ids, cache={})


def test_the_rule_of_the_cache_is_an_argument():
    model, ids = wrapped("tiny-no-envelope"), prompts(2)
    with pytest.warns(UserWarning, match=r"kv_rule=Single\(\) is not the trained rule"):
        shared = generate(model, ids, kv_rule=Single(), return_dict_in_generate=True, output_logits=True)
    assert shared[CACHE_NAME].core.rule == Single()
    own = generate(model, ids, return_dict_in_generate=True, output_logits=True)
    assert not torch.allclose(shared.logits[1], own.logits[1])
    with pytest.raises(ValueError, match=r"kv_rule must be that of the cache, DepthIndexed.*Got Single\(\)"):
        model(ids[:, :1], kv_rule=Single(), **{CACHE_NAME: own[CACHE_NAME]})


def test_a_misspelt_argument_of_generate_is_an_error():
    with pytest.raises(ValueError, match="num_step'"):
        generate(wrapped("tiny-dense"), prompts(), num_step=3)


def test_every_argument_of_forward_is_named():
    kinds = {parameter.kind for parameter in inspect.signature(LooplabForCausalLM.forward).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_rows_of_one_call_may_have_their_own_depths():
    model, ids = wrapped("tiny-no-envelope"), prompts(3)
    mixed = model(ids, num_steps=torch.tensor([1, 4, 2])).logits
    for row, steps in enumerate((1, 4, 2)):
        torch.testing.assert_close(mixed[row], model(ids[row : row + 1], num_steps=steps).logits[0], **ROWS)


@long
@pytest.mark.parametrize("steps", [-1, 2.5, torch.tensor(2.5), True])
def test_a_depth_that_is_none_is_refused(steps):
    with pytest.raises(ValueError, match=r"num_steps must be an int >= 0 or Int\[batch\]\. Got "):
        wrapped("tiny-no-envelope")(prompts(), num_steps=steps)


@long
def test_logits_are_those_of_the_trailing_tokens_asked_for():
    model, ids = wrapped("tiny-core"), prompts()
    whole = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:], **ROWS)
    for kept in (-1, True, 1.0):
        with pytest.raises(ValueError, match="logits_to_keep must be an int >= 0"):
            model(ids, logits_to_keep=kept)
    assert isinstance(model(ids, return_dict=False), tuple)
    torch.testing.assert_close(model(ids, return_dict=False)[0], whole, **EXACT)


def test_exits_follow_the_loop_of_the_exit_rules():
    model, ids = wrapped("tiny-ouro"), prompts(2, 9)
    expected = forward_until(model.model, ids, HazardExit(threshold=0.6))
    assert len(set(expected.steps.flatten().tolist())) > 1
    for given in ({"exit_rule": "hazard", "exit_threshold": 0.6}, {"exit_rule": HazardExit(threshold=0.6)}):
        out = model(ids, **given)
        torch.testing.assert_close(out.logits, expected.logits, **EXACT)
        torch.testing.assert_close(out.steps, expected.steps, **EXACT)
    torch.testing.assert_close(model(ids, exit_step=2).logits, model(ids, num_steps=2).logits, **ROWS)
    torch.testing.assert_close(
        model(ids, exit_rule=HazardExit(threshold=0.6), num_steps=2).steps, expected.steps.clamp(max=2), **EXACT
    )


def test_a_prompt_runs_in_full_and_what_is_decoded_may_stop():
    model, ids = wrapped("tiny-ouro"), prompts(2)
    for length in (1, 5):
        cache, tokens = LoopCache(), ids[:, :length]
        with torch.no_grad():
            first = model(tokens, exit_rule="latent", exit_threshold=1e9, cache=cache)
            then = model(ids[:, -1:], exit_rule="latent", exit_threshold=1e9, cache=cache)
        torch.testing.assert_close(first.logits, model(tokens).logits, **CACHED)
        assert first.steps.unique().tolist() == [4]
        assert then.steps.unique().tolist() == [1]
        assert cache.core.rule == DepthIndexed(missing=CopyLast())
    fixed = generate(model, ids, exit_rule=FixedExit(num_steps=4), return_dict_in_generate=True)
    torch.testing.assert_close(fixed.sequences, generate(model, ids), **EXACT)
    assert fixed[CACHE_NAME].core.rule == DepthIndexed()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"exit_rule": "full", "exit_step": 2}, "exits must be asked for in one way. Got exit_rule and exit_step"),
        (
            {"exit_step": 2, "weighted_exit": True},
            "exits must be asked for in one way. Got exit_step and weighted_exit",
        ),
        ({"exit_threshold": 0.5}, "exit_threshold needs the name of an exit_rule. Got 0.5"),
        ({"exit_rule": "hazard", "exit_threshold": 0.5}, "looped has no trained gate; exit rules available: "),
        ({"exit_rule": "full", "num_steps": torch.tensor([1, 2])}, "num_steps must be an int with exit_rule=full"),
        ({"labels": torch.zeros(2, 5, dtype=torch.long), "logits_to_keep": 1}, "logits_to_keep must be 0 with labels"),
        ({"input_ids": None}, r"input_ids must be Int\[batch, seq\]. Got None"),
        ({"inputs_embeds": torch.zeros(2, 5, 32)}, "inputs_embeds must be left out.*Got Tensor"),
        ({"output_attentions": True}, "output_attentions must be left out.*Got True"),
        ({"output_hidden_states": True}, "output_hidden_states must be left out.*Got True"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, r"attention_mask must be \[batch, past \+ seq\]"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        wrapped("tiny-no-envelope")(**{"input_ids": prompts()} | given)


def test_a_row_of_padding_only_is_refused():
    model, ids = wrapped("tiny-dense"), prompts()
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="encode: row 1 has no valid token"):
            call(ids, attention_mask=mask)


def test_the_loss_is_that_of_the_next_token_at_the_depth_that_was_chosen():
    model, ids = wrapped("tiny-core"), prompts(2, 7)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels, num_steps=3)
    logits = model(ids, num_steps=3).logits
    torch.testing.assert_close(out.logits, logits, **EXACT)
    terms = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(out.loss, terms.sum() / 9)
    torch.testing.assert_close(model(ids, labels=labels, num_steps=3, num_items_in_batch=20).loss, terms.sum() / 20)


def gradients(model, **given):
    model.zero_grad()
    ids = prompts(2, 7)
    model(ids, labels=ids, **given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_checkpointing_recomputes_every_application_and_changes_no_gradient():
    model = wrapped("tiny-core").train()
    calls = []
    step = model.model.step
    model.model.step = lambda *args, **kwargs: calls.append(1) or step(*args, **kwargs)
    plain = gradients(model, num_steps=4)
    assert len(calls) == 4
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    assert model.strategy == CheckpointApplication() and model.is_gradient_checkpointing
    calls.clear()
    torch.testing.assert_close(gradients(model, num_steps=4), plain, **EXACT)
    assert len(calls) == 8
    model.gradient = TruncatedBPTT(window=1)
    assert model.strategy == CheckpointApplication(inner=TruncatedBPTT(window=1))
    calls.clear()
    gradients(model, num_steps=4)
    assert len(calls) == 5
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()
    assert model.strategy == TruncatedBPTT(window=1)


@long
def test_a_window_of_gradient_is_an_attribute():
    model = wrapped("tiny-core").train()
    whole = gradients(model, num_steps=4)
    model.gradient = TruncatedBPTT(window=2)
    short = gradients(model, num_steps=4)
    ids = prompts(2, 7)
    model.zero_grad()
    noise = standard_noise(0, [item_of(*row.tolist()) for row in ids], torch.arange(7).expand(2, 7), 32).double()
    logits = forward(model.model, ids, num_steps=4, noise=noise, gradient=TruncatedBPTT(window=2)).logits
    functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(short, own, rtol=1e-6, atol=1e-9)  # the library's loss is in float32
    assert any(not torch.allclose(whole[name], short[name]) for name in short)
    model.gradient = SegmentedDetach(every=2)
    with pytest.raises(ValueError, match="needs a loss after 2, 4 applications"):
        gradients(model, num_steps=4)
    with pytest.raises(TypeError, match="gradient must be a strategy such as TruncatedBPTT"):
        model.gradient = "truncated"
    with pytest.raises(
        ValueError, match="exit_rule must be None while SegmentedDetach.* decides what carries gradient"
    ):
        model(ids, exit_rule="full")


@every_shape
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_saved_folder_comes_back_bit_by_bit(shape, tmp_path):
    model = wrapped(shape).float()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert "model.safetensors.index.json" in files and sum(name.endswith(".safetensors") for name in files) > 1
    assert not any("token" in name for name in files)
    again = LooplabForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), **EXACT)
    torch.testing.assert_close(again(prompts()).logits, model(prompts()).logits, **EXACT)
    assert again.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict() | {"_name_or_path": ""}
    head, table = again.get_output_embeddings().weight, again.get_input_embeddings().weight
    assert (head.data_ptr() == table.data_ptr()) == again.config.tie_word_embeddings
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LooplabForCausalLM  # no remote code needed here
    ours = looplab.load(tmp_path)
    torch.testing.assert_close(ours.model.state_dict(), model.model.state_dict(), **EXACT)
    assert not ours.model.training and ours.tokenizer is None
    assert isinstance(LooplabForCausalLM._tied_weights_keys, dict)


def test_types_of_weights_are_kept(tmp_path):
    wrapped("tiny-core").to(torch.bfloat16).save_pretrained(tmp_path)
    again = LooplabForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16 and again(prompts()).logits.dtype == torch.float32
    assert LooplabForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


FRESH = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
assert type(model).__module__ == "looplab.interop.citizen.model", type(model)
out = model.generate(torch.tensor({ids}), max_new_tokens=3, do_sample=False, num_steps=2, pad_token_id=63)
print(out.tolist())
"""


@pytest.mark.slow
def test_a_saved_folder_opens_in_a_fresh_process(tmp_path):
    model, ids = wrapped("tiny-core").float(), prompts()
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    code = FRESH.format(folder=str(folder), ids=ids.tolist())
    place = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=place, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = model.generate(ids, max_new_tokens=3, do_sample=False, num_steps=2, pad_token_id=PAD)
    assert json.loads(done.stdout) == expected.tolist()


def test_the_code_in_a_saved_folder_is_one_import_of_ours(tmp_path):
    model = wrapped("tiny-dense")
    LooplabForCausalLM.register_for_auto_class()  # what loading with remote code does to a class
    model.config.register_for_auto_class()
    model.save_pretrained(tmp_path)
    code = [path for path in tmp_path.iterdir() if path.suffix == ".py"]
    assert [path.name for path in code] == ["modeling_looplab.py"]
    lines = [line for line in code[0].read_text().splitlines() if "import" in line and not line.startswith('"')]
    assert lines == ["from looplab.interop.citizen import LooplabConfig, LooplabForCausalLM"]


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    wrapped("tiny-dense").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    lacking = {name: tensor for name, tensor in tensors.items() if name != "model.final_norm.weight"}
    save_file(lacking | {"other": torch.zeros(1)}, path, metadata={"format": "pt"})
    said = r"load: 1 tensor missing \(model\.final_norm\.weight\), 1 unexpected \(other\)"
    for door in (LooplabForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained, looplab.load):
        with pytest.raises(ValueError, match=said):
            door(tmp_path)
    save_file(tensors | {"model.final_norm.weight": torch.ones(3)}, path, metadata={"format": "pt"})
    said = r"load: 1 tensor of wrong shape \(model\.final_norm\.weight: file \[3\], model \[32\]\)"
    for door in (LooplabForCausalLM.from_pretrained, looplab.load):
        with pytest.raises(ValueError, match=said):
            door(tmp_path)


def test_what_looplab_opened_can_be_wrapped(tmp_path):
    save_folder(tmp_path / "ours", build(PRESETS["tiny-core"](), seed=3))
    loaded = looplab.load(tmp_path / "ours")
    model = LooplabForCausalLM.from_looplab(loaded)
    assert model.model is loaded.model and not model.training and model.config.tokenizer == "bytes"
    model.save_pretrained(tmp_path / "theirs")
    again = looplab.load(tmp_path / "theirs")
    assert again.tokenizer.name == "bytes"
    torch.testing.assert_close(again.model.state_dict(), loaded.model.state_dict(), **EXACT)


def test_fresh_weights_are_those_of_our_own_law():
    config = wrapped("tiny-core").config
    torch.manual_seed(0)
    model = LooplabForCausalLM(config)
    spread = model.model.core[0].attn.q.weight.std()
    assert 0.13 < spread < 0.17  # 0.15, as the preset says; the library's own would be 0.02


def test_embeddings_are_those_of_the_model_and_keep_their_size():
    model, ids = wrapped("tiny-core"), prompts()
    table = model.get_input_embeddings()
    assert table is model.model.embedding and model.get_output_embeddings() is model.model.lm_head
    assert model.resize_token_embeddings(64) is table and model.resize_token_embeddings() is table
    with pytest.raises(
        ValueError, match="new_num_tokens must be 64, the vocabulary of the model's configuration. Got 70"
    ):
        model.resize_token_embeddings(70)
    before = model(ids).logits
    other = torch.nn.Embedding(64, 32, dtype=torch.float64)
    model.set_input_embeddings(other)
    assert not torch.allclose(model(ids).logits, before)
    assert model.get_output_embeddings().weight is other.weight  # tied as before
    with pytest.raises(ValueError, match=r"embeddings must have shape \[64, 32\]. Got \[65, 32\]"):
        model.set_input_embeddings(torch.nn.Embedding(65, 32))


@pytest.mark.parametrize("preset", ["tiny-trm-mlp", "tiny-trm-attn", "tiny-hrm"])
def test_a_model_that_sees_both_directions_is_refused(preset):
    with pytest.raises(ValueError, match="model must be causal. Got (trm|hrm), whose positions see both directions"):
        LooplabForCausalLM.wrap(build(PRESETS[preset]()))


def test_a_model_of_the_library_is_not_wrapped_twice():
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match="must be of a registered class .*Got .*use its attribute `inner`"):
        LooplabForCausalLM.wrap(ADAPTERS["llama"].wrap(LlamaForCausalLM(config).eval()))
