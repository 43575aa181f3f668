import dataclasses

import pytest

from looplab.report import provenance
from looplab.report.keyed import Keyed
from report.sample import CASES, two_blocks

TABLES = ("model_card", "documents", "schedules", "self_tests", "findings", "totals", "phases", "settings", "versions")


def rows(table):
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("table", TABLES)
def test_every_row_is_as_wide_as_the_head(table, make):
    found = getattr(provenance, table)(Keyed(make()))
    assert {len(row) for row in found.rows} <= {len(found.columns)}


def test_the_model_card_holds_parameters_and_their_groups():
    found = rows(provenance.model_card(Keyed(two_blocks())))
    assert found["parameters"] == ["458,752", ""]
    assert found["parameters, prelude"] == ["262,144", ""]
    assert "block 1" in found


def test_the_model_card_says_what_a_reader_must_know():
    result = two_blocks()
    notes = ("padding is masked; the original attends to it", "test-time noise is off")
    noted = dataclasses.replace(result, model=dataclasses.replace(result.model, notes=notes))
    table = provenance.model_card(Keyed(noted))
    assert tuple(row[1].text for row in table.rows if row[0].text == "note") == notes
    assert "note" not in rows(provenance.model_card(Keyed(result)))


def test_documents_have_one_column_per_domain():
    table = provenance.documents(Keyed(two_blocks(domains=("text", "code"))))
    assert table.columns == ("quantity", "text", "code")
    assert rows(table)["scored evaluation tokens"] == ["101,422", "101,422"]


def test_the_counts_show_what_sharing_saves():
    result = two_blocks()
    found = rows(provenance.totals(Keyed(result)))
    assert found["applications per document, shared walk"] == [str(result.counts.minimal_applications)]
    assert found["applications per document, one schedule at a time"] == [str(result.counts.naive_applications)]


def test_warnings_stand_out_among_findings():
    tones = [row[0].tone for row in provenance.findings(Keyed(two_blocks())).rows]
    assert tones == ["", "warning"]


def test_every_setting_is_listed_with_its_key():
    result = two_blocks()
    table = provenance.settings(Keyed(result))
    assert rows(table)["probes"] == ["temperature, affine"]
    assert {row[1].path for row in table.rows} >= {"config.seed", "config.margin_nats", "config.grid"}


def test_long_hashes_are_cut_and_lead_to_the_whole_one():
    result = two_blocks()
    long = dataclasses.replace(result, model=dataclasses.replace(result.model, weight_hash="0123456789abcdef" * 4))
    assert rows(provenance.model_card(Keyed(long)))["weights"][0] == "0123456789abcdef\N{HORIZONTAL ELLIPSIS}"
    assert rows(provenance.model_card(Keyed(result)))["weights"][0] == result.model.weight_hash


def test_whole_numbers_among_the_evidence_have_no_digits_after_the_point():
    result = two_blocks()
    other = dataclasses.replace(result.findings[1], value=0.0313, threshold=0.05)
    table = provenance.findings(Keyed(dataclasses.replace(result, findings=(*result.findings, other))))
    places = [table.columns.index(name) for name in ("number", "threshold")]
    assert [[row[i].text for i in places] for row in table.rows[1:]] == [["62", "100"], ["0.031", "0.050"]]
