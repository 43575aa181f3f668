"""`looplab audit FOLDER` on a tiny saved folder of every family, and the words it must print for the family's class.

What is expected is written by hand from the classes of the Depth Control Protocol, not read off the code:

    one index-free core      every plan of k applications is the same function: suffix(k) is prefix(k), repeat, permute
                             and pinned are full, so none of the three parts can be told apart
    one core, first differs  classes {0}, {1..}: repeat(1) is informative, repeat(k >= 2) is full; composition is empty
    one core, all differ     only composition is empty
    levels, index-free       units are cycles (supervision steps where there are some); as the first, but layer_major
                             and inner(prefix(1)) are other functions
    blocks in turn, no index repeat(k) of the first block is repeat(1): distinct cannot be told apart, the others can
    blocks in turn, indexed  the paper's case: everything can be told apart
    dense                    no parts at all, only contrasts
"""

import html
import json
import re
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from interop.adapters.families import native
from looplab.audit.result import AuditResult
from looplab.cli import audit as command
from looplab.cli import exit_codes, main
from looplab.interop.adapters.base import ADAPTERS
from looplab.interop.load_check import load_check
from looplab.models.published import PUBLISHED
from source import ROOT

GOLDEN = ROOT / "tests" / "golden"
SMALL = ["--replicates", "1000", "--max-tokens", "16", "--documents", "20", "--calibration-documents", "10"]
SMALL += ["--probes", "none", "--init-seeds", "1", "--no-tokens", "--quiet", "--grid", "1,2"]

NO_INDEX, ONE_KIND = "the block has no iteration index", "only one kind of unit"
WHOLE, NO_VIEW = "takes the whole gap by construction", "model offers no layer view"
WORD = {reason: f"not identifiable ({reason})" for reason in (NO_INDEX, ONE_KIND, WHOLE)}
MEASURED = "inconclusive|present|substantial|dominant|harmful|negligible .*"
PARTS = {
    "index-free core": (WORD[WHOLE], WORD[NO_INDEX], WORD[ONE_KIND]),
    "index-free levels": (WORD[WHOLE], WORD[NO_INDEX], WORD[ONE_KIND]),
    "first differs": (MEASURED, MEASURED, WORD[ONE_KIND]),
    "all differ": (MEASURED, MEASURED, WORD[ONE_KIND]),
    "index-free blocks": (MEASURED, WORD[NO_INDEX], MEASURED),
    "indexed blocks": (MEASURED, MEASURED, MEASURED),
}
"""Class -> the words of application, distinct and composition; patterns where a number was measured."""

