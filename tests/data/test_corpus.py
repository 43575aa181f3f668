import sys
import sysconfig

import pytest

from looplab.data import corpus
from looplab.data.corpus import builtin_corpus, is_heldout
from looplab.data.documents import DataError

SPLITS = ("train", "heldout")


def test_the_corpus_has_the_stated_size():
    train, heldout = builtin_corpus("train").documents, builtin_corpus("heldout").documents
    sizes = [sum(len(d.text.encode()) for d in side) / 1e6 for side in (train, heldout)]
    assert 1.0 < sizes[0] < 2.5, f"training text has {sizes[0]:.2f} MB"
    assert 0.25 < sizes[1] < 0.8, f"held-out text has {sizes[1]:.2f} MB"
    assert len(heldout) >= 250, "too few held-out documents for a calibration and an evaluation half"


def test_no_document_occurs_twice_or_on_both_sides():
    keys = [d.key for split in SPLITS for d in builtin_corpus(split).documents]
    assert len(keys) == len(set(keys))


def test_building_again_imports_nothing_and_gives_the_same_documents_and_hash():
    before = builtin_corpus("heldout")
    assert before.hash != builtin_corpus("train").hash
    corpus._documents.cache_clear()
    modules = set(sys.modules)
    assert builtin_corpus("heldout") == before
    assert set(sys.modules) == modules


def test_every_topic_of_the_language_reference_is_there():
    from pydoc_data.topics import topics

    words = {split: " ".join(" ".join(d.text.split()) for d in builtin_corpus(split).documents) for split in SPLITS}
    for name, text in topics.items():
        first = " ".join(text.split("\n\n")[0].split())
        assert any(first in words[split] for split in SPLITS), name


def test_a_whole_module_is_on_one_side():
    import json.decoder

    side = "heldout" if is_heldout("json") else "train"
    texts = {split: "\n".join(d.text for d in builtin_corpus(split).documents) for split in SPLITS}
    other = "train" if side == "heldout" else "heldout"
    for docstring in (json.__doc__, json.decoder.JSONDecoder.__doc__):
        sentence = docstring.strip().split("\n")[0]
        assert sentence in texts[side]
        assert sentence not in texts[other]


def test_the_split_knows_names_by_their_hash_alone():
    names = ("json", "argparse", "strptime", "pyio")
    assert [is_heldout(f"_{name}") for name in names] == [is_heldout(name) for name in names] == [True] + [False] * 3
    share = sum(is_heldout(f"name{i}") for i in range(10_000)) / 10_000
    assert 0.14 < share < 0.16
    assert [is_heldout(name) for name in ("json", "argparse", "email", "topic:class")] == [True, False, True, True]


def test_docstrings_come_from_the_syntax_tree_in_order(tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text('"""Module."""\nraise SystemExit\n')
    (tmp_path / "json" / "later.py").write_text(
        'if True:\n    class A:\n        """Class."""\n        async def f(self):\n            """Method."""\n'
        'try:\n    pass\nexcept OSError:\n    def g():\n        """Handler."""\n    def h():\n        """Module."""\n'
    )
    (tmp_path / "json" / "tests").mkdir()
    (tmp_path / "json" / "tests" / "x.py").write_text('"""A test."""')
    (tmp_path / "turtle.py").write_text('"""Left out."""')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(corpus._modules()) == [("json", "Module."), ("json", "Class.\n\nMethod.\n\nHandler.")]


def test_a_python_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError) as caught:
        list(corpus._modules())
    assert str(caught.value) == (
        f"the built-in corpus needs the standard library's sources in {tmp_path}, which this Python lacks. "
        "Give text of your own instead."
    )


def test_a_misspelt_split_is_refused():
    with pytest.raises(DataError) as caught:
        builtin_corpus.__wrapped__("test")  # below the check of annotations, which production does not have
    assert str(caught.value) == ("builtin_corpus: split must be 'train' or 'heldout'. Got 'test'. Pass one of the two.")
