"""Continuous depth batching: tokens at different depths share a launch, and a token stops when an exit rule says.

The public names below are imported on first access: scheduler, pages and prefix cache need no PyTorch.
"""

import importlib
from typing import Any

_HOMES = {
    "Completion": "looplab.engine.request",
    "DepthParams": "looplab.engine.request",
    "Engine": "looplab.engine.engine",
    "EngineConfig": "looplab.engine.config",
    "Request": "looplab.engine.request",
    "SamplingParams": "looplab.engine.request",
    "Scheduler": "looplab.engine.scheduler",
}
"""Public name -> the module that defines it."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'looplab.engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
