"""`looplab scaling ACTION`: scaling laws of looped models, one file per action."""

import importlib
import sys
from collections.abc import Sequence

from looplab._registry import did_you_mean
from looplab.cli import exit_codes
from looplab.cli.exit_codes import UserError

ACTIONS = {
    "check": "say what a table of runs is good for, and what is wrong with it",
    "fit": "fit a law, with intervals, and compare it with others",
    "cost": "FLOPs, key-value bytes, time and price of shapes",
    "match": "looped shapes that cost what a reference costs",
}
EXAMPLES = (
    ("looplab scaling check synthetic_truncation", "576 synthetic runs with a known truth"),
    ("looplab scaling fit synthetic_truncation --gain decay --compare --out fit-out", "estimates and a report"),
    ("looplab scaling check sweep-out/table.csv", "the runs of a sweep"),
    ("looplab scaling cost --width 640 --num-steps 1 2 4 8", "what one more loop costs"),
    ("looplab scaling match --reference 2048x48 --loops 2 --widths 2176 2304 2432", "the Loopie table"),
)


def main(argv: Sequence[str]) -> int:
    """Runs one action and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return exit_codes.DONE if argv else exit_codes.USAGE
    name = argv[0]
    if name not in ACTIONS:
        hint = did_you_mean(name, ACTIONS)
        raise UserError(f"ACTION must be one of {', '.join(ACTIONS)}. Got {name!r}.{hint}", exit_codes.USAGE)
    code: int = importlib.import_module(f"looplab.cli.scaling_{name}").main(argv[1:])
    return code


def usage() -> str:
    """The text of `looplab scaling --help`."""
    lines = ["usage: looplab scaling ACTION [options]", "", "Scaling laws of looped models.", "", "Actions:"]
    lines += [f"  {name:<10}{text}" for name, text in ACTIONS.items()]
    lines += ["", "Examples:"]
    lines += [f"  {example}\n      {meaning}" for example, meaning in EXAMPLES]
    return "\n".join(lines)
