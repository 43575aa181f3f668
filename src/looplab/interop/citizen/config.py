"""LooplabConfig: what the transformers library is told of one of our models.

    architecture, model, schema        the registered name and the configuration, from which the model is made
    hidden_size, vocab_size, ...       the same facts under the library's names, for those who read only these
    num_hidden_layers                  stored layers
    total_num_hidden_layers            slots of the key-value cache: a layer that runs r times has up to r of them

The plain facts follow from `model`; a file in which they say something else is refused.
"""

import copy
import functools
import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from looplab._config import from_dict, to_dict
from looplab.interop.pretrained import MODEL_TYPE, SCHEMA, configuration
from looplab.models.base import MODELS, LoopedLM, build
from looplab.recurrence.kv.base import KVRule
from looplab.recurrence.plan import Steps, check_steps
from looplab.recurrence.spec import LoopSpec

CODE = "modeling_looplab.py"
"""File in a saved folder through which `trust_remote_code=True` finds our classes; all of it is one import."""

CODE_TEXT = '''"""The classes of this checkpoint are those of the package looplab: pip install looplab."""

from looplab.interop.citizen import LooplabConfig, LooplabForCausalLM

__all__ = ["LooplabConfig", "LooplabForCausalLM"]
'''

AUTO_MAP = {
    "AutoConfig": "modeling_looplab.LooplabConfig",
    "AutoModel": "modeling_looplab.LooplabForCausalLM",
    "AutoModelForCausalLM": "modeling_looplab.LooplabForCausalLM",
}


class LooplabConfig(PreTrainedConfig):
    """Settings of a looplab model for the transformers library.

    Args:
        architecture: Registered name of the model's class, such as "looped".
        model: The configuration of that class, as `looplab._config.to_dict` writes it.
        schema: Version of these settings.
        tokenizer: "bytes" where the model reads raw bytes; None: what lies beside the weights.
        inflated_to: Set by `inflated`.
        kwargs: Settings of the library, and the plain facts, which are checked against `model`.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["cache", "past_key_values", "steps"]  # noqa: RUF012, as the library has it

    def __init__(
        self,
        architecture: str | None = None,
        model: dict[str, Any] | None = None,
        schema: int = SCHEMA,
        tokenizer: str | None = None,
        inflated_to: Any = None,
        **kwargs: Any,
    ):
        steps = tuple(inflated_to) if isinstance(inflated_to, list) else inflated_to
        told = {"architecture": architecture, "model": model, "schema": schema}
        plain = {} if architecture is None and model is None else plain_facts(told)
        if steps is not None:
            plain["num_hidden_layers"] = cache_slots(spec_of(told), steps)
        for name, value in plain.items():
            given = kwargs.pop(name, value)
            if given != value:
                raise ValueError(
                    f"config.json: {name} must be {value}, as its entry 'model' says. Got {given}. "
                    "Remove the entry, or copy the file again"
                )
        super().__init__(**kwargs)
        self.architecture, self.model, self.schema = architecture, model, schema
        self.tokenizer, self.inflated_to, self.auto_map = tokenizer, steps, dict(AUTO_MAP)
        for name, value in plain.items():
            setattr(self, name, value)

    @classmethod
    def of(cls, model: LoopedLM, *, tokenizer: str | None = None) -> "LooplabConfig":
        """The settings of an existing model.

        Raises:
            ValueError: The model is none of ours, or not causal.
        """
        name = next((name for name in MODELS if MODELS[name] is type(model)), None)
        if name is None:
            inner = " It wraps a model of the transformers library: use its attribute `inner`." * hasattr(
                model, "inner"
            )
            raise ValueError(
                f"LooplabForCausalLM: model must be of a registered class ({', '.join(MODELS)}). "
                f"Got {type(model).__name__}.{inner}"
            )
        check_causal(model.spec)
        return cls(architecture=name, model=to_dict(model.config), tokenizer=tokenizer)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing to do: every saved folder names its classes and carries `modeling_looplab.py`."""

    @property
    def looped(self) -> Any:
        """The configuration of our model."""
        return configuration(self._told())

    @property
    def total_num_hidden_layers(self) -> int:
        """Slots of the key-value cache at the model's own depth, under its own rule."""
        return cache_slots(spec_of(self._told()))

    def inflated(self, num_steps: Steps | None = None) -> "LooplabConfig":
        """A copy whose num_hidden_layers is the number of cache slots, for paged caches and exporters.

        Args:
            num_steps: Depth that is to be run; None: the model's own.
        """
        spec = spec_of(self._told())
        inflated = copy.deepcopy(self)
        inflated.inflated_to = spec.default_steps if num_steps is None else check_steps(num_steps)
        inflated.num_hidden_layers = cache_slots(spec, inflated.inflated_to)
        return inflated

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes config.json, and the file through which `trust_remote_code=True` finds our classes."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CODE).write_text(CODE_TEXT)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def _told(self) -> dict[str, Any]:
        return {"architecture": self.architecture, "model": self.model, "schema": self.schema}


def plain_facts(told: dict[str, Any]) -> dict[str, Any]:
    """What the library calls the sizes of a model.

    Args:
        told: Entries `architecture`, `model`, `schema`.
    """
    spec, config = spec_of(told), configuration(told)
    attention = config.attention
    stored = {layer for block in spec.blocks for layer in block.layers}
    return {
        "hidden_size": config.dim,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": spec.vocab[0],
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": config.head.tied,
        "num_hidden_layers": len(stored) + spec.cost.prelude.layers + spec.cost.coda.layers,
    }


def spec_of(told: dict[str, Any]) -> LoopSpec:
    """What a model of these settings declares; it is built without storage, once.

    Raises:
        ValueError: The model is not causal, or what `configuration` refuses.
    """
    configuration(told)  # its errors, before anything is looked up
    spec = _spec(told["architecture"], json.dumps(told["model"], sort_keys=True))
    check_causal(spec)
    return spec


def check_causal(spec: LoopSpec) -> None:
    """Refuses a model that does not read left to right."""
    if not spec.causal:
        raise ValueError(
            f"LooplabForCausalLM: model must be causal. Got {spec.name}, whose positions see both directions: it has "
            "no next token to generate. Call looplab.forward on the model itself"
        )


def cache_slots(spec: LoopSpec, num_steps: Steps | None = None, rule: KVRule | None = None) -> int:
    """Slots of a key-value cache: one per layer outside the loop, those of the rule per layer inside."""
    rule, iterations = rule or spec.kv_rule, spec.plan(num_steps).iterations()
    core = sum(spec.cost.blocks[block].layers * rule.slots(count) for block, count in iterations.items())
    return spec.cost.prelude.layers + core + spec.cost.coda.layers


@functools.lru_cache(maxsize=64)
def _spec(architecture: str, model: str) -> LoopSpec:
    return build(from_dict(MODELS[architecture].config_class, json.loads(model)), device="meta").spec
