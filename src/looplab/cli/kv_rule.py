"""The `--kv-rule` option: what a query reads of past tokens, by the names of a command line."""

import re
from collections.abc import Callable

from looplab._registry import did_you_mean
from looplab.recurrence.kv import Anchor, Average, CopyLast, DepthIndexed, First, KVRule, Modulo, Single

PLAIN: dict[str, KVRule] = {
    "depth_indexed": DepthIndexed(),
    "last_exited": DepthIndexed(missing=CopyLast()),
    "single": Single(),
    "first": First(),
    "average": Average(),
}
NUMBERED: dict[str, Callable[[int], KVRule]] = {
    "first_then_shared": lambda s: Anchor(n=s - 1),
    "mod_m": lambda m: Modulo(m=m),
}
FORMS = (*PLAIN, "first_then_shared(s)", "mod_m(m)")


def kv_rule(text: str) -> KVRule | None:
    """The rule of a name such as `single` or `mod_m(4)`; None for an empty one.

    Raises:
        ValueError: Another name, or a number that the rule does not take.
    """
    if not text:
        return None
    form = re.fullmatch(r"(\w+)(?:\((\d+)\))?", text)
    name, number = (form[1], form[2]) if form else (text, None)
    if number is None and name in PLAIN:
        return PLAIN[name]
    if number is not None and name in NUMBERED:
        return NUMBERED[name](int(number))
    hint = did_you_mean(text, FORMS)
    raise ValueError(
        f"--kv-rule must be one of {', '.join(FORMS)}. Got {text!r}.{hint} Leave it out for the trained one."
    )
