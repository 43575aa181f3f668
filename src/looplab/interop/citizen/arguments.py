"""What the arguments of `LooplabForCausalLM.forward` mean: exits, masks, positions, and the items of the noise."""

from typing import Any

import torch
from torch import Tensor

from looplab._types import Bool, Int
from looplab.recurrence import state as states
from looplab.recurrence.exit import ExitRule, exit_rule
from looplab.recurrence.kv import Cache


def prompt_items(tokens: Int[Tensor, "batch seq"], valid: Bool[Tensor, "batch seq"] | None) -> list[int]:
    """Per row a 64-bit hash of its tokens without padding: the same wherever the row stands in whatever batch."""
    rows = list(tokens) if valid is None else [row[keep] for row, keep in zip(tokens, valid, strict=True)]
    return [states.item_of(*row.tolist()) for row in rows]


def items_of(item_ids: Any, rows: int) -> list[int]:
    """The numbers of a tensor or sequence with one entry per row."""
    items = [int(i) for i in (item_ids.tolist() if isinstance(item_ids, Tensor) else item_ids)]
    if len(items) != rows:
        raise ValueError(f"item_ids must have one number per row ({rows}). Got {len(items)}")
    return items


def exit_of(name: str | ExitRule | None, threshold: float | None, step: int | None, weighted: bool) -> ExitRule | None:
    """The exit rule that the arguments of `forward` mean together."""
    asked = {"exit_rule": name, "exit_step": step, "weighted_exit": weighted or None}
    asked = {key: value for key, value in asked.items() if value is not None}
    if len(asked) > 1:
        raise ValueError(f"exits must be asked for in one way. Got {' and '.join(asked)}. Leave all but one out")
    if threshold is not None and not isinstance(name, str):
        raise ValueError(f"exit_threshold needs the name of an exit_rule. Got {threshold}. Give both, or a rule object")
    if step is not None:
        return exit_rule("fixed", step)
    return exit_rule(name, threshold) if isinstance(name, str) else name


def valid_of(mask: Tensor | None, tokens: Tensor) -> Bool[Tensor, "batch seq"] | None:
    """The mask of the tokens of this call; None: no padding."""
    if mask is None:
        return None
    rows, length = tokens.shape
    if mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] < length:
        raise ValueError(
            f"attention_mask must be [batch, past + seq] with batch {rows} and at least {length} columns. "
            f"Got shape {list(mask.shape)}. Pass the tokenizer's mask"
        )
    return mask[:, -length:].bool().to(tokens.device)


def positions_of(
    given: Tensor | None, tokens: Tensor, valid: Tensor | None, core: Cache | None
) -> Int[Tensor, "batch seq"]:
    """Positions of these tokens: as given, else the count of valid tokens before each."""
    if given is not None:
        return given[..., -tokens.shape[1] :].to(tokens.device).expand(tokens.shape)
    own = torch.ones_like(tokens) if valid is None else valid.long()
    before = 0 if core is None else core.valid[:, : core.length].sum(dim=1, keepdim=True)
    return (before + own.cumsum(dim=1) - 1).clamp(min=0)


def refuse(**given: Any) -> None:
    """Refuses arguments, named as the caller knows them, that are neither None nor False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name} must be left out: LooplabForCausalLM reads tokens and returns logits. Got "
                f"{value if isinstance(value, bool) else type(value).__name__}. "
                "looplab.forward(recorder=...) keeps states"
            )
