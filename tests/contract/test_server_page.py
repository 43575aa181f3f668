"""The built-in page, used in a browser: send, stream, stop, heat map, inert markup, errors."""

import time

import pytest

from server.browser import browser
from server.live import serving

MARKUP = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> hi"
IDLE = "!document.getElementById('send').disabled"


def script(request, choice, index):
    """What the page is told: the markup, unless it was asked to go on for ever."""
    if b"ever" in bytes(request.tokens):
        return 97
    data = MARKUP.encode()
    return data[index] if index < len(data) else 257


def say(page, text):
    page.fill("prompt", text)
    page.click("send")


@pytest.mark.slow
def test_a_chat_in_the_browser(tmp_path):
    with serving(script=script, engine_args={"tick_seconds": 0.002}) as live, browser(tmp_path) as page:
        page.open(live.url)
        page.wait_until("document.getElementById('model')?.textContent === 'scripted'")
        assert page.run("document.querySelectorAll('#scale i').length") == 8

        page.fill("tokens", "200")
        say(page, "tell me")
        page.wait_until(f"document.querySelectorAll('.token').length > 0 && {IDLE}")
        cells = page.run("[...document.querySelectorAll('.token')].map((cell) => [cell.textContent, cell.title])")
        assert len(cells) == len(MARKUP) + 1, "one cell per token, the end of the text included"
        assert "".join(text for text, _ in cells) == MARKUP
        assert cells[0][1] == "4 steps, probability 0.779" and cells[1][1].startswith("2 steps")
        colours = page.run("[...document.querySelectorAll('.token')].map((cell) => cell.style.background)")
        assert colours[0] != colours[1] == colours[2]
        assert page.run("document.querySelectorAll('#log script, #log img').length") == 0
        assert page.run("document.title") == "looplab", "markup of a model ran"
        tokens = len(MARKUP) + 1
        assert page.run("document.getElementById('mean').textContent") == f"{(4 + 2 * (tokens - 1)) / tokens:.2f}"
        assert page.run("document.getElementById('saved').textContent") == "40.0 %"
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"

        page.fill("depth", "fixed")
        page.fill("steps", "3")
        say(page, "again")
        page.wait_until(f"document.querySelectorAll('.assistant').length === 2 && {IDLE}")
        assert live.engine.seen[-1].depth.num_steps == 3
        assert b"<assistant>" + MARKUP.encode() in bytes(live.engine.seen[-1].tokens), "a chat goes on"
        page.fill("depth", "hazard")
        page.fill("threshold", "0.25")
        page.fill("tokens", "500")
        live.engine.tick_seconds = 0.05
        say(page, "for ever")
        page.wait_until("document.querySelectorAll('.assistant').length === 3")
        page.wait_until("[...document.querySelectorAll('.cells')].pop().childElementCount > 3")
        assert (live.engine.seen[-1].depth.exit_rule, live.engine.seen[-1].depth.exit_threshold) == ("hazard", 0.25)
        page.click("stop")
        page.wait_until(IDLE)
        live.wait_until(lambda: not live.engine.live)
        assert "stopped after" in page.text()

        live.engine.max_waiting = 0
        say(page, "too much")
        page.wait_until("!document.getElementById('banner').hidden")
        assert page.run("document.getElementById('banner').textContent") == "0 requests waiting; retry in 7 s"
        time.sleep(0.05)
        assert page.run(IDLE)


@pytest.mark.slow
def test_without_a_template_the_page_continues_a_text(tmp_path):
    with serving(script=script, template=None) as live, browser(tmp_path) as page:
        page.open(live.url)
        page.wait_until("document.getElementById('model')?.textContent === 'scripted'")
        say(page, "once upon")
        page.wait_until(f"document.querySelectorAll('.token').length > 0 && {IDLE}")
        assert bytes(live.engine.seen[-1].tokens) == b"once upon"
        assert page.run("document.querySelectorAll('.token').length") == 64