PUBLISHED_CASES = {
    "huginn": ("huginn/full", {}, "index-free core", (7, 1)),
    "huginn-mqa": ("huginn/mqa", {}, "index-free core", (7, 1)),
    "ouro": ("ouro/full", {}, "index-free core", (4, 1)),
    "ouro-gqa": ("ouro/grouped", {}, "index-free core", (4, 1)),
    "parcae-diagonal": ("parcae/diagonal", {}, "index-free core", (5, 1)),
    "parcae-linear": ("parcae/linear", {}, "index-free core", (4, 1)),
    "retrofit-llama": ("retrofit/llama", {}, "index-free core", (4, 1)),
    "retrofit-llama-embed": ("retrofit/llama", {"initial_state_mode": "embed-init"}, "index-free core", (4, 1)),
    "retrofit-llama-skip": ("retrofit/llama", {"initial_state_mode": "skip-adapter"}, "first differs", (4, 1)),
    "retrofit-olmo": ("retrofit/olmo", {}, "index-free core", (4, 1)),
    "retrofit-olmo-embed": ("retrofit/olmo", {"initial_state_mode": "embed-init"}, "index-free core", (4, 1)),
    "retrofit-olmo-skip": ("retrofit/olmo", {"initial_state_mode": "skip-adapter"}, "first differs", (4, 1)),
    "loopformer": ("loopformer", {}, "all differ", (8, 1)),
    "trm-attention": ("trm/attention", {"halt_max_steps": 2}, "index-free levels", (2, 9)),
    "trm-mlp": ("trm/token_mlp", {"halt_max_steps": 2}, "index-free levels", (2, 12)),
    "hrm": ("hrm", {"halt_max_steps": 2}, "index-free levels", (2, 8)),
    "vera": ("vera", {}, "indexed blocks", (6, 1)),
}
"""Name -> recorded checkpoint, changed settings, class, (units of the full plan, applications in each).

VERA is two blocks of 3. A supervision step of TRM (3, 2) has 3 * (2 + 1) = 9 applications, of TRM (3, 3) 12, of HRM
(2, 3) 8.
"""
ELSEWHERE = {"ifm": "tests/interop/test_assume.py, with the answers that its files leave open"}
DENSE_FAMILIES = "llama qwen2 qwen3 mistral olmo olmo2 smollm3 gemma gemma2 gemma3 gpt_neox gpt2 opt".split()
ADAPTED_CASES = {
    **dict.fromkeys(DENSE_FAMILIES, ("dense", (3, 1))),
    "dory": ("index-free core", (3, 1)),
    "hrm_text": ("index-free levels", (2, 4)),
    "inkling2_loop": ("first differs", (3, 1)),
    "albert": ("index-free core", (4, 1)),
    "albert-groups": ("index-free blocks", (5, 1)),
}
"""Tiny model -> class, (units of the full plan, applications in each)."""
SHOWN = ("huginn",)
"""Cases whose report is drawn; for the others drawing would only take time."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),
]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A text of short words, and grids of 16 cells with puzzle ids."""
    home, random = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    texts = [{"text": "".join(random.choice(list("abcdefgh "), size=8))} for _ in range(60)]
    grids = []
    for i in range(60):
        cells = random.integers(6, size=16).tolist()
        grids.append({"tokens": cells, "labels": cells[::-1], "puzzle_id": i % 5})
    for name, lines in (("text", texts), ("grids", grids)):
        (home / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return home


def published(home, source, facts):
    """A recorded checkpoint with some settings changed, and a tokenizer of letters."""
    folder = home / "checkpoint"
    shutil.copytree(GOLDEN / source, folder, ignore=shutil.ignore_patterns("io.*", "README.md"))
    told = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(told | facts))
    return with_tokenizer(folder)


def adapted(home, name):
    """A tiny model of the transformers library, saved by it."""
    native(name).save_pretrained(home / "checkpoint")
    return with_tokenizer(home / "checkpoint")


def with_tokenizer(folder):
    letters = {letter: i for i, letter in enumerate("abcdefgh ")} | {"[MASK]": 9}
    tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


def audited(folder, documents, capsys, monkeypatch, *, shown=False):
    """What the command printed about a folder, and the result it wrote."""
    kind = "grids" if "seq_len" in json.loads((folder / "config.json").read_bytes()) else "text"
    if not shown:
        monkeypatch.setattr(command, "write_report", lambda result, folder, beside: folder)
    out = folder.parent / "audit"
    argv = [str(folder), "--data", f"{kind}={documents / kind}.jsonl", *SMALL, "--out", str(out)]
    code = main(["audit", *argv])
    said = capsys.readouterr()
    assert code == exit_codes.DONE, said.err
    result = AuditResult.load(out)
    if shown:
        page = html.unescape((out / "report.html").read_text())
        assert result.domains[0].verdict.sentence in page
        assert all(note in page for note in result.model.notes)
    return said.out, result


def rows_of(result):
    """Schedule -> (the earlier one that it is the same function as, why it was not run)."""
    return {row.name: (row.same_as, row.reason) for row in result.schedule_map}


