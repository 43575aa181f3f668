"""VERA: two blocks, each run several times, whose stream reads thought tokens and whose keys come from a gated state.

    x       = norm_m(prelude(E[tokens]));  m = prefix mean of x;  thoughts r: trained vectors;  h_b = 0 for each block b
    per application (b, t), g = num_steps b + t:
    r       <- norm(r) + a[g];  branches r_i = r + f_i(r), i < n;  v = router(mean of all r_i)
    r       <- sum_i softmax(v)_i r_i,  or the r_i of the largest v_i ("hard")
    w       = softmax(router'([mean r ; m]));  x <- x + W_o (W_t sum_i w_i mean(r_i) + W_s m)       the causal bridge
    u       = [r ; x];  y = norm(u);  z = sigmoid(W_z y + U_z h_b + c);  h_b <- z o h_b + (1 - z) o tanh(W_h y)
    q, k, v = W_q y, W_k h_b, W_v h_b;  thoughts see all thoughts, tokens see themselves and earlier tokens
    u       <- energy gate of recurrence/update.py over  u + attention, then feed-forward
    m       = prefix mean of x
    logits  = E^T norm_f(x);   verifier = MLP(mean over r of norm(r + W_v m[last]))

Rotary angles have several bases: cos and sin are averages over the bases with trained weights per head, of one set for
tokens of language and another for operators (digits, signs, brackets: `operator_ids`). Inside the blocks, not in the
prelude, thoughts stand at the first positions and tokens follow. Thoughts never see a token, so they are the same for
every row of a plan. The change of the energy that its gate reads carries over from block to block.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934; code dauhavanHaniAI/depth-control-protocol:
    public/vera_psi.py, public/sona_adapter.py (MIT).
Deviations: (1) Unverified: no weights were at hand, so the authors' losses were not reproduced. Counts and tensor names
    are those of their code, and a transcription of its forward pass gives the same states and gradient norms
    (tests/golden/vera). (2) The original routes softly in training and hard in evaluation; here `routing` says which,
    and a loaded file has "hard". (3) The original has no key-value cache; here the prefix mean is an attention read
    with equal weights, whose entries (x) lie in the cache beside keys and values, so that decoding equals
    recomputation. (4) Rotary tables and prefix sums are float32; the original casts them with the model, to bfloat16 in
    its own evaluations. (5) Padding is masked and left out of the means; the original has none. (6) The verifier scores
    each row; the original averages over the batch, and then leaves the current block only. (7) Sigmoid halting, an
    independent thought path, models without tree, bridge or gated state, and Lighthouse attention (which only training
    runs) are not built. (8) The small networks (energy, routers, branches, verifier) start normal; the original leaves
    them at PyTorch's uniform start.
"""

from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.models.base import MODELS, PRESETS, LoopedLM, count_parameters, prepare
from looplab.models.published import PUBLISHED, Family, Join, KeyMap, Rename, Rule
from looplab.nn.attention import Attention, KVView, Scope
from looplab.nn.cost import CostSpec, Group
from looplab.nn.embedding import Head, TokenEmbedding
from looplab.nn.linear import Init, linear
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import RMSNormModule
from looplab.nn.rope import NoPE, Rope
from looplab.recurrence.depth import Depth, FixedDepth
from looplab.recurrence.kv import Anchor, Average, Cache, CopyLast, DepthIndexed, First, Modulo, Single, Skip
from looplab.recurrence.plan import PRELUDE, Blocks
from looplab.recurrence.spec import BlockSpec, HaltSpec, LoopSpec, StateField, own_function
from looplab.recurrence.update import EnergyGate

LANGUAGE_BASES = (500.0, 10_000.0, 500_000.0)
OPERATOR_BASES = (50.0, 500.0, 5_000.0)
THOUGHT_EPS = 1e-6
"""Of the thoughts' norm, whatever the other norms have."""
VERIFIED = 0.7
"""Probability above which the trained verifier stops."""
OPERATOR_CHARACTERS = frozenset("0123456789+-*/=<>(){}[]^√∑∫πθ°%≈≠≤≥")


