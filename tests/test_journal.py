"""Parts of a run: there whole or not at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.journal import Journal, Part


def test_a_part_comes_back_as_it_was(tmp_path):
    journal = Journal(tmp_path)
    arrays = {"x": np.arange(6.0).reshape(2, 3).T, "flags": np.array([True, False]), "none": np.zeros((0, 4), np.int32)}
    journal.put(("a", "b"), Part(arrays, {"count": 3, "of": ["x"]}))
    part = journal.get(("a", "b"))
    assert part.facts == {"count": 3, "of": ["x"]}
    assert set(part.arrays) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(part.arrays[name], array)
        assert part.arrays[name].dtype == array.dtype
    assert journal.get(("a", "b"), arrays=False).arrays == {}


def test_a_part_may_have_facts_alone(tmp_path):
    Journal(tmp_path).put(("a",), Part(facts={"diverged": 3}))
    assert Journal(tmp_path).get(("a",)).facts == {"diverged": 3}


def test_a_missing_part_is_a_key_error(tmp_path):
    journal = Journal(tmp_path)
    assert ("a",) not in journal
    with pytest.raises(KeyError):
        journal.get(("a",))


def test_dropping_a_key_drops_what_begins_with_it_and_nothing_else(tmp_path):
    journal = Journal(tmp_path)
    for key in (("a",), ("a", "b"), ("a", "c"), ("ab", "b")):
        journal.put(key, Part())
    journal.drop(("a", "c"))
    assert ("a", "b") in journal
    journal.drop(("a",))
    journal.drop(("never",))
    assert [key in journal for key in (("a",), ("a", "b"), ("ab", "b"))] == [False, False, True]


def test_a_half_written_part_is_no_part(tmp_path):
    journal = Journal(tmp_path)
    journal.put(("a", "b"), Part())
    torn = tmp_path / "a" / ".c.safetensors.99.partial"
    torn.write_bytes(b"torn")
    assert ("a", "c") not in journal
    assert ("a", "b") in journal


KEYS = st.lists(st.lists(st.text(min_size=1), min_size=1, max_size=2).map(tuple), min_size=2, max_size=4, unique=True)


@given(keys=KEYS)
def test_any_texts_are_keys_and_different_keys_are_different_parts(tmp_path_factory, keys):
    journal = Journal(tmp_path_factory.mktemp("journal"))
    for i, key in enumerate(keys):
        journal.put(key, Part(facts={"i": i}))
    assert [journal.get(key).facts["i"] for key in keys] == list(range(len(keys)))
    assert all(path.is_relative_to(journal.root) for path in journal.files())


@pytest.mark.parametrize(
    "names", [("A", "a"), ("..", "."), ("x" * 300, "x" * 301), ("a/b", "a%2Fb"), ("[0.0 1.0]", "[0.01.0]")]
)
def test_names_that_a_file_system_confuses_stay_apart(tmp_path, names):
    journal = Journal(tmp_path / "root")
    for name in names:
        journal.put(("in", name), Part(facts={"name": name}))
    assert [journal.get(("in", name)).facts["name"] for name in names] == list(names)
    assert len({path.name.lower() for path in journal.files()}) == 2