def check_rows(rows, kind, units):
    """Which schedules the class says are one function."""
    ks = [k for k in (1, 2) if k < units]
    if kind == "index-free core":
        assert rows["layer_major"] == ("full", NO_VIEW)
    if kind in ("index-free core", "index-free levels"):
        assert {rows[f"suffix({k})"] for k in ks} == {(f"prefix({k})", NO_INDEX) for k in ks}
        assert {rows[f"repeat({k})"] for k in ks} == {("full", NO_INDEX)}
        assert rows["permute(0)"] == rows["pinned(0)"] == ("full", NO_INDEX)
        assert not any(name.startswith("regrid") for name in rows)
    if kind == "index-free levels":
        assert rows["layer_major"] == rows["inner(prefix(1))"] == (None, None)
    if kind == "first differs":
        assert rows["repeat(1)"] == (None, None)
        assert {rows[f"repeat({k})"] for k in ks if k > 1} == {("full", "same plan as full")}
        assert {rows[f"suffix({k})"] for k in ks} == {(None, None)}
        assert rows["pinned(0)"] == ("repeat(1)", "same plan as repeat(1)")
        # Where the first one stands is all that a permutation can change: units - 1 other places.
        assert sum(name.startswith("permute") for name in rows) == min(4, units - 1)
    if kind == "all differ":
        assert {rows[f"{family}({k})"] for family in ("suffix", "repeat", "regrid") for k in ks} == {(None, None)}
        assert sum(name.startswith("permute") for name in rows) == 4
        assert rows["pinned(0)"] == ("repeat(1)", "same plan as repeat(1)")
    if kind == "indexed blocks":
        assert {reason for _, reason in rows.values()} == {None}
        assert {"same(3)", "cyclic(6)", "repeat_first(6)", "pinned(0)", "pass_major"} < rows.keys()
    if kind == "index-free blocks":
        assert rows["repeat(2)"] == rows["repeat(3)"] == rows["cyclic(5)"] == ("repeat(1)", NO_INDEX)
        assert rows["same(3)"] == ("prefix(3)", NO_INDEX)
        assert rows["permute(0)"] == rows["pinned(0)"] == ("full", NO_INDEX)
        assert {rows[f"suffix({k})"] for k in ks} == {(None, None)} == {rows["pass_major"]}


def check_printed(text, result, kind, units, size):
    """The sentence, the table and the findings say the words of the class."""
    (domain,) = result.domains
    card = result.model
    assert (card.units, card.unit_applications, card.applications) == (units, size, units * size)
    if kind == "dense":
        assert card.dense and "This model has no repeated block; running the dense interventions only." in text
        assert domain.decompositions == () and "not identifiable" not in text
        assert rows_of(result).keys() == {"full"} | {
            f"{family}({k})" for family in ("prefix", "suffix", "repeat") for k in (1, 2)
        }
        return
    wanted = dict(zip(("application", "distinct", "composition"), PARTS[kind], strict=True))
    decomposition = domain.decompositions[0]
    for part in decomposition.parts:
        assert re.fullmatch(re.escape(w) if (w := wanted[part.name]).startswith("not") else w, part.word), part
        assert (part.nats is None) == part.word.startswith("not identifiable")
        assert re.search(rf"^  {part.name} +raw .*{re.escape(part.word)}$", text, re.M)
    assert f"On {domain.name}, {units * size} applications instead of {size} lower the loss by " in text
    assert re.search(rf"later blocks: [^;]*{re.escape(decomposition.parts[2].word)}\. Refitting", text)
    for name, (_, reason) in rows_of(result).items():
        assert reason is None or any(
            name in line and line.endswith(f"{reason}.") for line in text.splitlines() if "not_identifiable" in line
        )


def test_no_family_was_forgotten():
    opened = {source for source, *_ in PUBLISHED_CASES.values()}
    kinds = {load_check(GOLDEN / source).family for source in opened}
    assert kinds == set(PUBLISHED) - ELSEWHERE.keys()
    saved = {native(name).config.model_type for name in ADAPTED_CASES}
    assert saved | {"inkling2_loop"} == set(ADAPTERS)  # the composite model is opened as its text half


@pytest.mark.parametrize("name", PUBLISHED_CASES)
def test_published_families(name, documents, tmp_path, capsys, monkeypatch):
    source, facts, kind, (units, size) = PUBLISHED_CASES[name]
    text, result = audited(published(tmp_path, source, facts), documents, capsys, monkeypatch, shown=name in SHOWN)
    check_printed(text, result, kind, units, size)
    check_rows(rows_of(result), kind, units)


@pytest.mark.parametrize("name", ADAPTED_CASES)
def test_families_of_the_transformers_library(name, documents, tmp_path, capsys, monkeypatch):
    kind, (units, size) = ADAPTED_CASES[name]
    text, result = audited(adapted(tmp_path, name), documents, capsys, monkeypatch, shown=name in SHOWN)
    check_printed(text, result, kind, units, size)
    check_rows(rows_of(result), kind, units)
