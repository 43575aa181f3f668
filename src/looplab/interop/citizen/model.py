"""LooplabForCausalLM: one of our models as a causal language model of the transformers library.

    logits = head(coda(s_K)),   s_K by recurrence/loop.py at num_steps, or where an exit rule stops each token
    loss   = cross-entropy of the next token at that depth, and nothing else

Depth, exits, noise and the cache rule are arguments of `forward`, and so of `generate`. Which applications carry
gradient is the attribute `gradient`; the library's switch for gradient checkpointing recomputes application by
application. The class holds a `LoopedLM` as `model` and computes nothing itself.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from looplab._types import Float, Int
from looplab.data.tokenizers import ByteTokenizer
from looplab.interop.checkpoint import LoadedModel
from looplab.interop.citizen.arguments import exit_of, items_of, positions_of, prompt_items, refuse, valid_of
from looplab.interop.citizen.cache import LoopCache, own_cache
from looplab.interop.citizen.config import LooplabConfig
from looplab.interop.citizen.weighted import weighted_logits
from looplab.models.base import MODELS, LoopedLM
from looplab.models.published import misfit
from looplab.recurrence import state as states
from looplab.recurrence.exit import ExitRule, exit_points, forward_until
from looplab.recurrence.gradient import CheckpointApplication, FullBPTT, GradientStrategy
from looplab.recurrence.kv import Cache, CopyLast, DepthIndexed, KVRule
from looplab.recurrence.loop import forward

_PREPARE = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _PREPARE else "past_key_values"
"""What the installed version of the library calls the cache."""

PER_ROW = ("num_steps", "item_ids")
"""Arguments of `generate` with one entry per prompt; they are repeated for beams and for several answers."""

OURS = frozenset({
    *PER_ROW, "exit_rule", "exit_threshold", "exit_step", "weighted_exit", "noise_seed", "kv_rule",
})  # fmt: skip
"""Arguments of `forward` that no other model has."""

NOISE_BITS = 2**64


@dataclass
class LooplabOutput(CausalLMOutputWithPast):
    """The library's output, and after how many steps each token was read."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    steps: Tensor | None = None
    """Int[batch seq], where exits were asked for."""


