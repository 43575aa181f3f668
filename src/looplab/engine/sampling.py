"""The next token, as a pure function of logits, parameters, seed, choice and place in the text. Batched over rows.

    x  = logits + logit_bias                                          float32, the row's own
    x  = x / p where x > 0, else x * p                                repetition penalty; tokens of prompt and output
    x  = x - presence [c > 0] - frequency c                           c: times a token stands in the output
    x  = -inf at ids that end the text                                before `min_tokens`
    temperature 0: the largest x, of equals the lowest id. Otherwise, with p = softmax(x / temperature) in float64,
    top_k      keep the k largest, of equals the lowest ids first;    p is normalised again
    top_p      keep the fewest largest with mass >= top_p, at least one
    min_p      keep p_i >= min_p max p                                arXiv:2407.01082
    draw       the first id whose cumulative mass exceeds u times the mass kept
    u          (blake2b(seed, choice, number) >> 11) 2^-53             8 bytes, of three little-endian words of 8

No generator has a state, so neighbours, order, preemption and restarts cannot change a draw. Log-probabilities are
log-softmax of the unmodified logits in float32.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.engine.request import SamplingParams, TokenLogprob

WORD = 2**64 - 1


class Draw(NamedTuple):
    """What one row wants."""

    sampling: SamplingParams
    seed: int
    choice: int
    number: int
    """Which token of the output it is, from 0."""
    text: Sequence[int] = ()
    """Prompt and output so far; read where a penalty asks for it."""
    prompt: int = 0
    """Tokens of `text` that are prompt."""
    ends: tuple[int, ...] = ()
    """Ids that end the text, which `min_tokens` forbids."""


def uniform(seed: int, choice: int, number: int) -> float:
    """What draws token `number` of a choice, in [0, 1)."""
    words = b"".join((word & WORD).to_bytes(8, "little") for word in (seed, choice, number))
    return (int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def draw(logits: Float[Tensor, "batch vocab"], wants: Sequence[Draw]) -> Int[Tensor, " batch"]:
    """One token per row. A row with a NaN yields some token; look for it in the logits."""
    x = adjusted(logits, wants)
    tokens = x.argmax(dim=-1)  # of equals the first
    places = [i for i, want in enumerate(wants) if want.sampling.temperature > 0]
    if places:
        rows = torch.tensor(places, device=x.device)
        drawn = _drawn(x[rows], [wants[i] for i in places])
        tokens = drawn if len(places) == len(wants) else tokens.index_copy(0, rows, drawn)
    return tokens


def adjusted(logits: Float[Tensor, "batch vocab"], wants: Sequence[Draw]) -> Float[Tensor, "batch vocab"]:
    """Logits after bias, penalties and forbidden ends; a copy where anything changes."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    bias = [(i, token, value) for i, want in enumerate(wants) for token, value in want.sampling.logit_bias]
    if bias:
        x = _add(x.clone(), bias)
    if any(penalised(want.sampling) for want in wants):
        x = _penalise(x.clone() if x is logits else x, wants)
    ends = [
        (i, token, 0.0) for i, want in enumerate(wants) if want.number < want.sampling.min_tokens for token in want.ends
    ]
    if ends:
        row, token, _ = _columns(ends, x)
        x = x.index_put((row, token), x.new_tensor(-torch.inf))
    return x


def kept(x: Float[Tensor, "batch vocab"], samplings: Sequence[SamplingParams]) -> Float[Tensor, "batch vocab"]:
    """Probabilities in float64 after temperature and filters, 0 where filtered out; not normalised."""
    dtype = torch.float64
    temperature = torch.tensor([s.temperature for s in samplings], dtype=dtype, device=x.device)[:, None]
    x = x.to(dtype) / temperature
    counts = [s.top_k if 0 < s.top_k < x.shape[1] else 0 for s in samplings]
    if any(counts):
        limit = torch.tensor([count or x.shape[1] for count in counts], device=x.device)
        largest = x.topk(max(counts), dim=-1).values
        last = largest.gather(1, (limit.clamp(max=largest.shape[1]) - 1)[:, None])
        unlimited = torch.tensor([not count for count in counts], device=x.device)[:, None]
        x = x.masked_fill(~(_first(x, last, limit) | unlimited), -torch.inf)
    mass = x.softmax(dim=-1)
    shares = [s.top_p for s in samplings]
    if min(shares) < 1:
        share = torch.tensor(shares, dtype=dtype, device=x.device)[:, None]
        # A whole share keeps even what lies below the rounding of the sum.
        mass = torch.where(_nucleus(mass, share) | (share >= 1), mass, 0.0)
    floors = [s.min_p for s in samplings]
    if max(floors) > 0:
        floor = torch.tensor(floors, dtype=dtype, device=x.device)[:, None] * mass.amax(dim=-1, keepdim=True)
        mass = torch.where(mass >= floor, mass, 0.0)
    return mass


