import re

import pytest

from looplab.report.latex import escape, tables_tex
from report.depth_sample import valued
from report.sample import CASES, single_core, two_blocks


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_environments_rows_and_braces_balance(make):
    text = tables_tex(make())
    for begin, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}"), (begin, name)
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    for spec, body in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, flags=re.DOTALL):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert rows
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(spec)}
        assert re.findall(r"\\\w+rule", body) == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert not re.search(r"\bnan\b|\binf\b|None", text, flags=re.IGNORECASE)
    assert text.isascii(), "a letter that plain LaTeX does not know"


def test_numbers_are_rounded_as_on_the_page():
    text = tables_tex(two_blocks())
    assert (
        r"application & raw & prefix(1) - repeat(1) & 0.350 [0.342, 0.358] & 35.1~\% [34.2, 36.0] & substantial \\"
        in text
    )
    assert r"1.0~\% [$-$2.0, 4.0]" in text


def test_the_tables_of_a_paper_are_all_there():
    captions = re.findall(r"\\caption\{(.*?)\.? ?(?:\n|\. )", tables_tex(valued(two_blocks())))
    starts = (
        "What further depth is worth", "Decomposition of the gap", "Four-way view", "Refitted readouts on text",
        "Count and index on the first block", "This model against its dense control", "Refitted readouts of the dense",
    )  # fmt: skip
    assert len(captions) == len(starts)
    for caption, start in zip(captions, starts, strict=True):
        assert caption.startswith(start)


def test_small_type_below_a_number_stands_behind_it():
    text = tables_tex(two_blocks())
    assert r"index effect at 4 & same(4) - prefix(4) & 0.007 [0.004, 0.011] (equivalent to zero) &" in text
    assert "``application'' may come almost wholly" in text


def test_what_cannot_be_told_is_text():
    rows = [
        line for line in tables_tex(single_core()).splitlines() if line.startswith(("application", "distinct", "comp"))
    ]
    assert len(rows) == 9
    for row in rows:
        assert row.count("not identifiable") == 3
        assert not re.search(r"\d\.\d", row)


def test_every_letter_that_means_something_to_latex_is_escaped():
    assert escape(r"a_b 5% \x {y} $ # & ~ ^") == (
        r"a\_b 5\% \textbackslash{}x \{y\} \$ \# \& \textasciitilde{} \textasciicircum{}"
    )
