"""`load`: one door for every checkpoint, and `export`, the way back for published ones.

    a folder that looplab wrote          models/folder.py
    a published looped checkpoint        interop/published.py, models/<family>.py
    a model of the transformers library  interop/adapters/
    a built-in name

The family follows from the settings or the names of the tensors; weights are safetensors, strict to the last tensor;
nothing is unpickled, nothing is downloaded and no code of the folder runs.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import looplab
from looplab._registry import did_you_mean
from looplab.data.tokenizers import FILE as TOKENIZER_FILE
from looplab.data.tokenizers import Tokenizer, load_tokenizer
from looplab.interop.published import Source, family_of, open_published, write_published
from looplab.models.base import LoopedLM
from looplab.models.folder import CONFIG, FORMAT, load_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}


HUB_NAME = r"[\w.-]+/[\w.-]+"
HUB_HINT = " looplab downloads nothing: a name on a model hub has to be downloaded first; then give the folder."


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
    """What the folder's settings say; in folders of looplab, how the model was trained included."""
    source: Source | None = None
    """What `export` needs to write the checkpoint again; None where it is not of a published family."""

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


def load(
    path: str | os.PathLike[str],
    *,
    family: str = "auto",
    tie: bool | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> LoadedModel:
    """Opens a checkpoint in eval mode.

    Args:
        path: A folder, or the name of a built-in checkpoint (`looplab list builtins`). A folder of that name wins.
        family: Name of a published family that the folder is to be read as; "auto": what its files say.
        tie: Of a published family, whether the head is the embedding's table; None: what its settings say.
        dtype: float32, bfloat16 or float64; the type the weights are cast to.
    Raises:
        KeyError: Neither a folder nor a built-in name; an unknown family.
        FileNotFoundError: The folder lacks its settings or weights.
        ValueError: Pickled, truncated, foreign or non-finite weights; a family or dtype that is not supported; an
            adapter whose rollout differs from the native forward.
    """
    if dtype not in DTYPES:
        raise ValueError(f"load: dtype must be one of {', '.join(DTYPES)}. Got {dtype!r}.")
    if dtype == "float16" and device == "cpu":
        raise ValueError("dtype float16 is not supported on CPU here. Use float32 or bfloat16")
    folder = find_folder(path)
    facts, source = read_settings(folder), None
    ours = facts is not None and facts.get("format") == FORMAT and family == "auto"
    published = None if ours else family_of(folder, facts, family)
    if published is None and tie is not None:
        raise ValueError(f"load: tie must be None for what is not of a published family. Got {tie}. Leave it out.")
    model: LoopedLM
    tokenizer: Tokenizer | None = load_tokenizer(folder) if (folder / TOKENIZER_FILE).is_file() else None
    if published is not None:
        model, facts, source = open_published(folder, published, tie=tie, dtype=DTYPES[dtype], device=device)
    elif facts is not None and not ours and "model_type" in facts:
        from looplab.interop.adapters import open_folder  # loads the transformers library

        model = open_folder(folder, facts, dtype=DTYPES[dtype], device=device)
    else:
        model, facts = load_folder(folder, dtype=DTYPES[dtype], device=device)
        tokenizer = load_tokenizer("bytes" if facts["tokenizer"] == "bytes" else folder)
    return LoadedModel(model=model, tokenizer=tokenizer, name=str(path), folder=folder, facts=facts, source=source)


def export(loaded: LoadedModel, folder: str | os.PathLike[str]) -> None:
    """Writes a published checkpoint again: its settings, and the model's weights under the original names.

    Weights that were not changed come back bit by bit where the model holds them at least as precisely as the file,
    in the same files as before.

    Raises:
        ValueError: The model did not come from a published checkpoint.
    """
    if loaded.source is None:
        raise ValueError(
            f"export: MODEL must come from a checkpoint of a published family. Got {loaded.name!r}. "
            "Write it with looplab.models.folder.save_folder."
        )
    write_published(loaded.model, loaded.source, Path(folder))


def find_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint that is named or given."""
    if Path(path).is_dir():
        return Path(path)
    names = builtin_names()
    if str(path) in names:
        return builtin_folder(str(path))
    hub = "" if not re.fullmatch(HUB_NAME, str(path)) else HUB_HINT
    raise KeyError(
        f"MODEL must be a checkpoint folder or a built-in name. Got {str(path)!r}."
        f"{hub or did_you_mean(str(path), names)} Built in: {', '.join(names)}."
    )


def _assets() -> Path:
    return Path(looplab.__file__).parent / "assets"


def read_settings(folder: Path) -> dict[str, Any] | None:
    """What `config.json` says; None where it is not there or cannot be read, which whoever opens the folder tells."""
    try:
        facts = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None
