"""Folders of published checkpoints: found, understood, read a tensor at a time, and written again.

    weights     the shards that model.safetensors.index.json names, else model.safetensors, else weights.safetensors
    settings    the first file of `Family.config_files` that is there; .yaml is plain YAML
    family      from `model_type`, or from the names of the tensors where that is missing or shared by several

Files are mapped, and one shard is open at a time: memory peaks at the weights of the model and one shard. Nothing is
unpickled, no code of the folder runs, nothing is downloaded. What a family's file holds and what our model reads of
it is in the family's file, models/<family>.py.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from looplab.models.base import LoopedLM
from looplab.models.folder import WEIGHTS, check_size, listing, refuse_pickles
from looplab.models.published import PUBLISHED, Family, KeyMap, assemble, bare, understand
from looplab.records import write_atomic

INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = "weights.safetensors"
TIES = ("tie_embeddings", "tie_word_embeddings")


class Shards(Mapping[str, Tensor]):
    """The tensors of a folder, each read when asked for.

    Attributes:
        files: File names, in the order of the index.
        shapes: Shape of every tensor, without reading it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.index = (folder / INDEX).read_bytes() if (folder / INDEX).is_file() else None
        self.files = _weight_files(folder, self.index)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.homes: dict[str, str] = {}
        self.metadata: dict[str, dict[str, str] | None] = {}
        self._opened: tuple[str, Any] | None = None
        for file in self.files:
            check_size(folder / file)
            self.metadata[file] = self._open(file).metadata()
            for name in self._open(file).keys():  # noqa: SIM118, the handle is no mapping
                if name in self.homes:
                    raise ValueError(
                        f"load: {folder} must hold {name} once. Got it in {self.homes[name]} and {file}. "
                        "Download the folder again."
                    )
                self.homes[name] = file
                self.shapes[name] = tuple(self._open(file).get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        return self._open(self.homes[name]).get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.homes)

    def __len__(self) -> int:
        return len(self.homes)

    def _open(self, file: str) -> Any:
        if self._opened is None or self._opened[0] != file:
            self._opened = None  # the mapping before is given back first
            self._opened = (file, safe_open(self.folder / file, framework="pt"))
        return self._opened[1]


@dataclass(frozen=True, kw_only=True)
class Source:
    """What `export` needs besides the model to write the files of a checkpoint again."""

    family: str
    key_map: KeyMap
    settings: tuple[str, bytes]
    """Name and content of the file of settings."""
    index: bytes | None
    """Content of the index of shards, where there is one."""
    homes: Mapping[str, str]
    """Name of a tensor in the file -> name of the file."""
    metadata: Mapping[str, dict[str, str] | None]
    """Name of a file -> its metadata."""
    dtypes: Mapping[str, torch.dtype]
    """Types of the tensors in the file, which the model may hold in another one."""
    unread: Mapping[str, Tensor]
    """Tensors of the file that the model does not read."""


def family_of(folder: Path, facts: Mapping[str, Any] | None, family: str = "auto") -> Family | None:
    """The published family of a folder, or None where it has to be opened in another way.

    Args:
        facts: What `config.json` says; None if there is none.
        family: A name of `PUBLISHED`, which then decides.
    Raises:
        KeyError: An unknown family.
        ValueError: Tensors that fit several families, or none of those that share a model_type.
    """
    if family != "auto":
        return PUBLISHED[family]
    kind = (facts or {}).get("model_type")
    alike = [f for f in map(PUBLISHED.__getitem__, PUBLISHED) if kind is None or kind in f.model_types]
    if kind is not None and len(alike) < 2:
        return alike[0] if alike else None
    if kind is None and not any((folder / file).is_file() for f in alike for file in f.config_files):
        return None
    try:
        names = frozenset(map(bare, Shards(folder)))
    except FileNotFoundError:
        if kind is not None:
            raise
        return None
    fitting = [f for f in alike if f.recognises(names)]
    if len(fitting) == 1:
        return fitting[0]
    if kind is None and not fitting:
        return None
    fit = " and ".join(f.name for f in fitting) or f"none of {', '.join(f.name for f in alike)}"
    what = "" if kind is None else f" of model_type {kind!r}"
    raise ValueError(
        f"load: the tensors of {folder} must be those of one family{what}. They fit {fit}. Pass family=NAME"
    )


