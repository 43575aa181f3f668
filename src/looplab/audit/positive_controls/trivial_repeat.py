"""P5, trivial repeat: one core without an iteration index, where repeating is all there is.

    repeat(k) = permute = pinned = full, word for word: application, distinct and composition are not identifiable

No number for them may stand in the result or in any file that is written of it: JSON, page, card, TeX tables. In the
twin the same core has an index, and the search must find the numbers in every one of them: it is not blind.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from looplab.audit.positive_controls.base import Claim, Control
from looplab.audit.positive_controls.known import Known, audit_known
from looplab.audit.positive_controls.letters import Chain
from looplab.audit.positive_controls.rules import Towards
from looplab.audit.positive_controls.unprinted import PHRASE, printed_numbers
from looplab.audit.result import AuditResult

STEPS = 4
Writer = Callable[[AuditResult, Path], Any]
"""Writes pages and tables of a result into a folder, such as `looplab.report.write_report`."""


@dataclass(frozen=True)
class TrivialRepeat(Control):
    """P5. Without a writer only results.json is searched."""

    name, title = "P5", "trivial repeat"
    write_report: Writer | None = None

    def claims(self, seed: int) -> Iterator[Claim]:
        result = _audit(seed, indexed=False)
        words = [part.word for split in result.domains[0].decompositions for part in split.parts]
        unidentified = sum(word.startswith(PHRASE) for word in words)
        yield Claim(f"all {len(words)} parts {PHRASE}", f"{unidentified} of {len(words)}", unidentified == len(words))
        trivial = [c for c in result.domains[0].contrasts if c.family != "prefix-full"]
        silent = sum(contrast.effect is None for contrast in trivial)
        yield Claim(f"no effect of {len(trivial)} trivial contrasts", f"{silent} without", silent == len(trivial))
        silent_files = self._search(result)
        told = [f"{name}: {numbers[0]}" for name, numbers in silent_files.items() if numbers]
        yield Claim(f"no number for them in {', '.join(silent_files)}", ", ".join(told) or "none", not told)
        twin = self._search(_audit(seed, indexed=True))
        told = [name for name, numbers in twin.items() if numbers]
        yield Claim(f"twin, with an index: numbers in {', '.join(twin)}", ", ".join(told), told == list(twin))

    def _search(self, result: AuditResult) -> dict[str, list[str]]:
        """File -> the numbers found in it."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            result.save(folder)
            if self.write_report is not None:
                self.write_report(result, folder)
            return printed_numbers(folder)


def _audit(seed: int, *, indexed: bool) -> AuditResult:
    chain = Chain.drawn(seed)
    shift = 0.1 * torch.randn(1, STEPS, len(chain.moves), generator=torch.Generator().manual_seed(seed))
    rule = Towards([[0.3] * STEPS], shift if indexed else None)
    model = Known(chain, rule, steps=STEPS, indexed=indexed)
    return audit_known(model, chain.documents(seed), seed=seed, grid=None, controls=None, probes=("temperature",))
