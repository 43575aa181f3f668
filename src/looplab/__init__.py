"""looplab: the workbench for looped (recurrent-depth) language models.

The public names below are imported on first access, so `import looplab` is quick and needs no PyTorch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AuditConfig": "looplab.audit.protocol",
    "AuditResult": "looplab.audit.protocol",
    "audit_model": "looplab.audit.protocol",
    "load": "looplab.interop",
}
"""Public name -> the module that defines it."""

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'looplab' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
