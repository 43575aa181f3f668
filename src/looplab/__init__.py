"""looplab: the workbench for looped (recurrent-depth) language models.

The public names below are imported on first access, so `import looplab` is quick and needs no PyTorch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AuditConfig": "looplab.audit.config",
    "AuditResult": "looplab.audit.result",
    "Finding": "looplab.records",
    "Ledger": "looplab.recurrence.ledger",
    "Level": "looplab.records",
    "LoopSpec": "looplab.recurrence.spec",
    "LoopedLM": "looplab.models.base",
    "Plan": "looplab.recurrence.plan",
    "audit_model": "looplab.audit.protocol",
    "build": "looplab.models.base",
    "forward": "looplab.recurrence.loop",
    "load": "looplab.interop.checkpoint",
    "train": "looplab.training.trainer",
}
"""Public name -> the module that defines it."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'looplab' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
