"""Other people's formats, and the one door through which checkpoints come in.

The classes for the transformers library are imported, and our model type registered there, on first access to one of
their names (or by `import looplab.interop.citizen`), so that nobody else waits for that library.
"""

import importlib
from typing import Any

from looplab.interop.checkpoint import LoadedModel, builtin_folder, builtin_names, export, load

_CITIZEN = ("LoopCache", "LooplabConfig", "LooplabForCausalLM")
__all__ = ["LoadedModel", *_CITIZEN, "builtin_folder", "builtin_names", "export", "load"]


def __getattr__(name: str) -> Any:
    if name not in _CITIZEN:
        raise AttributeError(f"module 'looplab.interop' has no attribute {name!r}")
    return getattr(importlib.import_module("looplab.interop.citizen"), name)
