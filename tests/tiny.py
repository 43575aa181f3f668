"""Hand-made models of the contract: small enough to know every number they give, and texts they can predict.

`Mixing` is a causal two-block model with real mixing over positions, for tests of the machinery. `Planted` computes its
state from a rule given by the test, for models whose decomposition is known beforehand. `Around` sees both directions:
a model of masked letters, or of grids.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from looplab.data.documents import IGNORED, Document, DocumentSet, Grid
from looplab.data.tokenizers import Tokenizer
from looplab.models.base import Context, LoopedLM, prepare
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.kv.depth_indexed import DepthIndexed
from looplab.recurrence.plan import Blocks, ModelLoop, PlanOrder, Sequential
from looplab.recurrence.spec import BlockSpec, LoopSpec, ParamCount, StateField, own_function, same_function

LETTERS = 8


class LetterTokenizer(Tokenizer):
    """The letters a..h as ids 0..7."""

    name, hash, vocab_size = "letters", "letters", LETTERS
    bos = eos = pad = None
    starts_with_bos = False

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + i) for i in ids)

    def encode_all(self, texts: Any) -> list[list[int]]:
        return [self.encode(text) for text in texts]


def transitions(seed: int = 0, sharpness: float = 1.5) -> Tensor:
    """Log probabilities of a Markov chain over the letters, "from to", float64."""
    scores = np.random.default_rng(seed).normal(size=(LETTERS, LETTERS)) * sharpness
    return torch.log_softmax(torch.from_numpy(scores), dim=1)


def letters(count: int, *, length: int = 40, seed: int = 0, chain: Tensor | None = None) -> DocumentSet:
    """Texts drawn from the Markov chain, of ragged length."""
    chances = (transitions() if chain is None else chain).exp().numpy()
    random = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        ids = [int(random.integers(LETTERS))]
        for _ in range(length - int(random.integers(length // 3))):
            ids.append(int(random.choice(LETTERS, p=chances[ids[-1]] / chances[ids[-1]].sum())))
        texts.append("".join(chr(97 + i) for i in ids))
    documents = tuple(Document(text, line=i + 1) for i, text in enumerate(texts))
    return DocumentSet("letters.jsonl", documents, f"letters{seed}{count}{length}")


def tiny_spec(order: PlanOrder, blocks: int, width: int, **more: Any) -> LoopSpec:
    """A LoopSpec with plain counts; `more` replaces fields."""
    rule = DepthIndexed()
    group = Group(matmul=width * width, layers=1)
    fields: dict[str, Any] = {
        "name": "tiny",
        "version": "1",
        "blocks": tuple(BlockSpec(layers=(i,), params=width * width) for i in range(blocks)),
        "order": order,
        "trained_depth": FixedDepth(num_steps=4),
        "state": {"state": StateField(width=width)},
        "kv_rule": rule,
        "kv_rules": (rule,),
        "vocab": (LETTERS, LETTERS),
        "readout": ("head",),
        "params": ParamCount(core=(width * width,) * blocks),
        "cost": CostSpec(prelude=Group(), blocks=(group,) * blocks, coda=Group(), head=Group(matmul=width * LETTERS)),
        "max_positions": 256,
    }
    return LoopSpec(**{**fields, **more})


class Mixing(LoopedLM):
    """s <- tanh(W_b s + U mean of s over positions so far + e + E[b, t]); block 0, then block 1, of `steps` iterations.

    `noise`: the state starts from noise instead of zeros.
    """

    def __init__(
        self,
        *,
        steps: int = 4,
        blocks: int = 2,
        width: int = 12,
        indexed: bool = True,
        noise: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        make = torch.Generator().manual_seed(seed)

        def table(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=make, dtype=torch.float64) * scale).to(dtype))

        self.embedding = table(LETTERS, width, scale=0.7)
        self.inner = table(blocks, width, width, scale=0.5 / width**0.5)
        self.across = table(width, width, scale=0.5 / width**0.5)
        self.index = table(blocks, steps, width, scale=0.3)
        self.unembedding = table(width, LETTERS, scale=1.0)
        order = ModelLoop(num_steps=steps) if blocks == 1 else Blocks(num_steps=(steps,) * blocks)
        self.indexed = indexed
        self.spec = tiny_spec(
            order,
            blocks,
            width,
            operator_class=own_function if indexed else same_function,
            index_parts=frozenset({"embedding"}) if indexed else frozenset(),
            max_iteration=steps if indexed else None,
            noise_width=width if noise else 0,
        )

    def encode(self, tokens, cache=None, *, positions=None, valid=None, extras=None):
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        return Context(self.embedding[tokens], positions, valid)

    def init_state(self, context, noise):
        return torch.zeros_like(context.embeds) if noise is None else noise.to(context.embeds.dtype)

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        seen = state if context.valid is None else state * context.valid[..., None]
        mean = seen.cumsum(dim=1) / (context.positions[..., None] + 1)
        moved = state @ self.inner[block] + mean @ self.across + context.embeds
        if self.indexed:
            moved = moved + self.index[block][iteration][:, None]
        return torch.tanh(moved)

    def coda(self, state, context, cache=None):
        return state

    def head(self, hidden):
        return (hidden @ self.unembedding).float() if hidden.dtype != torch.float64 else hidden @ self.unembedding


Rule = Callable[[Tensor, Tensor, int, Tensor], Tensor]
"""(state, log probabilities of the next letter, block, iteration of every row) -> state."""


class Planted(LoopedLM):
    """The state is a row of logits; `rule` moves it. The context holds the true next-letter log probabilities."""

    def __init__(self, rule: Rule, *, steps: int | tuple[int, ...] = 8, indexed: bool = True):
        super().__init__()
        self.rule = rule
        self.chain = nn.Parameter(transitions().float())
        blocks = len(steps) if isinstance(steps, tuple) else 1
        self.spec = tiny_spec(
            Blocks(num_steps=steps) if isinstance(steps, tuple) else ModelLoop(num_steps=steps),
            blocks,
            LETTERS,
            operator_class=own_function if indexed else same_function,
        )

    def encode(self, tokens, cache=None, *, positions=None, valid=None, extras=None):
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        return Context(self.chain[tokens], positions, valid)

    def init_state(self, context, noise):
        return torch.zeros_like(context.embeds)

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        return self.rule(state, context.embeds, block, iteration[:, None, None])

    def coda(self, state, context, cache=None):
        return state

    def head(self, hidden):
        return hidden.float()


class TinyDense(Planted):
    """Layers that each add their share of the truth: no block is repeated."""

    def __init__(self, layers: int = 8):
        super().__init__(lambda state, truth, block, iteration: state + truth / layers, steps=(1,) * layers)
        self.spec = tiny_spec(Sequential(), layers, LETTERS, trained_depth=FixedDepth(num_steps=1))


class Around(LoopedLM):
    """s <- tanh(W s + U mean of s over all positions + e + P[puzzle] + E[t]): a model that sees both directions.

    With `mask_token` it is scored on masked tokens, without one on grids. `puzzles`: number of puzzle ids, which it
    then needs; 0 takes none. `padding`: sides on which it takes padding. `prefix`: positions before the tokens, filled
    with 3 and never changed.
    """

    def __init__(
        self,
        *,
        steps: int = 3,
        width: int = 10,
        vocab: int = LETTERS,
        mask_token: int | None = None,
        puzzles: int = 0,
        padding: frozenset[str] = frozenset(),
        prefix: int = 0,
        seed: int = 0,
    ):
        super().__init__()
        make = torch.Generator().manual_seed(seed)

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=make) / shape[0] ** 0.5)

        self.mask_token, self.puzzles, self.prefix = mask_token, puzzles, prefix
        self.embedding, self.places = table(vocab, width), table(64, width)
        self.inner, self.across = table(width, width), table(width, width)
        self.index, self.puzzle, self.unembedding = (
            table(steps, width),
            table(max(1, puzzles), width),
            table(width, vocab),
        )
        self.spec = tiny_spec(
            ModelLoop(num_steps=steps),
            1,
            width,
            operator_class=own_function,
            index_parts=frozenset({"embedding"}),
            max_iteration=steps,
            trained_depth=FixedDepth(num_steps=steps),
            vocab=(vocab, vocab),
            causal=False,
            state={"state": StateField(width=width, prefix=prefix)},
            padding=padding,
            kv_rules=(),
            max_positions=64,
            extras={"puzzle_ids": True} if puzzles else {},
        )

    def encode(self, tokens, cache=None, *, positions=None, valid=None, extras=None):
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        embeds = self.embedding[tokens] + self.places[positions]
        if self.puzzles:
            embeds = embeds + self.puzzle[extras["puzzle_ids"]][:, None]
        return Context(embeds, positions, valid)

    def init_state(self, context, noise):
        return torch.nn.functional.pad(torch.zeros_like(context.embeds), (0, 0, self.prefix, 0), value=3.0)

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        before, state = state[:, : self.prefix], state[:, self.prefix :]
        own = torch.ones_like(context.positions) if context.valid is None else context.valid.long()
        mean = (state * own[..., None]).sum(dim=1, keepdim=True) / own.sum(dim=1)[:, None, None]
        moved = torch.tanh(state @ self.inner + mean @ self.across + context.embeds + self.index[iteration][:, None])
        return torch.cat([before, moved], dim=1)

    def coda(self, state, context, cache=None):
        return state[:, self.prefix :]

    def head(self, hidden):
        return (hidden @ self.unembedding).float()


def squares(count: int, *, length: int = 9, puzzles: int = 0, seed: int = 0) -> DocumentSet:
    """Grids of letters whose labels are the letters mirrored; about a third of the labels is not scored."""
    random = np.random.default_rng(seed)
    documents = []
    for i in range(count):
        tokens = [int(t) for t in random.integers(LETTERS, size=length)]
        labels = [IGNORED if random.random() < 0.3 else t for t in tokens[::-1]]
        documents.append(Grid(tuple(tokens), tuple(labels), i % puzzles if puzzles else None, line=i + 1))
    return DocumentSet("squares.jsonl", tuple(documents), f"squares{seed}{count}{length}")
