"""P7, composition only: of two blocks of 4, the first settles at once and the second carries the answer.

    block 0:  every iteration writes 0.3 truth, give or take 0.2 %: idempotent, and distinct only in name
    block 1:  iteration t writes the t-th quarter of the truth
    C >= 99 %,  D equivalent to zero without being zero

In the twin the blocks change places: D carries everything, C is negligible.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from looplab._types import Bool, Float
from looplab.audit.positive_controls.base import Claim, Control
from looplab.audit.positive_controls.known import Known, audit_known
from looplab.audit.positive_controls.letters import Chain
from looplab.audit.positive_controls.rules import Writes, quarters
from looplab.audit.result import AuditResult, percent

STEPS = 4
LEAST = 0.99


class CompositionOnly(Control):
    """P7."""

    name, title = "P7", "composition only"

    def claims(self, seed: int) -> Iterator[Claim]:
        chain = Chain.drawn(seed)
        size = len(chain.moves)
        settles = torch.ones(STEPS, size, dtype=torch.bool)
        slightly = 0.3 * torch.linspace(0.998, 1.002, STEPS)
        carries, fully = quarters(size, STEPS), torch.ones(STEPS)
        result = _audit(chain, torch.stack([settles, carries]), torch.stack([slightly, fully]), seed)
        whole, distinct = (result.decomposition.part(name) for name in ("composition", "distinct"))
        yield Claim("C >= 99 %", percent(whole.share), whole.share is not None and whole.share.value >= LEAST)
        equivalent = bool(distinct.equivalent) and not distinct.bitwise_equal
        yield Claim("D equivalent to zero, and not bitwise equal", distinct.word, equivalent)

        none = torch.zeros(STEPS, size, dtype=torch.bool)
        twin = _audit(chain, torch.stack([carries, none]), torch.stack([fully, fully]), seed).decomposition
        later, distinct = (twin.part(name) for name in ("composition", "distinct"))
        silent = bool(later.equivalent) and distinct.word == "dominant" and not distinct.equivalent
        found = f"C {later.word}, D {distinct.word}"
        yield Claim("twin, block 0 carries the answer: C negligible, D dominant", found, silent)


def _audit(
    chain: Chain, owns: Bool[Tensor, "blocks steps dim"], strength: Float[Tensor, "blocks steps"], seed: int
) -> AuditResult:
    model = Known(chain, Writes(owns, strength), steps=(STEPS, STEPS))
    return audit_known(model, chain.documents(seed), seed=seed)
