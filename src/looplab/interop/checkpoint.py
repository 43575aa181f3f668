"""`load`: one door for every checkpoint, and `export`, the way back for published ones.

    a folder that looplab wrote          models/folder.py
    a published looped checkpoint        interop/published.py, models/<family>.py
    a model of the transformers library  interop/adapters/
    what our class of that library saved interop/pretrained.py
    a built-in name

The family follows from the settings or the names of the tensors; weights are safetensors, strict to the last tensor;
nothing is unpickled, nothing is downloaded and no code of the folder runs.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import looplab
from looplab._registry import did_you_mean
from looplab.data.tokenizers import FILE as TOKENIZER_FILE
from looplab.data.tokenizers import SPECIALS, Tokenizer, load_tokenizer
from looplab.interop.assume import answer
from looplab.interop.pretrained import is_pretrained, open_pretrained
from looplab.interop.published import Source, family_of, open_published, write_as, write_published
from looplab.models.base import LoopedLM
from looplab.models.folder import CONFIG, FORMAT, load_folder
from looplab.models.inverse import formats, settings_of
from looplab.models.published import PUBLISHED

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}

TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json")
"""The tokenizer, and the files that say which of its tokens are special."""

HUB_NAME = r"\w[\w.-]*/[\w.-]+"


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
    assume: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> LoadedModel:
    """Opens a checkpoint in eval mode.

    Args:
        path: A folder, or the name of a built-in checkpoint (`looplab list builtins`). A folder of that name wins.
        family: Name of a published family that the folder is to be read as; "auto": what its files say.
        tie: Of somebody else's checkpoint, whether the head is the embedding's table; None: what its settings say.
        assume: Answers to what files of the family leave open, "gate=fc1,rope=interleaved" (interop/assume.py).
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
    ours = facts is not None and (facts.get("format") == FORMAT or is_pretrained(facts)) and family == "auto"
    published = None if ours else family_of(folder, facts, family)
    if ours and tie is not None:
        raise ValueError(f"load: tie must be None for a folder that looplab wrote. Got {tie}. Leave it out.")
    if published is None and assume is not None:
        raise ValueError(
            f"load: assume must be None for a folder of no published family. Got {assume!r}. Leave it out."
        )
    model: LoopedLM
    home = tokenizer_folder(folder)
    tokenizer: Tokenizer | None = None if home is None else load_tokenizer(home)
    if published is not None:
        answered = answer(published, folder, assume, device=device)
        model, facts, source = open_published(folder, answered, tie=tie, dtype=DTYPES[dtype], device=device)
        facts |= {"reading": answered.notes[0]} if answered is not published else {}
    elif ours and facts is not None and is_pretrained(facts):
        model = open_pretrained(folder, facts, dtype=DTYPES[dtype], device=device)
        tokenizer = load_tokenizer("bytes") if facts.get("tokenizer") == "bytes" else tokenizer
    elif facts is not None and not ours and "model_type" in facts:
        from looplab.interop.adapters import open_folder  # loads the transformers library

        model = open_folder(folder, facts, tie=tie, dtype=DTYPES[dtype], device=device)
    else:
        model, facts = load_folder(folder, dtype=DTYPES[dtype], device=device)
        named = facts["tokenizer"]
        tokenizer = None if named == "task" else load_tokenizer("bytes" if named == "bytes" else folder)
    return LoadedModel(model=model, tokenizer=tokenizer, name=str(path), folder=folder, facts=facts, source=source)


def export(loaded: LoadedModel, folder: str | os.PathLike[str], *, format: str | None = None) -> list[str]:
    """Writes a model in the format of a published family: settings, weights under the original names, and tokenizer.

    A checkpoint of that family comes back bit by bit, in the same files as before, where its weights were not changed
    and the model holds them at least as precisely as the file. Any other model is written if the format has words for
    everything that it computes.

    Args:
        format: Name of a family; None: the one that the model came from.
    Returns:
        What the format does not say of the model, without changing what it computes: its law of training.
    Raises:
        KeyError: An unknown family.
        ValueError: No family to write in, or something that the model computes has no place in the format.
    """
    folder = Path(folder)
    if loaded.source is not None and format in (None, loaded.source.family):
        write_published(loaded.model, loaded.source, folder)
        _copy_tokenizer(loaded, folder)
        return []
    if format is None:
        raise ValueError(
            f"export: MODEL must come from a checkpoint of a published family. Got {loaded.name!r}. "
            f"Name a format: {', '.join(formats())}."
        )
    family = PUBLISHED[format]
    if not hasattr(loaded.model, "config"):
        raise ValueError(
            f"export: MODEL must be a looped model of looplab. Got {loaded.name!r}, one of the transformers library. "
            "Make one of it with looplab retrofit."
        )
    facts, lost = settings_of(loaded.model.config, family)
    ids = {} if loaded.tokenizer is None else {f"{n}_token_id": getattr(loaded.tokenizer, n) for n in SPECIALS}
    write_as(loaded.model, family, facts | {name: i for name, i in ids.items() if i is not None}, folder)
    _copy_tokenizer(loaded, folder)
    return lost


def _copy_tokenizer(loaded: LoadedModel, folder: Path) -> None:
    home = tokenizer_folder(loaded.folder)
    if home is None or home.resolve() == folder.resolve():
        return
    for name in TOKENIZER_FILES:
        if (home / name).is_file():
            shutil.copyfile(home / name, folder / name)


def find_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint that is named or given."""
    if Path(path).is_dir():
        return Path(path)
    names = builtin_names()
    if str(path) in names:
        return builtin_folder(str(path))
    raise KeyError(
        f"MODEL must be a checkpoint folder or a built-in name. Got {str(path)!r}."
        f"{hub_hint(str(path)) or did_you_mean(str(path), names)} Built in: {', '.join(names)}."
    )


def hub_hint(name: str) -> str:
    """How to get a local folder of what looks like a name on a model hub; nothing for other names."""
    if not re.fullmatch(HUB_NAME, name):
        return ""
    return (
        " looplab downloads nothing; a model of a hub is opened from a local folder. "
        f"Get one: hf download {name} --local-dir DIR, then give DIR."
    )


def tokenizer_folder(folder: Path) -> Path | None:
    """Where a checkpoint's `tokenizer.json` lies: beside the weights, or in a folder of its own; None: nowhere."""
    return next((home for home in (folder, folder / "tokenizer") if (home / TOKENIZER_FILE).is_file()), None)


def _assets() -> Path:
    return Path(looplab.__file__).parent / "assets"


def read_settings(folder: Path) -> dict[str, Any] | None:
    """What `config.json` says; None where it is not there or cannot be read, which whoever opens the folder tells."""
    try:
        facts = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None
