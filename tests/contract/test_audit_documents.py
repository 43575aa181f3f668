"""`looplab audit` on documents that are not texts read from left to right: masked texts, grids, and long texts."""

import dataclasses
import json

import pyarrow.parquet
import pytest
import tokenizers
import torch
from transformers import AlbertConfig, AlbertForMaskedLM

from looplab.audit.documents import unit
from looplab.audit.result import AuditResult
from looplab.cli import audit as command
from looplab.cli import exit_codes, main
from looplab.data.documents import Document
from looplab.models.base import PRESETS, build
from looplab.models.folder import save_folder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SPECIALS = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
SMALL = ["--replicates", "1000", "--max-tokens", "64", "--grid", "1", "--control", "none", "--quiet"]


@pytest.fixture
def no_report(monkeypatch):
    """Drawing is tested in report/; here it only takes time."""
    monkeypatch.setattr(command, "write_report", lambda result, folder, beside: folder)


@pytest.fixture(scope="module")
def albert(tmp_path_factory):
    """A folder as `save_pretrained` leaves it: two groups of layers, a tokenizer that frames texts."""
    folder = tmp_path_factory.mktemp("albert")
    torch.manual_seed(0)
    shape = {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = AlbertConfig(
        vocab_size=len(SPECIALS + WORDS), num_hidden_layers=4, num_hidden_groups=2, max_position_embeddings=64, **shape
    )
    AlbertForMaskedLM(config).save_pretrained(folder)
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({t: i for i, t in enumerate(SPECIALS + WORDS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    made.add_special_tokens(SPECIALS)
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "[CLS]", "eos_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def text_of(i):
    return " ".join(WORDS[(i * 7 + j * (i + 3)) % 10] for j in range(20 + i % 9))


@pytest.mark.parametrize("kind", ["txt", pytest.param("jsonl", marks=pytest.mark.nightly)])
def test_a_masked_model_is_audited_from_its_folder(albert, kind, tmp_path, no_report):
    path, out = tmp_path / f"words.{kind}", tmp_path / "audit-out"
    texts = [text_of(i) for i in range(60)]
    # A piece of a .txt is 2,000 characters long.
    lines = [json.dumps({"text": text}) for text in texts] if kind == "jsonl" else [f"{t} " * 20 + "\n" for t in texts]
    path.write_text("\n".join(lines))
    assert main(["audit", str(albert), "--data", f"words={path}", *SMALL, "--out", str(out)]) == exit_codes.DONE
    result = AuditResult.load(out)
    (domain,) = result.domains
    assert [test.name for test in result.self_tests] == [f"T{i}" for i in range(1, 10)]
    assert next(test for test in result.self_tests if test.name == "T7").note == "not causal"
    # One mask for fifty tokens and at least one, four passes over every document.
    assert domain.documents.evaluation_tokens == 4 * domain.documents.evaluation
    table = pyarrow.parquet.read_table(out / "tokens.parquet")
    assert not set(table["token"].to_pylist()) & set(range(len(SPECIALS)))
    places = list(zip(*(table[name].to_pylist() for name in ("schedule", "document", "position")), strict=True))
    assert len(places) == len(set(places)) == len(domain.schedules) * domain.documents.evaluation_tokens


GRIDS = [{"tokens": [i % 8, 1, 2, i // 8], "labels": [-100, 1, i % 8, 2]} for i in range(60)]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [*GRIDS[:6], {"text": "one two"}],
            "domain words must hold texts for this model. Got tokens and labels (line 1). "
            "Give documents with a 'text'.",
        ),
        (
            [{"text": "one two"}, {"tokens": [1, 2], "labels": [1]}],
            "{path} line 2 must have 'tokens' and 'labels' of equal length, ids from 0 (label -100: not scored). "
            "Got 2 entries and 1 entries. Repair the line.",
        ),
        (
            [{"text": word} for i in range(6) for word in ("a", "b")],
            "domain words needs 20 evaluation and 10 calibration documents. Got {far} and {near} after removing 10 "
            "duplicates and 0 empty. Add text or split it by blank lines.",
        ),
    ],
)
def test_documents_that_the_model_cannot_read_are_refused_by_line(albert, records, message, tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    argv = ["audit", str(albert), "--data", f"words={path}", *SMALL, "--out", str(tmp_path / "out")]
    assert main(argv) == exit_codes.DATA
    near = sum(unit(0, Document(word).key) < 0.5 for word in ("a", "b"))
    expected = message.format(path=path, near=near, far=2 - near)
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"audit: {expected}"


def test_a_masked_model_without_its_tokenizer_is_told_what_it_lacks(albert, tmp_path, capsys):
    bare, path = tmp_path / "bare", tmp_path / "m.jsonl"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((albert / name).read_bytes())
    path.write_text(json.dumps({"text": "one two"}))
    argv = ["audit", str(bare), "--data", f"words={path}", *SMALL, "--out", str(tmp_path / "out")]
    assert main(argv) == exit_codes.DATA
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        "audit: domain words must hold grids for this model, which is not causal and has no mask token. Got a text "
        "(line 1). Give documents with 'tokens' and 'labels', or put the tokenizer of a masked model into its folder."
    )


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-blocks"
    save_folder(folder, build(dataclasses.replace(PRESETS["tiny-blocks"](), vocab=259), seed=1))
    return folder


def test_no_window_at_all_is_refused(bytes_model, tmp_path, capsys):
    argv = ["audit", str(bytes_model), *SMALL, "--windows", "0", "--out", str(tmp_path / "out")]
    assert main(argv) == exit_codes.USAGE
    assert capsys.readouterr().err.strip().splitlines()[-1] == "audit: --windows must be at least 1. Got 0."


def test_windows_score_more_of_a_long_text_and_leave_the_number_of_documents(bytes_model, tmp_path, no_report):
    path = tmp_path / "m.jsonl"
    texts = [f"document {i} says {i * i} and {i * 7919 % 1000} and no more" for i in range(60)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    found = {}
    for windows in ("1", "3"):
        out = tmp_path / windows
        more = ["--windows", windows, "--max-tokens", "16", "--probes", "none", "--controls", "none"]
        argv = ["audit", str(bytes_model), "--data", f"m={path}", *SMALL, *more, "--out", str(out)]
        assert main(argv) == exit_codes.DONE
        found[windows] = AuditResult.load(out)
    one, three = (found[windows].domains[0].documents for windows in ("1", "3"))
    assert one.evaluation == three.evaluation
    assert one.evaluation_tokens == 15 * one.evaluation
    # Without bos the first token of every window is not scored; the third window of these texts is not full.
    assert 30 * three.evaluation < three.evaluation_tokens < 45 * three.evaluation
    for result in found.values():
        counts = result.counts
        assert counts.applications == counts.minimal_applications * counts.documents
