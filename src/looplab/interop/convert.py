"""`convert`: a released pickle of tensors, read once in the restricted way, becomes safetensors.

    FILE             written by torch.save, or the index (*.index.json) of several such files
    state dict       the mapping that holds tensors: FILE itself, or an entry of it that is found by name
    OUT              model.safetensors (shards and an index above 5 GB), settings and tokenizer, convert.json

Only `torch.load(weights_only=True)` reads FILE: tensors and plain containers come out, and a file that needs any other
type is refused with the type's name. What is no tensor is named in convert.json and not kept.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import looplab
from looplab.interop.published import INDEX
from looplab.models.folder import CONFIG, TOKENIZER, WEIGHTS, listing
from looplab.models.published import PUBLISHED
from looplab.records import dump_json

MANIFEST = "convert.json"
SCHEMA = 1
SHARD_BYTES = 5 * 10**9
"""Largest file of weights, unless a single tensor is larger."""
PICKLE_INDEX = ".index.json"
STATE_DICTS = ("state_dict", "model_state_dict", "model", "module")
"""Names under which training code saves the model, beside its optimizer and counters."""
BESIDE = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""Settings and tokenizers, copied from beside FILE; settings of published families under other names too."""
STORABLE = frozenset(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()
)
"""Types that safetensors has."""