def log_probs(logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
    """Log-softmax of unmodified logits in float32."""
    return logits.float().log_softmax(dim=-1)


class Read(NamedTuple):
    """What is told of the tokens of some rows, as tensors."""

    own: Float[Tensor, " batch"]
    values: Float[Tensor, "batch alternatives"]
    ids: Int[Tensor, "batch alternatives"]


def read(law: Float[Tensor, "batch vocab"], tokens: Int[Tensor, " batch"], alternatives: int) -> Read:
    """The log-probabilities of these tokens and of the likeliest ones.

    Args:
        law: `log_probs` of the rows.
    """
    count = min(alternatives, law.shape[1])
    own = law.gather(1, tokens[:, None])[:, 0]
    values, ids = law.topk(count, dim=-1)
    if count:  # of equals the lowest ids, whichever topk found
        chosen = _first(law, values[:, -1:], torch.full_like(tokens, count))
        ids = chosen.byte().topk(count, dim=-1).indices
        values = law.gather(1, ids)
    return Read(own, values, ids)


def told(found: Read, tokens: Sequence[int], alternatives: Sequence[int | None]) -> list[TokenLogprob | None]:
    """`Read` on the host: one entry per row, None where nothing was asked."""
    tops = zip(found.ids.tolist(), found.values.tolist(), strict=True)
    return [
        None if count is None else TokenLogprob(token, own, _best(*top)[:count])
        for token, own, top, count in zip(tokens, found.own.tolist(), tops, alternatives, strict=True)
    ]


def _best(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0])))


def _drawn(x: Float[Tensor, "batch vocab"], wants: Sequence[Draw]) -> Int[Tensor, " batch"]:
    mass = kept(x, [want.sampling for want in wants])
    u = [uniform(want.seed, want.choice, want.number) for want in wants]
    sums = mass.cumsum(dim=-1)
    aim = torch.tensor(u, dtype=mass.dtype, device=x.device)[:, None] * sums[:, -1:]
    last = (sums < sums[:, -1:]).sum(dim=-1)  # u times the mass may round up to the mass
    return torch.minimum((sums <= aim).sum(dim=-1), last)


def _first(
    x: Float[Tensor, "batch vocab"], last: Float[Tensor, "batch 1"], count: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch vocab"]:
    """The `count` largest, of which the smallest is `last`; of equals the lowest ids."""
    above, equal = x > last, x == last
    room = count[:, None] - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def _nucleus(mass: Float[Tensor, "batch vocab"], share: Float[Tensor, "batch 1"]) -> Bool[Tensor, "batch vocab"]:
    """The fewest largest whose mass reaches `share`."""
    ordered = mass.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    count = (before < share).sum(dim=-1).clamp(min=1)
    return _first(mass, ordered.gather(1, (count - 1)[:, None]), count)


def penalised(s: SamplingParams) -> bool:
    """Whether a draw depends on the tokens before it."""
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def _penalise(x: Float[Tensor, "batch vocab"], wants: Sequence[Draw]) -> Float[Tensor, "batch vocab"]:
    """Penalties at the tokens that have occurred, of the rows that ask for them; `x` is changed in place."""
    seen: list[tuple[np.ndarray, ...]] = []
    for i, want in enumerate(wants):
        s = want.sampling
        if not penalised(s):
            continue
        ids, back = np.unique(np.asarray(want.text, dtype=np.int64), return_inverse=True)
        times = np.bincount(back[want.prompt :], minlength=len(ids))
        off = s.presence_penalty * (times > 0) + s.frequency_penalty * times
        seen.append((np.full(len(ids), i), ids, np.full(len(ids), s.repetition_penalty), off))
    row, token, factor, less = (torch.from_numpy(np.concatenate(part)).to(x.device) for part in zip(*seen, strict=True))
    now = x[row, token]
    now = torch.where(now > 0, now / factor.to(x.dtype), now * factor.to(x.dtype)) - less.to(x.dtype)
    return x.index_put_((row, token), now)


def _add(x: Float[Tensor, "batch vocab"], entries: Sequence[tuple[int, int, float]]) -> Float[Tensor, "batch vocab"]:
    row, token, value = _columns(entries, x)
    return x.index_put_((row, token), value, accumulate=True)


def _columns(entries: Sequence[tuple[int, int, float]], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row, token, value = zip(*entries, strict=True)
    return (
        torch.tensor(row, device=like.device),
        torch.tensor(token, device=like.device),
        torch.tensor(value, dtype=like.dtype, device=like.device),
    )
