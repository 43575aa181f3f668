"""Retrofitting: layers of a trained dense model become prelude, looped core and coda of a native looped model.

    source   0 .. P-1 | ...dropped... | A .. B-1 | ...dropped... | L-Q .. L-1
    model    prelude                    core                       coda

    copy        core layer j = layer A + j
    average     core layer j = mean of layers A + j, A + j + n, A + j + 2n, ...       arXiv:2410.20672

    u = W [s ; e], W = [0 | I] or normal         concat-identity, concat-normal       arXiv:2511.07384
    u = s + alpha norm(e), alpha = 0             add-zero; nothing at iteration 0     arXiv:2609.03379

One iteration of concat-identity or add-zero without a boundary is the source with the dropped layers skipped. Under
concat-identity every further iteration gives the same until W is trained: it passes e and not s.

Reference: the surgery of arXiv:2511.07384 (mcleish7/retrofitting-recurrence), whose cuts are TinyLlama 4, 10:18, 4 and
    Llama-3.2-1B and OLMo-2-1B 4-6-4.
Deviations: averages are taken in float64 and stored in the type of the source.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looplab._config import to_dict
from looplab.interop.checkpoint import TOKENIZER_FILES
from looplab.interop.dense_source import DenseSource
from looplab.interop.layer_distance import LayerDistance
from looplab.models.base import build
from looplab.models.dense import DenseConfig
from looplab.models.folder import NAMED, check_finite, listing, save_folder
from looplab.models.looped import Envelope, Looped, LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import NoPE
from looplab.records import dump_json, write_atomic
from looplab.recurrence.boundary import Boundary, NoBoundary
from looplab.recurrence.depth import Depth, FixedDepth
from looplab.recurrence.halting import Halt, NoHalt
from looplab.recurrence.injection import Add, Concat, Injection, Reinjection
from looplab.recurrence.injection.add import LearnedScalar
from looplab.recurrence.injection.base import SkipFirst
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.spec import ParamCount
from looplab.recurrence.state_init import FromEmbeds, StateInit

RECORD = "retrofit.json"
INJECTIONS: dict[str, Reinjection] = {
    "concat-identity": Concat(order="state_first", init="identity"),
    "concat-normal": Concat(order="state_first", init="normal"),
    "add-zero": Add(weight=LearnedScalar(init=0.0)),
}
"""Name on the command line -> injection."""
KEPT = {"embedding", "final_norm", "lm_head"}
"""Parts of a looped model that a dense one has under the same name."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The run of `length` layers that changes the stream least."""

    length: int

    def __str__(self) -> str:
        return f"auto:{self.length}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Layers start .. stop - 1."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which layers of the source stand where."""

    layers: int
    """Layers of the source."""
    prelude: tuple[int, ...]
    core: tuple[tuple[int, ...], ...]
    """Per stored core layer, the layers that it is made of: one, or several whose mean it is."""
    coda: tuple[int, ...]

    @property
    def dropped(self) -> tuple[int, ...]:
        """Layers that the model does not have."""
        kept = {*self.prelude, *self.coda, *(layer for group in self.core for layer in group)}
        return tuple(layer for layer in range(self.layers) if layer not in kept)

    @property
    def rounds(self) -> int:
        """How many layers each core layer is made of: iterations that the source ran of it, so to speak."""
        return len(self.core[0])


def cut_layers(
    layers: int,
    core: Run | Auto,
    *,
    prelude: int | None = None,
    coda: int | None = None,
    average: int | None = None,
    distance: LayerDistance | None = None,
) -> Cut:
    """The cut of a model of `layers` layers.

    Args:
        core: Layers that are looped.
        prelude: Number of first layers; None: all before the core.
        coda: Number of last layers; None: all after the core.
        average: Stored core layers, each the mean of every so-many-th; None: every layer is its own.
        distance: What `Auto` chooses by; None: the first run, which tells wrong ranges before anything is measured.
    Raises:
        ValueError: Ranges that are empty, overlap or exceed the model; a core that `average` does not divide.
    """
    for name, count in (("prelude", prelude), ("coda", coda)):
        if count is not None and count < 0:
            raise ValueError(
                f"retrofit: {name} must be a number of layers from 0 on. Got {count}. Leave it out for all."
            )
    before, after = prelude or 0, coda or 0
    has = f"the model has {layers} layers"
    if isinstance(core, Auto):
        if core.length < 1:
            raise ValueError(f"retrofit: core {core} is empty; {has}. Give auto:n with n from 1 on.")
        if before + core.length + after > layers:
            raise ValueError(f"retrofit: prelude {before}, core {core} and coda {after} overlap; {has}")
        start = before if distance is None else distance.least(core.length, first=before, stop=layers - after)
        core = Run(start=start, stop=start + core.length)
    if not 0 <= core.start < core.stop:
        raise ValueError(f"retrofit: core {core} is empty; {has}. Give A:B with 0 <= A < B.")
    if core.stop > layers:
        raise ValueError(f"retrofit: core {core} exceeds the layers; {has}. Give A:B with B at most {layers}.")
    if before > core.start:
        raise ValueError(f"retrofit: prelude {before} and core {core} overlap; {has}")
    if core.stop > layers - after:
        raise ValueError(f"retrofit: core {core} and coda {after} overlap; {has}")
    length = core.stop - core.start
    stored = length if average is None else average
    if stored < 1 or length % stored:
        raise ValueError(
            f"retrofit: average must divide the {length} layers of core {core}. Got {average}. "
            f"Choose one of {', '.join(str(n) for n in range(1, length + 1) if length % n == 0)}."
        )
    return Cut(
        layers=layers,
        prelude=tuple(range(core.start if prelude is None else prelude)),
        core=tuple(tuple(range(core.start + j, core.stop, stored)) for j in range(stored)),
        coda=tuple(range(core.stop if coda is None else layers - coda, layers)),
    )


def looped_config(
    dense: DenseConfig,
    cut: Cut,
    *,
    injection: Injection = INJECTIONS["concat-identity"],
    state_init: StateInit = FromEmbeds(),  # noqa: B008, frozen
    skip_first: bool = False,
    boundary: Boundary = NoBoundary(),  # noqa: B008, frozen
    halt: Halt = NoHalt(),  # noqa: B008, frozen
    num_steps: int | None = None,
    trained_depth: Depth | None = None,
) -> LoopedConfig:
    """The configuration of the model that the cut makes.

    Args:
        skip_first: Iteration 0 runs without the injection (the published start "skip-adapter").
        num_steps: Iterations that the model runs by itself; None: what the source ran.
        trained_depth: None: what the source ran, `FixedDepth(num_steps=cut.rounds)`.
    Raises:
        ValueError: An injection that needs another start; averaged layers whose positions differ; what the
            configuration itself refuses.
    """
    silent = isinstance(injection, Add) or skip_first
    if silent and not isinstance(state_init, FromEmbeds):
        raise ValueError(
            "retrofit: state-init must be embeds where nothing is injected at iteration 0. Got "
            f"{type(state_init).__name__}. The core would start without the tokens: use embeds or a concat injection."
        )
    if skip_first:
        if not isinstance(injection, Concat):
            raise ValueError(
                f"retrofit: state-init skip-adapter needs a concat injection. Got {type(injection).__name__}. "
                "add-zero leaves iteration 0 alone anyway: use embeds."
            )
        injection = replace(injection, when=SkipFirst())
    groups = [*((i,) for i in cut.prelude), *cut.core, *((i,) for i in cut.coda)]
    unrotated = []
    for stored, group in enumerate(groups):
        without = [layer for layer in group if layer in dense.unrotated_layers]
        if without and len(without) < len(group):
            raise ValueError(
                f"retrofit: averaged layers must agree in positions. Got layers {list(group)}, of which {without} "
                "have no rotary positions. Choose another core or average."
            )
        unrotated += [stored] if without else []
    steps = cut.rounds if num_steps is None else num_steps
    return LoopedConfig(
        dim=dense.dim,
        vocab=dense.vocab,
        attention=dense.attention,
        ffn=dense.ffn,
        order=ModelLoop(num_steps=steps),
        trained_depth=trained_depth or FixedDepth(num_steps=cut.rounds),
        blocks=(len(cut.core),),
        envelope=Envelope(prelude=len(cut.prelude), coda=len(cut.coda)),
        injection=injection,
        state_init=state_init,
        boundary=boundary,
        halt=halt,
        norm=dense.norm,
        placement=dense.placement,
        head=dense.head,
        embed_scale=dense.embed_scale,
        padded_vocab=dense.padded_vocab,
        max_positions=dense.max_positions,
        unrotated_layers=tuple(unrotated),
        init=dense.init,
    )


def announced(config: LoopedConfig) -> ParamCount:
    """Parameters of the model that `retrofit` will make, without making it."""
    return build(config, device="meta").spec.params


def retrofit(
    tensors: Mapping[str, Tensor], cut: Cut, config: LoopedConfig, *, seed: int = 0, dtype: torch.dtype | None = None
) -> Looped:
    """The looped model, in eval mode. Tensors are read one at a time, so no more is held than the model and one shard.

    Args:
        tensors: Of the dense source, by their names in models/dense.py (`DenseSource.tensors`).
        seed: Of the parameters that the source does not have.
        dtype: Of all parameters; None: those of the source.
    Raises:
        ValueError: A tensor of the source that is not finite.
    """
    with torch.device("meta"):
        model = Looped(config)
    fresh = _fresh(config, seed)
    own = dtype or tensors["embedding.weight"].dtype
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        sources = _sources(name, cut)
        parts = [tensors[source] for source in sources]
        for source, part in zip(sources, parts, strict=True):
            check_finite(source, part)
        # A copy: the parts are views of a mapped file, or belong to another model.
        value = fresh[name].to(own) if not parts else _mean(parts).to(dtype or parts[0].dtype, copy=True)
        state[name] = value.contiguous()
    model.load_state_dict(state, assign=True)
    return model.eval()


def _sources(name: str, cut: Cut) -> list[str]:
    """Names in the dense model whose mean a tensor of the looped one is; none: it is new."""
    part, _, rest = name.partition(".")
    if part in KEPT:
        return [name]
    groups = {"prelude": [(i,) for i in cut.prelude], "core": cut.core, "coda_layers": [(i,) for i in cut.coda]}
    if part not in groups:
        return []
    index, _, leaf = rest.partition(".")
    return [f"layers.{layer}.{leaf}" for layer in groups[part][int(index)]]


def _mean(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    total = parts[0].double()
    for part in parts[1:]:
        total = total + part.double()
    return (total / len(parts)).to(parts[0].dtype)


def _fresh(config: LoopedConfig, seed: int) -> dict[str, Tensor]:
    """First values of everything the source lacks, out of a model whose layers and vocabulary are minute."""
    small = replace(
        config,
        vocab=1,
        padded_vocab=None,
        attention=Attention(heads=1, kv_heads=1, head_dim=1, position=NoPE()),
        ffn=SwiGLU(hidden=1),
        unrotated_layers=(),
    )
    return build(small, seed=seed).state_dict()


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a retrofit was: written as retrofit.json, and without the table into config.json."""

    source: str
    family: str
    sha256: dict[str, str]
    """Weight file of the source -> its hash; empty before anything is read."""
    cut: Cut
    source_parameters: int
    parameters: int
    groups: dict[str, int]
    """Parameters by group, those that are not zero."""
    injection: str
    seed: int
    dtype: str
    model_bytes: int
    """Bytes of the model's weights."""
    peak_bytes: int
    """Weights held at once: the model, or the source while it is measured, and one mapped shard."""
    config: dict[str, Any] = field(repr=False)
    """Configuration of the model."""
    distance: LayerDistance | None = field(repr=False)


