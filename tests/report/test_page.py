import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from looplab.audit.result import AuditResult
from looplab.report import audit_page
from looplab.report.latex import tables_tex
from report.depth_sample import valued
from report.sample import CASES, dense, single_core, two_blocks

PAGES = {
    **CASES,
    "two_blocks": lambda: valued(two_blocks()),
    "domains": lambda: valued(two_blocks(domains=("text", "code"))),
}
FORBIDDEN = ("recurrence is useless", "reasoning", "the calibration share")


class Page(HTMLParser):
    """Texts that carry a key, attributes that load something, and embedded results."""

    def __init__(self, html):
        super().__init__()
        self.numbers, self.loads, self.results = [], [], []
        self.text = ""
        self._open = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.loads += [attributes[name] for name in ("src", "href", "xlink:href", "action") if name in attributes]
        self._open = (tag, attributes)
        if tag == "a" and "data-key" in attributes:
            self.numbers.append([attributes["data-key"], int(attributes.get("data-home", 0)), ""])

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        tag, attributes = self._open or ("", {})
        if tag == "script" and attributes.get("class") == "results":
            self.results.append(json.loads(data))
        elif tag not in ("script", "style"):
            self.text += data
        if tag == "a" and "data-key" in attributes:
            self.numbers[-1][2] += data


def look(path, record):
    for text, index, name in re.findall(r'\["([^"]*)"\]|\[(\d+)\]|([^.\[\]]+)', path):
        record = record[int(index)] if index else record[text or name]
    return record


def numbers_in(text):
    return [
        float(x.replace("\N{MINUS SIGN}", "-").replace(",", ""))
        for x in re.findall(r"[−\d][\d,]*(?:\.\d+)?(?:e[−+]?\d+)?", text)
    ]


def expected(text, value):
    """The numbers that a text must show for a value of results.json."""
    scale = 100 if "%" in text else 1
    if isinstance(value, dict):
        parts = ["low", "high"] if text.startswith("[") else ["value", "low", "high"] if "[" in text else ["value"]
        return [value[part] for part in parts], scale
    return ([value], scale) if isinstance(value, (int, float)) and not isinstance(value, bool) else (None, scale)


@pytest.fixture(scope="module")
def html():
    return {case: audit_page(make()) for case, make in PAGES.items()} | {
        "beside": audit_page(two_blocks(), [two_blocks(sampled=True), single_core()])
    }


@pytest.mark.parametrize("case", [*PAGES, "beside"])
def test_every_number_on_the_page_is_the_one_in_results_json(html, case):
    page = Page(html[case])
    checked = 0
    for key, home, text in page.numbers:
        values, scale = expected(text, look(key, page.results[home]))
        if values is None or not numbers_in(text):
            continue
        size = re.fullmatch(r"([\d.]+) ([kMGTP])", text)
        if size is not None:
            shown = float(size[1]) * 1e3 ** (1 + "kMGTP".index(size[2]))
            assert shown == pytest.approx(values[0], rel=0.005), key
            continue
        # The band writes shares and nats apart from their intervals: both scales are right for one of them.
        scales = (1, 100) if text.startswith("[") else (scale,)
        shown = numbers_in(text.replace("\N{EN DASH}", "").split("%")[0] + text.partition("%")[2])
        digits = max(len(x.partition(".")[2]) for x in re.findall(r"[\d.]+", text))
        fits = [
            all(
                abs(n - s * v) <= 0.51 * 10**-digits + 0.06 * abs(v) * ("e" in text)
                for n, v in zip(shown, values, strict=True)
            )
            for s in scales
        ]
        assert any(fits), f"{key}: the page shows {text!r}, results.json holds {values}"
        checked += 1
    assert checked > 100


@pytest.mark.parametrize("case", PAGES)
def test_the_embedded_results_are_results_json(html, case):
    assert Page(html[case]).results == [json.loads(PAGES[case]().to_json())]


@pytest.mark.parametrize("case", PAGES)
def test_a_result_read_back_from_its_file_gives_the_same_page(html, case):
    read = AuditResult.from_json(PAGES[case]().to_json())
    assert audit_page(read) == html[case]
    assert tables_tex(read) == tables_tex(PAGES[case]())


def test_what_was_not_measured_leaves_no_empty_section(html):
    order = re.findall(r'<section id="([\w-]+)"', audit_page(dense()))
    assert not {"loops", "factorial", "states", "domains"} & set(order)
    assert not re.search(r"<tbody>\s*</tbody>", html["dense"])


def test_a_model_without_the_square_says_why_in_place_of_a_number(html):
    body = re.search(r'<section id="factorial">(.*?)</section>', html["single_core"], flags=re.DOTALL).group(1)
    assert "not identifiable: the block has no iteration index" in body
    assert not re.search(r"\d\.\d", body)


@pytest.mark.parametrize("case", [*PAGES, "beside"])
def test_the_page_loads_nothing(html, case):
    page = Page(html[case])
    assert page.loads
    assert all(link.startswith("#") for link in page.loads), [link for link in page.loads if link[0] != "#"]
    assert not re.search(r"@import|url\((?!#)|<link|<iframe|fetch\(|https?://", html[case])