def open_published(
    folder: Path, family: Family, *, tie: bool | None = None, dtype: torch.dtype | None = None, device: str = "cpu"
) -> tuple[LoopedLM, dict[str, Any], Source]:
    """The model of a folder in eval mode, what its settings say, and what `export` needs.

    Args:
        tie: What the settings should say of tying the head to the embedding; None: what they do say.
    Raises:
        FileNotFoundError: No settings, no weights, or a shard that the index names and that is not there.
        ValueError: Pickled, truncated or non-finite weights, settings that cannot be read, tensors that do not fit.
    """
    shards = Shards(folder)
    name, content, facts = family_settings(folder, family)
    told = facts if tie is None else facts | dict.fromkeys(TIES, tie)
    model = assemble(family, told, shards, shapes=shards.shapes, dtype=dtype, device=device)
    _, key_map, named = understand(family, told, shards.shapes)
    unread = {n: shards[n].clone() for n in shards if n not in named.values()}
    dtypes = {n: shards[n].dtype for n in shards}
    source = Source(
        family=family.name,
        key_map=key_map,
        settings=(name, content),
        index=shards.index,
        homes=shards.homes,
        metadata=shards.metadata,
        dtypes=dtypes,
        unread=unread,
    )
    return model, facts, source


def write_published(model: LoopedLM, source: Source, folder: Path) -> None:
    """Writes settings and weights under the names, in the files and in the types of the checkpoint they came from."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    foreign = source.key_map.export(state)
    foreign |= {alias: foreign[original] for alias, original in source.key_map.aliases.items()}
    files: dict[str, dict[str, Tensor]] = {file: {} for file in source.metadata}
    for name, file in source.homes.items():
        tensor = source.unread[name] if name in source.unread else foreign[source.key_map.strip(name)]
        # A copy, as tied tensors are stored once under each of their names.
        files[file][name] = tensor.to(source.dtypes[name], copy=True).contiguous()
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata=source.metadata[file])
    if source.index is not None:
        (folder / INDEX).write_bytes(source.index)
    (folder / source.settings[0]).write_bytes(source.settings[1])


def write_as(model: LoopedLM, family: Family, facts: Mapping[str, Any], folder: Path) -> None:
    """Writes a model under the names of a family, whose settings for it are `facts` (models/inverse.py).

    Tables that the original keeps in its files and that are computed here are written too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key_map = family.key_map(model.config)
    tensors = key_map.export({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()})
    tensors |= {name: make() for name, make in key_map.computed.items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_atomic(folder / family.config_files[0], json.dumps(facts, indent=2) + "\n")


def _weight_files(folder: Path, index: bytes | None) -> list[str]:
    if index is not None:
        names = _parsed(folder / INDEX, index).get("weight_map", {}).values()
        files = list(dict.fromkeys(names))
        for file in files:
            if Path(file).name != file or not (folder / file).is_file():
                raise FileNotFoundError(
                    f"load: {folder} has no {file}, which {INDEX} names. Found: {listing(folder)}. Download it again"
                )
        if files:
            return files
    for file in (WEIGHTS, OTHER_WEIGHTS):
        if (folder / file).is_file():
            return [file]
    if any(folder.glob("*.safetensors")):
        names = f"{INDEX}, {WEIGHTS} or {OTHER_WEIGHTS}"
        raise FileNotFoundError(f"load: {folder} has no {names}. Found: {listing(folder)}")
    refuse_pickles(folder)
    raise FileNotFoundError(f"load: {folder} has no *.safetensors. Found: {listing(folder)}")


def family_settings(folder: Path, family: Family) -> tuple[str, bytes, dict[str, Any]]:
    """Name, content and meaning of the file of settings; errors as for `open_published`."""
    for name in family.config_files:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            return name, content, _parsed(folder / name, content)
    raise FileNotFoundError(f"load: {folder} has no {' or '.join(family.config_files)}. Found: {listing(folder)}")


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    plain = path.suffix in (".yaml", ".yml")
    try:
        facts = yaml.safe_load(content) if plain else json.loads(content)
    except (ValueError, yaml.YAMLError) as error:
        kind = "plain YAML" if plain else "JSON"
        raise ValueError(f"load: {path} is not {kind} ({str(error).splitlines()[0]}). Copy it again") from None
    if not isinstance(facts, dict):
        raise ValueError(f"load: {path} must hold names and values. Got a {type(facts).__name__}. Copy it again")
    return facts
