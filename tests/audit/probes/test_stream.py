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
    maxima, sums = tilted_moments(logits, betas, order=4, power=True, vocab_block=block)
    assert torch.equal(maxima, logits.amax(dim=1))
    for i, beta in enumerate(betas):
        torch.testing.assert_close(sums[i, :5], direct(logits, beta, 4), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(sums[i, 5], direct(logits, 2 * beta, 0)[0], rtol=1e-10, atol=1e-12)


def test_moments_stay_finite_for_logits_of_ten_thousand():
    logits = torch.tensor([[-1e4, 1e4, 0.0], [1e4, 1e4, -1e4]])
    _, sums = tilted_moments(logits, [1.0], vocab_block=1)
    assert torch.isfinite(sums).all()
    assert sums[0, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("logit_bytes", "rows"), [(4 * 5 * 3, [1, 3, 3]), (4 * 5, [1] * 7), (10**6, [1, 6])])
def test_logits_are_never_above_their_bytes(logit_bytes, rows):
    hidden, weight = torch.randn(7, 2), torch.randn(2, 5)
    chunks = LogitChunks(hidden, lambda h: h @ weight, logit_bytes)
    for _ in range(2):
        assert [len(chunk) for chunk in chunks] == rows
        torch.testing.assert_close(torch.cat(list(chunks)), hidden @ weight)


def test_bytes_below_one_row_of_logits_are_refused():
    chunks = LogitChunks(torch.randn(7, 2), lambda h: h @ torch.ones(2, 5), 19)
    with pytest.raises(ValueError, match="logit_bytes must be at least 20, 1 rows of 5 logits. Got 19. Raise it"):
        list(chunks)


def test_chunks_stay_near_the_size_of_a_cache_however_much_is_allowed():
    chunks = LogitChunks(torch.randn(4000, 2), lambda h: h @ torch.ones(2, 5000))
    assert max(chunk.nbytes for chunk in chunks) <= 24 * 2**20


def test_leading_tokens_are_whole_documents():
    documents = torch.tensor([0, 0, 0, 1, 1, 2])
    assert [leading_tokens(documents, limit) for limit in (1, 3, 4, 5, 6, 99)] == [3, 3, 3, 5, 6, 6]
