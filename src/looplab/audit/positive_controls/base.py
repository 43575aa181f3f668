"""A positive control: a model made by hand, whose audit is known beforehand, and what the audit must find on it.

Every control runs the whole audit, on a model of the contract and on documents drawn for it. It makes claims; each has
a number that was found beside what was expected. Where the planted fault is left out, the same audit must stay silent:
every control holds such a twin.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Claim:
    """What must be found, what was, and whether they agree."""

    expected: str
    found: str
    holds: bool


@dataclass(frozen=True)
class ControlOutcome:
    """One control, run. `expected` and `found` have one line per claim; a claim that fails says so in `found`."""

    name: str
    title: str
    passed: bool
    expected: str
    found: str
    seconds: float = 0.0

    def __str__(self) -> str:
        head = f"{self.name}  {self.title:<28} {'passed' if self.passed else 'FAILED'}  {self.seconds:.1f} s"
        pairs = zip(self.expected.splitlines(), self.found.splitlines(), strict=False)
        return "\n".join([head, *(f"      {expected:<72} {found}" for expected, found in pairs)])


class Control(ABC):
    """One row of the self-check."""

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def claims(self, seed: int) -> Iterator[Claim]:
        """Builds the model and its documents from `seed`, audits them, and says what was found."""

    def run(self, seed: int) -> ControlOutcome:
        """The claims as one outcome; an audit that stops with an error fails its control, and the check goes on."""
        start = time.perf_counter()
        claims: list[Claim] = []
        try:
            claims.extend(self.claims(seed))
        except Exception as error:
            claims.append(Claim("the audit runs to its end", f"{type(error).__name__}: {error}", False))
        return ControlOutcome(
            name=self.name,
            title=self.title,
            passed=all(claim.holds for claim in claims),
            expected="\n".join(_line(claim.expected) for claim in claims),
            found="\n".join(_line(claim.found) + ("" if claim.holds else "  <- fails") for claim in claims),
            seconds=time.perf_counter() - start,
        )


def _line(text: str) -> str:
    return " ".join(text.split())
