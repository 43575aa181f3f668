"""Folders of the transformers library: a configuration and safetensors, opened strictly to the last tensor.

Weights are in the files that published checkpoints have them in (interop/published.py). Nothing is unpickled, nothing
is downloaded and no code of the folder runs. Errors are worded as for our own folders.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as library_logging

from looplab.interop.adapters.albert import Albert
from looplab.interop.adapters.base import ADAPTERS, Adapter
from looplab.interop.adapters.inkling2_loop import Inkling2Loop
from looplab.interop.published import INDEX, Shards
from looplab.models.folder import FORMAT, TOKENIZER, check_finite
from looplab.models.published import PUBLISHED, MisfitError, check_tie

MASK = "[MASK]"
COMPOSITE = "inkling2_loop"


def open_folder(
    folder: Path,
    facts: Mapping[str, Any],
    *,
    tie: bool | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Adapter:
    """The adapter of a folder, in eval mode, after its self-test.

    Args:
        facts: What the folder's `config.json` says; `model_type` names the family.
        tie: Whether the head is the embedding's table; None: what the settings say.
    Raises:
        FileNotFoundError: No weights.
        ValueError: A family without adapter, or that the installed library lacks; pickled or broken weights; tensors
            that do not fit; numbers that are not finite; a rollout that differs from the native forward.
    """
    family = facts["model_type"]
    if family not in ADAPTERS:
        native = {kind for name in PUBLISHED for kind in PUBLISHED[name].model_types}
        raise ValueError(
            f"load: model_type {family!r} has no native implementation and remote code is never run. "
            f"Known model types: {', '.join([FORMAT, *sorted({*ADAPTERS, *native})])}"
        )
    adapter_class = ADAPTERS[family]
    if family not in CONFIG_MAPPING:
        installed = transformers.__version__
        raise ValueError(f"{family} needs transformers >= {adapter_class.since} (installed {installed})")
    inner = _opened(folder, adapter_class, tie, dtype).to(device).eval()
    with settings_errors(family, *MISREAD):
        adapter = adapter_class.wrap(inner).eval()
        if isinstance(adapter, Albert):
            adapter.mask_token = _mask_token(folder)
        adapter.verify()
    return adapter


def read_config(folder: Path, tie: bool | None) -> Any:
    """The library's configuration of a folder, told where the weights are and whether head and embedding are tied."""
    shards = Shards(folder)
    with quiet(), settings_errors("its family", Exception):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.transformers_weights = shards.files[0] if shards.index is None else INDEX
    if tie is not None:
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            part.tie_word_embeddings = tie
    return config


def _opened(folder: Path, adapter_class: type[Adapter], tie: bool | None, dtype: torch.dtype) -> Any:
    """The library's model, every tensor of which came from the folder."""
    config = read_config(folder, tie)
    auto = "AutoModelForImageTextToText" if config.model_type == COMPOSITE else adapter_class.auto_class
    with quiet(), settings_errors(config.model_type, Exception):  # its report of missing tensors is our error
        inner, found = getattr(transformers, auto).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    del inner.config.transformers_weights  # a name in this folder, not in one that it is saved to
    check_tensors(found, adapter_class.ignored)
    for name, tensor in inner.state_dict().items():
        check_finite(name, tensor)
    check_ties(inner, tie, lambda name: inner.get_parameter(name).detach())
    return Inkling2Loop.text_half(inner) if config.model_type == COMPOSITE else inner


def check_ties(inner: Any, tie: bool | None, weight: Callable[[str], Tensor | None]) -> None:
    """Refuses weights that differ where the configuration says that one is the other.

    Biases are left out: where a masked model's are not tied, its adapter ties them and says so.

    Args:
        tie: What the caller wants of head and embedding.
        weight: Weights by the library's names; None for one that is not in the files.
    """
    tied = inner.get_expanded_tied_weights_keys(all_submodels=True)
    pairs = {alias: original for alias, original in tied.items() if not alias.endswith(".bias")}
    if tie and not pairs:
        raise ValueError(
            f"load: tie must be None or False for {inner.config.model_type}, whose head is its own. Got True. "
            "Leave it out."
        )
    for alias, original in pairs.items():
        one, other = weight(alias), weight(original)
        if one is not None and other is not None:
            check_tie(alias, original, one, other)


MISREAD = (TypeError, AttributeError, KeyError, IndexError, ArithmeticError, RuntimeError)
"""What a value of another kind than expected ends in, in code that is not the library's own reading of settings."""


@contextmanager
def settings_errors(family: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds become one that blames the settings; the library has many kinds of its own."""
    try:
        yield
    except kinds as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"load: config.json must hold what a model of {family} can have. Got something else; the library says: "
            f"{said.rstrip('.')}. Copy it again."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """No messages and no progress bars of the library."""
    verbosity, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()


def check_tensors(found: Mapping[str, Any], ignored: str) -> frozenset[str]:
    """The tensors of the files that the library does not read.

    Args:
        found: The library's loading report.
        ignored: Pattern of those that it need not read.
    Raises:
        MisfitError: Tensors that are missing, unexpected or of another shape.
    """
    unread = frozenset(found["unexpected_keys"])
    unexpected = [name for name in sorted(unread) if not (ignored and re.search(ignored, name))]
    missing = sorted(found["missing_keys"])
    shapes = [
        f"{name}: file {list(stored)}, model {list(own)}" for name, stored, own in sorted(found["mismatched_keys"])
    ]
    if missing or unexpected or shapes:
        raise MisfitError(missing, unexpected, shapes)
    return unread


def _mask_token(folder: Path) -> int | None:
    if not (folder / TOKENIZER).is_file():
        return None
    return tokenizers.Tokenizer.from_file(str(folder / TOKENIZER)).token_to_id(MASK)
