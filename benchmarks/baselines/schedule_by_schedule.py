"""Rival of the shared walk: every schedule is run alone, from the initial state to its end."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import run_plan
from looplab.recurrence.plan import Plan


def run(
    model: Any, context: Any, state: Any, plans: Mapping[str, Plan], visit: Callable[[str, Any], None], ledger: Ledger
) -> None:
    """Calls `visit` with the state after each plan."""
    with torch.no_grad():
        for name, plan in plans.items():
            visit(name, run_plan(model, plan, context, state, ledger=ledger))
