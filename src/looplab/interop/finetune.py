"""Adapting a model under the Trainer of the transformers library, with or without PEFT's low-rank adapters.

    PromptMask       a data collator: pads rows and scores answers only
    SampledDepth     a callback: one depth per optimizer step, and fresh starting noise
    MemoryNotice     a callback: what the step will need, printed before the first one
    lora_targets     the linear maps of a looped model, by the names that PEFT asks for

    T_k ~ depth law,  k = optimizer step,  drawn by (seed, k) alone, so that a resumed run draws what it would have

The depth is handed to `forward` as an argument where the step number is known: batches are collated ahead of time,
perhaps in other processes, and a resumed run skips some without collating them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from looplab.interop.citizen import LooplabForCausalLM
from looplab.objectives.base import IGNORED
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.plan import Steps
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.state import item_of
from looplab.training.memory import MemoryEstimate, estimate, trained_bytes
from looplab.training.step import Precision, draw_depth

PARTS = {"prelude": "prelude", "core": "core", "layers": "core", "coda_layers": "coda", "injections": "injection"}
"""Attribute of our models -> part of a looped model; the layers of a dense one count as core."""

OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
"""Names of the Trainer's optimizers whose state is counted exactly."""


class PromptMask:
    """Makes a batch of rows of token ids: padded on the right, with labels on the answers only.

    A row is a mapping with `input_ids` and one of: `prompt_tokens`, the number of leading tokens that are not scored;
    `labels`, which are taken as they are. Otherwise the prompt ends with the first `separator`. The Trainer drops the
    column `prompt_tokens` unless its argument `remove_unused_columns` is False.
    """

    def __init__(self, *, pad: int, separator: Sequence[int] | None = None):
        """`pad`: id that fills rows up; `separator`: ids that end a prompt, such as those of "Answer:"."""
        if separator is not None and not len(separator):
            raise ValueError("PromptMask.separator must have at least one id, or be None. Got none.")
        self.pad, self.separator = pad, None if separator is None else list(separator)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Input ids, attention mask and labels, all Int[batch seq]."""
        ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
        labels = [self._labels(row, own) for row, own in zip(rows, ids, strict=True)]
        masks = [torch.ones_like(row) for row in ids]
        filled = zip(
            ("input_ids", "attention_mask", "labels"), (ids, masks, labels), (self.pad, 0, IGNORED), strict=True
        )
        return {
            name: nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)
            for name, parts, value in filled
        }

    def _labels(self, row: Mapping[str, Any], ids: Tensor) -> Tensor:
        if "labels" in row:
            return torch.as_tensor(row["labels"], dtype=torch.long)
        prompt = int(row["prompt_tokens"]) if "prompt_tokens" in row else self._end_of_prompt(ids.tolist())
        labels = ids.clone()
        labels[:prompt] = IGNORED
        return labels

    def _end_of_prompt(self, ids: list[int]) -> int:
        if self.separator is None:
            raise ValueError(
                "PromptMask: a row must have prompt_tokens or labels. Got neither. Set remove_unused_columns=False in "
                "the training arguments, or give a separator"
            )
        length = len(self.separator)
        for start in range(len(ids) - length + 1):
            if ids[start : start + length] == self.separator:
                return start + length
        raise ValueError(
            f"PromptMask: every row must hold the separator {self.separator}. Got {ids[:8]}... without it. "
            "Encode it as it stands in the text"
        )


class SampledDepth(TrainerCallback):
    """Runs every optimizer step at a depth of its own, the same for all micro-batches and processes.

    Models that start from noise get another seed with every step. Evaluation runs at the depth it asks for.
    """

    def __init__(self, law: DepthSampler | None = None, *, seed: int = 0):
        """`law`: of the number of steps; None: the one the model was trained with."""
        self.law, self.seed = law, seed
        self.drawn: list[int] = []
        """Depth of every step so far, from the first one of this run."""
        self._spec: LoopSpec | None = None
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Checks the law and takes its place before `forward`."""
        wrapped = citizen_of(given["model"])
        self._spec, self.drawn = with_law(wrapped.model.spec, self.law), []
        self.on_train_end(args, state, control)  # of a run that an error ended
        self._hook = wrapped.register_forward_pre_hook(self._inject, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Draws the depth of the step."""
        assert self._spec is not None
        self._step = int(state.global_step)
        self.drawn.append(draw_depth(self._spec, self.seed, self._step)[0])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Lets go of the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _inject(self, model: LooplabForCausalLM, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if model.training and self.drawn:
            kwargs = {"num_steps": self.drawn[-1]} | kwargs
            if model.model.spec.noise_width:
                kwargs = {"noise_seed": item_of("noise", self.seed, self._step)} | kwargs
        return args, kwargs


class MemoryNotice(TrainerCallback):
    """Prints the memory that a training step will need, before the first one."""

    def __init__(self, *, tokens: int, num_steps: Steps | None = None):
        """`tokens`: those of the longest row; `num_steps`: the deepest run. Default: the deepest of the trained law."""
        self.tokens, self.num_steps = tokens, num_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Prints it, on one process."""
        if not state.is_world_process_zero:
            return
        model, rows, optim = (
            given["model"],
            args.per_device_train_batch_size,
            str(getattr(args.optim, "value", args.optim)),
        )
        spec, strategy = citizen_of(model).model.spec, citizen_of(model).strategy
        law, steps = spec.trained_depth, self.num_steps
        if steps is None:
            steps = max(law.support()) if isinstance(law, DepthSampler) and not law.of_prefix else spec.default_steps
        kind = OPTIMIZERS.get(optim, "adamw")
        memory = memory_of(
            model,
            rows=rows,
            tokens=self.tokens,
            num_steps=steps,
            optimizer=kind,
            precision="bf16" if args.bf16 else "fp32",
            accumulates=args.gradient_accumulation_steps > 1,
        )
        guess = "" if optim in OPTIMIZERS else f", optimizer {optim} counted as AdamW"
        print(f"{memory.line()}  ({rows} x {self.tokens} tokens, {steps} steps, {strategy}{guess})")


def memory_of(
    model: nn.Module,
    *,
    rows: int,
    tokens: int,
    num_steps: Steps | None = None,
    optimizer: str = "adamw",
    precision: Precision = "fp32",
    accumulates: bool = False,
) -> MemoryEstimate:
    """The bytes of one training step of a `LooplabForCausalLM`, or of a PEFT model around one.

    Activations are counted as if every weight were trained, which bounds those of adapters from above; gradients and
    optimizer state are those of what is trained. Arguments as in `training.memory.estimate`.
    """
    wrapped = citizen_of(model)
    plain = estimate(
        wrapped.model.config,
        rows=rows,
        tokens=tokens,
        num_steps=num_steps,
        gradient=wrapped.strategy,
        optimizer=optimizer,
        dtype=wrapped.dtype,
        precision=precision,
    )
    return dataclasses.replace(
        plain,
        weights=sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        **trained_bytes([p for p in model.parameters() if p.requires_grad], optimizer, accumulates=accumulates),
    )


def lora_targets(model: nn.Module, parts: Sequence[str] = ("core",)) -> list[str]:
    """Names of the linear maps of some parts, for `LoraConfig(target_modules=...)`.

    An adapter in the core is shared by all iterations, as the weight it changes is.

    Args:
        model: A `LooplabForCausalLM`.
        parts: Of prelude, core, coda and injection.
    Raises:
        ValueError: An unknown part, or no linear map in any of them.
    """
    known = sorted(set(PARTS.values()))
    if not parts or isinstance(parts, str) or set(parts) - set(known):
        raise ValueError(f"lora_targets: parts must be some of {', '.join(known)}. Got {parts!r}.")
    names = [
        f"{LooplabForCausalLM.base_model_prefix}.{name}"
        for name, module in citizen_of(model).model.named_modules()
        if isinstance(module, nn.Linear) and PARTS.get(name.split(".")[0]) in parts
    ]
    if not names:
        raise ValueError(f"lora_targets: parts must hold a linear map. Got {', '.join(parts)}, which have none here.")
    return names


def with_law(spec: LoopSpec, law: DepthSampler | None) -> LoopSpec:
    """The same model's declaration with this depth law in the place of the trained one.

    Raises:
        ValueError: No law is known, it draws prefixes of a plan, or it draws a depth that the model does not have.
    """
    law = spec.trained_depth if law is None else law  # type: ignore[assignment]
    if not isinstance(law, DepthSampler) or law.of_prefix:
        kind = "which draws prefixes of a plan" if isinstance(law, DepthSampler) else "as the model declares"
        raise ValueError(
            "SampledDepth: law must be one of numbers of steps, such as UniformDepth(low=1, high=8). "
            f"Got {law}, {kind}. Give one"
        )
    spec.plan(max(law.support()))  # refuses what the model has no parameters for
    return dataclasses.replace(spec, trained_depth=law)


def citizen_of(model: nn.Module) -> LooplabForCausalLM:
    """The `LooplabForCausalLM` in a model that may be wrapped, by PEFT or for several devices.

    Raises:
        ValueError: There is none.
    """
    found = next((module for module in model.modules() if isinstance(module, LooplabForCausalLM)), None)
    if found is None:
        raise ValueError(
            f"model must be a LooplabForCausalLM, or a wrapper around one. Got {type(model).__name__}. "
            "Make one with LooplabForCausalLM.from_looplab(looplab.load(...))"
        )
    return found
