"""The model of one rule."""

import numpy as np
import torch

from looplab.audit.positive_controls.known import Known, as_hidden, audit_known, rotation
from looplab.audit.positive_controls.letters import Chain
from looplab.audit.positive_controls.rules import Towards

CHAIN = Chain.drawn(0)


def test_the_head_turns_the_truth_into_the_law_of_the_next_letter():
    model = Known(CHAIN, Towards([[1.0]]), steps=1)
    law = torch.softmax(model.head(model.truth), dim=1).detach().numpy()
    np.testing.assert_allclose(law, CHAIN.moves, atol=1e-6)


def test_hidden_states_can_be_made_for_any_logits():
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Known(CHAIN, Towards([[1.0]]), steps=1)
    torch.testing.assert_close(model.head(as_hidden(logits)), logits.float())
    np.testing.assert_allclose(rotation(12) @ rotation(12).T, np.eye(12), atol=1e-12)


def test_the_audit_sees_the_entropy_of_the_chain_at_full_depth():
    documents = CHAIN.documents(0, count=400)
    result = audit_known(Known(CHAIN, Towards([[0.2, 1.0]]), steps=2), documents, seed=0)
    entropy = -(CHAIN.stationary[:, None] * CHAIN.moves * np.log(CHAIN.moves)).sum()
    loss = result.domains[0].schedule("full").loss().loss
    assert loss.low < entropy < loss.high
    assert abs(loss.value - entropy) < 0.05


def test_the_spec_says_what_the_rule_depends_on():
    two = Known(CHAIN, Towards([[0.1] * 3, [0.2] * 3]), steps=(3, 3)).spec
    assert (len(two.blocks), two.max_iteration, two.operator_class(0, 2)) == (2, 3, 2)
    free = Known(CHAIN, Towards([[0.1]]), steps=3, indexed=False).spec
    assert (free.max_iteration, free.operator_class(0, 2)) == (None, 0)
    assert two.params.total == 2 * 12 * 12 + 6
