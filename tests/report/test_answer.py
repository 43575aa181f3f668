import dataclasses

from looplab.records import Level
from looplab.report import answer
from looplab.report.keyed import Keyed
from report.sample import dense, finding, single_core, two_blocks


def domain(result):
    return Keyed(result).domains[0]


def test_four_figures_with_intervals():
    found = answer.tiles(domain(two_blocks()))
    assert [(tile.name, tile.number.text, tile.interval.text) for tile in found] == [
        ("application", "35.1\u00a0%", "[34.2, 36.0]"),
        ("distinct", "0.8\u00a0%", "[0.5, 1.0]"),
        ("composition", "64.1\u00a0%", "[62.7, 65.6]"),
        ("affine refit", "32.5\u00a0%", "[31.1, 33.9]"),
    ]


def test_what_cannot_be_told_is_grey_and_has_no_number():
    found = answer.tiles(domain(single_core()))
    assert [tile.tone for tile in found] == ["unknown", "unknown", "unknown", ""]
    assert [tile.number.text for tile in found[:3]] == ["", "", ""]
    assert found[0].word == "not identifiable (takes the whole gap by construction)"


def test_a_dense_model_shows_its_gap_in_place_of_parts():
    found = answer.tiles(domain(dense()))
    numbers = [(tile.name, tile.number.text) for tile in found]
    assert numbers == [("gap", "1.050\u00a0nats"), ("affine refit", "32.5\u00a0%")]


def test_controls_are_grouped_by_the_reason_they_say_nothing():
    lines = answer.unidentified(domain(single_core()))
    assert lines[0] == "application: not identifiable: takes the whole gap by construction"
    assert lines[1].startswith("distinct, composition, suffix(1) - full, suffix(2) - full and ")
    assert answer.unidentified(domain(two_blocks())) == []


def test_failures_come_before_warnings_and_the_rest_stays_below():
    result = two_blocks()
    failure = finding(Level.FAILURE, "index_inert", "block 0 ignores its index")
    result = dataclasses.replace(result, findings=(*result.findings, failure))
    assert [cell.text[:7] for cell in answer.warnings(Keyed(result))] == ["block 0", "62 cali"]
