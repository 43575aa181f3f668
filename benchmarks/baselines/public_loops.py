"""Rivals of the training step: the loops of two public training repositories, over the same layers and weights.

    window      as in looped_nanochat: a Python loop whose first iterations run under no_grad, W [e ; s] before the core
    schedule    as in xllm-loop: a flat list of (layer, iteration) drives the forward, s + e where an iteration begins

Written from the public descriptions of the loops; the repositories' own models, data, optimizers and distributed code
are not here, so a comparison says what the loop costs and nothing about the repositories.

References: github.com/LoopedLMs/looped_nanochat, github.com/ifm-ai/xllm-loop.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from looplab.nn.attention import Scope


def window(model: Any, tokens: Tensor, labels: Tensor, num_steps: int, gradient_steps: int) -> Tensor:
    """Mean next-token loss, with gradient through the last `gradient_steps` iterations."""
    e, scope = _prelude(model, tokens)
    (inject,) = model.injections
    s = e
    for index in range(num_steps):
        trained = index >= num_steps - gradient_steps
        if trained and index == num_steps - gradient_steps and index:
            s = s.detach()
        with torch.set_grad_enabled(trained):
            s = F.linear(torch.cat([e, s], dim=-1), inject.rule.w.weight)
            for layer in model.core:
                s = layer(s, scope)
    return _loss(model, s, scope, labels)


def schedule(model: Any, tokens: Tensor, labels: Tensor, num_steps: int) -> Tensor:
    """Mean next-token loss, with gradient everywhere."""
    e, scope = _prelude(model, tokens)
    s = e
    for layer, _ in [(layer, index) for index in range(num_steps) for layer in range(len(model.core))]:
        s = s + e if layer == 0 else s
        s = model.core[layer](s, scope)
    return _loss(model, s, scope, labels)


def _prelude(model: Any, tokens: Tensor) -> tuple[Tensor, Scope]:
    places = torch.arange(tokens.shape[1]).expand(tokens.shape)
    attention = model.config.attention
    scope = Scope(places, attention.position.tables(places, attention.head_dim, torch.float32), None)
    e = F.embedding(tokens, model.embedding.weight)
    for layer in model.prelude:
        e = layer(e, scope)
    return e, scope


def _loss(model: Any, s: Tensor, scope: Scope, labels: Tensor) -> Tensor:
    for layer in model.coda_layers:
        s = layer(s, scope)
    logits = F.linear(model.final_norm(s), model.embedding.weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()
