"""LooplabLM: equal to our own losses and to lm-eval's own `hf` backend, at every depth, in any order."""

import dataclasses
import sys
import warnings
from pathlib import Path

import pytest
import torch

import looplab
from looplab.data.tokenizers import ByteTokenizer
from looplab.interop import lm_eval as ours
from looplab.interop.checkpoint import LoadedModel
from looplab.interop.decoding import Sampling
from looplab.interop.lm_eval import (
    APPLICATIONS,
    STEPS,
    LooplabLM,
    RequestError,
    depth_unit,
    generation,
    require_lm_eval,
)
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.exit import LatentExit
from looplab.recurrence.kv import CopyLast, DepthIndexed, Single
from looplab.recurrence.loop import forward
from tiny import LetterTokenizer, Mixing
from tolerances import EVAL_SCORES, EVAL_TEXTS

TEXT = "the cat sat on the mat and the dog sat on the log while the cat and the dog looked on. "


def instances(kind, arguments, task="t"):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, 0, (task, number, 1)) for number, args in enumerate(arguments)]


def pairs(*arguments):
    return instances("loglikelihood", arguments)


PAIRS = [
    ("the cat", " sat on the mat"),
    ("the cat ", "sat"),
    ("", "the dog"),
    ("and the dog sat on the log while", " the"),
    ("and the dog sat on the log while", " a"),
    ("\n", "mat"),
    (TEXT * 2, " the end"),
]


class Letters(LetterTokenizer):
    """The letters, where a stands for bos too."""

    bos = 0


def noisy(steps=4, **options):
    """A model of letters that starts from noise."""
    model = Mixing(steps=steps, blocks=1, noise=True, **options)
    model.spec = dataclasses.replace(
        model.spec, trained_depth=FixedDepth(num_steps=steps), padding=frozenset({"left", "right"})
    )
    return LoadedModel(model=model.eval(), tokenizer=Letters(), name="noisy", folder=Path("none"), facts={})


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A folder with a dense Llama and a byte-pair tokenizer that begins texts with bos."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<says>{% endif %}"
    )
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=48, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("twin")
    LlamaForCausalLM(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def both(twin):
    """lm-eval's own backend and ours on the same folder."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(twin).eval()
    theirs = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(twin), batch_size=3)
    return theirs, LooplabLM(looplab.load(twin), batch_size=2)


def quietly(ask, *arguments):
    """The other library's answer, without its progress bars and warnings of texts that are too long."""
    from looplab.interop.eval_tasks import listening

    with listening(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ask(*arguments)


def test_log_likelihoods_are_those_of_the_hf_backend(both):
    theirs, mine = both
    wanted, found = quietly(theirs.loglikelihood, pairs(*PAIRS)), quietly(mine.loglikelihood, pairs(*PAIRS))
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert mine.truncated["t", "loglikelihood"][0] == 1


def test_texts_in_rolling_windows_are_those_of_the_hf_backend(both):
    theirs, mine = both
    texts = [(TEXT,), (TEXT * 5,), ("cat",)]
    wanted = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
    found = mine.loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    assert found == pytest.approx(wanted, rel=EVAL_TEXTS["rtol"], abs=EVAL_TEXTS["atol"])


def test_greedy_texts_are_those_of_the_hf_backend(both):
    theirs, mine = both
    options = {"until": ["."], "max_gen_toks": 10, "do_sample": False}
    asked = [(text, dict(options)) for text in ("the cat", "and the dog sat on the", TEXT * 3, "on")]
    wanted = quietly(theirs.generate_until, instances("generate_until", asked))
    found = quietly(mine.generate_until, instances("generate_until", asked))
    assert found == wanted
    assert any(wanted)
    assert mine.truncated["t", "generate_until"][0] == 1


def test_stop_texts_are_cut_off(both):
    _, mine = both
    (whole,) = mine.generate_until(instances("generate_until", [("the cat", {"max_gen_toks": 10})]))
    stop = whole[3:5]
    (cut,) = mine.generate_until(instances("generate_until", [("the cat", {"max_gen_toks": 10, "until": [stop]})]))
    assert cut == whole[: whole.index(stop)]


def test_log_likelihoods_are_our_own_losses():
    loaded = looplab.load("text-2x4-sampled")
    lm = LooplabLM(loaded, num_steps=[2, 8])
    context, continuation = "Return the", " value of the key."
    tokens = torch.tensor([list((context + continuation).encode())])
    for depth in (2, 8):
        with torch.no_grad():
            logits = forward(loaded.model, tokens, plan=loaded.model.spec.plan()[:depth]).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")[len(context) - 1 :].sum()
        ((logprob, _),) = lm.at(depth).loglikelihood(pairs((context, continuation)))
        assert logprob == pytest.approx(-float(nll), abs=EVAL_SCORES["atol"])


def test_all_depths_are_answered_from_one_rollout():
    lm = LooplabLM(looplab.load("text-2x4-sampled"), num_steps=[1, 2, 4, 8])
    asked = pairs(("Return the", " value"), ("Return a", " list"))
    first = lm.at(1).loglikelihood(asked)
    assert (lm.ledger.launches, lm.ledger.row_applications) == (8, 16)
    answers = [lm.at(depth).loglikelihood(asked) for depth in (1, 2, 4, 8)]
    assert lm.ledger.launches == 8, "the other depths were ready"
    assert answers[0] == first != answers[3]
    for depth, answer in zip((1, 2, 4, 8), answers, strict=True):
        assert LooplabLM(lm.loaded, num_steps=depth).loglikelihood(asked) == answer


def test_other_documents_are_not_answered_from_memory():
    lm = LooplabLM(noisy(), num_steps=[1])
    first = lm.loglikelihood(instances("loglikelihood", [("abc", "d")], task="one"))
    second = lm.loglikelihood(instances("loglikelihood", [("abc", "d")], task="two"))
    assert first != second, "noise belongs to the document"


def test_what_a_document_gets_does_not_depend_on_its_batch():
    asked = pairs(("abc", "def"), ("hgfedcba", "a"), ("ab", "h"), ("cdcdcd", "cd"))
    wanted = LooplabLM(noisy(), num_steps=[2, 4]).loglikelihood(asked)
    for options in ({"batch_size": 1}, {"batch_tokens": 9}):
        found = LooplabLM(noisy(), num_steps=[2, 4], **options).loglikelihood(asked[::-1])[::-1]
        assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-5)
    texts = instances("generate_until", [(c, {"max_gen_toks": 5, "temperature": 1.0}) for c in ("abc", "hgfedc", "a")])
    told = LooplabLM(noisy(), num_steps=3).generate_until(texts)
    assert LooplabLM(noisy(), num_steps=3, batch_size=1).generate_until(texts[::-1])[::-1] == told


def test_repeats_of_a_question_are_drawn_anew_and_the_seed_decides():
    (question,) = instances("generate_until", [("abc", {"max_gen_toks": 12, "temperature": 2.0})])
    told = LooplabLM(noisy()).generate_until([question] * 3)
    assert len(set(told)) > 1
    assert (
        LooplabLM(noisy()).generate_until([question] * 3)
        == told
        != LooplabLM(noisy(), seed=5).generate_until([question] * 3)
    )


def test_windows_of_a_text_have_noise_of_their_own():
    lm = LooplabLM(noisy(), num_steps=1, max_length=4)
    (two,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [("aaaaaaaa",)]))
    (one,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [("aaaa",)]))
    assert lm.ledger.head_tokens == 12, "every token is predicted once"
    assert two != pytest.approx(2 * one)