def convert(
    file: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    key: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Writes the tensors of a pickle as a folder of safetensors.

    Args:
        file: A file that torch.save wrote, or `pytorch_model.bin.index.json` beside the files that it names.
        out: A folder that is not there, or is empty.
        key: Where the state dict is, such as "model.ema"; None: found by name.
        shard_bytes: Largest file of weights.
    Returns:
        What convert.json says: source files and hashes, counts, ties, what was dropped.
    Raises:
        FileNotFoundError: `file` is not there, or a file that the index names.
        FileExistsError: `out` holds files.
        ValueError: A file that is no such pickle, that needs other types than tensors and plain containers, that holds
            no tensors, several state dicts, or tensors that safetensors cannot store.
    """
    file, out = Path(file), Path(out)
    if not file.is_file():
        raise FileNotFoundError(f"convert: FILE must be a file. Got {file}: {listing(file)}. Check the path.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(
            f"convert: OUT must be a new or empty folder. Got {out}, which has {listing(out)}. Choose another folder."
        )
    sources, tensors, dropped, found_under = _read(file, key)
    tensors, ties = _untied(tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".partial", dir=out.parent) as name:
        stage = Path(name)
        files = _write(stage, tensors, shard_bytes)
        manifest = {
            "format": "looplab-convert",
            "schema": SCHEMA,
            "source": [{"file": path.name, "sha256": _sha256(path)} for path in sources],
            "state_dict": found_under,
            "tensors": len(tensors),
            "bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "dtypes": dtype_counts(tensors.values()),
            "ties": ties,
            "dropped": dropped,
            "files": files,
            "copied": _copy_beside(file.parent, stage),
            "looplab": looplab.__version__,
            "torch": torch.__version__,
        }
        (stage / MANIFEST).write_text(dump_json(manifest), encoding="utf-8")
        out.mkdir(exist_ok=True)
        for path in sorted(stage.iterdir(), key=lambda path: path.name == MANIFEST):
            os.replace(path, out / path.name)  # the manifest comes last: where it is, the rest is
    return manifest


def dtype_counts(tensors: Any) -> dict[str, int]:
    """Name of a type -> how many tensors have it."""
    names = [dtype_name(tensor.dtype) for tensor in tensors]
    return {name: names.count(name) for name in sorted(set(names))}


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def _read(file: Path, key: str | None) -> tuple[list[Path], dict[str, Tensor], dict[str, str], str]:
    """Source files, tensors by name, what else was there by path, and the path of the state dict."""
    if not file.name.endswith(PICKLE_INDEX):
        path, mapping, dropped = _state_dict(file, _unpickled(file), key)
        tensors = {name: value.detach() for name, value in mapping.items() if isinstance(value, Tensor)}
        dropped |= _described({n: v for n, v in mapping.items() if n not in tensors}, path)
        _check_storable(file, tensors)
        return [file], tensors, dropped, ".".join(path)
    if key is not None:
        raise ValueError(f"convert: --key must be left out for an index, whose files are flat. Got {key!r}.")
    homes = _homes(file)
    sources = [file.parent / name for name in dict.fromkeys(homes.values())]
    tensors, dropped = {}, {}
    for source in sources:
        _, mapping, more = _state_dict(source, _unpickled(source), None)
        held = {name: value.detach() for name, value in mapping.items() if isinstance(value, Tensor)}
        named = {name for name, home in homes.items() if home == source.name}
        if held.keys() != named:
            apart = ", ".join(sorted(map(str, held.keys() ^ named))[:8])
            raise ValueError(
                f"convert: {source.name} must hold the tensors that {file.name} says. They differ in {apart}. "
                "Download the files again."
            )
        _check_storable(source, held)
        tensors |= held
        dropped |= more | _described({n: v for n, v in mapping.items() if n not in held}, [])
    return [file, *sources], tensors, dropped, ""


def _homes(index: Path) -> dict[str, str]:
    try:
        homes = json.loads(index.read_bytes())["weight_map"]
        files = sorted({*homes.values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        homes, files = {}, []
    if not files:
        raise ValueError(
            f"convert: FILE must be an index with a weight_map of tensors to files. Got {index}. Download it again."
        )
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or not (index.parent / name).is_file():
            raise FileNotFoundError(
                f"convert: {index.name} must name files beside it. Got {name!r}. Found: {listing(index.parent)}. "
                "Download the missing file."
            )
    return homes


def _unpickled(file: Path) -> Any:
    """What a file holds, tensors and plain containers only; tensors stay in the file where its layout allows it."""
    # Types that other code has declared safe in this process are not safe for a downloaded file.
    with _no_added_types():
        try:
            return torch.load(file, weights_only=True, map_location="cpu", mmap=_is_archive(file))
        except pickle.UnpicklingError as error:
            raise ValueError(_refusal(file, str(error))) from None
        except (RuntimeError, EOFError, OSError, KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            # The unpickler meets arbitrary bytes with errors of many kinds.
            why = str(error).splitlines()[0] if str(error) else "it ends too early"
            raise ValueError(
                f"convert: FILE must be a complete file written by torch.save. Got {file} "
                f"({type(error).__name__}: {why}). Download it again."
            ) from None


@contextlib.contextmanager
def _no_added_types() -> Iterator[None]:
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(added)


def _is_archive(file: Path) -> bool:
    """Whether a file has the layout from which tensors can be mapped."""
    with file.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"


def _refusal(file: Path, said: str) -> str:
    found = re.search(r"GLOBAL (\S+)", said) or re.search(r"(?:class|function|type) ([\w.]+\.\w+)", said)
    what = f"the type {found[1]}" if found else "something else"
    return (
        f"convert: FILE must hold tensors and plain containers only. Got {file}, which needs {what} to be unpickled; "
        "looplab never does that, as it can run code. Save its state dict alone where you trust the file: "
        "torch.save(model.state_dict(), NEW)."
    )


def _state_dict(file: Path, content: Any, key: str | None) -> tuple[list[str], Mapping[Any, Any], dict[str, str]]:
    """Path of the state dict, the state dict, and what was beside it on the way there."""
    if key is not None:
        return _under(file, content, key)
    path: list[str] = []
    dropped: dict[str, str] = {}
    while True:
        if isinstance(content, Tensor) or not _count(content):
            raise ValueError(
                f"convert: FILE must hold named tensors. Got {file}, a {type(content).__name__} without any. "
                "Convert the file of the weights."
            )
        inner = {name: value for name, value in content.items() if isinstance(value, Mapping) and _count(value)}
        own = any(isinstance(value, Tensor) for value in content.values())
        choices = [name for name in STATE_DICTS if name in inner] or ([] if own else list(inner))
        if not choices:
            return path, content, dropped
        if len(choices) > 1:
            named = [".".join([*path, str(name)]) for name in choices]
            raise ValueError(
                f"convert: FILE must hold one state dict. Got {file} with {', '.join(named)}. "
                f"Choose one: --key {named[0]}."
            )
        dropped |= _described({n: v for n, v in content.items() if n != choices[0]}, path)
        path.append(str(choices[0]))
        content = inner[choices[0]]


def _under(file: Path, content: Any, key: str) -> tuple[list[str], Mapping[Any, Any], dict[str, str]]:
    path: list[str] = []
    dropped: dict[str, str] = {}
    for part in key.split("."):
        known = content if isinstance(content, Mapping) else {}
        if part not in known:
            raise ValueError(
                f"convert: --key must be a path of entries of FILE. Got {key!r}, but {'.'.join(path) or file.name} has "
                f"{', '.join(map(str, list(known)[:8])) or 'no entries'}. Choose one of them."
            )
        dropped |= _described({n: v for n, v in known.items() if n != part}, path)
        path.append(part)
        content = known[part]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(
            f"convert: --key must lead to a state dict. Got {key!r}, which is {_what(content)}. Choose another entry."
        )
    return path, content, dropped


def _count(value: Any) -> int:
    """How many tensors lie in nested mappings."""
    if isinstance(value, Tensor):
        return 1
    return sum(map(_count, value.values())) if isinstance(value, Mapping) else 0


def _described(entries: Mapping[Any, Any], path: Sequence[str]) -> dict[str, str]:
    """Path of an entry that is not kept -> its type."""
    return {".".join([*path, str(name)]): _what(value) for name, value in entries.items()}


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor {dtype_name(value.dtype)} {list(value.shape)}"
    count = _count(value)
    return type(value).__name__ + (f" with {count} tensor{'s' if count > 1 else ''}" if count else "")


def _check_storable(file: Path, tensors: Mapping[Any, Tensor]) -> None:
    for name, tensor in tensors.items():
        dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
        kind = dtype_name(tensor.dtype) if dense else "a sparse, quantized or empty layout"
        if not isinstance(name, str) or not dense or kind not in STORABLE:
            raise ValueError(
                f"convert: tensors must be dense, named by strings and of a type that safetensors has. Got {name!r} of "
                f"{kind} in {file}. Save it as a plain tensor first."
            )


def _untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, and name that is left out -> name under which the same storage is kept."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        kept = first.setdefault(same, name)
        if kept != name:
            ties[name] = kept
    return {name: tensor for name, tensor in tensors.items() if name not in ties}, ties


def _write(folder: Path, tensors: Mapping[str, Tensor], limit: int) -> list[str]:
    """Writes the tensors in order, in files of at most `limit` bytes; returns the files' names."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    count = len(shards)
    files = [WEIGHTS] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for file, names in zip(files, shards, strict=True):
        save_file({name: _alone(tensors[name]) for name in names}, folder / file, metadata={"format": "pt"})
    if count > 1:
        homes = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        (folder / INDEX).write_text(dump_json(index), encoding="utf-8")
    return files


def _alone(tensor: Tensor) -> Tensor:
    """The tensor, copied where it is a view of a larger storage or its numbers do not lie in order."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _copy_beside(folder: Path, out: Path) -> list[str]:
    own = {name for family in map(PUBLISHED.__getitem__, PUBLISHED) for name in family.config_files}
    names = [name for name in sorted({*BESIDE, *own}) if (folder / name).is_file()]
    for name in names:
        shutil.copyfile(folder / name, out / name)
    return names


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
