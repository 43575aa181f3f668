"""`load_check`: what a checkpoint folder is, and whether it would open, without holding the model in memory.

    settings                  -> the model without storage: architecture, trained depth, KV rule, parameters
    names and shapes          -> every tensor that is missing, unexpected or misshapen
    tensors, one at a time    -> numbers that are not finite, equal bytes

It applies the rules of `load` (interop/checkpoint.py) and goes on where `load` would stop at the first thing wrong.
An adapter's comparison with its library's own forward needs the whole model, and is left to `load`.
"""

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplab._config import from_dict
from looplab.data.documents import DataError
from looplab.data.tokenizers import FILE as TOKENIZER_FILE
from looplab.data.tokenizers import load_tokenizer
from looplab.interop.assume import RECORDED, answer, readings, recorded
from looplab.interop.checkpoint import find_folder, read_settings, tokenizer_folder
from looplab.interop.convert import MANIFEST, dtype_name
from looplab.interop.pretrained import PREFIX, configuration, is_pretrained
from looplab.interop.published import TIES, Shards, family_of, family_settings
from looplab.models.base import MODELS, LoopedLM, build
from looplab.models.folder import FORMAT, NAMED, WEIGHTS, listing, read_config
from looplab.models.published import (
    PUBLISHED,
    Family,
    MisfitError,
    bare,
    check_computed,
    check_tie,
    configured,
    understand,
)

UNKNOWN = "unknown"
SELF_TEST = "The comparison with the library's own forward was not made; it is when the model is opened."


