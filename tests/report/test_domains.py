import dataclasses

from looplab.report import domains
from looplab.report.keyed import Keyed
from report.sample import single_core, two_blocks


def both():
    return Keyed(two_blocks(domains=("text", "code")))


def test_what_agrees_and_what_differs_is_said_in_words():
    assert [cell.text for cell in domains.sentences(both())] == [
        "The same in every domain: application (substantial), composition (dominant), temperature refit (present), "
        "affine refit (present).",
        "Differs by domain: distinct (negligible, but not zero on text; present on code).",
    ]
    assert domains.sentences(Keyed(two_blocks())) == []


def test_every_part_stands_with_share_and_word_per_domain_and_the_difference():
    table = domains.agreements(both())
    assert table.columns == ("part", "readout", "same word?", "text", "code", "text - code (share)")
    row = next(row for row in table.rows if (row[0].text, row[1].text) == ("distinct", "raw"))
    assert [(cell.text, cell.under) for cell in row[3:5]] == [
        ("0.8\u00a0% [0.5, 1.0]", "negligible, but not zero"),
        ("0.8\u00a0% [0.5, 1.0]", "present"),
    ]
    assert row[5].path.endswith('.differences["text - code"]')
    assert [row[0].text for row in table.rows[-2:]] == ["readout", "readout"]


def test_shares_that_cannot_be_told_have_neither_number_nor_difference():
    result = single_core()
    other = dataclasses.replace(result.domains[0], name="code")
    same = {"text": "not identifiable (the block has no iteration index)"}
    agreements = (
        dataclasses.replace(
            two_blocks(domains=("text", "code")).agreements[1], words={**same, "code": same["text"]}, differences={}
        ),
    )
    table = domains.agreements(
        Keyed(dataclasses.replace(result, domains=(result.domains[0], other), agreements=agreements))
    )
    assert [cell.text for cell in table.rows[0][3:]] == ["not identifiable"] * 2
