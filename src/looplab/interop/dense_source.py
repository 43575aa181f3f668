"""Dense checkpoints as our own layers: where retrofitting starts.

    llama qwen2 qwen3 mistral olmo2 smollm3     a folder of the transformers library, opened as models/dense.py
    looplab                                     a folder of models/dense.py itself

The settings are read by the library's own configuration class, so its defaults hold. A setting for which our layers
have no place is refused by its name; nothing is approximated. Tensors are strict to the last name and read when asked.

    family   layer         norm of q and k        biases     positions
    llama    pre-norm      none                   none       rotary, plain or Llama 3
    mistral  pre-norm      none                   none       the same; one window for all layers
    qwen2    pre-norm      none                   q, k, v    rotary; a window for all layers or none
    qwen3    pre-norm      each head              none       rotary after the norm
    olmo2    branch-only   all heads together     none       rotary after the norm
    smollm3  pre-norm      none                   none       rotary, except in layers that the file names
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from looplab._config import from_dict
from looplab.data.tokenizers import FILE as TOKENIZER_FILE
from looplab.data.tokenizers import SPECIALS, FileTokenizer
from looplab.interop.checkpoint import find_folder, read_settings, tokenizer_folder
from looplab.interop.published import Shards
from looplab.models.dense import Dense, DenseConfig
from looplab.models.folder import CONFIG, FORMAT, NAMED, listing
from looplab.models.published import Family, KeyMap, Rename, Rule, assemble, check_tie, understand
from looplab.nn.attention import RMS, Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import FeedForward, GeGLU, SwiGLU
from looplab.nn.norm import BranchOnly, PreNorm, RMSNorm
from looplab.nn.rope import Llama3, Rope

FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
"""Values of model_type that have native layers."""
ROTARY = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
"""A table that old files carry; it is made anew."""
MATRICES = {
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
}
PRE_NORMS = {"input_layernorm": "attn_in", "post_attention_layernorm": "ffn_in"}
BRANCH_NORMS = {"post_attention_layernorm": "attn_out", "post_feedforward_layernorm": "ffn_out"}
ACTIVATIONS = {"silu": SwiGLU, "gelu": GeGLU}


class Renamed(Mapping[str, Tensor]):
    """Tensors of a dense model under our names, each read from the file when asked for."""

    def __init__(self, shards: Shards, names: Mapping[str, str]):
        self._shards, self._names = shards, names

    def __getitem__(self, name: str) -> Tensor:
        return self._shards[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, kw_only=True)
class DenseSource:
    """A dense checkpoint, understood and not yet read."""

    name: str
    """As it was given: a folder or a built-in name."""
    folder: Path
    family: Family
    facts: Mapping[str, Any]
    """What its config.json says."""
    config: DenseConfig
    shards: Shards
    tensors: Mapping[str, Tensor]
    """Name in the state dict of models/dense.py -> tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files."""
        return sum((self.folder / file).stat().st_size for file in self.shards.files)

    @property
    def largest_shard(self) -> int:
        """Bytes of the largest weight file."""
        return max((self.folder / file).stat().st_size for file in self.shards.files)

    def hashes(self) -> dict[str, str]:
        """Name of every weight file -> its SHA-256, as model hubs list it. Reads them all."""
        found = {}
        for name in self.shards.files:
            with (self.folder / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return found

    def model(self, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Dense:
        """The whole dense model, in eval mode, in the types of the file unless `dtype` says otherwise."""
        made = assemble(self.family, self.facts, self.shards, shapes=self.shards.shapes, dtype=dtype, device=device)
        assert isinstance(made, Dense)
        return made

    def tokenizer(self) -> tuple[str | Path, dict[str, int]] | None:
        """What `save_folder` needs to keep the tokenizer: a name, or a file with its special ids; None: there is none.

        Raises:
            DataError: The file is no tokenizer.
        """
        if self.facts.get("format") == FORMAT and self.facts["tokenizer"] in NAMED:
            return self.facts["tokenizer"], {}
        home = tokenizer_folder(self.folder)
        if home is None:
            return None
        known = FileTokenizer(home)
        return home / TOKENIZER_FILE, {name: i for name in SPECIALS if (i := getattr(known, name)) is not None}


def open_dense(path: str) -> DenseSource:
    """A dense checkpoint: its settings and names are checked, its weights not yet read.

    Args:
        path: A folder, or the name of a built-in checkpoint.
    Raises:
        KeyError: Neither a folder nor a built-in name.
        FileNotFoundError: No settings or no weights.
        ValueError: Another family, a setting without a native place, pickled or broken weights, tensors that do not
            fit; every message says what to do.
    """
    folder = find_folder(path)
    facts = read_settings(folder)
    if facts is None:
        raise FileNotFoundError(f"load: {folder} has no readable {CONFIG}. Found: {listing(folder)}")
    family = _family(folder, facts)
    shards = Shards(folder)
    config, key_map, named = understand(family, facts, shards.shapes)
    for alias, original in key_map.aliases.items():
        if alias in named and named[alias] != named[original]:
            check_tie(alias, original, shards[named[alias]], shards[named[original]])
    names = {ours: named[theirs] for rule in key_map.rules for ours, theirs in zip(rule.ours, rule.theirs, strict=True)}
    return DenseSource(
        name=str(path),
        folder=folder,
        family=family,
        facts=facts,
        config=config,
        shards=shards,
        tensors=Renamed(shards, names),
    )


def _family(folder: Path, facts: Mapping[str, Any]) -> Family:
    """How the files of this folder become a dense model."""
    kind = facts.get("model") if facts.get("format") == FORMAT else facts.get("model_type")
    if facts.get("format") == FORMAT and kind == "dense":
        return Family(
            name="dense",
            model_types=(),
            reference=Dense.reference,
            config=lambda facts, shapes: from_dict(DenseConfig, facts["config"], path=f"{folder / CONFIG}: config"),
            key_map=_own_names,
            build=Dense,
        )
    if kind not in FAMILIES:
        raise ValueError(
            f"retrofit: CHECKPOINT must be a dense model of {', '.join(FAMILIES)}, or a folder of looplab's own "
            f"'dense'. Got {kind!r}. Take a checkpoint of one of these."
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return Family(
        name=str(kind),
        model_types=(str(kind),),
        reference="through transformers",
        config=lambda facts, shapes: dense_config(config),
        key_map=lambda ours: _library_names(str(kind), ours),
        build=Dense,
    )


def dense_config(c: Any) -> DenseConfig:
    """Our configuration of a configuration object of the transformers library.

    Raises:
        ValueError: A setting that our layers have no place for, by its name.
    """
    family = c.model_type
    for name, wanted in (("attention_bias", False), ("mlp_bias", False)):
        if getattr(c, name, wanted) != wanted:
            raise _no_place(name, repr(wanted), getattr(c, name))
    normed_branches, heads = family == "olmo2", c.num_attention_heads
    norms = {"qwen3": "head", "olmo2": "full"}
    rotated = getattr(c, "no_rope_layers", None) or (1,) * c.num_hidden_layers  # 1: rotary, whatever the name says
    return DenseConfig(
        dim=c.hidden_size,
        vocab=c.vocab_size,
        layers=c.num_hidden_layers,
        attention=Attention(
            heads=heads,
            kv_heads=c.num_key_value_heads or heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
            position=_rope(c),
            qk_norm=RMS(affine=True, over=norms[family], eps=c.rms_norm_eps) if family in norms else None,  # type: ignore[arg-type]
            qkv_bias=family == "qwen2",
            window=_window(c),
        ),
        ffn=_feed_forward(c),
        norm=RMSNorm(eps=c.rms_norm_eps),
        placement=BranchOnly() if normed_branches else PreNorm(),
        head=Head(tied=bool(c.tie_word_embeddings)),
        max_positions=c.max_position_embeddings,
        unrotated_layers=tuple(i for i in range(c.num_hidden_layers) if not rotated[i]),
        init=Init(std=c.initializer_range),
    )


def _feed_forward(c: Any) -> FeedForward:
    if c.hidden_act not in ACTIVATIONS:
        raise _no_place("hidden_act", " or ".join(map(repr, ACTIVATIONS)), c.hidden_act)
    return ACTIVATIONS[c.hidden_act](hidden=c.intermediate_size)


def _rope(c: Any) -> Rope:
    given = dict(c.rope_parameters or {})
    kind = given.get("rope_type", "default")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise _no_place("partial_rotary_factor", "1", given["partial_rotary_factor"])
    base = float(given["rope_theta"])
    if kind == "default":
        return Rope(base=base, order="after_norm")
    if kind != "llama3":
        raise _no_place("rope_type", "'default' or 'llama3'", kind)
    scaling = Llama3(
        factor=float(given["factor"]),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
        original_max_positions=given["original_max_position_embeddings"],
    )
    return Rope(base=base, order="after_norm", scaling=scaling)


def _window(c: Any) -> int | None:
    """The window of every layer; None: all positions."""
    size = getattr(c, "sliding_window", None)
    if c.model_type == "mistral" or size is None:
        return size
    sliding = {kind == "sliding_attention" for kind in c.layer_types}
    if len(sliding) > 1:
        raise _no_place("layer_types", "the same for all layers", sorted(set(c.layer_types)))
    return size if True in sliding else None


def _no_place(name: str, wanted: str, got: Any) -> ValueError:
    return ValueError(
        f"retrofit: {name} in CHECKPOINT's config.json must be {wanted}. Got {got!r}, which our layers have no place "
        "for. Take a checkpoint without it."
    )


def _library_names(family: str, c: DenseConfig) -> KeyMap:
    """Names of a file of the library, without the prefix "model."."""
    rules: list[Rule] = [
        Rename("embed_tokens.weight", "embedding.weight"),
        Rename("norm.weight", "final_norm.weight"),
    ]
    weights = MATRICES | (BRANCH_NORMS if family == "olmo2" else PRE_NORMS)
    weights |= {f"self_attn.{n}": f"attn.{n}" for n in ("q_norm", "k_norm") if c.attention.qk_norm is not None}
    for i in range(c.layers):
        rules += [
            Rename(f"layers.{i}.{theirs}.weight", f"layers.{i}.{ours}.weight") for theirs, ours in weights.items()
        ]
        biased = "qkv" if c.attention.qkv_bias else ""
        rules += [Rename(f"layers.{i}.self_attn.{x}_proj.bias", f"layers.{i}.attn.{x}.bias") for x in biased]
    if c.head.tied:
        return KeyMap(tuple(rules), ignorable=(ROTARY,), aliases={"lm_head.weight": "embed_tokens.weight"})
    return KeyMap((*rules, Rename("lm_head.weight", "lm_head.own_weight")), ignorable=(ROTARY,))


def _own_names(c: DenseConfig) -> KeyMap:
    """Names of a folder of looplab: the model's own."""
    with torch.device("meta"):
        return KeyMap(tuple(Rename(name, name) for name in Dense(c).state_dict()))
