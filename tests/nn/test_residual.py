import math

import pytest
import torch

from looplab._config import from_dict, to_dict
from looplab.nn.norm import PreNorm
from looplab.nn.residual import LoomResidual, Residual, UnitResidual

WIDTH, TOKENS = 64, 256


def variance(rule, loops, layers, branches=1):
    """Variance of a stream of unit variance after branches that are equal in every loop, and new in every layer."""
    draw = torch.Generator().manual_seed(0)
    stream = torch.randn(TOKENS, WIDTH, generator=draw)
    outputs = [torch.randn(TOKENS, WIDTH, generator=draw) for _ in range(layers * branches)]
    for _ in range(loops):
        for output in outputs:
            weight = rule.weight(loops, layers)
            stream = PreNorm().apply(stream, lambda u, output=output: output, lambda h: h, lambda h: h, weight)
    return float(stream.var())


@pytest.mark.parametrize(("loops", "layers"), [(2, 4), (9, 8), (12, 16)])
def test_loops_and_layers_add_the_same_variance_however_many(loops, layers):
    assert variance(LoomResidual(), loops, layers) == pytest.approx(1.25, rel=0.05)
    assert variance(LoomResidual(), loops, layers, branches=2) == pytest.approx(1.5, rel=0.05)
    assert variance(UnitResidual(), loops, layers) == pytest.approx(1 + loops**2 * layers, rel=0.05)


def test_the_weight_is_the_formula():
    assert LoomResidual(lam=0.3).weight(4, 9) == 0.3 / (4 * math.sqrt(9))
    assert UnitResidual().weight(4, 9) == 1


@pytest.mark.parametrize("rule", [UnitResidual(), LoomResidual(lam=0.25)])
def test_a_rule_survives_its_written_form(rule):
    assert from_dict(Residual, to_dict(rule)) == rule


def test_a_weight_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"LoomResidual.lam must be positive. Got 0.0. LOOM has 0.5."):
        LoomResidual(lam=0.0)
