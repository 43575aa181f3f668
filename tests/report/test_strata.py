from looplab.report.keyed import Keyed
from looplab.report.strata import strata
from report.sample import dense, single_core, two_blocks

PROBES = ("temperature", "affine")


def test_a_stratum_has_gap_parts_and_refits_in_nats():
    table = strata(Keyed(two_blocks()).domains[0], PROBES)
    assert len(table.rows) == 10
    assert [cell.text for cell in table.rows[0]] == [
        "loss",
        "lowest third",
        "0.798 [0.748, 0.848]",
        "0.280 [0.260, 0.300]",
        "0.006 [\N{MINUS SIGN}0.014, 0.026]",
        "0.512 [0.492, 0.532]",
        "0.132 [0.112, 0.152]",
        "0.259 [0.239, 0.279]",
    ]

    assert table.rows[0][1].under == "67 documents, 33,800 tokens"


def test_parts_that_cannot_be_told_are_words_in_every_stratum():
    table = strata(Keyed(single_core()).domains[0], PROBES)
    assert {cell.text for row in table.rows for cell in row[3:6]} == {"not identifiable"}


def test_without_strata_there_are_no_rows():
    assert not strata(Keyed(dense()).domains[0], PROBES).rows
