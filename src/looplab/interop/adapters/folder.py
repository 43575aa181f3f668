"""Folders of the transformers library: a configuration and safetensors, opened strictly to the last tensor.

Nothing is unpickled, nothing is downloaded and no code of the folder runs. Errors are worded as for our own folders.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as library_logging

from looplab.interop.adapters.albert import Albert
from looplab.interop.adapters.base import ADAPTERS, Adapter
from looplab.interop.adapters.inkling2_loop import Inkling2Loop
from looplab.models.folder import FORMAT, TOKENIZER, check_size, listing, refuse_pickles
from looplab.models.published import PUBLISHED

WEIGHTS = "*.safetensors"
MASK = "[MASK]"
COMPOSITE = "inkling2_loop"


def open_folder(
    folder: Path, facts: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Adapter:
    """The adapter of a folder, in eval mode, after its self-test.

    Args:
        facts: What the folder's `config.json` says; `model_type` names the family.
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
    _check_files(folder)
    adapter = adapter_class.wrap(_opened(folder, adapter_class, dtype).to(device).eval())
    if isinstance(adapter, Albert):
        adapter.mask_token = _mask_token(folder)
    adapter.eval().verify()
    return adapter


def _opened(folder: Path, adapter_class: type[Adapter], dtype: torch.dtype) -> Any:
    """The library's model, every tensor of which came from the folder."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    auto = "AutoModelForImageTextToText" if config.model_type == COMPOSITE else adapter_class.auto_class
    with quiet():  # its report of missing tensors is our error
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
    _check_tensors(found, adapter_class.ignored)
    for name, tensor in inner.state_dict().items():
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            raise ValueError(f"load: {bad} non-finite values in {name}")
    return Inkling2Loop.text_half(inner) if config.model_type == COMPOSITE else inner


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


def _check_files(folder: Path) -> None:
    weights = sorted(folder.glob(WEIGHTS))
    if not weights:
        refuse_pickles(folder)
        raise FileNotFoundError(f"load: {folder} has no {WEIGHTS}. Found: {listing(folder)}")
    for file in weights:
        check_size(file)


def _check_tensors(found: Mapping[str, Any], ignored: str) -> None:
    unexpected = [name for name in sorted(found["unexpected_keys"]) if not (ignored and re.search(ignored, name))]
    shapes = [
        f"{name}: file {list(stored)}, model {list(own)}" for name, stored, own in sorted(found["mismatched_keys"])
    ]
    lists = {"missing": sorted(found["missing_keys"]), "unexpected": unexpected, "of wrong shape": shapes}
    problems = [
        f"{len(names)} {what} ({names[0]}{', ...' if len(names) > 1 else ''})" for what, names in lists.items() if names
    ]
    if problems:
        count, rest = problems[0].split(" ", 1)
        first = f"{count} tensor{'' if count == '1' else 's'} {rest}"
        raise ValueError(f"load: {', '.join([first, *problems[1:]])}")


def _mask_token(folder: Path) -> int | None:
    if not (folder / TOKENIZER).is_file():
        return None
    return tokenizers.Tokenizer.from_file(str(folder / TOKENIZER)).token_to_id(MASK)
