import pytest
import torch

from looplab.nn.attention import Attention
from looplab.nn.layer import Layer, Modulation
from looplab.nn.linear import Init, LowRank
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import BranchOnly, PostSum, PreAndBranch, PreNorm, RMSNorm, SandwichSum
from looplab.nn.rope import Rope
from reference import attention, layers
from tolerances import BLOCK_GRADIENTS, BLOCKS, EXACT


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


ATTENTION = Attention(heads=2, kv_heads=1, head_dim=4, position=Rope(base=100.0))
PLACEMENTS = [PreNorm(), SandwichSum(), PreAndBranch(), BranchOnly(), PostSum()]
POSITIONS = torch.arange(4).expand(2, -1)


def layer(placement, residual=1.0):
    torch.manual_seed(0)
    made = Layer(
        6,
        attention=ATTENTION,
        ffn=SwiGLU(hidden=9),
        norm=RMSNorm(eps=1e-3),
        placement=placement,
        init=Init(std=0.6),
        residual=residual,
    ).double()
    for name, parameter in made.named_parameters():
        if "_in" in name or "_out" in name:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return made


def inputs():
    return torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True), ATTENTION.scope(
        POSITIONS, dtype=torch.float64
    )


def written_out(made, h, gains=None):
    """The layer from the equations: the stream is normed, branched and summed token by token."""
    weights = dict(made.named_parameters())
    kind = type(made.placement).__name__

    def norm(name):
        return lambda x: torch.stack(
            [torch.stack([layers.rms_norm(t, 1e-3, weights[f"{name}.weight"]) for t in row]) for row in x]
        )

    def attend(x):
        own = {n.removeprefix("attn."): p for n, p in weights.items() if n.startswith("attn.")}
        return attention.attention(x, own, POSITIONS, heads=2, kv_heads=1, head_dim=4, rope=(100.0, "half"))

    def feed(x):
        own = {n.removeprefix("ffn."): p for n, p in weights.items() if n.startswith("ffn.")}
        return torch.stack([torch.stack([layers.feed_forward("SwiGLU", t, own) for t in row]) for row in x])

    for i, (name, branch) in enumerate((("attn", attend), ("ffn", feed))):
        g, k = (1.0, 0.0) if gains is None else (gains[i], gains[2 + i])
        h = layers.place(kind, h, lambda u, f=branch, k=k: f(u * (1 + k)), norm(f"{name}_in"), norm(f"{name}_out"), g)
    return h


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: type(p).__name__)
def test_a_layer_equals_the_twin_in_outputs_and_gradients(placement, modulated):
    made = layer(placement)
    h, scope = inputs()
    gains = Modulation(*torch.randn(4, 2, 1, 6, dtype=torch.float64)) if modulated else None
    fast, slow = made(h, scope, modulation=gains), written_out(made, h, gains)
    torch.testing.assert_close(fast, slow, **BLOCKS)
    wanted = [h, *made.parameters()]
    for a, b in zip(*(torch.autograd.grad(y.pow(3).sum(), wanted) for y in (fast, slow)), strict=True):
        torch.testing.assert_close(a, b, **BLOCK_GRADIENTS)


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: type(p).__name__)
def test_a_residual_weight_scales_what_both_branches_add(placement, modulated):
    made = layer(placement, residual=0.3)
    h, scope = inputs()
    drawn = torch.randn(4, 2, 1, 6, dtype=torch.float64)
    given = Modulation(*drawn) if modulated else None
    gains = (0.3 * drawn[0], 0.3 * drawn[1], drawn[2], drawn[3]) if modulated else (0.3, 0.3, 0.0, 0.0)
    torch.testing.assert_close(made(h, scope, modulation=given), written_out(made, h, gains), **BLOCKS)


def test_only_the_norms_in_use_exist():
    names = {
        type(p).__name__: sorted(n.split(".")[0] for n, _ in layer(p).named_parameters() if "_in" in n or "_out" in n)
        for p in PLACEMENTS
    }
    both = ["attn_in", "attn_out", "ffn_in", "ffn_out"]
    assert names == {
        "PreNorm": ["attn_in", "ffn_in"],
        "SandwichSum": both,
        "PreAndBranch": both,
        "BranchOnly": ["attn_out", "ffn_out"],
        "PostSum": ["attn_out", "ffn_out"],
    }


def test_neutral_gains_and_zero_changes_leave_every_bit():
    made = layer(PreNorm())
    h, scope = inputs()
    one, zero = torch.ones(2, 1, 6, dtype=torch.float64), torch.zeros(2, 1, 6, dtype=torch.float64)
    plain = made(h, scope)
    torch.testing.assert_close(made(h, scope, modulation=Modulation(one, one, zero, zero)), plain, **EXACT)
    deltas = {
        name: LowRank(torch.randn(2, 3, i, dtype=torch.float64), torch.zeros(2, o, 3, dtype=torch.float64))
        for name, (i, o) in Layer.linears(6, ATTENTION, SwiGLU(hidden=9)).items()
    }
    assert set(deltas) == {"q", "k", "v", "o", "gate", "up", "down"}
    torch.testing.assert_close(made(h, scope, deltas=deltas), plain, **EXACT)


def test_gains_and_changes_of_a_row_touch_that_row_only():
    made = layer(PreNorm())
    h, scope = inputs()
    plain = made(h, scope)
    gains = Modulation(*(torch.full((2, 1, 6), v, dtype=torch.float64) for v in (1.0, 1.0, 0.0, 0.0)))
    gains.ffn_gate[1] = 2.0
    delta = LowRank(torch.ones(2, 1, 6, dtype=torch.float64), torch.zeros(2, 9, 1, dtype=torch.float64))
    delta.b[1] = 1.0
    for changed in (made(h, scope, modulation=gains), made(h, scope, deltas={"up": delta})):
        torch.testing.assert_close(changed[0], plain[0], **BLOCKS)
        assert (changed[1] - plain[1]).abs().max() > 1e-3