def test_a_name_cannot_leave_its_place_in_the_page():
    import dataclasses

    result = single_core()
    evil = "</script><script>alert(1)</script><b>"
    result = dataclasses.replace(result, command=evil, model=dataclasses.replace(result.model, name=evil))
    page = audit_page(result)
    assert "<script>alert" not in page
    assert Page(page).results[0]["command"] == evil


def test_equal_results_give_equal_pages(html):
    assert audit_page(single_core()) == html["single_core"]


@pytest.mark.parametrize("case", [*PAGES, "beside"])
def test_the_words_that_an_audit_must_not_use_are_absent(html, case):
    text = " ".join(Page(html[case]).text.split()).lower()
    assert not [word for word in FORBIDDEN if word in text]
    assert "intervals cover documents, not training runs" in text
    assert not re.search(r"\bnan\b|\bnone\b(?!\.)|undefined", text)


def test_what_cannot_be_told_has_no_number_in_results_either(html):
    page = Page(html["single_core"])
    for decomposition in page.results[0]["domains"][0]["decompositions"]:
        assert [part["nats"] for part in decomposition["parts"]] == [None] * 3
    keys = [key for key, _, text in page.numbers if re.search(r"\.parts\[\d\]\.(nats|share)", key)]
    assert not keys, f"numbers of parts that cannot be told: {keys}"


def test_sections_stand_in_order_and_figures_have_words(html):
    order = re.findall(r'<section id="([\w-]+)"', html["two_blocks"])
    assert order == [
        "answer",
        "loops",
        "run",
        "depth",
        "decomposition",
        "readout",
        "factorial",
        "control",
        "states",
        "domains",
        "self-tests",
        "findings",
        "ledger",
        "settings",
    ]
    drawings = re.findall(r'<div class="drawing[^>]*>', html["two_blocks"])
    assert len(drawings) == 13
    assert all('role="img" aria-label="' in drawing for drawing in drawings)
    ids = re.findall(r'\bid="([^"]+)"', html["two_blocks"])
    assert len(ids) == len(set(ids)), "an id stands twice"
    for target in re.findall(r'href="#([^"]+)"', html["two_blocks"]):
        assert target in ids


def browser(tmp_path, *arguments):
    """Headless Chromium on the arguments; its standard output."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on the path, so the page cannot be looked at")
    flags = (
        "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-background-networking "
        "--disable-component-update --disable-sync --no-first-run --window-size=1280,800"
    ).split()
    command = [chromium, *flags, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


PROBE = """<script>
const all = document.querySelectorAll.bind(document);
const head = document.querySelector("#decomposition th:nth-child(4) button");
if (head) head.click();
const column = head ? [...head.closest("table").tBodies[0].rows].map((row) => row.cells[3].textContent) : [];
document.querySelector(".number a.n").click();
document.title = JSON.stringify({
  verdicts: [...all("#answer .verdict")].map((p) => p.getBoundingClientRect().bottom),
  band: document.querySelector(".scope").getBoundingClientRect().bottom,
  bars: [...all("#answer .bar svg, #answer .tile")].map((each) => each.getBoundingClientRect().bottom),
  scrolled: [...all(".scroll")]
    .filter((t) => !t.closest("details") && t.scrollWidth > t.clientWidth)
    .map((t) => t.textContent),
  loops: (document.querySelector("#loops") || document.body).getBoundingClientRect().top,
  wide: document.documentElement.scrollWidth,
  clipped: [...all(".tile")].filter((t) => t.scrollWidth > t.clientWidth).map((t) => t.textContent),
  column,
  key: document.querySelector("#key code").textContent,
});
</script></body>"""


def looked_at(tmp_path, html):
    """What a browser of 1280 by 800 pixels says of the page, after a click on a column head and on a number."""
    page = tmp_path / "report.html"
    page.write_text(html.replace("</body>", PROBE), encoding="utf-8")
    dom = browser(tmp_path, "--dump-dom", page.as_uri())
    return json.loads(re.search(r"<title>(.*?)</title>", dom, flags=re.DOTALL).group(1).replace("&amp;", "&"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["two_blocks", "single_core", "dense", "domains", "beside"])
def test_the_first_screen_holds_the_answer(tmp_path, html, case):
    picture = tmp_path / "screen.png"
    plain = tmp_path / "plain.html"
    plain.write_text(html[case], encoding="utf-8")
    browser(tmp_path, f"--screenshot={picture}", plain.as_uri())
    assert picture.read_bytes().startswith(b"\x89PNG")
    seen = looked_at(tmp_path, html[case])
    assert max(seen["verdicts"]) < 800, "the verdict is below the first screen"
    if case != "domains":
        assert max(seen["bars"]) < seen["band"] < 800, "the answer band does not fit the first screen"
    assert seen["wide"] <= 1280, "the page scrolls sideways"
    assert not seen["scrolled"], "a table scrolls sideways"
    assert not seen["clipped"]


@pytest.mark.slow
def test_a_click_sorts_a_column_and_opens_the_key_of_a_number(tmp_path, html):
    seen = looked_at(tmp_path, html["two_blocks"])
    values = [numbers_in(text)[0] for text in seen["column"]]
    assert values == sorted(values), "a click on the head does not sort the column by number"
    assert seen["key"].startswith("results.json  domains[0].decompositions[0].parts[0].share = {")
    assert seen["band"] < seen["loops"] < 800, "what to pay for does not follow the answer"
