"""The search for numbers that must not be there."""

import json

import pytest

from looplab.audit.positive_controls.unprinted import printed_numbers

ESTIMATE = {"value": 0.0, "low": -0.1}
UNIDENTIFIED = {"name": "distinct", "nats": None, "reason": "not identifiable: only one kind of unit", "k": 1}


def search(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return printed_numbers(folder)[name]


@pytest.mark.parametrize(
    "content",
    [
        {"parts": [UNIDENTIFIED]},
        {"contrasts": [{"name": "a - b", "effect": None, "margin": 0.02, "k": 3, "reason": "not identifiable: x"}]},
        {"gap": ESTIMATE, "reason": None},
        {"schedule_map": [{"name": "prefix(1)", "distinct": 1, "reason": "same plan as full"}]},
        {"verdict": "8 applications lower the loss by 0.2 nats. later blocks: not identifiable (x)"},
        {"words": {"application": "not identifiable (x)"}},
    ],
)
def test_a_result_without_such_numbers_is_clean(tmp_path, content):
    assert search(tmp_path, "results.json", content) == []


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"parts": [UNIDENTIFIED | {"nats": ESTIMATE}]}, "parts[0].nats.value = 0.0"),
        ({"parts": [{"name": "composition", "share": ESTIMATE, "reason": None}]}, "parts[0].share.value = 0.0"),
        ({"contrasts": [{"effect": ESTIMATE, "reason": "not identifiable: x"}]}, "contrasts[0].effect.value = 0.0"),
        ({"terms": {"application": ESTIMATE}}, "terms.application.value = 0.0"),
        ({"spread": {"distinct": [0.0, 0.1]}}, "spread.distinct[0] = 0.0"),
        ({"verdict": "Gap 0.2 nats. Later: x; later blocks: 3 %, present."}, "verdict: later blocks: 3 %, present."),
        ({"shares": {"distinct": 1.5}}, "shares.distinct = 1.5"),
    ],
)
def test_a_number_in_a_result_is_found_with_its_place(tmp_path, content, where):
    assert where in search(tmp_path, "results.json", content)


ROW = "<table><tr><th>part</th><th>nats</th></tr><tr><td class=x>{}</td><td>{}</td></tr></table>"
STRATA = (
    "<table><tr><th>stratum</th><th>gap</th><th>distinct</th></tr><tr><td>low</td><td>0.4</td><td>{}</td></tr></table>"
)


@pytest.mark.parametrize(
    "content",
    [
        ROW.format("application", "not identifiable"),
        ROW.format("repeat(2) - full [0.0 0.0]", "not identifiable") + ROW.format("gap", "0.182"),
        "<p>8 applications take 0.182 nats off. More of them: not identifiable (x); later: not identifiable.</p>",
        STRATA.format("not identifiable"),
        "<style>p { width: 3.5em } /* not identifiable */</style>",
        "<p>The gap of 0.2 nats.</p><li>distinct: not identifiable: x</li>",
    ],
)
def test_a_page_without_such_numbers_is_clean(tmp_path, content):
    assert search(tmp_path, "report.html", content) == []


@pytest.mark.parametrize(
    "content",
    [
        ROW.format("application", "0.182"),
        ROW.format("repeat(2) - full", "not identifiable 0.000"),
        "<ul><li>composition: <b>0.0</b> nats</li></ul>",
        "<p>On text: x. Later blocks: 12 %, not identifiable</p>",
        STRATA.format("0.0"),
        ROW.format("<a>distinct</a>", "100&#37;"),
    ],
)
def test_a_number_on_a_page_is_found(tmp_path, content):
    assert len(search(tmp_path, "report.html", content)) == 1


def test_tables_are_searched_line_by_line(tmp_path):
    clean = "part & readout & nats \\\\\ngap & raw & 0.182 \\\\\ndistinct & raw & not identifiable \\\\\n"
    assert search(tmp_path, "tables.tex", clean) == []
    assert search(tmp_path, "tables.tex", clean + "application & raw & 98 \\% \\\\\n") == ["application raw 98 \\%"]


CARD = """## Depth card
|  | text |
| --- | --- |
| loss gap | 0.320 [0.292, 0.347] |
| share of distinct | {} |

- On text the loss falls by 0.320 nats. Running more applications of the first unit: {}; refitting removes 100.0 %.
"""


def test_a_card_is_searched_by_rows_and_clauses(tmp_path):
    phrase = "not identifiable (x)"
    assert search(tmp_path, "depth_card.md", CARD.format(phrase, phrase)) == []
    assert search(tmp_path, "depth_card.md", CARD.format("5.8 %", phrase)) == ["share of distinct 5.8 %"]
    (clause,) = search(tmp_path, "depth_card.md", CARD.format(phrase, "94.2 %, dominant"))
    assert clause == "Running more applications of the first unit: 94.2 %, dominant"


def test_only_text_files_are_read(tmp_path):
    (tmp_path / "tokens.parquet").write_bytes(bytes([255, 254]))
    (tmp_path / "figures").mkdir()
    assert printed_numbers(tmp_path) == {}
