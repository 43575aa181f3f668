import pytest

from looplab.report.keyed import Keyed
from report.sample import two_blocks


def test_the_path_is_the_way_through_results_json():
    result = two_blocks()
    part = Keyed(result).domains[0].decompositions[1].parts[2].share
    assert part.path == "domains[0].decompositions[1].parts[2].share"
    assert part.held is result.domains[0].decompositions[1].parts[2].share


def test_items_of_a_mapping_are_named_in_quotes():
    part = Keyed(two_blocks(), home=3).domains[0].gaps_per_byte["prefix(1)"].value
    assert (part.path, part.home) == ('domains[0].gaps_per_byte["prefix(1)"].value', 3)


def test_iteration_and_choice_keep_the_path():
    parts = Keyed(two_blocks()).domains[0].decompositions[0].parts
    assert [part.path[-8:] for part in parts] == ["parts[0]", "parts[1]", "parts[2]"]
    assert [part.path[-8:] for part in parts.where(name="composition")] == ["parts[2]"]
    assert len(parts) == 3


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="domian"):
        _ = Keyed(two_blocks()).domian