def test_zero_starts_at_the_mean():
    asked = pairs(("abc", "def"))
    zero = LooplabLM(noisy(), init="zero")
    assert zero.loglikelihood(asked) == LooplabLM(noisy(), init="zero", seed=9).loglikelihood(asked)
    assert zero.loglikelihood(asked) != LooplabLM(noisy()).loglikelihood(asked)


def test_an_empty_continuation_is_certain():
    assert LooplabLM(noisy()).loglikelihood(pairs(("abc", ""))) == [(0.0, True)]
    assert LooplabLM(noisy()).loglikelihood_rolling(instances("loglikelihood_rolling", [("",)])) == [0.0]


def test_what_is_too_long_loses_its_left_and_says_so():
    lm = LooplabLM(noisy(), num_steps=1, max_length=6)
    with pytest.warns(UserWarning, match="t: 1 of 2 inputs are longer than 6 tokens and lost 4 tokens on the left"):
        long, _ = lm.loglikelihood(pairs(("abcdefgh", "abc"), ("ab", "c")))
    with_less = lm.loglikelihood(pairs(("efgh", "abc")))
    assert long == with_less[0]
    assert lm.truncated["t", "loglikelihood"] == (0, 0), "that of the last call"
    with pytest.raises(RequestError, match="a continuation must be at most 6 tokens long. Got 7 in t, document 0"):
        lm.loglikelihood(pairs(("a", "abcdefg")))


def test_chats_use_the_template_of_the_folder(twin, both):
    _, mine = both
    chat = [{"role": "user", "content": "cat?"}]
    assert mine.apply_chat_template(chat) == "<user>cat?<says>"
    assert "<says>" in mine.chat_template(True)
    assert mine.chat_template(False) == ""
    with pytest.raises(ValueError, match="MODEL must have a chat template. Got text-core"):
        LooplabLM(looplab.load("text-core")).chat_template(True)


def test_a_depth_counts_applications_where_prefixes_were_trained():
    assert depth_unit(looplab.load("text-2x4-sampled").model.spec) == APPLICATIONS
    assert depth_unit(noisy().model.spec) == STEPS
    assert list(LooplabLM(noisy(), num_steps=[4, 1]).plans) == [1, 4]
    with pytest.raises(
        ValueError, match=r"num_steps must be from 0 to 8: looped was trained on the first applications"
    ):
        LooplabLM(looplab.load("text-2x4-sampled"), num_steps=[4, 9])


