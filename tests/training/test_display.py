import io

import pytest

from looplab.training.display import Bar, Display, Lines, choose_display, clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report(display, steps=5):
    for step in range(1, steps + 1):
        display.step({"step": step, "loss": 2.0, "T": 3}, steps=steps, tokens_per_second=1234.0, seconds_left=61.2)
    display.say("evaluated")
    display.close()


def test_one_plain_line_per_so_many_steps_and_at_the_end():
    stream = io.StringIO()
    display = choose_display(2, stream=stream)
    assert isinstance(display, Lines)
    report(display)
    tail = "loss 2.0000  1.2k tokens/s  T 3  left 1:01"
    assert stream.getvalue().splitlines() == [f"step {n}/5  {tail}" for n in (2, 4, 5)] + ["evaluated"]


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    display = choose_display(2, stream=stream)
    assert isinstance(display, Bar)
    report(display)
    assert "step 5/5" in stream.getvalue()
    assert "evaluated" in stream.getvalue()


def test_quiet_says_nothing():
    stream = Terminal()
    display = choose_display(2, quiet=True, stream=stream)
    assert type(display) is Display
    report(display)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0:00"), (59.6, "1:00"), (3723.0, "1:02:03")])
def test_the_clock(seconds, text):
    assert clock(seconds) == text
