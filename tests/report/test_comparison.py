"""The page of several audits: every number of the comparison, reasons where there is none, links to each audit."""

import dataclasses

import pytest

from looplab.audit.compare import PER_BYTE, SHARE, ComparedDomain, Comparison, Quantity
from looplab.report.comparison import comparison_page, quantities, write_comparison
from looplab.report.keyed import Keyed
from report.sample import estimate, single_core, two_blocks

MODELS = ("first", "second")


def quantity(name, unit, values, missing=()):
    there = {model: value for model, value in values.items()}
    differences = {"second": estimate(0.25, 0.01)} if len(there) == 2 else {}
    points = [value.value for value in there.values()]
    return Quantity(
        name=name, unit=unit, values=there, missing=dict(missing), baseline=next(iter(there), None),
        differences=differences, smallest=min(points), largest=max(points),
        deviation=0.125 if len(there) == 2 else None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def results():
    return [two_blocks(), single_core()]


@pytest.fixture(scope="module")
def comparison(results):
    reason = {"second": "not identifiable: the block has no iteration index"}
    found = (
        quantity("loss at full depth", PER_BYTE, {"first": estimate(1.5, 0.1), "second": estimate(1.75, 0.1)}),
        quantity("distinct", SHARE, {"first": estimate(0.125, 0.01)}, reason),
        quantity("distinct", PER_BYTE, {"first": estimate(0.0321, 0.01)}, reason),
    )
    domain = ComparedDomain(name="math", documents=120, same_tokens=False, quantities=found)
    return Comparison(
        models=MODELS, cards=tuple(result.model for result in results), domains=(domain,), config_hash="c" * 16,
        versions={}, command="looplab audit a b",
    )  # fmt: skip


def test_a_row_per_quantity_and_model_with_difference_and_spread(comparison):
    table = quantities(Keyed(comparison), Keyed(comparison).domains[0])
    texts = [[cell.text for cell in row] for row in table.rows]
    assert [row[1] for row in texts] == ["first", "second"] * 2
    assert texts[1][2:4] == ["1.750 [1.650, 1.850]", "0.250 [0.240, 0.260]"]
    assert texts[0][4:] == ["1.500 to 1.750", "0.125"]
    assert texts[3][2] == "not identifiable: the block has no iteration index"
    assert table.rows[3][2].tone == "unknown"
    assert table.rows[0][2].path == 'domains[0].quantities[0].values["first"]'


def test_the_page_links_to_every_audit_and_says_that_tokens_differ(comparison, results):
    page = comparison_page(comparison, results)
    for model in MODELS:
        assert f'href="{model}/report.html"' in page
    assert "compare numbers per byte and shares" in page
    same = dataclasses.replace(comparison, domains=(dataclasses.replace(comparison.domains[0], same_tokens=True),))
    assert "compare numbers per byte and shares" not in comparison_page(same, results)


@pytest.mark.slow
def test_the_folder_is_written_whole_and_repeats_byte_for_byte(comparison, results, tmp_path):
    for name in ("one", "two"):
        assert write_comparison(comparison, results, tmp_path / name) == tmp_path / name / "report.html"
    names = sorted(str(p.relative_to(tmp_path / "one")) for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert names == [
        "figures/F14-spread-0.pdf",
        "figures/F14-spread-0.svg",
        "report.html",
        "results.json",
        "tables.tex",
    ]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
