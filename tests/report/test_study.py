"""The page of a study, from planted audits."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from looplab.records import ClaimResult, StudyArm, StudyResult, dump_json
from looplab.report.keyed import Keyed
from looplab.report.study import arms_table, claims_table, parts_table, study_page, study_tex, write_study
from looplab.studies.base import STUDIES
from looplab.studies.claims import decide_claims
from report.sample import dense, single_core, two_blocks
from report.test_page import browser, look

PLANTED = {"text-core": single_core, "text-dense": dense}


def planted(name="dcp", scale="cpu", seeds=0, claims=None, **changes):
    """A study whose audits are planted; `claims` says how many of its claims rest on audits alone."""
    study = STUDIES[name]()
    arms, rows = study.arms(scale, seeds), []
    for arm in arms:
        rows += study.measure(arm, PLANTED.get(arm.name, two_blocks)())
    fields = {
        "study": name,
        "version": 1,
        "scale": scale,
        "question": study.question,
        "references": study.references,
        "predictions": "ab" * 32,
        "arms": tuple(
            StudyArm(
                name=arm.name,
                title=arm.title,
                seed=arm.seed,
                audit=f"audits/{arm.folder}",
                sentence="On text, nothing.",
                facts={"weights": "0123"},
            )
            for arm in arms
        ),
        "rows": tuple(rows),
        "claims": decide_claims(study.claims[:claims], rows, scale=scale),
        "matched": (),
        "columns": study.columns,
        "plots": study.plots,
        "notes": ("Nothing is shown about any model.",) if scale == "smoke" else study.notes,
        "versions": {"looplab": "0"},
        "command": f"looplab study {name} --scale {scale}",
    }
    return StudyResult(**{**fields, **changes})


def test_claims_without_a_word_and_untested_ones_say_why():
    study = planted()
    first, second = study.claims[:2]
    turned = replace(
        first,
        word="not supported",
        flags=("reversed",),
        parts=(replace(first.parts[0], note="sign-flip p = 0.25"), *first.parts[1:]),
    )
    parts = tuple(replace(part, value=None, word="-") for part in second.parts)
    absent = replace(second, word="-", reason="not measured (--arms)", parts=parts)
    claim = replace(first.claim, id="dcp.9", parts=(), withheld="size: 20B parameters")
    untested = ClaimResult(claim=claim, parts=(), word="not identifiable at this scale", reason="size: 20B parameters")
    page = Page(study_page(replace(study, claims=(turned, absent, untested)), drawn=[]))
    text = " ".join(page.text.split())
    assert "1 not supported, 1 not run, 1 not identifiable at this scale, of 3 claims." in text
    for words in (
        "not supported, reversed",
        "sign-flip p = 0.25",
        "not measured (--arms)",
        "Not tested here",
        "size: 20B",
    ):
        assert words in text
    assert text.count("dcp.9") == 1
    assert "Not tested here" not in Page(study_page(study, drawn=[])).text


class Page(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.numbers, self.loads, self.results, self.text = [], [], [], ""
        self._open = ("", {})
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.loads += [attributes[name] for name in ("src", "href", "xlink:href") if name in attributes]
        self._open = (tag, attributes)

    def handle_endtag(self, tag):
        self._open = ("", {})

    def handle_data(self, data):
        tag, attributes = self._open
        if tag == "script" and attributes.get("class") == "results":
            self.results.append(json.loads(data))
        elif tag not in ("script", "style"):
            self.text += data
        if tag == "a" and "data-key" in attributes:
            self.numbers.append((attributes["data-key"], data))


@pytest.fixture(scope="module")
def page():
    return Page(study_page(planted()))


def test_every_number_is_the_one_in_results_json(page):
    (record,) = page.results
    checked = 0
    for key, text in page.numbers:
        held = look(key, record)
        shown = re.match(r"(−?[\d.]+)( %)? \[(−?[\d.]+), (−?[\d.]+)\]", text)
        if not isinstance(held, dict) or not shown:
            continue
        scale, digits = (100 if shown[2] else 1), len(shown[1].partition(".")[2])
        values = [float(shown[i].replace("\N{MINUS SIGN}", "-")) for i in (1, 3, 4)]
        wanted = [scale * held[name] for name in ("value", "low", "high")]
        assert values == pytest.approx(wanted, abs=0.51 * 10**-digits), key
        checked += 1
    assert checked > 25


def test_the_page_holds_its_record_and_loads_nothing(page):
    assert page.results == [json.loads(dump_json(planted()))]
    foreign = [
        link
        for link in page.loads
        if not link.startswith("#") and not re.fullmatch(r"audits/[\w-]+/report\.html", link)
    ]
    assert not foreign
    links = {link for link in page.loads if link.startswith("audits/")}
    assert links == {f"{arm.audit}/report.html" for arm in planted().arms}


def test_claims_rules_words_and_the_hash_are_on_the_page(page):
    text = " ".join(page.text.split())
    for result in planted().claims:
        assert result.claim.id in text
        assert result.claim.statement in text
        assert result.claim.rule in text
    assert "ab" * 32 in text
    assert f"{planted().counts()}, of 8 claims." in text
    assert "Intervals cover documents, not training runs" in text
    assert not re.search(r"\bNone\b|\bnan\b|undefined|Traceback", text)


def test_a_smoke_page_says_that_nothing_is_shown():
    text = Page(study_page(planted(scale="smoke"))).text
    assert "At this scale nothing is shown." in text
    assert text.count("not identifiable at this scale (smoke)") == 8
    assert "At this scale nothing is shown." not in Page(study_page(planted())).text


def test_the_table_of_arms_has_words_where_there_is_no_number():
    table = arms_table(Keyed(planted()))
    assert len(table.rows) == 4
    core = next(row for row in table.rows if row[0].text == "text-core")
    cell = core[table.columns.index("application")]
    assert (cell.text, cell.path) == ("not identifiable: takes the whole gap by construction", "")


def test_seeds_and_matches_are_shown_for_a_study_that_trains():
    result = planted("depth_schedule", seeds=3, claims=5)
    assert len(arms_table(Keyed(result)).rows) == 18
    table = parts_table(Keyed(result))
    assert table.rows[0][table.columns.index("seeds")].text.count("%") == 3
    assert "A, seed 2" in Page(study_page(result)).text


def test_tables_tex_holds_claims_parts_and_arms():
    text = study_tex(planted())
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 3
    assert "dcp.1 &" in text
    assert "%" not in re.sub(r"\\%", "", text.split("\n", 1)[1])


def test_equal_results_give_equal_files(tmp_path):
    for place in ("a", "b"):
        write_study(planted(), tmp_path / place)
    names = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert len(names) == 6
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_name_cannot_leave_its_place_in_the_page():
    evil = "</script><script>alert(1)</script><b>"
    html = study_page(planted(command=evil))
    assert "<script>alert" not in html
    assert Page(html).results[0]["command"] == evil


def test_a_word_that_is_no_answer_has_its_reason_beside_it():
    table = claims_table(Keyed(planted("depth_schedule", seeds=1, claims=5)))
    reasons = [row[table.columns.index("why there is no answer")].text for row in table.rows]
    assert all("1 training seed, 3 needed" in reason for reason in reasons)


def test_a_result_survives_json_and_another_schema_is_refused():
    result = planted()
    assert StudyResult.from_json(dump_json(result)) == result
    with pytest.raises(ValueError, match="must have schema 1"):
        StudyResult.from_json(dump_json(result).replace('"schema": 1', '"schema": 9'))


PROBE = """<script>document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth,
  claims: document.querySelector("#claims table").getBoundingClientRect().top,
});</script></body>"""


@pytest.mark.slow
def test_the_claims_are_on_the_first_screen_and_nothing_scrolls_sideways(tmp_path):
    path = tmp_path / "report.html"
    path.write_text(study_page(planted()).replace("</body>", PROBE), encoding="utf-8")
    dom = browser(tmp_path, "--dump-dom", path.as_uri())
    seen = json.loads(re.search(r"<title>(.*?)</title>", dom, flags=re.DOTALL).group(1))
    assert seen["wide"] <= 1280
    assert seen["claims"] < 400