@dataclass(frozen=True, kw_only=True)
class VeraConfig:
    """Everything that fixes a VERA."""

    dim: int
    """Width of the stream."""
    vocab: int
    """Columns of the logits."""
    heads: int
    kv_heads: int
    hidden: int
    """Inner width of the feed-forward."""
    prelude: int
    """Layers before the blocks."""
    blocks: int = 2
    """One-layer blocks."""
    num_steps: int = 4
    """Iterations of every block, each with a vector of its own."""
    trained_depth: Depth
    thoughts: int = 32
    """Thought tokens."""
    branches: int = 2
    """Branches of a thought."""
    router_hidden: int = 256
    """Inner width of both routers."""
    routing: Literal["hard", "soft"]
    """How the branches of a thought become one: the best ("hard", evaluation) or their mean by weight (training)."""
    verifier: int | None
    """Inner width of the verifier; None: there is none."""
    operators: tuple[int, ...]
    """Token ids that count as operators (`operator_ids`)."""
    language_bases: tuple[float, ...] = LANGUAGE_BASES
    """Rotary bases of tokens of language, and of thoughts."""
    operator_bases: tuple[float, ...] = OPERATOR_BASES
    """Rotary bases of operators, as many."""
    tau: float = 1.0
    """Temperature of the energy gate."""
    eps: float = 1e-6
    """Added to the mean square of every norm but the thoughts'."""
    max_positions: int | None = None
    """Longest trained context, in tokens."""
    init: Init = Init()
    bridge_std: float = 0.0
    """Start of the bridge's last matrix; at 0 the thoughts say nothing at first."""

    def __post_init__(self) -> None:
        for name in ("dim", "vocab", "blocks", "num_steps", "thoughts", "branches", "router_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"VeraConfig.{name} must be at least 1. Got {getattr(self, name)}.")
        if self.prelude < 0:
            raise ValueError(f"VeraConfig.prelude must be at least 0. Got {self.prelude}.")
        if self.heads < 1 or self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(
                f"VeraConfig.heads must cut dim ({self.dim}) into heads of even width. Got {self.heads}. "
                "Rotary turns pairs."
            )
        if self.dim < 4:
            raise ValueError(f"VeraConfig.dim must be at least 4: the energy is dim // 4 wide. Got {self.dim}.")
        if not self.language_bases or len(self.language_bases) != len(self.operator_bases):
            raise ValueError(
                "VeraConfig.language_bases and operator_bases must be equally many, at least one. Got "
                f"{self.language_bases} and {self.operator_bases}."
            )
        if self.verifier is not None and self.verifier < 1:
            raise ValueError(f"VeraConfig.verifier must be at least 1. Got {self.verifier}. Use None for none.")
        if self.routing not in ("hard", "soft"):
            raise ValueError(f"VeraConfig.routing must be 'hard' or 'soft'. Got {self.routing!r}.")
        outside = [i for i in self.operators if not 0 <= i < self.vocab]
        if outside:
            raise ValueError(f"VeraConfig.operators must be token ids below vocab ({self.vocab}). Got {outside[0]}.")
        if self.bridge_std < 0:
            raise ValueError(f"VeraConfig.bridge_std must be at least 0. Got {self.bridge_std}.")
        self.attention  # noqa: B018  refuses heads and kv_heads that do not fit

    @property
    def attention(self) -> Attention:
        """Shape of every attention; positions are this file's own."""
        return Attention(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.dim // self.heads, position=NoPE())


class Places(NamedTuple):
    """What rotates queries and keys: cosines and sines of every base, and which stream a token belongs to."""

    cos: Float[Tensor, "batch seq bases pairs"]
    sin: Float[Tensor, "batch seq bases pairs"]
    operator: Int[Tensor, "batch seq"]


class VeraContext(NamedTuple):
    """Context of VERA."""

    embeds: Float[Tensor, "batch seq dim"]
    """The state's start: prelude output after its norm."""
    positions: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    mean: Float[Tensor, "batch seq dim"]
    """Prefix means of `embeds`."""
    scope: Scope
    """The mask among tokens."""
    places: Places
    """Of thoughts and tokens together."""


@MODELS.register("vera")
class Vera(LoopedLM):
    """Thought tokens, a causal bridge, and blocks whose keys and values come from a gated state."""

    config_class = VeraConfig
    reference = "Dau, Khuat, Dung, arXiv:2609.19934"
    operator_table: Tensor

    def __init__(self, config: VeraConfig):
        super().__init__()
        c = self.config = config
        self.embedding = TokenEmbedding(c.vocab, c.dim, init=c.init)
        # On the CPU even where the weights have no storage yet: the settings alone fill it.
        table = torch.zeros(c.vocab, dtype=torch.long, device="cpu")
        table[list(c.operators)] = 1
        self.register_buffer("operator_table", table, persistent=False)
        self.prelude = nn.ModuleList(StreamLayer(c) for _ in range(c.prelude))
        self.mid_norm = _norm(c)
        self.thoughts = Thoughts(c)
        self.bridge = Bridge(c)
        self.core = nn.ModuleList(ReasoningBlock(c) for _ in range(c.blocks))
        self.final_norm = _norm(c)
        self.lm_head = Head(tied=True).build(c.dim, vocab=c.vocab, embedding=self.embedding, init=c.init)
        self.verifier = None if c.verifier is None else Verifier(c, c.verifier)
        self._state_type = _state_type(c)
        self.idle_parameters = dict(_idle(c))
        self.spec = _spec(self)

    def encode(
        self,
        tokens: Int[Tensor, "batch seq"],
        cache: Cache | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> VeraContext:
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        c = self.config
        operator = self.operator_table[tokens]
        x = self.embedding(tokens, positions)
        scope = c.attention.scope(positions, valid, cached=cache is not None, dtype=x.dtype)
        places = _places(c, positions, operator, x.dtype)
        for index, layer in enumerate(self.prelude):
            view = None if cache is None else cache.view(PRELUDE, index, None)
            x = layer(x, places, scope.mask, view)
        x = self.mid_norm(x)
        mean = prefix_mean(x, valid, None if cache is None else cache.view(PRELUDE, c.prelude, None))
        # Inside the blocks the thoughts stand before the tokens.
        own = torch.arange(c.thoughts, device=tokens.device).expand(tokens.shape[0], -1)
        everything = torch.cat([own, c.thoughts + positions], dim=1)
        places = _places(c, everything, torch.cat([torch.zeros_like(own), operator], dim=1), x.dtype)
        return VeraContext(x, positions, valid, mean, scope, places)

    def init_state(self, context: VeraContext, noise: Float[Tensor, "batch seq noise"] | None) -> Any:
        if noise is not None:
            raise ValueError(f"init_state: this model draws no noise; got width {noise.shape[-1]}. Pass noise=None")
        rows, seq, dim = context.embeds.shape
        thoughts = self.thoughts.start.to(context.embeds.dtype).expand(rows, -1, -1)
        energy = context.embeds.new_zeros(rows, self.config.thoughts + seq, 2)
        gated = (context.embeds.new_zeros(rows, self.config.thoughts + seq, dim) for _ in self.core)
        return self._state_type(context.embeds, context.mean, thoughts, energy, *gated)

    def step(
        self,
        state: Any,
        context: VeraContext,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> Any:
        count, field = self.config.thoughts, _gated_fields(self.config)[block]
        views = [None if cache is None else cache.view(block, layer, iteration) for layer in (0, 1)]
        thoughts, branches = self.thoughts(state.thoughts, block * self.config.num_steps + iteration)
        x = state.x + self.bridge(thoughts, branches, state.mean)
        u, energy, gated = self.core[block](
            torch.cat([thoughts, x], dim=1), state.energy, getattr(state, field), context, views[0]
        )
        x = u[:, count:]
        mean = prefix_mean(x, context.valid, views[1])
        return state._replace(x=x, mean=mean, thoughts=u[:, :count], energy=energy, **{field: gated})

    def coda(self, state: Any, context: VeraContext, cache: Cache | None = None) -> Float[Tensor, "batch seq dim"]:
        return self.final_norm(state.x)

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return self.lm_head(hidden)

    def halt(self, state: Any) -> Float[Tensor, " batch"]:
        """The verifier's logit of every row, about all of its tokens, in float32 (float64 for float64 models)."""
        if self.verifier is None:
            return super().halt(state)
        score = self.verifier(state.thoughts + self.bridge.verifier(state.mean[:, -1:]))
        return score.to(torch.promote_types(score.dtype, torch.float32))


class StreamAttention(nn.Module):
    """Maps of an attention whose rotary angles mix several bases."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear

    def __init__(self, c: VeraConfig):
        super().__init__()
        self.config = c.attention
        for name, (inputs, outputs) in self.config.linears(c.dim).items():
            self.add_module(name, linear(inputs, outputs, init=c.init, output=name == "o"))
        self.mix = nn.Parameter(torch.zeros(2, c.heads, len(c.language_bases)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with their heads apart (B T H*d -> B H T d); queries and keys turned."""
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for part in (q, k, v))
        weights = self.mix.to(places.cos.dtype).softmax(-1)
        shared = weights.unflatten(1, (self.config.kv_heads, -1)).mean(2)  # a key has the mean of its queries' weights
        return _turned(q, weights, places), _turned(k, shared, places), v


class StreamLayer(nn.Module):
    """A layer of attention and feed-forward, each normed before."""

    def __init__(self, c: VeraConfig):
        super().__init__()
        self.attn = StreamAttention(c)
        self.ffn = SwiGLU(hidden=c.hidden).build(c.dim, c.init)
        self.attn_in, self.ffn_in = _norm(c), _norm(c)

    def forward(
        self, h: Float[Tensor, "batch seq dim"], places: Places, mask: Tensor | None, view: KVView | None
    ) -> Float[Tensor, "batch seq dim"]:
        """The stream after the layer, keys and values from the stream itself."""
        y = self.attn_in(h)
        q, k, v = self.attn(self.attn.q(y), self.attn.k(y), self.attn.v(y), places)
        return self.finish(h, _attend(q, k, v, mask, view))

    def finish(
        self, h: Float[Tensor, "batch seq dim"], read: Float[Tensor, "batch seq width"]
    ) -> Float[Tensor, "batch seq dim"]:
        """The stream after the layer, of what attention read."""
        h = h + self.attn.o(read)
        return h + self.ffn(self.ffn_in(h))


class ReasoningBlock(nn.Module):
    """One layer over thoughts and tokens; keys and values come from a state that lives as long as the block runs."""

    def __init__(self, c: VeraConfig):
        super().__init__()
        self.count = c.thoughts
        self.layer = StreamLayer(c)
        kv = c.kv_heads * (c.dim // c.heads)
        self.gate = linear(2 * c.dim, c.dim, init=c.init, bias=True)
        self.candidate = linear(c.dim, c.dim, init=c.init)
        self.k = linear(c.dim, kv, init=c.init)
        self.v = linear(c.dim, kv, init=c.init)
        self.energy = EnergyGate(hidden=c.dim // 4, tau=c.tau).build(c.dim, c.init)

    def forward(
        self,
        u: Float[Tensor, "batch slots dim"],
        energy: Float[Tensor, "batch slots 2"],
        gated: Float[Tensor, "batch slots dim"],
        context: VeraContext,
        view: KVView | None,
    ) -> tuple[Float[Tensor, "batch slots dim"], Float[Tensor, "batch slots 2"], Float[Tensor, "batch slots dim"]]:
        """Stream, energy and gated state after the application; thoughts come before tokens in all of them."""
        y = self.layer.attn_in(u)
        z = torch.sigmoid(self.gate(torch.cat([y, gated], dim=-1)))
        gated = z * gated + (1 - z) * torch.tanh(self.candidate(y))
        q, k, v = self.layer.attn(self.layer.attn.q(y), self.k(gated), self.v(gated), context.places)
        q0, k0, v0 = (part[:, :, : self.count] for part in (q, k, v))
        among = F.scaled_dot_product_attention(q0, k0, v0, enable_gqa=q0.shape[1] != k0.shape[1])
        q1, k1, v1 = (part[:, :, self.count :] for part in (q, k, v))
        read = torch.cat([_joined(among), _attend(q1, k1, v1, context.scope.mask, view)], dim=1)
        new, extra = self.energy(u, self.layer.finish(u, read), {"energy": energy})
        return new, extra["energy"], gated


class Network(nn.Module):
    """down(silu(up x))."""

    def __init__(self, inputs: int, hidden: int, outputs: int, init: Init, *, bias: bool):
        super().__init__()
        self.up = linear(inputs, hidden, init=init)
        self.down = linear(hidden, outputs, init=init, bias=bias)

    def forward(self, x: Float[Tensor, "*any inputs"]) -> Float[Tensor, "*any outputs"]:
        """The output."""
        return self.down(F.silu(self.up(x)))


class Thoughts(nn.Module):
    """The thought tokens, and how they advance by one application."""

    def __init__(self, c: VeraConfig):
        super().__init__()
        self.routing = c.routing
        self.start = nn.Parameter(torch.empty(c.thoughts, c.dim))
        self.index = nn.Parameter(torch.empty(c.blocks * c.num_steps, c.dim))
        c.init.matrix_(self.start)
        nn.init.normal_(self.index, std=c.init.std / 2**0.5)
        self.norm = RMSNormModule(c.dim, eps=THOUGHT_EPS, affine=True)
        self.branch_norms = nn.ModuleList(_norm(c) for _ in range(c.branches))
        self.branches = nn.ModuleList(Network(c.dim, c.dim // 2, c.dim, c.init, bias=False) for _ in range(c.branches))
        self.router = Network(c.dim, c.router_hidden, c.branches, c.init, bias=True)

    def forward(
        self, thoughts: Float[Tensor, "batch thoughts dim"], index: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch thoughts dim"], Float[Tensor, "batch branches thoughts dim"]]:
        """The next thoughts, and the branches they were made of; `index` counts over all blocks."""
        r = self.norm(thoughts) + self.index[index][:, None]
        grown = [r + branch(norm(r)) for norm, branch in zip(self.branch_norms, self.branches, strict=True)]
        branches = torch.stack(grown, dim=1)
        scores = self.router(branches.mean(dim=(1, 2)))
        if self.routing == "hard":
            best = scores.argmax(dim=-1)
            return branches[torch.arange(len(best), device=best.device), best], branches
        return (scores.softmax(-1)[:, :, None, None] * branches).sum(1), branches


class Bridge(nn.Module):
    """What tokens read of the thoughts: a mixture of branches, chosen by the mean of the tokens up to here."""

    def __init__(self, c: VeraConfig):
        super().__init__()
        self.thought = linear(c.dim, c.dim, init=c.init)
        self.prefix = linear(c.dim, c.dim, init=c.init)
        self.out = linear(c.dim, c.dim, init=Init(std=c.bridge_std))
        self.router = Network(2 * c.dim, c.router_hidden, c.branches, c.init, bias=True)
        self.verifier = linear(c.dim, c.dim, init=c.init)
        """Of the last mean, for the verifier alone."""

    def forward(
        self,
        thoughts: Float[Tensor, "batch thoughts dim"],
        branches: Float[Tensor, "batch branches thoughts dim"],
        mean: Float[Tensor, "batch seq dim"],
    ) -> Float[Tensor, "batch seq dim"]:
        """What is added to the stream of the tokens."""
        # Both products are linear, so what all tokens of a row share is multiplied once per row.
        own, shared = self.router.up.weight.chunk(2, dim=1)
        inner = F.linear(thoughts.mean(1), own)[:, None] + F.linear(mean, shared)
        weights = self.router.down(F.silu(inner)).softmax(-1)  # B T branches
        return self.out(weights @ self.thought(branches.mean(2)) + self.prefix(mean))


class Verifier(nn.Module):
    """A score of thoughts that know the row."""

    def __init__(self, c: VeraConfig, hidden: int):
        super().__init__()
        self.norm = _norm(c)
        self.net = Network(c.dim, hidden, 1, c.init, bias=True)

    def forward(self, thoughts: Float[Tensor, "batch thoughts dim"]) -> Float[Tensor, " batch"]:
        """The logit of being right."""
        return self.net(self.norm(thoughts).mean(1))[:, 0]


def operator_ids(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of the tokens that are nothing but digits, signs and brackets, in order.

    Args:
        vocabulary: Token as the tokenizer spells it -> id; marks of a leading space do not count.
    """
    spelled = ((token.lstrip("\u2581 ").strip(), index) for token, index in vocabulary.items())
    return tuple(sorted(index for token, index in spelled if token and OPERATOR_CHARACTERS.issuperset(token)))


def prefix_mean(
    x: Float[Tensor, "batch seq dim"], valid: Bool[Tensor, "batch seq"] | None, view: KVView | None
) -> Float[Tensor, "batch seq dim"]:
    """Mean of `x` over all tokens up to each one; under a cache, an attention read with equal weights."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if view is None:
        kept = x.to(dtype) if valid is None else x.to(dtype) * valid[..., None]
        ones = x.new_ones(x.shape[:2], dtype=dtype) if valid is None else valid.to(dtype)
        return (kept.cumsum(1) / ones.cumsum(1).clamp(min=1)[..., None]).to(x.dtype)
    first, second, allowed = view.append(*x[:, None].chunk(2, dim=-1))
    seen = torch.cat([first, second], dim=-1)[:, 0].to(dtype)
    if allowed is None:
        return seen.mean(1, keepdim=True).to(x.dtype)
    weights = allowed[:, 0].to(dtype)
    return (weights @ seen / weights.sum(-1, keepdim=True)).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, view: KVView | None) -> Tensor:
    """What tokens read of themselves and earlier ones, heads joined."""
    if view is not None:
        k, v, mask = view.append(k, v)
    causal = view is None and mask is None
    grouped = q.shape[1] != k.shape[1]
    return _joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped))


def _joined(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _places(c: VeraConfig, positions: Tensor, operator: Tensor, dtype: torch.dtype) -> Places:
    wide = torch.promote_types(dtype, torch.float32)
    tables = [
        [Rope(base=base).waves(positions, c.dim // c.heads, wide) for base in bases]
        for bases in (c.language_bases, c.operator_bases)
    ]
    chosen = operator[..., None, None].bool()

    def table(which: int) -> Tensor:
        language, operators = (torch.stack([one[which] for one in stream], dim=2) for stream in tables)
        return torch.where(chosen, operators, language)

    return Places(table(0), table(1), operator)


def _turned(x: Tensor, weights: Tensor, places: Places) -> Tensor:
    """`x` (B H T d), its pairs (2i, 2i + 1) turned by the mean of cosines and sines, not of angles."""
    own = weights[places.operator]  # B T H bases
    cos, sin = (
        sum(own[..., i, None] * table[:, :, i, None] for i in range(own.shape[-1])).transpose(1, 2)  # type: ignore[union-attr,misc]
        for table in (places.cos, places.sin)
    )
    wide = x.to(cos.dtype)
    first, second = wide[..., 0::2], wide[..., 1::2]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).to(x.dtype)


def _norm(c: VeraConfig) -> RMSNormModule:
    return RMSNormModule(c.dim, eps=c.eps, affine=True)


def _state_type(c: VeraConfig) -> Any:
    return namedtuple("VeraState", ("x", "mean", "thoughts", "energy", *_gated_fields(c)))


def _gated_fields(c: VeraConfig) -> tuple[str, ...]:
    return tuple(f"gated{block}" for block in range(c.blocks))


def _idle(c: VeraConfig) -> Iterator[tuple[str, str]]:
    for block in range(c.blocks):
        for name in "kv":
            yield f"core.{block}.layer.attn.{name}.", "the original stores these maps too, and reads the gated state"
    if c.verifier is None:
        yield "bridge.verifier.", "read by the verifier alone, which this model lacks"
    if c.routing == "hard":
        yield "thoughts.router.", "the choice of a branch passes no gradient"


def _spec(model: Vera) -> LoopSpec:
    c = model.config
    params = count_parameters(
        [block.parameters() for block in model.core],
        embedding=model.embedding.parameters(),
        prelude=[*model.prelude.parameters(), *model.mid_norm.parameters()],
        injection=[*model.thoughts.parameters(), *model.bridge.parameters()],
        readout=model.final_norm.parameters(),
        halt=[] if model.verifier is None else model.verifier.parameters(),
    )
    gated = _gated_fields(c)
    state = {
        "x": StateField(width=c.dim, init="FromEmbeds"),
        "mean": StateField(width=c.dim, init="prefix means of x", read_by_coda=False),
        "thoughts": StateField(width=c.thoughts * c.dim, per="row", init="Learned", read_by_coda=False),
        "energy": StateField(width=2, init="zeros", read_by_coda=False, prefix=c.thoughts),
    } | {name: StateField(width=c.dim, init="zeros", read_by_coda=False, prefix=c.thoughts) for name in gated}
    common = ("x", "mean", "thoughts", "energy")
    rule = f"the first iteration at which sigmoid(q_halt) exceeds {VERIFIED}, else the last"
    return LoopSpec(
        name="vera",
        version="1",
        blocks=tuple(
            BlockSpec(layers=(i,), params=count, reads=(*common, gated[i]), writes=(*common, gated[i]))
            for i, count in enumerate(params.core)
        ),
        order=Blocks(num_steps=(c.num_steps,) * c.blocks),
        trained_depth=c.trained_depth,
        operator_class=own_function,
        index_parts=frozenset({"embedding"}),
        max_iteration=c.num_steps,
        state=state,
        kv_rule=DepthIndexed(),
        kv_rules=(
            DepthIndexed(),
            DepthIndexed(missing=CopyLast()),
            DepthIndexed(missing=Skip()),
            Single(),
            First(),
            Average(),
            Modulo(m=1),
            Anchor(n=1),
        ),
        max_positions=c.max_positions,
        vocab=(c.vocab, c.vocab),
        readout=("final_norm", "head"),
        halt=None if c.verifier is None else HaltSpec(layout="q_halt", per="row", rule=rule),
        params=params,
        cost=_cost(c),
    )


def _cost(c: VeraConfig) -> CostSpec:
    attention, dim = c.attention, c.dim
    ffn = SwiGLU(hidden=c.hidden).matmul_params(dim)
    kv = attention.kv_width
    energy = EnergyGate(hidden=dim // 4).matmul_params(dim)
    # A block runs over thoughts and tokens alike; tokens cross the bridge, and thoughts advance, once per row.
    both = attention.matmul_params(dim) + ffn + energy + 3 * dim * dim
    bridge = 2 * dim * dim + c.router_hidden * (dim + c.branches) + c.branches * dim
    grown = c.branches * 2 * dim * (dim // 2)
    router = c.router_hidden * (dim + c.branches)
    row = c.thoughts * (both + grown) + router + dim * c.router_hidden + c.branches * dim * dim
    block = Group(
        matmul=both + bridge,
        matmul_per_row=row + 2 * attention.width * c.thoughts**2,
        attention_width=attention.width,
        layers=1,
        kv_width=kv + dim,
    )
    return CostSpec(
        prelude=Group(
            matmul=c.prelude * (attention.matmul_params(dim) + ffn),
            attention_width=c.prelude * attention.width,
            layers=c.prelude,
            kv_width=c.prelude * kv + dim,
        ),
        blocks=(block,) * c.blocks,
        coda=Group(),
        head=Group(matmul=dim * c.vocab),
    )


REQUIRED = (
    "dim",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "n_perception_layers",
    "n_reasoning_blocks",
    "max_reasoning_iters",
    "n_thought_tokens",
    "ffn_hidden",
    "norm_eps",
    "max_seq_len",
    "rope_thetas_lang",
    "rope_thetas_op",
    "n_branches",
    "branch_router_hidden",
    "use_verifier",
    "verifier_hidden",
    "energy_temperature",
    "operator_ids",
)
"""Settings without which the forward pass is not fixed; `operator_ids` is ours, the others are the original's."""

BUILT = {
    "n_streams": 2,
    "use_tree_memory": True,
    "halt_mode": "energy",
    "use_melt_kv": True,
    "thought_read_mode": "causal_cross",
    "use_causal_thought_bridge": True,
}
"""Switches of the original, and the side of each that is built here."""


def _config(facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> VeraConfig:
    missing = [name for name in REQUIRED if name not in facts]
    if missing == ["operator_ids"]:
        raise ValueError(
            "load: config.json must have operator_ids, the ids of tokens that rotate as operators: they follow from "
            "the tokenizer. Got none. Write those of looplab.models.vera.operator_ids(vocabulary) into it"
        )
    if missing:
        raise ValueError(f"load: config.json must have {', '.join(missing)}. Write the settings of the checkpoint")
    for name, built in BUILT.items():
        if facts.get(name, built) != built:
            raise ValueError(f"load: config.json: {name} must be {built!r}. Got {facts[name]!r}. It is not built here")
    return VeraConfig(
        dim=facts["dim"],
        vocab=facts["vocab_size"],
        heads=facts["n_heads"],
        kv_heads=facts["n_kv_heads"],
        hidden=facts["ffn_hidden"],
        prelude=facts["n_perception_layers"],
        blocks=facts["n_reasoning_blocks"],
        num_steps=facts["max_reasoning_iters"],
        trained_depth=FixedDepth(num_steps=facts["max_reasoning_iters"]),
        thoughts=facts["n_thought_tokens"],
        branches=facts["n_branches"],
        router_hidden=facts["branch_router_hidden"],
        routing="hard",
        verifier=facts["verifier_hidden"] if facts["use_verifier"] else None,
        operators=tuple(facts["operator_ids"]),
        language_bases=tuple(map(float, facts["rope_thetas_lang"])),
        operator_bases=tuple(map(float, facts["rope_thetas_op"])),
        tau=float(facts["energy_temperature"]),
        eps=facts["norm_eps"],
        max_positions=facts["max_seq_len"],
    )


def _network_rules(theirs: str, ours: str, first: int, last: int, *, bias: bool) -> list[Rule]:
    rules: list[Rule] = [
        Rename(f"{theirs}.{first}.weight", f"{ours}.up.weight"),
        Rename(f"{theirs}.{last}.weight", f"{ours}.down.weight"),
    ]
    return [*rules, Rename(f"{theirs}.{last}.bias", f"{ours}.down.bias")] if bias else rules


def _layer_rules(theirs: str, ours: str) -> list[Rule]:
    rules: list[Rule] = [Rename(f"{theirs}.attention.w{x}.weight", f"{ours}.attn.{x}.weight") for x in "qkvo"]
    rules += [Rename(f"{theirs}.attention.rope.mix_logits", f"{ours}.attn.mix")]
    rules += [Rename(f"{theirs}.ffn.{x}.weight", f"{ours}.ffn.{x}.weight") for x in ("gate", "up", "down")]
    return [*rules, *(Rename(f"{theirs}.{x}_norm.weight", f"{ours}.{x}_in.weight") for x in ("attn", "ffn"))]


def _key_map(config: VeraConfig) -> KeyMap:
    rules: list[Rule] = [
        Rename("tok_embeddings.weight", "embedding.weight"),
        Rename("mid_norm.weight", "mid_norm.weight"),
        Rename("final_norm.weight", "final_norm.weight"),
        Rename("thought_tokens.thought_embeds", "thoughts.start"),
        Rename("thought_tokens.iter_embeds", "thoughts.index"),
        Rename("thought_tokens.thought_norm.weight", "thoughts.norm.weight"),
        *_network_rules("thought_tokens.tree.router", "thoughts.router", 0, 2, bias=True),
        *_network_rules("thought_bridge.pos_router", "bridge.router", 0, 2, bias=True),
    ]
    for theirs, ours in (("prefix", "prefix"), ("thought", "thought"), ("out", "out"), ("verifier", "verifier")):
        rules.append(Rename(f"thought_bridge.{theirs}_proj.weight", f"bridge.{ours}.weight"))
    for i in range(config.branches):
        theirs = f"thought_tokens.tree.branch_proj.{i}"
        rules.append(Rename(f"{theirs}.0.weight", f"thoughts.branch_norms.{i}.weight"))
        rules += _network_rules(theirs, f"thoughts.branches.{i}", 1, 3, bias=False)
    for i in range(config.prelude):
        rules += _layer_rules(f"perception_layers.{i}", f"prelude.{i}")
    for i in range(config.blocks):
        theirs, ours, melt = f"reasoning_blocks.{i}", f"core.{i}", f"reasoning_blocks.{i}.melt_kv"
        rules += _layer_rules(theirs, f"{ours}.layer")
        rules += _network_rules(f"{theirs}.halt.energy_net", f"{ours}.energy", 0, 2, bias=True)
        rules += [
            Join(((f"{melt}.W_z.weight", config.dim), (f"{melt}.U_z.weight", config.dim)), f"{ours}.gate.weight", 1),
            Rename(f"{melt}.b_z", f"{ours}.gate.bias"),
            Rename(f"{melt}.W_h.weight", f"{ours}.candidate.weight"),
            Rename(f"{melt}.W_k.weight", f"{ours}.k.weight"),
            Rename(f"{melt}.W_v.weight", f"{ours}.v.weight"),
        ]
    if config.verifier is not None:
        rules.append(Rename("verifier.norm.weight", "verifier.norm.weight"))
        rules += _network_rules("verifier.net", "verifier.net", 0, 2, bias=True)
    return KeyMap(tuple(rules), aliases={"output.weight": "tok_embeddings.weight"})


PUBLISHED.register("vera")(
    Family(
        name="vera",
        model_types=(),
        reference="Dau, Khuat, Dung, arXiv:2609.19934; dauhavanHaniAI/depth-control-protocol",
        config=_config,
        key_map=_key_map,
        build=Vera,
        recognises=lambda names: {"thought_bridge.out_proj.weight", "thought_tokens.iter_embeds"} <= names,
        notes=(
            "unverified: the authors' losses were not reproduced, for want of their weights",
            "the original's own evaluations run in bfloat16, rotary tables and prefix means included",
            "which tokens rotate as operators follows from the tokenizer: operator_ids in config.json",
        ),
    )
)


def _authors(**sizes: Any) -> VeraConfig:
    """The defaults of the original's code, with its depth-scaled start."""
    std = 0.02
    out_std = std / (2 * (sizes["prelude"] + 2)) ** 0.5
    return VeraConfig(
        vocab=32000,
        trained_depth=FixedDepth(num_steps=4),
        routing="hard",
        verifier=384,
        operators=(),
        init=Init(std=std, out_std=out_std),
        **sizes,
    )


@PRESETS.register("vera-543m")
def vera_543m() -> VeraConfig:
    """The authors' model; its tokenizer says which tokens are `operators`."""
    return _authors(dim=1536, heads=24, kv_heads=4, hidden=4352, prelude=16, max_positions=2048)


@PRESETS.register("vera-90m")
def vera_90m() -> VeraConfig:
    """A model of their calibration grid, 71 M parameters by their code; its name says 90."""
    return _authors(dim=640, heads=10, kv_heads=2, hidden=1792, prelude=8, max_positions=1024)


@PRESETS.register("tiny-vera")
def tiny_vera() -> VeraConfig:
    """Two layers and two blocks x 3, three thoughts of three branches, soft routing as in training."""
    return VeraConfig(
        dim=32,
        vocab=64,
        heads=4,
        kv_heads=2,
        hidden=40,
        prelude=2,
        num_steps=3,
        trained_depth=FixedDepth(num_steps=3),
        thoughts=3,
        branches=3,
        router_hidden=12,
        routing="soft",
        verifier=10,
        operators=tuple(range(0, 64, 3)),
        max_positions=64,
        init=Init(std=0.15),
        bridge_std=0.15,
    )
