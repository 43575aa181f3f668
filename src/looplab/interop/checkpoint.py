"""`load`: one door for every checkpoint. A folder that looplab or the transformers library wrote, or a built-in name.

The family follows from `config.json`; weights are safetensors, strict to the last tensor; nothing is unpickled and no
code of the folder runs.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import looplab
from looplab._registry import did_you_mean
from looplab.data.tokenizers import FILE as TOKENIZER_FILE
from looplab.data.tokenizers import Tokenizer, load_tokenizer
from looplab.models.base import LoopedLM
from looplab.models.folder import CONFIG, FORMAT, load_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model and what belongs to it."""

    model: LoopedLM
    tokenizer: Tokenizer | None
    """None where a foreign folder has no `tokenizer.json`."""
    name: str
    """Built-in name, or the folder as it was given."""
    folder: Path
    facts: dict[str, Any]
    """What the folder's `config.json` says, how it was trained included."""

    @property
    def control(self) -> str | None:
        """Name of the built-in dense twin of a built-in model; None for a folder, or a model without one."""
        if self.folder != builtin_folder(self.name):
            return None
        return json.loads((_assets() / "controls.json").read_bytes()).get(self.name)


def builtin_names() -> list[str]:
    """Names of the checkpoints inside the package."""
    return sorted(path.parent.name for path in _assets().glob(f"*/{CONFIG}"))


def builtin_folder(name: str) -> Path:
    """Folder of a built-in checkpoint."""
    return _assets() / name


def load(path: str | os.PathLike[str], *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Opens a checkpoint in eval mode.

    Args:
        path: A folder, or the name of a built-in checkpoint (`looplab list builtins`). A folder of that name wins.
        dtype: float32, bfloat16 or float64; the type the weights are cast to.
    Raises:
        KeyError: Neither a folder nor a built-in name.
        FileNotFoundError: The folder lacks its config or weights.
        ValueError: Pickled, truncated, foreign or non-finite weights; a family or dtype that is not supported; an
            adapter whose rollout differs from the native forward.
    """
    if dtype not in DTYPES:
        raise ValueError(f"load: dtype must be one of {', '.join(DTYPES)}. Got {dtype!r}.")
    if dtype == "float16" and device == "cpu":
        raise ValueError("dtype float16 is not supported on CPU here. Use float32 or bfloat16")
    folder = Path(path)
    if not folder.is_dir():
        names = builtin_names()
        if str(path) not in names:
            raise KeyError(
                f"MODEL must be a checkpoint folder or a built-in name. Got {str(path)!r}."
                f"{did_you_mean(str(path), names)} Built in: {', '.join(names)}."
            )
        folder = builtin_folder(str(path))
    facts = _foreign_facts(folder)
    tokenizer: Tokenizer | None
    if facts is not None:
        from looplab.interop.adapters import open_folder  # loads the transformers library

        model: LoopedLM = open_folder(folder, facts, dtype=DTYPES[dtype], device=device)
        tokenizer = load_tokenizer(folder) if (folder / TOKENIZER_FILE).is_file() else None
    else:
        model, facts = load_folder(folder, dtype=DTYPES[dtype], device=device)
        tokenizer = load_tokenizer("bytes" if facts["tokenizer"] == "bytes" else folder)
    return LoadedModel(model=model, tokenizer=tokenizer, name=str(path), folder=folder, facts=facts)


def _assets() -> Path:
    return Path(looplab.__file__).parent / "assets"


def _foreign_facts(folder: Path) -> dict[str, Any] | None:
    """The config of a folder that another library wrote; None for ours, and for what `load_folder` will refuse."""
    try:
        facts = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    foreign = isinstance(facts, dict) and facts.get("format") != FORMAT and "model_type" in facts
    return facts if foreign else None