@dataclass(kw_only=True)
class LoadCheck:
    """What was found. Empty lists mean that nothing was; `problems` are the reasons why the folder would not open."""

    path: str
    kind: str = UNKNOWN
    """"looplab", "published" or "transformers"; "unknown" where nothing says how to open it."""
    family: str = UNKNOWN
    nearest: str = ""
    """Of an unknown family: the known one that its model_type or tensors resemble."""
    loads: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the original does differently, and what `load` would warn of."""
    architecture: dict[str, Any] = field(default_factory=dict)
    trained_depth: str = ""
    kv_rule: str = ""
    parameters: int | None = None
    """Of the model, tied ones once."""
    files: list[str] = field(default_factory=list)
    tensors: int = 0
    bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    ties: list[dict[str, Any]] = field(default_factory=list)
    """{"names": [..], "by": "storage" (in the model, or in the pickle that was converted) or "equal bytes"}."""
    non_finite: dict[str, int] = field(default_factory=dict)
    """Name of a tensor -> how many of its numbers are NaN or infinite."""
    tokenizer: str = ""
    """"bytes", "task" (a model of a task's own tokens), "tokenizer.json", or nothing."""


@dataclass(kw_only=True)
class _Opened:
    """What the families give: the model without storage, and the names in the files that it would read."""

    model: LoopedLM | None = None
    read: frozenset[str] = frozenset()


def load_check(
    path: str | os.PathLike[str], *, family: str = "auto", tie: bool | None = None, assume: str | None = None
) -> LoadCheck:
    """Looks at a folder of looplab, of a published family or of the transformers library.

    Args:
        path: A folder, or the name of a built-in checkpoint.
        family: Name of a published family that the folder is to be read as; "auto": what its files say.
        tie, assume: As for `load`. Recorded logits are not compared, which needs the whole model.
    Raises:
        KeyError: Neither a folder nor a built-in name; an unknown family.
    """
    folder = find_folder(path)
    if family != "auto":
        PUBLISHED[family]
    found = LoadCheck(path=str(path))
    facts = read_settings(folder)
    shards: Shards | None = None
    with _problems(found):
        shards = Shards(folder)
    published: Family | None = None
    with _problems(found):
        published = _named(found, folder, facts, family)
    if published is not None:
        published = _answered(found, published, folder, assume)
    opened = _Opened()
    with _problems(found), _warnings(found):
        if published is None and assume is not None:
            raise ValueError(
                f"load: assume must be None for a folder of no published family. Got {assume!r}. Leave it out."
            )
        if found.kind == FORMAT:
            if tie is not None:
                raise ValueError(f"load: tie must be None for a folder that looplab wrote. Got {tie}. Leave it out.")
            _look_at_ours(found, opened, folder, shards)
        elif published is not None:
            _look_at_published(opened, folder, published, shards, tie)
        elif found.kind == "transformers":
            _look_at_adapter(found, opened, folder, facts or {}, shards, tie)
    if opened.model is not None:
        _describe(found, opened.model)
    if shards is not None:
        _read_tensors(found, shards, opened.read)
        found.ties += _recorded_ties(folder)
    with _problems(found):
        _look_for_tokenizer(found, folder, facts)
    found.problems = list(dict.fromkeys(found.problems))  # a missing file is met more than once
    found.loads = not found.problems
    return found


@contextmanager
def _problems(found: LoadCheck) -> Iterator[None]:
    """What `load` would refuse with becomes a line of `problems`."""
    try:
        yield
    except MisfitError as error:
        found.missing, found.unexpected, found.misshapen = map(list, (error.missing, error.unexpected, error.misshapen))
        found.problems.append(str(error))
    except (ValueError, TypeError, KeyError, OSError, DataError) as error:
        # str(KeyError("x")) puts quotes around the message.
        found.problems.append(str(error.args[0] if isinstance(error, KeyError) and error.args else error))


@contextmanager
def _warnings(found: LoadCheck) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    found.notes += [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def _named(found: LoadCheck, folder: Path, facts: dict[str, Any] | None, wanted: str) -> Family | None:
    """Fills in kind and family; the published family where it is one."""
    if facts is not None and is_pretrained(facts) and wanted == "auto":
        found.kind, found.family = FORMAT, str(facts.get("architecture", UNKNOWN))
        return None
    if facts is not None and facts.get("format") == FORMAT and wanted == "auto":
        found.kind, found.family = FORMAT, str(facts.get("model", UNKNOWN))
        return None
    family = family_of(folder, facts, wanted)
    if family is not None:
        found.kind, found.family = "published", family.name
        found.notes += family.notes
        return family
    if facts is not None and "model_type" in facts:
        from looplab.interop.adapters import ADAPTERS, open_folder  # loads the transformers library

        kind = str(facts["model_type"])
        if kind in ADAPTERS:
            found.kind, found.family = "transformers", kind
            return None
        native = {name for key in PUBLISHED for name in PUBLISHED[key].model_types}
        found.nearest = next(iter(get_close_matches(kind, {*ADAPTERS, *native}, n=1)), "") or _resembling(folder)
        open_folder(folder, facts)  # refuses, in its own words
    found.nearest = _resembling(folder)
    read_config(folder)  # likewise
    return None


def _answered(found: LoadCheck, family: Family, folder: Path, assume: str | None) -> Family:
    """The family with an answer to what its files leave open; names and sizes of tensors are those of any answer."""
    with _problems(found):
        possible = readings(family, folder, assume)
        if possible and recorded(folder):
            found.notes.append(f"Whether {RECORDED} fits is found when the model is opened.")
        elif possible:
            found.notes.append(answer(family, folder, assume).notes[0])
    first = {question: answers[0] for question, answers in family.open_questions.items()}
    return family if family.answered is None else family.answered(first)


def _resembling(folder: Path) -> str:
    """The published family whose tensors those of a folder look like."""
    try:
        names = frozenset(map(bare, Shards(folder)))
    except (OSError, ValueError):
        return ""
    return next((name for name in PUBLISHED if PUBLISHED[name].recognises(names)), "")


def _look_at_ours(found: LoadCheck, opened: _Opened, folder: Path, shards: Shards | None) -> None:
    saved, prefix = read_settings(folder), ""
    config: Any
    if saved is not None and is_pretrained(saved):
        config, prefix = configuration(saved), PREFIX
    else:
        facts = read_config(folder)
        config = from_dict(MODELS[facts["model"]].config_class, facts["config"], path="config.json: config")
    opened.model = build(config, device="meta")
    if shards is None:
        return
    if not prefix and not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"load: {folder} has no {WEIGHTS}. Found: {listing(folder)}")
    # A tie is one tensor under several names; without storage there is no address to tell it by.
    places: dict[int, list[str]] = {}
    own = opened.model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        places.setdefault(id(tensor), []).append(name)
    found.ties += [{"names": names, "by": "storage"} for names in places.values() if len(names) > 1]
    expected = {prefix + names[0]: tuple(own[names[0]].shape) for names in places.values()}
    opened.read = frozenset(shards)
    missing, unexpected = sorted(expected.keys() - shards.keys()), sorted(shards.keys() - expected.keys())
    misshapen = [
        f"{name}: file {list(shards.shapes[name])}, model {list(shape)}"
        for name, shape in sorted(expected.items())
        if shards.shapes.get(name, shape) != shape
    ]
    if missing or unexpected or misshapen:
        raise MisfitError(missing, unexpected, misshapen)


def _places(model: LoopedLM) -> list[list[str]]:
    """The names of every tensor of a model; tied ones have several.

    Without storage there is no address to tell a tie by, but it is one tensor.
    """
    places: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        places.setdefault(id(tensor), []).append(name)
    return list(places.values())


def _look_at_published(opened: _Opened, folder: Path, family: Family, shards: Shards | None, tie: bool | None) -> None:
    _, _, facts = family_settings(folder, family)
    if shards is None:
        return
    facts = facts if tie is None else facts | dict.fromkeys(TIES, tie)
    _, _, opened.model = configured(family, facts, shards.shapes)
    opened.model.reference = family.reference
    opened.read = frozenset(shards)  # until it is known which of them are not read
    _, key_map, named = understand(family, facts, shards.shapes)
    opened.read = frozenset(named[name] for name in key_map.theirs)
    for alias, original in key_map.aliases.items():
        if alias in named and named[alias] != named[original]:
            check_tie(alias, original, shards[named[alias]], shards[named[original]])
    check_computed(key_map, shards)


def _look_at_adapter(
    found: LoadCheck,
    opened: _Opened,
    folder: Path,
    facts: Mapping[str, Any],
    shards: Shards | None,
    tie: bool | None,
) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from looplab.interop.adapters import ADAPTERS, open_folder
    from looplab.interop.adapters.folder import (
        COMPOSITE,
        MISREAD,
        check_tensors,
        check_ties,
        quiet,
        read_config,
        settings_errors,
    )
    from looplab.interop.adapters.inkling2_loop import Inkling2Loop

    family = ADAPTERS[facts["model_type"]]
    if facts["model_type"] not in CONFIG_MAPPING:
        open_folder(folder, facts)  # refuses, in its own words
    if shards is None:
        return
    config = read_config(folder, tie)
    composite = config.model_type == COMPOSITE
    auto = getattr(transformers, "AutoModelForImageTextToText" if composite else family.auto_class)
    with torch.device("meta"), settings_errors(config.model_type, Exception):
        inner_class = type(auto.from_config(config))
    # The library matches the names by its own rules, on tensors that are one number each.
    numbers = {name: torch.zeros(()).expand(shape) for name, shape in shards.shapes.items()}
    with quiet(), settings_errors(config.model_type, Exception):
        inner, report = inner_class.from_pretrained(
            None,
            config=config,
            state_dict=numbers,
            dtype=torch.float32,  # that of `numbers`: a cast would give each its full size
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    with settings_errors(config.model_type, *MISREAD):
        adapter = family.wrap((Inkling2Loop.text_half(inner) if composite else inner).eval())
    opened.model = adapter
    found.notes += [*adapter.notes, SELF_TEST]
    opened.read = frozenset(shards) - frozenset(report["unexpected_keys"])
    check_tensors(report, family.ignored)
    check_ties(inner, tie, shards.get)


def _describe(found: LoadCheck, model: LoopedLM) -> None:
    spec = model.spec
    found.ties += [
        {"names": [name.removeprefix("inner.") for name in names], "by": "storage"}
        for names in _places(model)
        if len(names) > 1
    ]
    found.architecture = {
        "name": spec.name,
        "reference": model.reference,
        "order": str(spec.order),
        "plan": str(spec.plan()),
        "layers": [list(block.layers) for block in spec.blocks],
        "state": {name: part.width for name, part in spec.state.items()},
        "causal": spec.causal,
        "max_positions": spec.max_positions,
        "vocabulary": spec.vocab[0],
        "halt": spec.halt.layout if spec.halt else None,
    }
    found.trained_depth, found.parameters = str(spec.trained_depth), spec.params.total
    found.kv_rule = str(spec.kv_rule) if spec.causal else "none, not causal"


def _read_tensors(found: LoadCheck, shards: Shards, read: frozenset[str]) -> None:
    """Reads every tensor once: sizes, types, numbers that are not finite, equal bytes."""
    found.files, found.tensors = shards.files, len(shards)
    dtypes: Counter[str] = Counter()
    equal: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in shards.items():
        dtypes[dtype_name(tensor.dtype)] += 1
        found.bytes += tensor.nbytes
        bad, constant = _numbers(tensor)
        if bad:
            found.non_finite[name] = bad
            if name in read:
                found.problems.append(f"load: {bad} non-finite values in {name}")
        if not constant:  # norms of ones and biases of zeros are alike without being tied
            digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).digest()
            equal.setdefault((digest, tensor.dtype, tensor.shape), []).append(name)
    found.dtypes = dict(sorted(dtypes.items()))
    found.ties += [{"names": names, "by": "equal bytes"} for names in equal.values() if len(names) > 1]


def _numbers(tensor: Tensor) -> tuple[int, bool]:
    """How many numbers are NaN or infinite, and whether all are the same."""
    if tensor.numel() == 0:
        return 0, True
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    elif tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # 8-bit floats have no comparisons
    low, high = torch.aminmax(tensor)
    # The extremes are NaN where any number is; unlike a mask they take no memory.
    finite = not tensor.is_floating_point() or bool(torch.isfinite(low) & torch.isfinite(high))
    return 0 if finite else int((~torch.isfinite(tensor)).sum()), bool(low == high)


def _recorded_ties(folder: Path) -> list[dict[str, Any]]:
    """Ties by storage of the pickle that `looplab convert` read."""
    try:
        ties = json.loads((folder / MANIFEST).read_bytes())["ties"]
        return [{"names": [kept, name], "by": "storage"} for name, kept in ties.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _look_for_tokenizer(found: LoadCheck, folder: Path, facts: dict[str, Any] | None) -> None:
    if found.kind == FORMAT and (facts or {}).get("tokenizer") in NAMED:
        found.tokenizer = (facts or {})["tokenizer"]
    elif (found.kind == FORMAT and not is_pretrained(facts)) or tokenizer_folder(folder) is not None:
        tokenizer = load_tokenizer(tokenizer_folder(folder) or folder)
        found.tokenizer = TOKENIZER_FILE
        vocabulary = found.architecture.get("vocabulary")
        if vocabulary is not None and tokenizer.vocab_size > vocabulary:
            found.notes.append(f"The tokenizer has {tokenizer.vocab_size} ids, the model {vocabulary}.")
