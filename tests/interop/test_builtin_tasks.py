"""The shipped task files: made by the generator, of held-out text, and within the context of the built-in models."""

import json

import pytest
import yaml

from looplab.data.corpus import builtin_corpus
from looplab.interop import builtin_names
from looplab.interop.builtin_tasks import (
    CHOICES,
    DOCUMENTS,
    FINISH_WORD,
    NAMES,
    NEXT_LINE,
    TEXT,
    builtin_tasks,
    write_builtin_tasks,
)


def documents(name, folder=None):
    text = ((folder or builtin_tasks()) / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def settings(name, folder=None):
    return yaml.safe_load(((folder or builtin_tasks()) / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.nightly
def test_the_shipped_files_are_what_the_generator_writes(tmp_path):
    """On the version of Python whose corpus they were made of."""
    if settings(TEXT)["metadata"]["corpus"] != builtin_corpus("heldout").hash:
        pytest.skip("made from the corpus of another version of Python")
    write_builtin_tasks(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in builtin_tasks().iterdir())
    for name in NAMES:
        assert documents(name, tmp_path) == documents(name)
        made, shipped = settings(name, tmp_path), settings(name)
        for each in (made, shipped):
            del each["metadata"]["source"]  # names the patch release of Python
        assert made == shipped


@pytest.mark.parametrize("name", NAMES)
def test_every_task_has_its_documents_and_says_where_they_come_from(name):
    assert len(documents(name)) == DOCUMENTS[name]
    assert len({json.dumps(document) for document in documents(name)}) == DOCUMENTS[name]
    assert "held-out side of the built-in corpus" in settings(name)["metadata"]["source"]


def test_one_of_four_different_lines_comes_next():
    found = documents(NEXT_LINE)
    assert all(len(set(document["choices"])) == CHOICES for document in found)
    assert all(document["text"].endswith("\n") for document in found)
    answers = [document["answer"] for document in found]
    assert all(answers.count(place) >= DOCUMENTS[NEXT_LINE] // 10 for place in range(CHOICES)), "places tell nothing"


def test_the_word_to_finish_stood_before():
    for document in documents(FINISH_WORD):
        shown = document["text"][-3:]
        assert shown + document["rest"] in document["text"][:-3]


def test_questions_fit_the_context_of_the_built_in_models():
    longest = max(len(d["text"]) + max(map(len, d["choices"])) for d in documents(NEXT_LINE))
    assert longest <= 256
    assert max(len(d["text"]) + 16 for d in documents(FINISH_WORD)) <= 256
    assert builtin_names() and "eval" not in builtin_names(), "the folder of tasks is no checkpoint"


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in builtin_tasks().iterdir()) < 50_000
