"""Batched decoding with a cache, at one depth or under an exit rule.

    prompt   one launch over the left-padded prompts, all iterations
    token    one launch over the last tokens; greedy, or drawn from softmax(logits / temperature)

A row that has ended leaves the batch with its cache. Noise and draws belong to the row's item and position, so what a
row says does not depend on its neighbours. A model without a cache runs its whole text again for every token.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.audit.runner import Runner
from looplab.interop.adapters.base import positions_of
from looplab.interop.scoring import Batching, Progress, padded
from looplab.recurrence.exit import ExitRule, forward_until
from looplab.recurrence.kv.base import Cache, KVRule
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.plan import Plan


class Prompt(NamedTuple):
    """One text to go on with."""

    tokens: tuple[int, ...]
    item: int = 0
    """Names the noise."""
    draws: int = 0
    """Seeds the row's draws."""


class Continuation(NamedTuple):
    """What a row said."""

    tokens: tuple[int, ...]
    """Without the end-of-text token; the text that ended it may be among them."""
    steps: float | None = None
    """Mean iterations per generated token, under an exit rule."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. A temperature of 0 takes the likeliest."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the fewest likeliest tokens that have this probability together."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_gen_toks must be at least 1. Got {self.max_tokens}. Raise it.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be a number >= 0. Got {self.temperature}. Use 0 for the likeliest token."
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0. Got {self.top_k}. Use 0 for all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1. Got {self.top_p}. Use 1 for all tokens.")


def decode(
    runner: Runner,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    sampling: Sampling,
    ended: Callable[[list[int]], bool],
    batching: Batching,
    num_steps: int | None = None,
    eos: int | None = None,
    kv_rule: KVRule | None = None,
    exit_rule: ExitRule | None = None,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
) -> list[Continuation]:
    """One continuation per prompt, in the order given.

    Args:
        plan: The applications to run: those of `num_steps`, or the first of them.
        num_steps: What the cache makes room for, and the latest exit; None: what the model itself runs.
        ended: Whether a row is finished, by the tokens it has said.
        eos: The end-of-text token, which ends a row too.
        kv_rule: What the cache keeps; None: what the model was trained with.
        exit_rule: After the prompt every token leaves the loop where the rule says.
    """
    said: list[Continuation] = [Continuation(()) for _ in prompts]
    lengths = [len(prompt.tokens) + sampling.max_tokens for prompt in prompts]
    for launch in batching.split(lengths, ragged="left" in runner.spec.padding):
        rows = [_Row(prompts[i], i) for i in launch]
        text = _Text(runner, rows, plan, num_steps, sampling.max_tokens, kv_rule, exit_rule, ledger)
        with torch.no_grad():
            _decode(text, sampling, ended, eos)
        for row in rows:
            steps = sum(row.steps) / len(row.steps) if exit_rule is not None and row.steps else None
            said[row.index] = Continuation(tuple(row.said), steps)
        if progress is not None:
            progress(len(rows))
    return said


class _Row:
    def __init__(self, prompt: Prompt, index: int):
        self.prompt, self.index = prompt, index
        self.said: list[int] = []
        self.steps: list[float] = []
        self.random = np.random.default_rng(prompt.draws)


def _decode(text: "_Text", sampling: Sampling, ended: Callable[[list[int]], bool], eos: int | None) -> None:
    while text.rows:
        logits, steps = text.next()
        going = []
        for place, (row, scores) in enumerate(zip(text.rows, logits, strict=True)):
            token = choose(scores, sampling, row.random)
            row.steps += [] if steps is None else [float(steps[place])]
            if token == eos:
                continue
            row.said.append(token)
            if len(row.said) < sampling.max_tokens and not ended(row.said):
                going.append(place)
        text.keep(going)


class _Text:
    """The rows of one batch, their cache, and the launch that comes next."""

    def __init__(
        self,
        runner: Runner,
        rows: list[_Row],
        plan: Plan,
        num_steps: int | None,
        room: int,
        kv_rule: KVRule | None,
        exit_rule: ExitRule | None,
        ledger: Ledger | None,
    ):
        self.runner, self.rows, self.plan, self.num_steps = runner, list(rows), plan, num_steps
        self.exit_rule, self.ledger = exit_rule, ledger
        self.cache: Cache | None = None
        if runner.spec.kv_rules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # who chose another rule was told once
                self.cache = new_cache(
                    runner.spec,
                    rows=len(rows),
                    capacity=max(len(row.prompt.tokens) for row in rows) + room,
                    num_steps=num_steps,
                    rule=kv_rule,
                    dtype=runner.weights.dtype,
                    device=runner.weights.device,
                )

    def next(self) -> tuple[Float[Tensor, "batch vocab"], Float[Tensor, " batch"] | None]:
        """Logits after the last token of every row, on the CPU, and the iterations that token ran under a rule."""
        device = self.runner.weights.device
        if self.cache is None or self.cache.length == 0:
            texts = [(*row.prompt.tokens, *row.said) for row in self.rows]
            tokens, valid, _ = padded(texts, "left", device)
            positions = positions_of(tokens, valid)
        else:
            tokens, valid = torch.tensor([row.said[-1:] for row in self.rows], device=device), None
            positions = torch.tensor([[len(row.prompt.tokens) + len(row.said) - 1] for row in self.rows], device=device)
        return self._launch(tokens, valid, positions)

    def keep(self, places: list[int]) -> None:
        """Goes on with these rows alone."""
        if len(places) < len(self.rows):
            self.rows = [self.rows[place] for place in places]
            if self.cache is not None and self.rows:
                self.cache = self.cache.select(places)

    def _launch(
        self, tokens: Int[Tensor, "batch seq"], valid: Any, positions: Int[Tensor, "batch seq"]
    ) -> tuple[Tensor, Tensor | None]:
        given = {
            "noise": self.runner.noise(positions, [row.prompt.item for row in self.rows]),
            "valid": valid,
            "cache": self.cache,
            "ledger": self.ledger,
            "logits_to_keep": 1,
        }
        if self.exit_rule is None:
            out = forward(self.runner.model, tokens, plan=self.plan, **given)
            steps = None
        else:
            out = forward_until(self.runner.model, tokens, self.exit_rule, num_steps=self.num_steps, **given)
            steps = out.steps[:, -1].float().cpu()
        assert out.logits is not None
        return out.logits[:, -1].cpu(), steps


def choose(logits: Float[Tensor, " vocab"], sampling: Sampling, random: np.random.Generator) -> int:
    """The next token: the likeliest, or a draw by the inverse of the summed probabilities."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    order = torch.sort(logits.double(), descending=True, stable=True)
    chances = torch.softmax(order.values / sampling.temperature, dim=0)
    kept = torch.ones_like(chances, dtype=torch.bool)
    if sampling.top_k:
        kept[sampling.top_k :] = False
        chances = chances * kept / (chances * kept).sum()
    if sampling.top_p < 1:
        kept &= chances.cumsum(0) - chances < sampling.top_p
    sums = (chances * kept).cumsum(0)
    place = int(torch.searchsorted(sums, random.random() * float(sums[-1]), right=True))
    return int(order.indices[min(place, int(kept.sum()) - 1)])