def make_record(
    source: DenseSource,
    cut: Cut,
    config: LoopedConfig,
    *,
    injection: str,
    seed: int,
    dtype: torch.dtype | None,
    distance: LayerDistance | None,
    sha256: Mapping[str, str] | None = None,
) -> Record:
    """What the retrofit will be; nothing of the weights is read but the type of the embedding."""
    params, kept = announced(config), build(source.config, device="meta").spec.params
    groups = {name: getattr(params, name) for name in ("embedding", "position", "prelude", "injection")}
    groups |= {"core": sum(params.core)}
    groups |= {name: getattr(params, name) for name in ("coda", "readout", "head", "halt")}
    own = dtype or source.tensors["embedding.weight"].dtype
    size = params.total * own.itemsize
    return Record(
        source=source.name,
        family=source.family.name,
        sha256=dict(sha256 or {}),
        cut=cut,
        source_parameters=kept.total,
        parameters=params.total,
        groups={name: count for name, count in groups.items() if count},
        injection=injection,
        seed=seed,
        dtype=str(own).removeprefix("torch."),
        model_bytes=size,
        peak_bytes=max(size, source.nbytes if distance is not None else 0) + source.largest_shard,
        config=to_dict(config),
        distance=distance,
    )


def refuse_full(out: Path) -> None:
    """Raises FileExistsError where the output folder holds files."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(
            f"retrofit: OUT must be a new or empty folder. Got {out}, which has {listing(out)}. Choose another folder."
        )


def save_retrofit(
    out: Path, model: Looped, record: Record, *, tokenizer: str | Path, token_ids: Mapping[str, int] | None = None
) -> None:
    """Writes the folder that `looplab.load` opens, and retrofit.json with the record."""
    kept = {"source": record.source, "family": record.family, "sha256": record.sha256, "cut": to_dict(record.cut)}
    trained = {"retrofit": {**kept, "injection": record.injection, "seed": record.seed}}
    save_folder(out, model, tokenizer=tokenizer, token_ids=token_ids, trained=trained)
    if tokenizer not in NAMED:
        for name in TOKENIZER_FILES[1:]:
            if (beside := Path(tokenizer).parent / name).is_file():
                shutil.copyfile(beside, out / name)
    write_atomic(out / RECORD, dump_json(record))
