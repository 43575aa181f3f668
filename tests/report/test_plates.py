import dataclasses

from looplab.report.plates import domain_slug, plates
from report.depth_sample import valued
from report.sample import dense, single_core, two_blocks


def test_each_case_has_the_figures_it_has_numbers_for():
    always = {"F1-waterfall-text", "F2-depth-text", "F3-temperature-text", "F4-probes-text", "F12-schedules"}
    told = {"F7-reliability-text", "F8-geometry-text", "F9-updates-text", "F11-strata-text"}
    square = {"F5-factorial-text", "F6-equivalence", "F10-dense-text"}
    assert set(plates(two_blocks())) == always | told | square
    assert set(plates(valued(two_blocks()))) == always | told | square | {"F13-depth-value-text"}
    assert set(plates(single_core())) == always | told
    assert set(plates(dense())) == always | {"F7-reliability-text"}


def test_the_alternative_text_says_the_finding():
    alt = plates(two_blocks())["F1-waterfall-text"].alt
    assert alt.startswith("Waterfall of the loss gap")
    assert "composition carries 64.1 % of the 0.998 nats" in alt


def test_domains_whose_names_no_file_can_have_get_their_own_files():
    result = two_blocks(domains=("a/b", "a b"))
    assert [domain_slug(result, domain) for domain in result.domains] == ["a-b-0", "a-b-1"]
    odd = dataclasses.replace(result.domains[0], name="../")
    assert domain_slug(dataclasses.replace(result, domains=(odd,)), odd) == "domain-0"
