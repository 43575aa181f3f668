from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from linear_core import TASK, Line, given, share, words
from looplab.models.base import build
from looplab.models.looped import LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives.latent_anchor import LatentAnchor
from looplab.recurrence.depth import UniformDepth
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.recurrence.injection import Add
from looplab.recurrence.loop import forward, run_plan
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.signal import PerIterationLoRA
from looplab.recurrence.spec import ClampLast

PARENT = LoopedConfig(
    dim=16,
    vocab=len(TASK.tokens),
    attention=Attention(heads=2, kv_heads=2, head_dim=8, position=Rope(base=1e4)),
    ffn=SwiGLU(hidden=24),
    blocks=(1,),
    envelope=NoEnvelope(),
    order=ModelLoop(num_steps=8),
    trained_depth=UniformDepth(low=12, high=24),
    injection=Add(source="embeds"),
    head=Head(tied=False, outputs=len(TASK.symbols)),
    init=Init(std=0.3),
)
CHANGED = replace(
    PARENT,
    signal=PerIterationLoRA(rank=16, targets=("q", "k", "v", "o", "gate", "up", "down"), max=1),
    beyond=ClampLast(),
)


def pair(dtype=torch.float32):
    """The parent, and the same weights with a low-rank change of the core that alone is trained."""
    parent, model = build(PARENT, dtype=dtype), build(CHANGED, dtype=dtype)
    missing = model.load_state_dict(parent.state_dict(), strict=False)
    assert not missing.unexpected_keys and all(name.startswith("layer_signals") for name in missing.missing_keys)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("layer_signals"))
    return parent, model


def drift(model, near=8, far=128):
    with torch.no_grad():
        context = model.encode(words().tokens)
        plan = model.spec.plan(far)
        anchor = run_plan(model, plan[:near], context, model.init_state(context, None))
        end = run_plan(model, plan[near:], context, anchor)
    return float(((end - anchor).square().sum(-1) / anchor.square().sum(-1)).mean())


@pytest.mark.filterwarnings("ignore:num_steps=:UserWarning")
def test_untrained_the_change_leaves_the_outputs_as_they_are():
    parent, model = pair(torch.float64)
    for steps in (1, 8, 30):
        found, wanted = (forward(m, words().tokens, num_steps=steps).logits for m in (model, parent))
        assert torch.equal(found, wanted)


def test_a_drifting_core_drifts_less_than_half_as_far():
    parent, model = pair()
    before = drift(model)
    assert before == drift(parent) > 1
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    kept = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    for step in range(40):
        optimizer.zero_grad()
        depth = 12 + step * 7 % 13
        share(LatentAnchor(), model, words(8, step), depth, gradient=TruncatedBPTT(window=8))[0].backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    assert drift(model) < before / 2
    for name, parameter in model.named_parameters():
        assert name not in kept or (parameter.grad is None and torch.equal(parameter, kept[name]))


def test_the_gradient_stops_at_the_anchor():
    model = Line()
    share(LatentAnchor(anchor=2), model, words())[0].backward()
    found = float(model.a.grad)
    model.zero_grad()
    context = given(model, words()).encode()
    state = model.init_state(context, None)
    for k in range(4):
        state = model.step(state, context, 0, torch.full((4,), k))
        if k == 1:
            anchor = state.detach()
    ce = torch.nn.functional.cross_entropy(model.head(state).flatten(0, 1), words().labels.flatten())
    (ce + ((state - anchor).square().sum(-1) / anchor.square().sum(-1)).mean()).backward()
    assert_close(found, float(model.a.grad), rtol=1e-12, atol=0)


def test_a_run_that_ends_at_the_anchor_is_refused():
    with pytest.raises(
        ValueError, match="LatentAnchor.anchor must be below the applications.* Got 8, and 8 applications"
    ):
        LatentAnchor().counts(words().labels, 8)


@pytest.mark.parametrize(
    ("fields", "message"), [({"anchor": 0}, "anchor must be"), ({"weight": -1.0}, "weight"), ({"chunk": 0}, "chunk")]
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"LatentAnchor.{message}"):
        LatentAnchor(**fields)