def test_depths_past_the_trained_one_are_warned_about():
    loaded = noisy()
    loaded.model.spec = dataclasses.replace(loaded.model.spec, trained_depth=FixedDepth(num_steps=2))
    with pytest.warns(UserWarning, match=r"num_steps=4 is beyond the trained depth FixedDepth\(2\)"):
        LooplabLM(loaded, num_steps=[2, 4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": []}, "num_steps must be one depth or several different ones. Got \\[\\]"),
        ({"num_steps": [2, 2]}, "num_steps must be one depth or several different ones. Got \\[2, 2\\]"),
        ({"init": "one"}, "init must be 'model' or 'zero'. Got 'one'"),
        ({"max_length": 999}, "max_length must be from 1 to 256. Got 999"),
        ({"batch_size": 0}, "batch_size must be at least 1. Got 0"),
        (
            {"num_steps": [1, 2], "exit_rule": LatentExit(threshold=0.1)},
            "num_steps must be one number under an exit rule",
        ),
        ({"tokenizer": ByteTokenizer()}, "the tokenizer must have at most the model's 8 ids. Got 259"),
    ],
)
def test_impossible_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LooplabLM(noisy(), **options)


def test_what_lm_eval_cannot_ask_is_refused():
    loaded = noisy()
    loaded.model.spec = dataclasses.replace(loaded.model.spec, causal=False)
    with pytest.raises(
        ValueError, match="MODEL must be causal: lm-eval asks for the next token. Got tiny, which sees both"
    ):
        LooplabLM(loaded)
    loaded = noisy()
    loaded.model.spec = dataclasses.replace(loaded.model.spec, extras={"puzzle_ids": True})
    with pytest.raises(ValueError, match="MODEL must need nothing but tokens. Got tiny, which needs puzzle_ids"):
        LooplabLM(loaded)
    with pytest.raises(ValueError, match="MODEL must have a tokenizer"):
        LooplabLM(dataclasses.replace(noisy(), tokenizer=None))
    with pytest.raises(ValueError, match=r"at: depth must be one of \[1, 2\]. Got 3"):
        LooplabLM(noisy(), num_steps=[1, 2]).at(3)
    bare = LooplabLM(dataclasses.replace(noisy(), tokenizer=LetterTokenizer()))
    with pytest.raises(RequestError, match="an empty context is read as bos or eos. Got a tokenizer that has neither"):
        bare.loglikelihood(pairs(("", "abc")))


def test_an_exit_rule_decides_and_is_recorded():
    core = looplab.load("text-core")
    lm = LooplabLM(core, exit_rule=LatentExit(threshold=1e9))
    assert lm.kv_rule == DepthIndexed(missing=CopyLast())
    lm.loglikelihood(pairs(("Return the", " value")))
    assert 1 <= lm.steps["t", lm.depth] < lm.depth
    (told,) = lm.generate_until(instances("generate_until", [("Return", {"max_gen_toks": 4})], task="g"))
    assert len(told) >= 1
    assert 1 <= lm.steps["g", lm.depth] < lm.depth


def test_another_cache_rule_is_warned_about_once():
    loaded = looplab.load("text-core")
    with pytest.warns(UserWarning, match="is not the trained rule"):
        lm = LooplabLM(loaded, kv_rule=Single())
    (told,) = lm.generate_until(instances("generate_until", [("Return", {"max_gen_toks": 3})]))  # a warning would fail
    assert len(told) == 3


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, Sampling(max_tokens=256)),
        ({"max_new_tokens": 5, "do_sample": False, "temperature": 0.7}, Sampling(max_tokens=5)),
        ({"temperature": 0.7}, Sampling(max_tokens=256, temperature=0.7)),
        ({"do_sample": True}, Sampling(max_tokens=256, temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9},
            Sampling(temperature=0.5, top_k=3, top_p=0.9),
        ),
        ({"num_beams": 1}, Sampling(max_tokens=256)),
    ],
)
def test_generation_options_are_read(options, wanted):
    assert generation(options)[0] == wanted


def test_stops_are_read_and_what_is_unknown_is_refused():
    assert generation({"until": "x"})[1] == ("x",)
    assert generation({"until": ["x", "", "yz"]})[1] == ("x", "yz")
    with pytest.raises(
        RequestError, match=r"generation options must be until, .* Got num_beams, penalty\. Leave it out"
    ):
        generation({"num_beams": 4, "penalty": 2})
    with pytest.raises(RequestError, match="generation options: top_p must be above 0"):
        generation({"top_p": 2.0})
    with pytest.raises(
        RequestError, match=r"max_gen_toks must be below the model's context of 256 tokens. Got 256 in t"
    ):
        LooplabLM(noisy()).generate_until(instances("generate_until", [("abc", {})]))


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(ours, "LM", object)
    with pytest.raises(
        ImportError, match=r"lm-eval must be installed. It is not. Install it: pip install 'looplab\[eval\]'"
    ):
        require_lm_eval()


def test_the_module_imports_without_the_extra(monkeypatch):
    import importlib.util

    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    spec = importlib.util.spec_from_file_location("without_extra", ours.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ImportError, match="looplab\\[eval\\]"):
        module.require_lm_eval()
