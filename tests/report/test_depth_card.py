import dataclasses
import json

import pytest
from markdown_it import MarkdownIt

from looplab.records import Finding, Level
from looplab.report.depth_card import depth_card, depth_card_markdown, escape, write_depth_card
from report.depth_sample import VALUED, made
from report.sample import dense, single_core, two_blocks


def parsed(text):
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def plain(token):
    """The text that a reader sees."""
    return "".join(
        child.content if child.type != "softbreak" else " " for child in token.children if child.type != "html_inline"
    )


def tables(text):
    """Cells of every table, row by row."""
    found = []
    tokens = parsed(text)
    for i, token in enumerate(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("td_open", "th_open"):
            found[-1][-1].append(plain(tokens[i + 1]))
    return found


def facts(text):
    """Label -> cells, over both tables."""
    return {row[0]: row[1:] for table in tables(text) for row in table[1:]}


@pytest.mark.parametrize("case", VALUED)
def test_it_parses_as_one_section_with_two_whole_tables(case):
    text = depth_card_markdown(made(case))
    headings = [token for token in parsed(text) if token.type == "heading_open"]
    assert [token.tag for token in headings] == ["h2"]
    assert len(tables(text)) == 2
    for table in tables(text):
        assert len(table) > 3
        assert {len(row) for row in table} == {len(table[0])}
    assert not [token for token in parsed(text) if token.type.startswith("html")]


def test_it_says_what_was_audited_and_what_it_costs():
    result = made("extended_core")
    found = facts(depth_card_markdown(result))
    assert found["weights"] == [result.model.weight_hash]
    assert found["parameters"] == ["458,752"]
    assert found["trained depth"] == ["fixed 4"]
    assert found["full depth"] == ["4 units; 4 applications"]
    assert found["depends on the iteration index"] == ["iteration embedding"]
    assert found["KV rule"] == ["DepthIndexed(Refuse)"]
    assert found["FLOPs per token, full depth"] == ["2.03 M at 512 tokens"]
    assert found["KV bytes per token, full depth"] == ["2,560 at 2 bytes a number"]
    assert found["loss gap to full depth, nats"] == ["0.816 [0.791, 0.840], from prefix(1)"]
    assert found["enough units"] == ["4 of 4"]
    assert found["safe up to, units"] == ["8"]


def test_sentences_and_command_stand_as_they_are():
    result = made("extended_core")
    tokens = parsed(depth_card_markdown(result))
    lines = [plain(token) for token in tokens if token.type == "inline"]
    domain = result.domains[0]
    assert domain.verdict.sentence in lines
    assert domain.depth_value.sentence in lines
    assert (
        "Intervals cover documents, not training runs. Nats are per scored token; brackets hold 95 % intervals."
        in lines
    )
    (code,) = [token for token in tokens if token.type == "fence"]
    assert code.content == f"{result.command}\n"


def test_shares_that_cannot_be_told_apart_are_words():
    found = facts(depth_card_markdown(made("extended_core")))
    for part in ("application", "distinct", "composition"):
        (cell,) = found[f"share of {part}"]
        assert cell.startswith("not identifiable (")
        assert "%" not in cell


def test_shares_that_can_are_numbers_with_their_words():
    (cell,) = facts(depth_card_markdown(made("two_blocks")))["share of application"]
    assert cell == "35.1 % [34.2, 36.0], substantial"


def test_a_share_that_came_with_a_reason_is_not_printed():
    result = two_blocks()
    domain = result.domains[0]
    raw = domain.decompositions[0]
    parts = tuple(
        dataclasses.replace(part, reason="not measured: diverged", word="not measured (diverged)") for part in raw.parts
    )
    changed = dataclasses.replace(
        domain, decompositions=(dataclasses.replace(raw, parts=parts), *domain.decompositions[1:])
    )
    found = facts(depth_card_markdown(dataclasses.replace(result, domains=(changed,))))
    assert found["share of application"] == ["not measured (diverged)"]


def test_without_a_value_of_depth_its_rows_say_not_measured():
    found = facts(depth_card_markdown(single_core()))
    assert found["enough units"] == found["safe up to, units"] == found["cost at full depth"] == ["not measured"]
    card = depth_card(single_core())
    assert card["cost_at_full"] is None
    assert card["domains"][0]["enough_units"] is None


def test_undecided_and_unrun_are_said():
    found = facts(depth_card_markdown(made("open")))
    assert found["enough units"] == ["undecided"]
    assert found["safe up to, units"] == ["nothing deeper was run (--extend)"]


def test_a_dense_model_has_no_parts_and_no_safe_range():
    text = depth_card_markdown(made("dense"))
    found = facts(text)
    assert not [label for label in found if label.startswith(("share of", "safe"))]
    assert "This model has no repeated block; running the dense interventions only." in text
    assert found["full depth"] == ["6 layers; 6 applications"]
    assert found["further blocks, up to 5"] == ["as in depth_card.json"]
    assert len(depth_card(dense())["model"]["blocks"]) == 6


def test_every_domain_is_a_column():
    result = made("two_blocks")
    other = dataclasses.replace(result.domains[0], name="a|b_c*")
    both = dataclasses.replace(result, domains=(result.domains[0], other))
    model, domains = tables(depth_card_markdown(both))
    assert domains[0] == ["", "text", "a|b_c*"]
    assert len(model[0]) == 2


def test_only_findings_that_warn_are_listed():
    result = made("two_blocks")
    text = depth_card_markdown(result)
    assert "audit.few\\_documents" in text
    assert "tokenizer" not in text
    assert [finding["level"] for finding in depth_card(result)["findings"]] == ["warning"]
    failure = Finding(kind="audit.bad", level=Level.FAILURE, message="bad")
    assert "audit.bad" in depth_card_markdown(dataclasses.replace(result, findings=(failure,)))
    assert "Findings:" not in depth_card_markdown(dataclasses.replace(result, findings=()))


@pytest.mark.parametrize(
    "odd", ["a|b", "_a_", "*a*", "`a`", "<b>a</b>", "[a](b)", "$a$", "a\\|b", "# a", "~~a~~", "&amp;"]
)
def test_odd_names_are_printed_as_they_are(odd):
    result = made("two_blocks")
    odd_result = dataclasses.replace(result, model=dataclasses.replace(result.model, name=odd, kv_rule=odd))
    text = depth_card_markdown(odd_result)
    assert facts(text)["KV rule"] == [odd]
    assert f"What the depth of {odd} is worth, measured by a looplab audit." in [
        plain(token) for token in parsed(text) if token.type == "inline"
    ]


def test_line_breaks_do_not_leave_the_cell():
    assert escape("a\n\n| b") == "a \\| b"


def test_a_command_with_backticks_stays_inside_its_fence():
    command = "looplab audit 'a\n```\nb' --out x"
    result = dataclasses.replace(made("two_blocks"), command=command)
    (code,) = [token for token in parsed(depth_card_markdown(result)) if token.type == "fence"]
    assert code.content == f"{command}\n"


def test_the_json_holds_the_numbers_of_the_result():
    result = made("extended_core")
    card = depth_card(result)
    assert (card["kind"], card["schema"], card["looplab"]) == ("looplab.depth_card", 1, "0.1.0")
    (domain,) = card["domains"]
    assert domain["gap"]["value"] == result.domains[0].decompositions[0].gap.value
    assert (domain["enough_units"], domain["safe_until_units"], domain["margin"]) == (4, 8, pytest.approx(0.02))
    assert set(domain["parts_without_a_number"]) == {"application", "distinct", "composition"}
    assert [probe["probe"] for probe in domain["probes"]] == ["temperature", "affine"]
    assert card["cost_at_full"] == {
        "flops_per_token": 2_032_896, "kv_bytes_per_token": 2_560, "context_tokens": 512, "itemsize": 2,
    }  # fmt: skip


def test_both_files_are_written_and_repeat_byte_for_byte(tmp_path):
    path = write_depth_card(made("extended_core"), tmp_path / "one")
    write_depth_card(VALUED["extended_core"](), tmp_path / "two")
    names = sorted(each.name for each in (tmp_path / "one").iterdir())
    assert names == ["depth_card.json", "depth_card.md"]
    assert path == tmp_path / "one" / "depth_card.md"
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert json.loads((tmp_path / "one" / "depth_card.json").read_text()) == depth_card(made("extended_core"))


@pytest.mark.parametrize("case", VALUED)
def test_no_time_and_no_forbidden_word_appears(case):
    for text in (depth_card_markdown(made(case)), json.dumps(depth_card(made(case)))):
        assert not [word for word in ("useless", "reasoning", "milliseconds", "second") if word in text]
