import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from looplab._config import from_dict, to_dict
from looplab.nn.embedding import Head, TokenEmbedding
from looplab.nn.linear import Init
from looplab.nn.rope import Learned
from looplab.training.live_bytes import LiveBytes
from tolerances import BLOCKS, EXACT


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


INIT = Init(std=0.5)


class Ends(nn.Module):
    """An embedding of 7 tokens padded to 10 rows, and a head."""

    def __init__(self, head=None, **options):
        super().__init__()
        self.embed = TokenEmbedding(10, 4, init=INIT, **options)
        self.head = (head or Head(tied=True)).build(4, vocab=7, embedding=self.embed, init=INIT)


def test_embedding_is_scale_times_the_sum_of_token_and_position():
    embed = TokenEmbedding(10, 4, scale=3.0, positions=Learned(max=5), init=INIT).double()
    tokens, positions = torch.tensor([[1, 9, 1]]), torch.tensor([[4, 0, 4]])
    expected = torch.stack([3 * (embed.weight[t] + embed.position_weight[p]) for t, p in ((1, 4), (9, 0), (1, 4))])
    torch.testing.assert_close(embed(tokens, positions)[0], expected, **BLOCKS)
    plain = TokenEmbedding(10, 4, init=INIT)
    assert torch.equal(plain(tokens, positions), plain.weight[tokens])
    assert [n for n, _ in plain.named_parameters()] == ["weight"]


@pytest.mark.parametrize("change", ["load", "assign", "to", "deepcopy", "to_empty"])
def test_a_tied_head_stays_tied(change):
    ends = Ends()
    source = Ends().state_dict()
    if change == "load":
        ends.load_state_dict(source)
    elif change == "assign":
        ends.load_state_dict(source, assign=True)
    elif change == "to":
        ends = ends.to(torch.float64).to(torch.bfloat16)
    elif change == "deepcopy":
        ends = copy.deepcopy(ends)
    else:
        ends = ends.to("meta").to_empty(device="cpu")
    assert ends.head.weight.data_ptr() == ends.embed.weight.data_ptr()
    assert list(ends.state_dict()) == ["embed.weight"]
    assert sum(p.numel() for p in ends.parameters()) == 40


def test_a_tied_head_sends_its_gradient_to_the_embedding_and_none_to_padding_rows():
    ends = Ends()
    ends.head(torch.randn(1, 3, 4)).sum().backward()
    assert (ends.embed.weight.grad[:7].abs().sum(1) > 0).all()
    assert torch.equal(ends.embed.weight.grad[7:], torch.zeros(3, 4))


def test_a_matrix_without_padding_rows_gets_its_gradient_once():
    embed = TokenEmbedding(1000, 4, init=INIT)
    head = Head(tied=True).build(4, vocab=1000, embedding=embed, init=INIT)
    with LiveBytes([embed.weight]) as live:
        head(torch.randn(1, 1, 4)).sum().backward()
    assert embed.weight.nbytes < live.most < 2 * embed.weight.nbytes


def test_an_untied_head_has_its_own_matrix():
    ends = Ends(Head(tied=False))
    assert ends.head.weight.shape == (10, 4)
    assert ends.head.weight.data_ptr() != ends.embed.weight.data_ptr()
    assert "head.own_weight" in ends.state_dict()


@pytest.mark.parametrize("config", [Head(tied=True), Head(tied=False), Head(tied=False, outputs=25)], ids=repr)
def test_padded_columns_are_cut_and_the_flops_are_those_of_the_true_columns(config):
    head = Ends(config).head
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = head(torch.randn(2, 3, 4))
    columns = 7 if config.outputs is None else 25
    assert logits.shape == (2, 3, columns)
    assert config.columns(7) == columns
    assert counter.get_total_flops() == 2 * config.matmul_params(4, 7) * 6


def test_logits_are_the_scaled_and_capped_product():
    head = Ends(Head(tied=False, softcap=2.0, logit_scale=3.0, bias=True)).double().head
    head.bias.data.copy_(torch.randn(7, dtype=torch.float64))
    hidden = torch.randn(1, 1, 4, dtype=torch.float64)
    z = torch.stack([3 * ((head.weight[c] * hidden[0, 0]).sum() + head.bias[c]) for c in range(7)])
    torch.testing.assert_close(head(hidden)[0, 0], 2 * torch.tanh(z / 2), **BLOCKS)


def test_softcap_bounds_every_logit():
    head = Ends(Head(tied=True, softcap=1.5)).head
    logits = head(1000 * torch.randn(2, 3, 4))
    assert 1.4 < logits.abs().max() <= 1.5


def test_a_bfloat16_head_multiplies_in_bfloat16_and_scales_in_float32():
    head = Ends(Head(tied=True, logit_scale=0.3)).bfloat16().head
    hidden = torch.randn(1, 2, 4).bfloat16()
    product = hidden @ head.weight[:7].T
    assert head(hidden).dtype == torch.float32
    torch.testing.assert_close(head(hidden), 0.3 * product.float(), **EXACT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tied": True, "outputs": 5}, r"Head\.outputs must be None for a tied head.* Got 5"),
        ({"tied": False, "outputs": 0}, r"Head\.outputs must be at least 1\. Got 0"),
        ({"tied": True, "softcap": -1.0}, r"Head\.softcap must be positive\. Got -1"),
    ],
)
def test_a_head_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Head(**fields)


def test_a_choice_survives_json():
    config = Head(tied=False, outputs=25, softcap=15.0, logit_scale=0.5, bias=True)
    assert from_dict(Head, to_dict(config)) == config
