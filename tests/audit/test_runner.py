"""The runner starts documents the same whatever stands beside them."""

import torch

from looplab.audit.documents import pad, prepare
from looplab.audit.runner import Runner
from looplab.recurrence.ledger import Ledger
from tiny import LetterTokenizer, Mixing, letters

DOCUMENTS = prepare("text", letters(60), LetterTokenizer()).evaluation.documents


def started(documents, **more):
    tokens, valid = pad(documents, **more)
    return Runner(Mixing(noise=True)).start(tokens, valid, [document.item(0) for document in documents])


def test_noise_does_not_depend_on_batch_padding_or_length():
    _, together = started(DOCUMENTS[:3])
    _, alone = started(DOCUMENTS[1:2])
    length = len(DOCUMENTS[1].tokens)
    torch.testing.assert_close(together[1, :length], alone[0], rtol=0, atol=0)
    _, left = started(DOCUMENTS[1:2], side="left", extra=5)
    torch.testing.assert_close(left[0, 5:], alone[0], rtol=0, atol=0)
    other = Runner(Mixing(noise=True), seed=1)
    _, reseeded = other.start(*pad(DOCUMENTS[1:2]), [DOCUMENTS[1].item(0)])
    assert not torch.equal(reseeded[0], alone[0])


def test_zero_noise_starts_from_zero():
    runner = Runner(Mixing(noise=True), zero_noise=True)
    _, state = runner.start(*pad(DOCUMENTS[:2]), [0, 1])
    assert torch.equal(state, torch.zeros_like(state))


def test_a_model_without_noise_gets_none():
    assert Runner(Mixing()).noise(torch.zeros(1, 3, dtype=torch.long), [0]) is None


def test_the_head_takes_hidden_states_of_any_dtype_and_stays_differentiable():
    hidden = torch.randn(3, 12, dtype=torch.bfloat16, requires_grad=True)
    logits = Runner(Mixing()).head(hidden)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert hidden.grad is not None


def test_encoding_is_counted():
    ledger = Ledger()
    tokens, valid = pad(DOCUMENTS[:2])
    Runner(Mixing()).start(tokens, valid, [0, 1], ledger)
    assert ledger.encoded_tokens == tokens.numel()
