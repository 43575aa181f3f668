"""Folders that `save_pretrained` of our transformers class wrote (interop/citizen), opened without that library.

    config.json     {"model_type": "looplab", "schema": 1, "architecture": registry name, "model": configuration, ...}
    *.safetensors   one file or shards with an index; every tensor under "model." and the name it has in our model

Strict to the last tensor, a tensor at a time; nothing is unpickled and the code in the folder is not run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from looplab._config import from_dict
from looplab.interop.published import Shards
from looplab.models.base import MODELS, LoopedLM, build
from looplab.models.folder import CONFIG, check_finite, unique_tensors
from looplab.models.published import MisfitError

MODEL_TYPE, SCHEMA = "looplab", 1
PREFIX = "model."
"""Of a tensor's name in the files."""


def is_pretrained(facts: Mapping[str, Any] | None) -> bool:
    """Whether these are the settings of such a folder."""
    return facts is not None and facts.get("model_type") == MODEL_TYPE


def configuration(facts: Mapping[str, Any], *, path: str = CONFIG) -> Any:
    """The configuration of the model that the settings describe.

    Args:
        facts: With the entries `schema`, `architecture` and `model`.
        path: Where they stand, for errors.
    Raises:
        KeyError: An architecture or a choice that this version does not know.
        ValueError: Another schema, or an entry that is missing.
    """
    absent = [key for key in ("architecture", "model", "schema") if facts.get(key) is None]
    if absent:
        raise ValueError(f"load: {path} has no {', '.join(map(repr, absent))}. Copy it again")
    if facts["schema"] != SCHEMA:
        raise ValueError(
            f"load: {path} has schema {facts['schema']}, this version reads {SCHEMA}. "
            "Read it with the version that wrote it"
        )
    return from_dict(MODELS[facts["architecture"]].config_class, facts["model"], path=f"{path}: model")


def open_pretrained(
    folder: Path, facts: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> LoopedLM:
    """The model of a folder, in eval mode.

    Raises:
        FileNotFoundError: No weights.
        ValueError: What `configuration` refuses; broken or pickled weights; tensors that do not fit or are not finite.
    """
    shards = Shards(folder)
    model = build(configuration(facts, path=str(folder / CONFIG)), dtype=dtype, device=device)
    own = unique_tensors(model)
    check_names({PREFIX + name: tuple(tensor.shape) for name, tensor in own.items()}, shards.shapes)
    with torch.no_grad():
        for name in shards:
            value = shards[name]
            check_finite(name, value)
            own[name.removeprefix(PREFIX)].copy_(value)
    return model


def check_names(own: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses stored tensors that are not exactly the model's own; both map names in the files to shapes."""
    missing, unexpected = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
    misshapen = [
        f"{name}: file {list(stored[name])}, model {list(shape)}"
        for name, shape in sorted(own.items())
        if name in stored and stored[name] != shape
    ]
    if missing or unexpected or misshapen:
        raise MisfitError(missing, unexpected, misshapen)
