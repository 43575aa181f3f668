"""What an audit was asked to do: the settings that its numbers depend on, and nothing about how it is run.

The hash of this object names the audit; the equivalence margins are part of it, so they are fixed before the run.
"""

import dataclasses
import math

PROBES = ("temperature", "affine", "full_rank")
"""Readout probes that can be asked for."""
DEFAULT_PROBES = ("temperature", "affine")
OBJECTIVES = ("nll", "kl")
"""What the full-rank probe minimises: the loss, or the divergence from the model's own full depth."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Settings of one audit; the defaults are those of `looplab audit`.

    Raises:
        ValueError: A value out of its range, naming the command-line option.
    """

    num_steps: tuple[int, ...] | None = None
    """Steps of the full plan: one number, or one per block; None is the checkpoint's default."""
    grid: tuple[int, ...] | None = None
    """Numbers of units k; None is the default grid."""
    controls: tuple[str, ...] | None = None
    """Schedule families to run besides full, prefix, suffix and repeat; None is all identifiable ones."""
    schedules: tuple[str, ...] = ()
    """Further schedules in text form, such as "same(3)" or "[0.0 0.1 1.0]"."""
    extend: tuple[int, ...] = ()
    """Numbers of units past the full plan, made by repeating trained units."""
    permutations: int = 4
    probes: tuple[str, ...] = DEFAULT_PROBES
    objective: str = "nll"
    """"nll" or "kl", of the full-rank probe."""
    documents: int = 200
    calibration_documents: int = 200
    max_tokens: int | None = None
    """Longest document; None is 1024, or the trained context where that is shorter."""
    windows: int = 1
    """Most windows of a text that is longer than that; they are one document in everything that is reported."""
    calibration_tokens: int = 50_000
    affine_tokens: int = 12_000
    init_seeds: int = 3
    init: str = "model"
    """"model", or "zero": start from zero noise, which changes a model that draws noise."""
    seed: int = 0
    replicates: int = 10_000
    level: float = 0.95
    margin_nats: float = 0.02
    margin_share: float = 0.05
    gap_floor: float = 0.01
    """Shares are printed only if the gap's lower bound exceeds this many nats."""
    weighting: str = "token"
    """"token" or "document"."""

    def __post_init__(self) -> None:
        at_least = {
            "permutations": 0, "documents": 1, "calibration_documents": 1, "max_tokens": 2, "windows": 1,
            "calibration_tokens": 1, "affine_tokens": 1, "init_seeds": 1, "replicates": 1000, "seed": 0,
        }  # fmt: skip
        for name, low in at_least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {low}. Got {value}.")
        if not 0 < self.level < 1:
            raise ValueError(f"--level must be between 0 and 1. Got {self.level}.")
        for name in ("margin_nats", "margin_share", "gap_floor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be a number above 0. Got {getattr(self, name)}.")
        for name, choices in (
            ("init", ("model", "zero")),
            ("weighting", ("token", "document")),
            ("objective", OBJECTIVES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"--{name} must be {' or '.join(choices)}. Got {getattr(self, name)!r}.")
        for probe in self.probes:
            if probe not in PROBES:
                raise ValueError(f"--probes must be names out of {', '.join(PROBES)}. Got {probe!r}.")
