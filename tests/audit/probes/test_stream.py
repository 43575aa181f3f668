import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looplab.audit.probes.stream import LogitChunks, leading_tokens, tilted_moments


def direct(logits, beta, order):
    x = (logits - logits.amax(dim=1, keepdim=True)).double()
    return torch.stack([(torch.exp(beta * x) * x**r).sum(dim=1) for r in range(order + 1)])


@given(st.integers(1, 9), st.integers(2, 40), st.integers(1, 41), st.integers(0, 10**6))
def test_moments_of_any_vocabulary_blocks_equal_the_direct_sums(tokens, vocab, block, seed):
    logits = torch.randn(tokens, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 4
    betas = [0.0, 0.3, 1.0, 7.0]
    maxima, sums = tilted_moments(logits, betas, power=True, vocab_block=block)
    assert torch.equal(maxima, logits.amax(dim=1))
    for i, beta in enumerate(betas):
        torch.testing.assert_close(sums[i, :4], direct(logits, beta, 3), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(sums[i, 4], direct(logits, 2 * beta, 0)[0], rtol=1e-10, atol=1e-12)


def test_moments_stay_finite_for_logits_of_ten_thousand():
    logits = torch.tensor([[-1e4, 1e4, 0.0], [1e4, 1e4, -1e4]])
    _, sums = tilted_moments(logits, [1.0], vocab_block=1)
    assert torch.isfinite(sums).all()
    assert sums[0, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("logit_bytes", "rows"), [(4 * 5 * 3, [1, 3, 3]), (1, [1] * 7), (10**6, [1, 6])])
def test_logits_are_never_above_their_bytes_except_for_a_single_token(logit_bytes, rows):
    hidden, weight = torch.randn(7, 2), torch.randn(2, 5)
    chunks = LogitChunks(hidden, lambda h: h @ weight, logit_bytes)
    for _ in range(2):
        assert [len(chunk) for chunk in chunks] == rows
        torch.testing.assert_close(torch.cat(list(chunks)), hidden @ weight)


def test_leading_tokens_are_whole_documents():
    documents = torch.tensor([0, 0, 0, 1, 1, 2])
    assert [leading_tokens(documents, limit) for limit in (1, 3, 4, 5, 6, 99)] == [3, 3, 3, 5, 6, 6]
