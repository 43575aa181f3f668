"""P2, planted affine: the affine probe puts right what was stretched and shifted, feature by feature.

    prefix(1): hidden = (truth - b*) / a*     a* = 2^cos, from 2 down to 1/2; b* = 3/2 sin
    full:      hidden = truth

The twin is cut short to the stationary law of its documents: no map of a constant says more, so nothing is to be found.
"""

from collections.abc import Iterator

import torch

from looplab.audit.positive_controls.base import Claim, Control
from looplab.audit.positive_controls.known import Known, audit_known
from looplab.audit.positive_controls.letters import Chain
from looplab.audit.positive_controls.rules import Maps, stationary_start
from looplab.audit.result import ProbeGain, percent

LEAST = 0.95


class PlantedAffine(Control):
    """P2."""

    name, title = "P2", "planted affine map"

    def claims(self, seed: int) -> Iterator[Claim]:
        chain = Chain.drawn(seed)
        place = torch.linspace(0, torch.pi, len(chain.moves))
        gain, shift = 2 ** torch.cos(place), 1.5 * torch.sin(2 * place)
        ones, zeros = torch.ones_like(gain), torch.zeros_like(gain)
        gains = _gains(chain, Maps(torch.stack([1 / gain, ones]), torch.stack([-shift / gain, zeros])), seed)
        affine, temperature = (gains[probe].share for probe in ("affine", "temperature"))
        assert affine is not None and temperature is not None, "the planted gap is too small"
        yield Claim("affine share >= 95 %", percent(affine), affine.value >= LEAST)
        yield Claim("temperature share below it", percent(temperature), temperature.high < affine.low)
        twin = _gains(chain, stationary_start(chain), seed)["affine"]
        found = f"{percent(twin.share)}, {twin.word}"
        yield Claim("twin, nothing to map: affine probe absent", found, twin.word == "absent")


def _gains(chain: Chain, rule: Maps, seed: int) -> dict[str, ProbeGain]:
    documents = chain.documents(seed, count=200)
    result = audit_known(Known(chain, rule, steps=2), documents, seed=seed, probes=("temperature", "affine"))
    return {gain.probe: gain for gain in result.domains[0].gains}
