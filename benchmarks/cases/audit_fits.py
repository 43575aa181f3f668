"""The probe fits of an audit against L-BFGS as published: same hidden states, head and targets.

Temperature: over streamed logits, against logits stored once (making them is part of its time), closures on all tokens
at once and in pieces near the size of a cache. Affine: the six finite penalties, each side to its own minimum. The
excess of a temperature over the least loss is f'^2 / (2 f'') in float64; ours must be below 1e-9 nats, the rivals'
below 1e-5, and the penalised affine losses equal to 1e-5 (a gradient of 1e-5 leaves some 1e-6 at the smallest penalty),
before a time is printed. Logits have the spread and the entropy of a language model's: a random head with a bias;
`affine_checkpoint` takes the states and the head of a built-in model.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import looplab
from benchmarks.baselines import stored_logits
from benchmarks.timing import paired, ratio, report
from looplab.audit import schedules
from looplab.audit.probes import LogitChunks, fit_temperature
from looplab.audit.probes.affine import AffineProblem
from looplab.audit.probes.descent import Descent
from looplab.audit.probes.gradient import TokenIds
from looplab.audit.probes.penalty import STRENGTHS, falling
from looplab.data.corpus import builtin_corpus
from looplab.recurrence.loop import run_plan

PIECE = 24 * 2**20
PUBLISHED = 256 * 2**20


class CountingHead:
    """A linear head that notes the largest logits it made and how many rows."""

    def __init__(self, vocab: int, dim: int):
        draws = torch.Generator().manual_seed(0)
        self.weight = 3.2 / dim**0.5 * torch.randn(vocab, dim, generator=draws)
        self.bias = 2 * torch.randn(vocab, generator=draws)
        self.largest, self.rows = 0, 0

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = torch.addmm(self.bias, hidden, self.weight.T)
        self.largest, self.rows = max(self.largest, logits.nbytes), self.rows + len(hidden)
        return logits


def problem(tokens: int, vocab: int, dim: int) -> tuple[Tensor, CountingHead, Tensor]:
    """Hidden states, head, and targets drawn at temperature 1.3 from features that were scaled and shifted.

    Features are correlated, with the falling spectrum (variance of direction j as 1 / j) of trained hidden states.
    """
    draws = torch.Generator().manual_seed(1)
    rotation, _ = torch.linalg.qr(torch.randn(dim, dim, generator=draws))
    spectrum = 1 / torch.arange(1, dim + 1).sqrt()
    spectrum /= spectrum.square().mean().sqrt()
    hidden, head = torch.randn(tokens, dim, generator=draws) * spectrum @ rotation, CountingHead(vocab, dim)
    gain = 1 + 0.3 * torch.sin(torch.arange(dim) * 1.3)
    targets = [
        torch.multinomial(torch.softmax(head(gain * part + 0.2) / 1.3, dim=1), 1, generator=draws)[:, 0]
        for part in hidden.split(200)
    ]
    return hidden, head, torch.cat(targets)


def excess(hidden: Tensor, head: CountingHead, targets: Tensor, beta: float) -> float:
    """How far the loss at beta is above the least, in nats."""
    first = second = 0.0
    weight, bias = head.weight.double().T, head.bias.double()
    for part, ids in zip(hidden.split(200), targets.split(200), strict=True):
        logits = torch.addmm(bias, part.double(), weight)
        p = torch.softmax(beta * logits, dim=1)
        mean = (p * logits).sum(dim=1, keepdim=True)
        first += float((mean - logits.gather(1, ids[:, None])).sum())
        second += float((p * (logits - mean).square()).sum())
    return first**2 / (2 * second) / len(targets)


def temperature_case(options: argparse.Namespace) -> dict[str, Any]:
    hidden, head, targets = problem(options.tokens, options.vocab, options.dim)

    def ours() -> float:
        return fit_temperature(LogitChunks(hidden, head), targets).beta

    def rival(piece: int) -> Callable[[], float]:
        return lambda: stored_logits.temperature(head(hidden), targets, max(1, piece // (4 * options.vocab)))

    head.largest = head.rows = 0
    found = ours()
    numbers: dict[str, Any] = {
        "tokens": options.tokens, "vocab": options.vocab, "dim": options.dim, "passes": head.rows / len(targets),
        "logit_bytes": head.largest, "excess": excess(hidden, head, targets, found),
    }  # fmt: skip
    assert numbers["excess"] <= 1e-9, "the fit is not at the minimum"
    rivals = (("stored_in_pieces", PIECE, options.pairs), ("stored", PUBLISHED, options.published_pairs))
    for name, piece, pairs in rivals:
        head.largest = 0
        above = excess(hidden, head, targets, rival(piece)())
        assert above <= 1e-5, f"{name} is not at the minimum"
        slow, fast = paired(rival(piece), ours, pairs=pairs)
        numbers[name] = {"excess": above, "logit_bytes": head.largest, **ratio(slow, fast)}
    return numbers


def checkpoint(tokens: int) -> tuple[Tensor, CountingHead, Tensor]:
    """Hidden states of the built-in 2 x 4 model after one of its eight applications, on held-out text."""
    loaded = looplab.load("text-2x4-fixed")
    model, length = loaded.model, loaded.model.spec.max_positions
    texts = [d.text for d in builtin_corpus("heldout").documents if len(d.text.encode()) >= length]
    ids = torch.tensor([loaded.tokenizer.encode(text)[:length] for text in texts[: tokens // (length - 1)]])
    with torch.no_grad():
        context = model.encode(ids)
        plan = schedules.prefix(1).plan(schedules.full_plan(model.spec))
        hidden = model.coda(run_plan(model, plan, context, model.init_state(context, None)), context)
        head = CountingHead(*model.lm_head.weight.shape)
        head.weight, head.bias = model.lm_head.weight.detach()[: model.lm_head.columns], torch.zeros(())
    return hidden[:, :-1].flatten(0, 1), head, ids[:, 1:].flatten()


def affine_case(options: argparse.Namespace) -> dict[str, Any]:
    return affine_fits(*problem(options.affine_tokens, options.vocab, options.affine_dim), options.pairs)


def checkpoint_case(options: argparse.Namespace) -> dict[str, Any]:
    return affine_fits(*checkpoint(12_000), options.pairs)


def affine_fits(hidden: Tensor, head: CountingHead, targets: Tensor, pairs: int) -> dict[str, Any]:
    vocab, dim = head.weight.shape
    strengths = STRENGTHS[1:]

    def asked() -> AffineProblem:
        return AffineProblem(hidden, head, TokenIds(targets), 1.0, 2**28)

    def ours() -> list[Tensor]:
        problem = asked()
        search = Descent(problem.loss_and_gradient, problem.identity())
        return [point.x for _, point, _ in falling(problem, search)][1:]

    def rival() -> list[Tensor]:
        rows = max(1, PIECE // (4 * vocab))
        return stored_logits.affine(hidden, head, targets, 1.0, strengths, rows)

    def losses(found: list[Tensor]) -> list[float]:
        checked, identity = asked(), asked().identity()
        return [
            checked.loss(x.double()) + strength * float((x.double() - identity).square().sum())
            for strength, x in zip(strengths, found, strict=True)
        ]

    passes, reached, largest = {}, {}, {}
    for name, side in (("ours", ours), ("rival", rival)):
        head.largest = head.rows = 0
        found = side()
        passes[name], largest[name] = head.rows / len(targets), head.largest
        reached[name] = losses(found)
    apart = max(abs(a - b) for a, b in zip(reached["ours"], reached["rival"], strict=True))
    assert apart <= 1e-5, f"the two sides end {apart:.1e} nats apart"
    slow, fast = paired(rival, ours, pairs=pairs)
    return {
        "tokens": len(targets), "vocab": vocab, "dim": dim, "passes": passes,
        "logit_bytes": largest, "losses_apart": apart, **ratio(slow, fast),
    }  # fmt: skip


CASES = {"temperature": temperature_case, "affine": affine_case, "affine_checkpoint": checkpoint_case}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--affine-tokens", type=int, default=20_000)
    parser.add_argument("--affine-dim", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--published-pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fit", choices=tuple(CASES), help="only one of them")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, case in CASES.items():
        if options.fit in (None, name):
            report(f"audit_fits_{name}", {**case(options), "load": os.getloadavg()[0]}, options.out)


if __name__ == "__main__":
    main()
