"""Model folders: a configuration and its weights, from which the model opens without anything else.

    config.json         {"format": "looplab", "schema": 1, "model": registry name, "config": ..., "tokenizer": ..., ...}
    model.safetensors   every tensor once; a tie is stored under its first name and made again by the model
    tokenizer.json      where the tokenizer is not "bytes"

Nothing is unpickled, and what does not fit the model to the last tensor is refused.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import looplab
from looplab._config import from_dict, to_dict
from looplab.models.base import MODELS, LoopedLM, build, model_name
from looplab.records import dump_json, write_atomic

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
FORMAT, SCHEMA = "looplab", 1
NAMED = ("bytes", "task")
"""Tokenizers that need no file: bytes, and none at all, where the tokens are those of a task."""
PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def save_folder(
    folder: str | os.PathLike[str],
    model: LoopedLM,
    *,
    tokenizer: str | Path = "bytes",
    token_ids: Mapping[str, int] | None = None,
    trained: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes the two (or three) files of a model; `load_folder` gives the model back.

    Args:
        folder: Made if missing; files of these names are replaced.
        model: Of a registered class, with its configuration in `model.config`.
        tokenizer: "bytes", "task" (a model of a task's own tokens), or the `tokenizer.json` to copy.
        token_ids: Special ids by name ("bos", "eos", "pad") of a tokenizer that is copied.
        trained: How the weights came about; kept as it is under "trained".
        dtype: Type of the stored floating-point tensors; None: as they are.
        tensors: What is written in place of the model's own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = unique_tensors(model) if tensors is None else tensors
    save_tensors(folder / WEIGHTS, {name: _stored(tensor, dtype) for name, tensor in own.items()})
    facts: dict[str, Any] = {
        "format": FORMAT,
        "schema": SCHEMA,
        "version": looplab.__version__,
        "model": model_name(model.config),
        "config": to_dict(model.config),
        "tokenizer": str(tokenizer) if tokenizer in NAMED else TOKENIZER,
        "trained": dict(trained or {}),
    }
    if tokenizer not in NAMED:
        if Path(tokenizer) != folder / TOKENIZER:
            shutil.copyfile(tokenizer, folder / TOKENIZER)
        facts |= {f"{name}_token_id": i for name, i in (token_ids or {}).items()}
    write_atomic(folder / CONFIG, dump_json(facts))


def load_folder(
    folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[LoopedLM, dict[str, Any]]:
    """The model of a folder, in eval mode, and what its `config.json` says.

    Raises:
        FileNotFoundError: `config.json` or the weights are missing.
        ValueError: Another format, a broken file, pickled weights, tensors that do not fit or are not finite.
        KeyError: A model or choice that this version does not know.
    """
    folder = Path(folder)
    facts = read_config(folder)
    weights = _weights(folder)
    config_class = MODELS[facts["model"]].config_class
    model = build(
        from_dict(config_class, facts["config"], path=f"{folder / CONFIG}: config"), dtype=dtype, device=device
    )
    load_tensors(model, read_tensors(weights, device=device))
    return model, facts


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `config.json` says, without opening the weights; errors as for `load_folder`."""
    folder = Path(folder)
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"load: {folder} has no {CONFIG}. Found: {listing(folder)}")
    try:
        facts = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"load: {path} is not JSON ({error}). Copy it again") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f'load: {path} must have "format": "{FORMAT}". It was written by something else')
    if facts.get("schema") != SCHEMA:
        raise ValueError(
            f"load: {path} has schema {facts.get('schema')}, this version reads {SCHEMA}. "
            "Read it with the version that wrote it"
        )
    absent = [key for key in ("model", "config", "tokenizer") if key not in facts]
    if absent:
        raise ValueError(f"load: {path} has no {', '.join(map(repr, absent))}. Copy it again")
    return facts


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of tied ones the first name only."""
    first: dict[tuple[Any, ...], str] = {}
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,), name)
    return {name: tensors[name] for name in first.values()}


def weight_hash(model: Any) -> str:
    """Hex digest over names, shapes, dtypes and values of all parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into `model`; they must be exactly the ones it has.

    Raises:
        ValueError: Missing, unexpected or misshapen tensors, or numbers that are not finite.
    """
    own = unique_tensors(model)
    shapes = [
        f"{name}: file {list(tensors[name].shape)}, model {list(own[name].shape)}"
        for name in sorted(own.keys() & tensors.keys())
        if own[name].shape != tensors[name].shape
    ]
    problems = [
        _listed("missing", sorted(own.keys() - tensors.keys())),
        _listed("unexpected", sorted(tensors.keys() - own.keys())),
        _listed("of wrong shape", shapes),
    ]
    if any(problems):
        text = ", ".join(filter(None, problems))
        raise ValueError(f"load: {_plural(text)}")
    for name, tensor in tensors.items():
        check_finite(name, tensor)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def load_partly(model: nn.Module, folder: str | os.PathLike[str], *, missing: tuple[str, ...]) -> None:
    """Copies the weights of a folder into a model that may have more: tensors whose names begin with one of `missing`.

    Raises:
        FileNotFoundError, ValueError: As for `load_folder`; other tensors are missing.
    """
    read_config(folder)
    tensors = read_tensors(_weights(Path(folder)))
    new = {name: t for name, t in unique_tensors(model).items() if name not in tensors and name.startswith(missing)}
    load_tensors(model, {**new, **tensors})


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that holds NaN or an infinity."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    # The extremes are NaN where any entry is; unlike a mask they take no memory.
    if not all(torch.isfinite(extreme) for extreme in torch.aminmax(tensor)):
        bad = int((~torch.isfinite(tensor)).sum())
        raise ValueError(f"load: {bad} non-finite values in {name}")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file; names in order, so equal tensors give equal bytes."""
    save_file({name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}, path)


