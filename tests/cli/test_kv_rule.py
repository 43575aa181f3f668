import pytest

from looplab.cli.kv_rule import kv_rule
from looplab.recurrence.kv import Anchor, CopyLast, DepthIndexed, Modulo, Single


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", None),
        ("depth_indexed", DepthIndexed()),
        ("last_exited", DepthIndexed(missing=CopyLast())),
        ("single", Single()),
        ("mod_m(4)", Modulo(m=4)),
        ("first_then_shared(3)", Anchor(n=2)),
    ],
)
def test_names_of_the_command_line_are_rules(text, rule):
    assert kv_rule(text) == rule


@pytest.mark.parametrize("text", ["singel", "single(2)", "mod_m", "mod_m(x)", "first_then_shared(1)"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="must be"):
        kv_rule(text)


def test_a_misspelt_rule_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"Got 'singel'\. Did you mean 'single'\? Leave it out for the trained one"):
        kv_rule("singel")
