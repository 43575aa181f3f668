"""P4, identity: of two blocks of 4, iterations 1 to 3 of block 0 do nothing at all, and block 1 brings the answer.

    block 0:  iteration 0 writes half the features of the truth (idempotent), iterations 1 .. 3 are the identity
    block 1:  writes the truth
    prefix(1) = repeat(1) = repeat(4), bit by bit:  A = D = 0,  C = 100 %

In the twin every iteration of block 0 goes its own part of the way: nothing is bitwise equal, D is not negligible.
"""

from collections.abc import Iterator

import torch

from looplab.audit.positive_controls.base import Claim, Control
from looplab.audit.positive_controls.known import Known, audit_known
from looplab.audit.positive_controls.letters import Chain
from looplab.audit.positive_controls.rules import Towards, Writes
from looplab.audit.result import RAW, percent

STEPS = 4
TEMPERED = ("temperature",)


class Identity(Control):
    """P4."""

    name, title = "P4", "identity iterations"

    def claims(self, seed: int) -> Iterator[Claim]:
        chain = Chain.drawn(seed)
        size = len(chain.moves)
        owns = torch.ones(2, STEPS, size, dtype=torch.bool)
        owns[0, 0, size // 2 :] = False
        owns[0, 1:] = False
        model = Known(chain, Writes(owns, torch.ones(2, STEPS)), steps=(STEPS, STEPS))
        result = audit_known(model, chain.documents(seed), seed=seed, probes=TEMPERED)
        for probe in (RAW, *TEMPERED):
            split = result.domains[0].decomposition(probe)
            zeros = [split.part(name) for name in ("application", "distinct")]
            exact = all(part.bitwise_equal and part.nats is not None and part.nats.value == 0 for part in zeros)
            found = "0 (bitwise equal)" if exact else ", ".join(part.word for part in zeros)
            yield Claim(f"A = D = 0 (bitwise equal), {probe}", found, exact)
            share = split.part("composition").share
            yield Claim(f"C = 100 %, {probe}", percent(share), share is not None and share.value == 1)
        yield from _twin(chain, seed)


def _twin(chain: Chain, seed: int) -> Iterator[Claim]:
    rates = [[0.1, 0.3, 0.4, 0.5], [0.6, 0.7, 0.8, 0.9]]
    result = audit_known(Known(chain, Towards(rates), steps=(STEPS, STEPS)), chain.documents(seed), seed=seed)
    parts = result.decomposition.parts
    moved = not any(part.bitwise_equal or part.word.startswith("negligible") for part in parts[:2])
    found = ", ".join(f"{part.name} {part.word}" for part in parts[:2])
    yield Claim("twin, every iteration moves: neither A nor D is negligible", found, moved)