class LooplabForCausalLM(PreTrainedModel, GenerationMixin):
    """A looped language model of looplab for the transformers library."""

    config_class = LooplabConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True
    # A tied head of ours reads the embedding's table and has none of its own, so no two stored tensors are tied.
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012, as the library has it

    def __init__(self, config: LooplabConfig, looped: LoopedLM | None = None):
        """A fresh model of `config`, or `looped` itself."""
        super().__init__(config)
        if looped is None:
            own = config.looped
            looped = MODELS[str(config.architecture)](own)  # type: ignore[call-arg]
        self.model = looped
        self._gradient: GradientStrategy = FullBPTT()
        self.gradient_checkpointing = False  # set by the library's switch
        self.post_init()

    @classmethod
    def wrap(cls, model: LoopedLM, *, tokenizer: str | None = None) -> "LooplabForCausalLM":
        """The class around an existing model, which it shares.

        Args:
            model: Of a registered class, and causal.
            tokenizer: "bytes" for a model of raw bytes, so that `looplab.load` knows it.
        Raises:
            ValueError: A model of another class, or one that is not causal.
        """
        config = LooplabConfig.of(model, tokenizer=tokenizer)
        config.dtype = next(model.parameters()).dtype
        return cls(config, looped=model).train(model.training)

    @classmethod
    def from_looplab(cls, loaded: LoadedModel) -> "LooplabForCausalLM":
        """The class around what `looplab.load` opened; the tokenizer is not part of it, save for the name "bytes"."""
        return cls.wrap(loaded.model, tokenizer="bytes" if isinstance(loaded.tokenizer, ByteTokenizer) else None)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in the library, but strict: safetensors only, and every tensor has to fit.

        Raises:
            ValueError: Missing, unexpected or misshapen tensors.
        """
        wants = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("use_safetensors", True)
        opened: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        model, found = opened
        shapes = [f"{n}: file {list(a)}, model {list(b)}" for n, a, b in sorted(found["mismatched_keys"])]
        missing, unexpected = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
        if missing or unexpected or shapes:
            raise ValueError(f"load: {misfit(missing, unexpected, shapes)}")
        return (model, found) if wants else model

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModelForCausalLM") -> None:
        """Nothing to do: every saved folder names its classes and carries `modeling_looplab.py`."""

    @property
    def gradient(self) -> GradientStrategy:
        """Which applications carry gradient: `FullBPTT()` at first; `TruncatedBPTT(window=8)` for a window."""
        return self._gradient

    @gradient.setter
    def gradient(self, strategy: GradientStrategy) -> None:
        if not isinstance(strategy, GradientStrategy):
            raise TypeError(f"gradient must be a strategy such as TruncatedBPTT(window=8). Got {strategy!r}.")
        self._gradient = strategy

    @property
    def strategy(self) -> GradientStrategy:
        """`gradient`, recomputed application by application while gradient checkpointing is on."""
        if not self.gradient_checkpointing or self._gradient.recomputes:
            return self._gradient
        return CheckpointApplication(inner=self._gradient)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether applications are recomputed; PEFT asks by this name, which newer versions of the library warn of."""
        return self.gradient_checkpointing

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: Int[Tensor, "batch seq"] | None = None,
        num_steps: Any = None,
        exit_rule: str | ExitRule | None = None,
        exit_threshold: float | None = None,
        exit_step: int | None = None,
        weighted_exit: bool = False,
        noise_seed: int = 0,
        item_ids: Any = None,
        kv_rule: KVRule | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        num_items_in_batch: Any = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """One forward pass.

        Args:
            attention_mask: 0 on padding, for the tokens of this call or for all up to them [batch, past + seq].
            position_ids: Position of every token; default: the count of valid tokens before it.
            cache: A `LoopCache`, or an empty cache of the library, which a LoopCache replaces in the output.
            past_key_values: The same, under its name in earlier versions.
            labels: Targets, shifted here; -100 is not scored.
            num_steps: Iterations: an int, one per block, or Int[batch]. Default: the model's own. With exits: the most.
            exit_rule: When a token stops: a rule, or the name of one, whose number is `exit_threshold`.
            exit_step: Read every token after this many steps; short for the rule "fixed".
            weighted_exit: Logits of all exits, weighted by the gate's exit probabilities.
            noise_seed: Key of the starting noise of models that have one.
            item_ids: Per row the 64-bit number that noise is drawn by. Default: a hash of the row's tokens at the first
                call, kept in the cache.
            kv_rule: What queries read of past tokens. Default: the rule the model was trained with; with an exit rule
                that may stop early, `DepthIndexed(missing=CopyLast())`.
            logits_to_keep: Trailing tokens whose logits are made; 0: all.
            use_cache: Whether to fill and return a cache. Default: where one is given.
            num_items_in_batch: Labels in the whole optimizer step, which the summed loss is divided by.
            inputs_embeds, output_attentions, output_hidden_states: Refused; the library's callers pass them empty.
            return_dict: False: a tuple.
        Raises:
            ValueError: Arguments that contradict each other, or that the model cannot answer.
        """
        refuse(
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        if input_ids is None:
            raise ValueError("input_ids must be Int[batch, seq]. Got None. Pass the tokens")
        if labels is not None and logits_to_keep:
            raise ValueError(f"logits_to_keep must be 0 with labels. Got {logits_to_keep}. Leave one of them out")
        if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be an int >= 0. Got {logits_to_keep!r}. 0 keeps all")
        rule = exit_of(exit_rule, exit_threshold, exit_step, weighted_exit)
        given = cache if cache is not None else past_key_values
        held = own_cache(given) if given is not None or use_cache else None
        caching = use_cache if use_cache is not None else given is not None
        core = None
        if held is not None and caching:
            core = self._room(held, input_ids, num_steps, kv_rule or self._exit_kv_rule(held, rule))
        valid = valid_of(attention_mask, input_ids)
        positions = positions_of(position_ids, input_ids, valid, core)
        arguments: dict[str, Any] = {
            "num_steps": num_steps,
            "noise": self._noise(input_ids, valid, positions, noise_seed, item_ids, held),
            "positions": positions,
            "valid": valid,
            "cache": core,
            "logits_to_keep": logits_to_keep or None,
        }
        logits, steps = self._logits(input_ids, rule, weighted_exit, arguments)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch
            )
        named: dict[str, Any] = {CACHE_NAME: held} if caching else {}
        output = LooplabOutput(loss=loss, logits=logits, steps=steps, **named)
        return output.to_tuple() if return_dict is False else output

    def _logits(
        self, tokens: Tensor, rule: ExitRule | None, weighted: bool, arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits, and exit steps where exits were asked for."""
        if weighted:
            return weighted_logits(self.model, tokens, gradient=self.strategy, **arguments), None
        if rule is None:
            return forward(self.model, tokens, gradient=self.strategy, **arguments).logits, None  # type: ignore[return-value]
        if isinstance(arguments["num_steps"], Tensor):
            raise ValueError(
                f"num_steps must be an int with exit_rule={rule}: the rule gives every token its own depth. "
                "Got one per row. Leave one of them out"
            )
        if torch.is_grad_enabled() and self.strategy != FullBPTT():
            raise ValueError(
                f"exit_rule must be None while {self.strategy} decides what carries gradient. Got {rule}. "
                "Train at num_steps, or set gradient = FullBPTT() and gradient checkpointing off"
            )
        core = arguments["cache"]
        if core is not None and core.length == 0 and tokens.shape[1] == 1:
            # A prompt of one token is a prompt: it runs in full.
            points = exit_points(self.model.spec, arguments["num_steps"])
            rule.check(self.model.spec)
            rule.fits(points)
            whole = forward(self.model, tokens, **arguments).logits
            return whole, torch.full_like(tokens, max(points))  # type: ignore[return-value]
        out = forward_until(self.model, tokens, rule, **arguments)
        return out.logits, out.steps  # type: ignore[return-value]

    def _room(self, held: LoopCache, tokens: Tensor, num_steps: Any, rule: KVRule | None) -> Cache:
        """The cache of ours, with room for these tokens."""
        rows, length = tokens.shape
        return held.make_room(
            self.model.spec,
            rows=rows,
            tokens=length,
            num_steps=int(num_steps.max()) if isinstance(num_steps, Tensor) else num_steps,
            rule=rule,
            dtype=self.dtype,
            device=tokens.device,
        )

    def _exit_kv_rule(self, held: LoopCache, rule: ExitRule | None) -> KVRule | None:
        """The rule of a new cache in which tokens of different depths will stand; None: the model's own."""
        own = self.model.spec.kv_rule
        if held.core is not None or rule is None or not rule.early or own != DepthIndexed():
            return None
        return DepthIndexed(missing=CopyLast())

    def _noise(
        self,
        tokens: Tensor,
        valid: Tensor | None,
        positions: Tensor | None,
        seed: int,
        item_ids: Any,
        held: LoopCache | None,
    ) -> Float[Tensor, "batch seq noise"] | None:
        """Starting noise of these tokens; None for models that have none."""
        width = self.model.spec.noise_width
        if not width:
            return None
        if item_ids is not None:
            items = items_of(item_ids, len(tokens))
        elif held is not None and held.items is not None:
            items = held.items
        else:
            items = prompt_items(tokens, valid)
        if held is not None:
            held.items = items
        assert positions is not None
        return states.standard_noise(seed, items, positions, width).to(tokens.device, self.dtype)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> Any:
        """Where `generate` knows the prompts: checks what has one entry per prompt, and settles the noise's items."""
        rows = 0 if input_ids is None else len(input_ids)
        for name in PER_ROW:
            value = model_kwargs.get(name)
            if isinstance(value, Tensor) and value.shape != (rows,):
                raise ValueError(f"{name} must have one entry per prompt ({rows}). Got shape {list(value.shape)}")
        given = model_kwargs.get(CACHE_NAME)
        fresh = not isinstance(given, LoopCache) or given.items is None
        if input_ids is not None:
            valid = valid_of(model_kwargs.get("attention_mask"), input_ids)
            empty = [] if valid is None else (~valid.any(dim=1)).nonzero().flatten().tolist()
            if empty:
                raise ValueError(f"encode: row {empty[0]} has no valid token")
            if self.model.spec.noise_width and model_kwargs.get("item_ids") is None and fresh:
                # Later calls see pieces of the prompt, drafts, or all that was generated.
                signed = [i - NOISE_BITS if i >= NOISE_BITS // 2 else i for i in prompt_items(input_ids, valid)]
                model_kwargs["item_ids"] = torch.tensor(signed, device=input_ids.device)
        expand: Any = super()._expand_inputs_for_generation  # type: ignore[misc]
        return expand(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
        )

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Drafts of another model are asked for without the arguments that only ours have."""
        told, assistant = dict(kwargs.get("model_kwargs") or {}), kwargs.get("assistant_model")
        if told.get("exit_rule") is not None or told.get("exit_step") is not None:
            raise ValueError(
                "exit_rule must be None in assisted decoding, which checks several tokens in one pass, as a prompt. "
                f"Got {told.get('exit_rule') or told.get('exit_step')}. Leave one of them out"
            )
        if assistant is not None and not isinstance(assistant, LooplabForCausalLM):
            kwargs["model_kwargs"] = {name: value for name, value in told.items() if name not in OURS}
        candidates: Any = super()._get_candidate_generator  # type: ignore[misc]
        return candidates(*args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: our modules are initialised when they are made, and what a file lacks is an error."""

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens."""
        return self.model.embedding  # type: ignore[return-value]

    def set_input_embeddings(self, value: Any) -> None:
        """Puts the weight of `value` in the place of the table; a tied head reads it too."""
        own: Any = self.get_input_embeddings()
        if value.weight.shape != own.weight.shape:
            raise ValueError(
                f"embeddings must have shape {list(own.weight.shape)}. Got {list(value.weight.shape)}. "
                "The sizes are those of the model's configuration"
            )
        own.weight = value.weight

    def get_output_embeddings(self) -> nn.Module:
        """The head; its `weight` is the embedding's where they are tied."""
        return self.model.lm_head  # type: ignore[return-value]

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """The embeddings as they are; another size is refused, as the model's configuration fixes it.

        Raises:
            ValueError: Another number of tokens than the vocabulary, or than the padded table, has.
        """
        if new_num_tokens not in (None, *self.model.spec.vocab):
            raise ValueError(
                f"new_num_tokens must be {self.model.spec.vocab[0]}, the vocabulary of the model's configuration. "
                f"Got {new_num_tokens}. Use unassigned ids of the vocabulary for new tokens"
            )
        return self.get_input_embeddings()
