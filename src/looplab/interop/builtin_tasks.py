"""The built-in evaluation tasks: three small ones, made from the held-out side of the built-in corpus.

    looplab_next_line     which of four lines comes next; log-likelihood of each
    looplab_finish_word   the rest of a word that stood before in the text; generated
    looplab_text          a text as a whole; bits per byte

`write_builtin_tasks` makes the files of `assets/eval`, a task file (.yaml) and documents (.jsonl) for each. They are
shipped, and not made where they are run, because the corpus differs between versions of Python and scores of different
documents cannot be compared. The text is that of CPython's language reference and docstrings (PSF License Version 2).
They tell small models apart in seconds; they measure nothing that a paper would quote.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import looplab
from looplab.data.corpus import builtin_corpus
from looplab.data.documents import Document

VERSION = 1.0
NEXT_LINE, FINISH_WORD, TEXT = "looplab_next_line", "looplab_finish_word", "looplab_text"
NAMES = (NEXT_LINE, FINISH_WORD, TEXT)
DOCUMENTS = {NEXT_LINE: 60, FINISH_WORD: 60, TEXT: 16}
CONTEXT, LONGEST_TEXT = 160, 400
"""Characters of a context, and of a whole text."""
CHOICES = 4
SHOWN, REST = 3, 3
"""Letters of a word that are shown, and how many are left to say at least."""
STOPS = [" ", "\n", ".", ",", ";", ":", "(", ")", "'", '"', "`", "*"]


def builtin_tasks() -> Path:
    """The folder of the shipped task files."""
    return Path(looplab.__file__).parent / "assets" / "eval"


def write_builtin_tasks(folder: str | os.PathLike[str]) -> None:
    """Writes all files; equal corpora give equal bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = builtin_corpus("heldout")
    texts = [d.text for d in corpus.documents if isinstance(d, Document) and d.text.isascii()]
    made = {NEXT_LINE: _next_lines(texts), FINISH_WORD: _words(texts), TEXT: _texts(texts)}
    for name, found in made.items():
        documents = sorted({json.dumps(document) for document in found}, key=_rank)[: DOCUMENTS[name]]
        lines = "".join(document + "\n" for document in documents)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        settings = _settings(name) | {
            "metadata": {
                "version": VERSION,
                "source": f"held-out side of the built-in corpus, CPython {platform.python_version()}",
                "corpus": corpus.hash,
                "made_by": "looplab.interop.builtin_tasks",
            }
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def _settings(name: str) -> dict[str, Any]:
    """The task file without its metadata."""
    kinds = {NEXT_LINE: "multiple_choice", FINISH_WORD: "generate_until", TEXT: "loglikelihood_rolling"}
    base: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "output_type": kinds[name],
    }
    if name == TEXT:
        metrics = [
            {"metric": metric, "aggregation": how, "higher_is_better": False}
            for metric, how in (("bits_per_byte", "bits_per_byte"), ("byte_perplexity", "weighted_perplexity"))
        ]
        return base | {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": metrics}
    texts = {"doc_to_text": "{{text}}", "target_delimiter": ""}
    if name == NEXT_LINE:
        metrics = [{"metric": each, "aggregation": "mean", "higher_is_better": True} for each in ("acc", "acc_norm")]
        return base | texts | {"doc_to_choice": "choices", "doc_to_target": "answer", "metric_list": metrics}
    return base | texts | {
        "doc_to_target": "rest",
        "generation_kwargs": {"until": STOPS, "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip


def _next_lines(texts: list[str]) -> Iterator[dict[str, Any]]:
    """A context that ends with a line's end, and four lines of which one comes next."""
    lines = sorted({line for text in texts for line in text.split("\n") if _plain(line)}, key=_rank)
    for number, text in enumerate(texts):
        cut = text.rfind("\n", 0, CONTEXT) + 1
        line = text[cut:].split("\n", 1)[0]
        if cut < CONTEXT // 2 or not _plain(line):
            continue
        start = number * CHOICES % len(lines)
        others = [other for other in lines[start:] + lines[:start] if other not in text][: CHOICES - 1]
        choices = sorted([line, *others], key=lambda choice: _rank(text[:cut] + choice))
        yield {"text": text[:cut], "choices": choices, "answer": choices.index(line)}


def _words(texts: list[str]) -> Iterator[dict[str, Any]]:
    """A context that ends within a word which it holds already, and the rest of that word."""
    pattern = re.compile(rf"(?<![\w.])[a-z]{{{SHOWN + REST},}}(?![\w.])")
    for text in texts:
        seen: set[str] = set()
        for word in pattern.finditer(text[:CONTEXT]):
            if word[0] in seen and word.start() > CONTEXT // 2:
                end = word.start() + SHOWN
                yield {"text": text[:end], "rest": word[0][SHOWN:]}
                break
            seen.add(word[0])


def _texts(texts: list[str]) -> Iterator[dict[str, Any]]:
    for text in texts:
        cut = text.rfind("\n", 0, LONGEST_TEXT)
        if cut > LONGEST_TEXT // 2:
            yield {"text": text[:cut]}


def _plain(line: str) -> bool:
    """Whether a line is prose of a moderate length."""
    letters = sum(c.isalpha() or c == " " for c in line)
    return 25 <= len(line) <= 70 and line[0] not in " =*-#>" and letters >= 0.85 * len(line)


def _rank(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
