"""Rival of the training step: the loop of a looped transformer written by hand, over the same modules and weights.

It knows its one shape (prelude, one core repeated T times, coda, tied head), asks no contract and counts nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from looplab.nn.attention import Scope


def loss(model: Any, tokens: Tensor, labels: Tensor, num_steps: int) -> Tensor:
    """Mean next-token loss after `num_steps` loops."""
    places = torch.arange(tokens.shape[1]).expand(tokens.shape)
    attention = model.config.attention
    scope = Scope(places, attention.position.tables(places, attention.head_dim, torch.float32), None)
    e = F.embedding(tokens, model.embedding.weight)
    for layer in model.prelude:
        e = layer(e, scope)
    h = e
    for _ in range(num_steps):
        for layer in model.core:
            h = layer(h, scope)
    for layer in model.coda_layers:
        h = layer(h, scope)
    logits = F.linear(model.final_norm(h), model.embedding.weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor, num_steps: int) -> float:
    """One optimizer step with clipping at 1."""
    optimizer.zero_grad(set_to_none=True)
    found = loss(model, tokens, labels, num_steps)
    found.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(found.detach())