def read_tensors(path: Path, *, device: str = "cpu") -> dict[str, Tensor]:
    """All tensors of a safetensors file.

    Raises:
        ValueError: The file is shorter than its header says, or is no safetensors file.
    """
    check_size(path)
    return load_file(path, device=device)


def check_size(path: Path) -> None:
    """Refuses a safetensors file that is shorter than its header says, or that has no header."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length <= size else None
        ends = [entry["data_offsets"][1] for name, entry in (header or {}).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        header, ends = None, []
    if header is None:
        raise ValueError(f"load: {path} is no safetensors file ({_bytes(size)}). Download it again")
    promised = 8 + length + max(ends, default=0)
    if size < promised:
        raise ValueError(
            f"load: {path} is truncated (header says {_bytes(promised)}, file has {_bytes(size)}). Download it again"
        )
    with safe_open(path, framework="pt"):  # the library's own checks of the header
        pass


def refuse_pickles(folder: Path) -> None:
    """Names the way out where a folder's weights are pickled. Called when it has no others."""
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLES:
            raise ValueError(
                f"load: {file} is a pickle; looplab does not unpickle. Convert it once: looplab convert {file} OUT"
            )


def listing(folder: Path) -> str:
    """What is there instead of a file, for errors."""
    if not folder.is_dir():
        return "no such folder" if not folder.exists() else "a file"
    return ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"


def _weights(folder: Path) -> Path:
    path = folder / WEIGHTS
    if path.is_file():
        return path
    refuse_pickles(folder)
    wanted = WEIGHTS if any(folder.glob("*.safetensors")) else "*.safetensors"
    raise FileNotFoundError(f"load: {folder} has no {wanted}. Found: {listing(folder)}")


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = ", ..." if len(names) > 1 else ""
    return f"{len(names)} {what} ({names[0]}{more})"


def _plural(text: str) -> str:
    # The first count carries the noun: "3 tensors missing (...), 1 unexpected (...)".
    count, rest = text.split(" ", 1)
    return f"{count} tensor{'' if count == '1' else 's'} {rest}"


def _bytes(size: int) -> str:
    """1,234 bytes, or 2.1 MB."""
    if size < 10_000:
        return f"{size:,} bytes"
    power = min(4, int(math.log(size, 1000)))
    return f"{size / 1000**power:.1f} {('', 'kB', 'MB', 'GB', 'TB')[power]}"
