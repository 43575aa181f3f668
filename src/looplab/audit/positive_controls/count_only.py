"""P6, count only: an iteration index is declared, and its embedding is all zeros, so that only the count matters.

    state + 0.25 (truth - state) + shift[iteration],  shift = 0
    repeat(1) = full, bit by bit:  D = 0,  A = 100 %,  finding `index_inert`

In the twin the embedding is not zero: no `index_inert`, and nothing is bitwise equal.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from looplab._types import Float
from looplab.audit.positive_controls.base import Claim, Control
from looplab.audit.positive_controls.known import Known, audit_known
from looplab.audit.positive_controls.letters import Chain
from looplab.audit.positive_controls.rules import Towards
from looplab.audit.result import AuditResult, percent

STEPS, RATE = 8, 0.25
INERT = "audit.index_inert"


class CountOnly(Control):
    """P6."""

    name, title = "P6", "count only"

    def claims(self, seed: int) -> Iterator[Claim]:
        chain = Chain.drawn(seed)
        size = len(chain.moves)
        result = _audit(chain, torch.zeros(1, STEPS, size), seed)
        distinct, application = (result.decomposition.part(name) for name in ("distinct", "application"))
        exact = distinct.bitwise_equal and distinct.nats is not None and distinct.nats.value == 0
        yield Claim("D = 0 (bitwise equal)", "0 (bitwise equal)" if exact else distinct.word, exact)
        share = application.share
        yield Claim("A = 100 %", percent(share), share is not None and share.value == 1)
        yield Claim(f"finding {INERT}", _inert(result), _inert(result) == INERT)
        shift = 0.1 * torch.randn(1, STEPS, size, generator=torch.Generator().manual_seed(seed))
        twin = _audit(chain, shift, seed)
        used = twin.decomposition.part("distinct")
        silent = _inert(twin) == "none" and not used.bitwise_equal
        found = f"{_inert(twin)}, D {percent(used.share)}"
        yield Claim(f"twin, the index is used: no {INERT}, D not bitwise 0", found, silent)


def _audit(chain: Chain, shift: Float[Tensor, "blocks steps dim"], seed: int) -> AuditResult:
    rule = Towards([[RATE] * STEPS], shift)
    return audit_known(Known(chain, rule, steps=STEPS), chain.documents(seed), seed=seed)


def _inert(result: AuditResult) -> str:
    return INERT if any(finding.kind == INERT for finding in result.findings) else "none"
