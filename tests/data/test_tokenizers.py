import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from looplab.data.documents import DataError
from looplab.data.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer

VOCABULARY = {"[UNK]": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "hello": 4, "world": 5}


def save(folder, *, template=False, **files):
    """A word-level tokenizer.json in `folder`, with other JSON files beside it."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>", "<pad>"])
    inner.enable_truncation(1)
    inner.enable_padding(length=8)
    if template:
        inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_have_three_special_ids_or_none():
    full, bare = load_tokenizer("bytes"), ByteTokenizer(specials=False)
    assert (full.vocab_size, full.bos, full.eos, full.pad) == (259, 256, 257, 258)
    assert (bare.vocab_size, bare.bos, bare.eos, bare.pad) == (256, None, None, None)
    assert full.hash != bare.hash
    assert full.hash == ByteTokenizer().hash
    assert full.decode([256, 104, 105, 257, 258]) == "hi"
    assert full.decode([0xC3]) == "\ufffd"
    assert not full.starts_with_bos


@pytest.mark.parametrize("ids", [[0, 256], [0, -1]])
def test_decoding_refuses_ids_outside_the_vocabulary(ids):
    with pytest.raises(DataError) as caught:
        ByteTokenizer(specials=False).decode(ids)
    assert str(caught.value) == (
        f"decode: ids must be from 0 to 255. Got {ids[1]} at position 1. The ids come from another tokenizer."
    )


def test_a_file_encodes_without_specials_truncation_or_padding(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path, template=True, tokenizer_config={"bos_token": "<s>"}))
    assert tokenizer.encode("hello world hello") == [4, 5, 4]
    assert tokenizer.encode_all(["hello", "world hello"]) == [[4], [5, 4]]
    assert tokenizer.decode([1, 4, 5, 2]) == "hello world"
    assert tokenizer.vocab_size == 6
    with pytest.raises(DataError, match="ids must be from 0 to 5. Got 6"):
        tokenizer.decode([6])


def test_special_ids_come_from_the_first_file_that_declares_them(tmp_path):
    folder = save(
        tmp_path,
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": None},
        special_tokens_map={"bos_token": "</s>", "eos_token": "</s>"},
        config={"eos_token_id": 5, "pad_token_id": [3, 4]},
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, 2, 3)


def test_a_lone_file_has_no_special_ids(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path) / "tokenizer.json")
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (None, None, None)


@pytest.mark.parametrize(
    ("template", "config", "expected"),
    [
        (True, {"bos_token": "<s>"}, True),
        (False, {"bos_token": "<s>"}, False),
        (True, {"bos_token": "<s>", "add_bos_token": False}, False),
        (False, {"bos_token": "<s>", "add_bos_token": True}, True),
        (True, {}, False),
    ],
)
def test_whether_texts_start_with_bos_is_declared_or_seen(tmp_path, template, config, expected):
    assert load_tokenizer(save(tmp_path, template=template, tokenizer_config=config)).starts_with_bos is expected


def test_the_hash_covers_the_file_and_the_special_ids(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    plain = FileTokenizer(save(tmp_path / "a"))
    assert plain.hash != FileTokenizer(save(tmp_path / "b", template=True)).hash
    assert plain.hash != FileTokenizer(save(tmp_path / "c", config={"eos_token_id": 2})).hash
    assert plain.hash == FileTokenizer(tmp_path / "a" / "tokenizer.json").hash


def error_of(path):
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    return str(caught.value)


def test_what_is_no_tokenizer_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of("gpt2") == "tokenizer must be 'bytes' or a local path. Got 'gpt2': no such path. Download it first."
    remedy = "Save the tokenizer there with save_pretrained of transformers, or pass 'bytes'."
    assert error_of(tmp_path) == f"tokenizer: {tmp_path} must hold tokenizer.json. Got no tokenizer files. {remedy}"
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert error_of(tmp_path) == f"tokenizer: {tmp_path} must hold tokenizer.json. Got tokenizer.model. {remedy}"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert error_of(tmp_path).startswith(
        f"tokenizer: {tmp_path / 'tokenizer.json'} must be a Hugging Face tokenizer.json."
    )


def test_a_broken_neighbour_file_is_named(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    save(tmp_path, tokenizer_config={"eos_token": "<end>"})
    assert error_of(tmp_path) == (
        f"tokenizer: eos_token of {path} must be a token of tokenizer.json. Got '<end>'. Correct the field."
    )
    path.write_text("[]")
    assert error_of(tmp_path) == f"tokenizer: {path} must hold a JSON object. Got a list. Repair the file."
    path.write_text("{")
    assert error_of(tmp_path).startswith(f"tokenizer: {path} must be JSON. Got: ")
