"""P1, planted temperature: logits that are only scaled must be found to be only scaled.

    labels ~ softmax(z / T*)                  fit(z) = T*; with exact soft labels to 1e-6, with 200,000 samples to 1 %
    fit(c z) = c fit(z)
    prefix(k): hidden = truth / T*_k          temperature share 100 +- 1 %; no gap, and no share, at T* = 1

The twin is cut short to the stationary law of its documents, which is worse and calibrated: its share must be zero.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from looplab.audit.positive_controls.base import Claim, Control
from looplab.audit.positive_controls.known import Known, audit_known
from looplab.audit.positive_controls.letters import Chain
from looplab.audit.positive_controls.rules import Maps, stationary_start
from looplab.audit.probes.temperature import fit_temperature
from looplab.audit.result import percent

TEMPERATURES = (0.5, 0.6, 1.0, 1.7, 2.5, 4.0)
FACTORS = (0.1, 3.0)
SAMPLED, SOFT, WIDTH = 200_000, 2_000, 16
EXACT, SAMPLING, SHARE = 1e-6, 0.01, 0.01


class PlantedTemperature(Control):
    """P1."""

    name, title = "P1", "planted temperature"

    def claims(self, seed: int) -> Iterator[Claim]:
        soft, sampled, scale = fit_errors(seed)
        yield Claim(f"T from exact soft labels: error <= {EXACT:g}", f"{soft:.1e}", soft <= EXACT)
        yield Claim(f"T from {SAMPLED:,} sampled tokens: error <= 1 %", f"{100 * sampled:.2f} %", sampled <= SAMPLING)
        yield Claim(f"fit(c z) = c fit(z): error <= {EXACT:g}", f"{scale:.1e}", scale <= EXACT)
        yield from _scaled(seed)
        yield from _twin(seed)


def fit_errors(seed: int) -> tuple[float, float, float]:
    """Largest relative errors of the fit: exact soft labels, sampled labels, and fit(c z) / c against fit(z)."""
    draws = torch.Generator().manual_seed(seed)
    logits = 3.5 * torch.randn(SAMPLED, WIDTH, generator=draws, dtype=torch.float64)
    few = logits[:SOFT]
    soft, sampled, scale = [], [], []
    for planted in TEMPERATURES:
        law = torch.softmax(logits / planted, dim=1)
        level = torch.rand(SAMPLED, 1, generator=draws, dtype=torch.float64)
        labels = (law.cumsum(dim=1) < level).sum(dim=1).clamp(max=WIDTH - 1)
        fitted = _fit(few, law[:SOFT])
        soft.append(abs(fitted / planted - 1))
        sampled.append(abs(_fit(logits, labels) / planted - 1))
        scale += [abs(_fit(c * few, law[:SOFT]) / (c * fitted) - 1) for c in FACTORS]
    return max(soft), max(sampled), max(scale)


def _fit(logits: Tensor, targets: Tensor) -> float:
    return fit_temperature([logits], targets).temperature or float("inf")


def _scaled(seed: int) -> Iterator[Claim]:
    chain = Chain.drawn(seed)
    gain = 1 / torch.tensor([*TEMPERATURES, 1.0])[:, None]
    model = Known(chain, Maps(gain, torch.zeros_like(gain)), steps=len(gain))
    result = audit_known(model, chain.documents(seed), seed=seed, grid=None, probes=("temperature",))
    gains = {TEMPERATURES[found.k - 1]: found for found in result.domains[0].gains}
    shares = {t: gains[t].share for t in TEMPERATURES if t != 1.0}
    yield Claim(
        "readout scaled by 1/T*: temperature share 100 +- 1 %",
        ", ".join(f"{t:g}: {'none' if share is None else f'{100 * share.value:.2f} %'}" for t, share in shares.items()),
        all(share is not None and abs(share.value - 1) <= SHARE for share in shares.values()),
    )
    same = gains[1.0]
    silent = same.gap.value == 0 and same.share is None
    found = f"gap {same.gap.value:g} nats, share {percent(same.share)}"
    yield Claim("T* = 1: no gap, and no share of it", found, silent)


def _twin(seed: int) -> Iterator[Claim]:
    chain = Chain.drawn(seed)
    model = Known(chain, stationary_start(chain), steps=2)
    result = audit_known(model, chain.documents(seed, count=400), seed=seed, probes=("temperature",))
    (gain,) = result.domains[0].gains
    margin = result.decomposition.margin
    silent = -margin < gain.net.low90 and gain.net.high90 < margin and gain.word == "absent"
    found = f"{percent(gain.share)} of {gain.gap.value:.3f} nats"
    yield Claim("twin, calibrated where it is cut short: temperature share equivalent to 0", found, silent)
