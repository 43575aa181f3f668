"""Streams of logits: chunks of spooled hidden states through the head, and moments of tilted softmax distributions.

With x = z - max z and a tilt beta, a token's statistics are ratios of the sums

    S_r = sum_v e^{beta x_v} x_v^r,  r = 0..4          P = sum_v e^{2 beta x_v}

Blocks of the vocabulary are merged as they come. A block with a larger maximum m' = m + D rescales by c = e^{-beta D}:
S0 <- c S0,  S1 <- c (S1 - D S0),  S2 <- c (S2 - 2 D S1 + D^2 S0),  S3 <- c (S3 - 3 D S2 + 3 D^2 S1 - D^3 S0).
and for S4 likewise. Exponentials keep the dtype of the logits, and so do the sums inside one row of a block, which are
pairwise; blocks are added in float64.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from looplab._types import Float, Int

LOGIT_BYTES = 256 * 2**20
"""Largest size of logits held at once."""
VOCAB_BLOCK = 65_536
PIECE_BYTES = 24 * 2**20
"""Size of a chunk of logits, and of what is made of a piece of it for many betas."""
_BLOCK_ELEMENTS = 2**18

Head = Callable[[Tensor], Tensor]
"""Hidden "tokens dim" (spooled dtype or float32, on the CPU) to logits "tokens vocab" (float32; tests use float64).

Where a token answers with several cells, each a law of its own, it has as many rows of logits, one after another.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class LogitChunks:
    """Logits of spooled hidden states, made anew in every iteration and never above `logit_bytes` at once.

    Every token goes through the head once per iteration. The first chunk is a single token, which tells the width of
    the vocabulary; a later chunk has as many tokens as fit, at least one.
    """

    hidden: Float[Tensor, "tokens dim"]
    head: Head
    logit_bytes: int = LOGIT_BYTES

    def __iter__(self) -> Iterator[Tensor]:
        logits = self.head(self.hidden[:1])
        rows = max(1, chunk_rows(logits, self.logit_bytes) // len(logits))
        yield logits
        for start in range(1, len(self.hidden), rows):
            yield self.head(self.hidden[start : start + rows])


def chunk_rows(logits: Float[Tensor, "tokens vocab"], logit_bytes: int, *, copies: int = 1) -> int:
    """Rows per chunk where `copies` tensors of the size of its logits are held at once.

    Chunks stay near the size of a cache, and below the size from which the allocator maps every buffer anew.

    Raises:
        ValueError: `logit_bytes` is less than `copies` rows; rows are not cut, for the head makes them whole.
    """
    row = logits.element_size() * logits.shape[1]
    if copies * row > logit_bytes:
        raise ValueError(
            f"probes: logit_bytes must be at least {copies * row}, {copies} rows of {logits.shape[1]} logits. "
            f"Got {logit_bytes}. Raise it; a head makes whole rows."
        )
    return max(1, min(logit_bytes // copies, PIECE_BYTES) // row)


def rows_at_once(betas: int, numbers: int) -> int:
    """Rows of which `numbers` float64 numbers at each of so many betas are held at once."""
    return max(1, PIECE_BYTES // (8 * numbers * betas))


def leading_tokens(documents: Int[Tensor, " tokens"], limit: int) -> int:
    """How many leading tokens make whole documents without passing `limit`; the first document is always kept."""
    if len(documents) <= limit:
        return len(documents)
    ends = torch.cat([torch.nonzero(documents.diff()).flatten() + 1, torch.tensor([len(documents)])])
    return int(ends[max(0, int((ends <= limit).sum()) - 1)])


def tilted_moments(
    logits: Float[Tensor, "tokens vocab"],
    betas: Sequence[float],
    *,
    order: int = 3,
    power: bool = False,
    vocab_block: int = VOCAB_BLOCK,
) -> tuple[Tensor, Tensor]:
    """Row maxima, and S_0..S_order (and P if `power`) of every row at every beta.

    Returns:
        maxima Float "tokens" in the dtype of the logits, sums float64 "betas order+1(+1) tokens".
    """
    tokens, vocab = logits.shape
    width = min(vocab, vocab_block)
    rows = max(1, _BLOCK_ELEMENTS // width)
    maxima = logits.new_empty(tokens)
    sums = torch.zeros(len(betas), order + 1 + power, tokens, dtype=torch.float64, device=logits.device)
    room = logits.new_empty(2, min(rows, tokens), width)
    for start in range(0, tokens, rows):
        part, total = slice(start, start + rows), sums[:, :, start : start + rows]
        running = logits[part, :width].amax(dim=1)
        for column in range(0, vocab, width):
            block = logits[part, column : column + width]
            if column:
                larger = torch.maximum(running, block.amax(dim=1))
                _shift_maximum(total, betas, (larger - running).double(), order, power)
                running = larger
            x, term = room[:, : block.shape[0], : block.shape[1]]
            torch.sub(block, running[:, None], out=x)
            for i, beta in enumerate(betas):
                total[i] += torch.stack(_block_sums(x, term, beta, order, power))
        maxima[part] = running
    return maxima, sums


def _block_sums(x: Tensor, term: Tensor, beta: float, order: int, power: bool) -> list[Tensor]:
    """S_0..S_order, and P, of one block; `term` is scratch."""
    torch.mul(x, beta, out=term)
    term.exp_()
    sums = [term.sum(dim=1)]
    squares = [(term * term).sum(dim=1)] if power else []
    for _ in range(order):
        term.mul_(x)
        sums.append(term.sum(dim=1))
    return sums + squares


def _shift_maximum(total: Tensor, betas: Sequence[float], shift: Tensor, order: int, power: bool) -> None:
    """Re-expresses the sums relative to a maximum that is larger by `shift`; binomial expansion of (x - shift)^r."""
    for i, beta in enumerate(betas):
        scale = torch.exp(-beta * shift)
        s = total[i, : order + 1].clone()
        for r in range(order + 1):
            total[i, r] = scale * sum(_BINOMIAL[r][j] * (-shift) ** (r - j) * s[j] for j in range(r + 1))
        if power:
            total[i, -1] *= scale * scale


_BINOMIAL = ((1,), (1, 1), (1, 2, 1), (1, 3, 3, 1), (1, 4, 6, 4, 1))
