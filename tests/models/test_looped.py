import dataclasses
import re

import pytest
import torch

from contract.axes import BASE, attention
from contract.zoo import noise, positions_of, run, tokens
from looplab.models.base import build
from looplab.models.dense import DenseConfig
from looplab.models.looped import Envelope, NoEnvelope
from looplab.nn.norm import LayerNorm, PostSum, SandwichSum
from looplab.nn.residual import LoomResidual
from looplab.nn.rope import Learned
from looplab.recurrence import state as states
from looplab.recurrence.boundary import EndNorm, SharedFinalNorm
from looplab.recurrence.depth import Grid
from looplab.recurrence.injection import Add, Concat, Diagonal, NoInjection
from looplab.recurrence.injection.base import FirstOnly
from looplab.recurrence.plan import Blocks, LayerLoop, ModelLoop, Plan, TwoLevel
from looplab.recurrence.signal import AdaLN, StepEmbedding
from looplab.recurrence.spec import ClampLast, Cycle
from looplab.recurrence.state_init import Normal, Zeros
from reference.two_levels import two_levels
from tolerances import EXACT, GRADIENTS, TWIN

PLAIN = {"injection": NoInjection(), "envelope": NoEnvelope()}
pytestmark = pytest.mark.filterwarnings("ignore:num_steps=:UserWarning")


def made(seed=0, **changes):
    return build(dataclasses.replace(BASE, **changes), seed=seed, dtype=torch.float64)


def dense_copy(model, order):
    """A dense stack of copies of the layers of `model`: prelude, the core's in `order`, coda."""
    c = model.config
    count = c.envelope.prelude + len(order) + c.envelope.coda
    stack = build(
        DenseConfig(
            dim=c.dim, vocab=c.vocab, layers=count, attention=c.attention, ffn=c.ffn, norm=c.norm,
            placement=c.placement, head=c.head,
        ),
        dtype=torch.float64,
    )  # fmt: skip
    layers = [*model.prelude, *(model.core[i] for i in order), *model.coda_layers]
    for copy, layer in zip(stack.layers, layers, strict=True):
        copy.load_state_dict(layer.state_dict())
    stack.embedding.load_state_dict(model.embedding.state_dict())
    stack.final_norm.load_state_dict(model.final_norm.state_dict())
    return stack, layers


@pytest.mark.parametrize("envelope", [Envelope(prelude=1, coda=2), NoEnvelope()], ids=["envelope", "none"])
@pytest.mark.parametrize("placement", [BASE.placement, SandwichSum(), PostSum()], ids=lambda p: type(p).__name__)
def test_a1_one_loop_without_injection_is_the_dense_stack_bit_for_bit(envelope, placement):
    model = made(
        injection=NoInjection(), envelope=envelope, placement=placement, blocks=(3,), order=ModelLoop(num_steps=1)
    )
    stack, _ = dense_copy(model, (0, 1, 2))
    ids = tokens(model, 2, 6)
    torch.testing.assert_close(run(model, ids, num_steps=1).logits, run(stack, ids).logits, **EXACT)


@pytest.mark.parametrize(
    ("order", "blocks", "layers"),
    [
        (ModelLoop(num_steps=3), (2,), (0, 1, 0, 1, 0, 1)),
        (LayerLoop(num_steps=3), (2,), (0, 0, 0, 1, 1, 1)),
        (Blocks(num_steps=(2, 1)), (1, 2), (0, 0, 1, 2)),
    ],
    ids=["model-loop", "layer-loop", "blocks"],
)
@pytest.mark.parametrize("envelope", [Envelope(prelude=1, coda=1), NoEnvelope()], ids=["envelope", "none"])
def test_a2_a_tied_loop_is_the_untied_stack_of_copies_with_summed_gradients(order, blocks, layers, envelope):
    model = made(injection=NoInjection(), order=order, blocks=blocks, envelope=envelope)
    stack, sources = dense_copy(model, layers)
    ids = tokens(model, 2, 5)
    tied, untied = run(model, ids).logits, run(stack, ids).logits
    torch.testing.assert_close(tied, untied, **EXACT)
    tied.square().sum().backward()
    untied.square().sum().backward()
    for layer in {*model.prelude, *model.core, *model.coda_layers}:
        copies = [copy for copy, source in zip(stack.layers, sources, strict=True) if source is layer]
        for name, parameter in layer.named_parameters():
            summed = sum(copy.get_parameter(name).grad for copy in copies)
            torch.testing.assert_close(parameter.grad, summed, **GRADIENTS)
    torch.testing.assert_close(model.embedding.weight.grad, stack.embedding.weight.grad, **GRADIENTS)


def test_a2_one_layer_loop_is_one_model_loop():
    ids = tokens(made(), 2, 5)
    options = {"injection": NoInjection(), "blocks": (3,)}
    by_layer = run(made(order=LayerLoop(num_steps=1), **options), ids, num_steps=1)
    by_model = run(made(order=ModelLoop(num_steps=1), **options), ids, num_steps=1)
    torch.testing.assert_close(by_layer.logits, by_model.logits, **EXACT)
    assert (len(by_layer.plan), len(by_model.plan)) == (3, 1)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a2_both_loops_agree_for_a_core_of_one_layer(steps):
    ids = tokens(made(), 2, 5)
    by_layer, by_model = (run(made(order=order(num_steps=2)), ids, num_steps=steps) for order in (LayerLoop, ModelLoop))
    torch.testing.assert_close(by_layer.logits, by_model.logits, **EXACT)


@pytest.mark.parametrize(
    ("order", "blocks", "weights"),
    [
        (ModelLoop(num_steps=4), (3,), (0.5 / (4 * 3**0.5),) * 3),
        (LayerLoop(num_steps=4), (3,), (0.5 / (4 * 3**0.5),) * 3),
        (Blocks(num_steps=(2, 4)), (1, 2), (0.5 / 2, 0.5 / (4 * 2**0.5), 0.5 / (4 * 2**0.5))),
    ],
    ids=["model-loop", "layer-loop", "blocks"],
)
def test_a8_a_residual_scale_is_one_weight_on_the_branches_of_the_core_at_any_depth(order, blocks, weights):
    changes = {"order": order, "blocks": blocks, "envelope": Envelope(prelude=1, coda=1)}
    scaled, plain = made(residual=LoomResidual(), **changes), made(**changes)
    for layer, weight in zip(plain.core, weights, strict=True):  # the last matrix of a branch carries its weight
        layer.attn.o.weight.data *= weight
        layer.ffn.down.weight.data *= weight
    ids = tokens(plain, 2, 5)
    for steps in (plain.spec.default_steps, 1 if len(blocks) == 1 else (1, 1)):
        torch.testing.assert_close(
            run(scaled, ids, num_steps=steps).logits, run(plain, ids, num_steps=steps).logits, **TWIN
        )


@pytest.mark.parametrize(
    ("order", "blocks"),
    [
        (TwoLevel(h=2, l=3), 2),
        (TwoLevel(h=3, l=1), 1),
        (TwoLevel(h=2, l=2, share=False), 4),
        (TwoLevel(h=2, l=1, repeats=3), 2),
        (TwoLevel(h=1, l=2, share=False, repeats=2), 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("start", [Zeros(), Normal(std=1.0)], ids=lambda s: type(s).__name__)
def test_a11_two_levels_equal_the_plain_twin(order, blocks, start):
    model = made(order=order, blocks=(blocks,), injection=Add(), state_init=start)
    ids = tokens(model, 2, 4)
    out = run(model, ids)
    context = model.encode(ids)
    first = model.init_state(context, noise(model, positions_of(torch.ones_like(ids, dtype=torch.bool))))
    assert torch.equal(first.high, context.embeds)
    layers = [lambda x, layer=layer: layer(x, context.scope) for layer in model.core]
    low, high = (layers, layers) if order.share else (layers[blocks // 2 :], layers[: blocks // 2])
    high, low = two_levels(
        first.low, context.embeds, context.embeds, low_layers=low, high_layers=high, h=order.h, l=order.l,
        repeats=order.repeats, inject=lambda state, e: state + e,
    )  # fmt: skip
    torch.testing.assert_close(out.state.high, high, **TWIN)
    torch.testing.assert_close(out.state.low, low, **TWIN)
    torch.testing.assert_close(out.hidden, model.coda(first._replace(high=high), context), **TWIN)
    executed = sum(model.spec.cost.blocks[block].layers for block, _ in out.plan)
    each = blocks if order.share else blocks // 2
    assert executed == order.h * (order.l + 1) * each * order.repeats


def test_a11_levels_say_what_they_read_and_write():
    spec = made(order=TwoLevel(share=False), blocks=(2,), state_init=Zeros()).spec
    assert [(block.layers, block.writes) for block in spec.blocks] == [((1,), ("low",)), ((0,), ("high",))]
    assert spec.writes_readout == {1}
    shared = made(order=TwoLevel(), blocks=(2,), state_init=Zeros()).spec
    assert shared.blocks[0].layers == shared.blocks[1].layers == (0, 1)
    assert shared.params.core == (shared.params.core[0], 0)


def test_the_context_enters_by_its_source():
    ids = tokens(made(), 1, 4)
    for source in ("prelude", "embeds"):
        model = made(injection=Add(source=source), embed_norm=LayerNorm(), prelude_norm=LayerNorm())
        context = model.encode(ids)
        e = model.embed_norm(model.embedding.weight[ids])
        prelude = model.prelude_norm(model.prelude[0](e, context.scope))
        torch.testing.assert_close(context.embeds, prelude, **EXACT)
        torch.testing.assert_close(context.injected, prelude if source == "prelude" else e, **EXACT)
        torch.testing.assert_close(model.init_state(context, None), prelude, **EXACT)


def test_an_application_is_injection_signal_layers_and_boundary():
    model = made(injection=Concat(order="state_first", init="normal"), signal=StepEmbedding(max=2), boundary=EndNorm())
    context = model.encode(tokens(model, 2, 4))
    state = torch.randn(2, 4, 8, dtype=torch.float64)
    u = torch.cat([state, context.embeds], -1) @ model.injections[0].rule.w.weight.T
    u = u + model.signals[0].table[[1, 0]][:, None]
    h = model.core[0](u, context.scope)
    expected = h / h.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(model.step(state, context, 0, torch.tensor([1, 0])), expected, **TWIN)


@pytest.mark.parametrize(
    ("changes", "normed"),
    [
        ({"exit_norm": "own", "coda": 1}, 2),
        ({"exit_norm": "final", "coda": 1}, 2),
        ({"boundary": SharedFinalNorm(), "coda": 0}, 0),
        ({"coda": 0}, 1),
    ],
    ids=["own", "final", "shared", "plain"],
)
def test_the_readout_norms_where_it_says(changes, normed):
    changes = dict(changes)
    model = made(envelope=Envelope(prelude=0, coda=changes.pop("coda")), **changes)
    context = model.encode(tokens(model, 1, 4))
    state = 3 * torch.randn(1, 4, 8, dtype=torch.float64)
    h = state
    if model.config.exit_norm != "none":
        h = (model.exit_norm or model.final_norm)(h)
    for layer in model.coda_layers:
        h = layer(h, context.scope)
    expected = h if normed == 0 else model.final_norm(h)
    torch.testing.assert_close(model.coda(state, context), expected, **EXACT)
    names = [name for name in model.spec.readout if "norm" in name]
    assert len(names) == normed


def test_blocks_share_one_injection_or_have_their_own():
    two = {"order": Blocks(num_steps=(1, 1)), "blocks": (1, 1)}
    shared = made(injection=Diagonal(initial_decay=0.5), **two)
    own = made(injection=Diagonal(initial_decay=0.5, shared_over_blocks=False), **two)
    assert (len(shared.injections), len(own.injections)) == (1, 2)
    assert own.spec.params.injection == 2 * shared.spec.params.injection
    with torch.no_grad():
        own.injections[1].rule.w.weight.mul_(2)
    ids = tokens(own, 1, 3)
    context, state = own.encode(ids), torch.randn(1, 3, 8, dtype=torch.float64)
    own.core[1].load_state_dict(own.core[0].state_dict())
    first, second = (own.step(state, context, block, torch.zeros(1, dtype=torch.long)) for block in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "init_state: this model starts from noise of width 8; got None. Use standard_noise(...)"),
        (5, "init_state: this model starts from noise of width 8; got width 5. Use standard_noise(...)"),
    ],
)
def test_missing_or_misshapen_noise_is_refused(given, message):
    model = made(state_init=Normal(std=1.0))
    context = model.encode(tokens(model, 1, 2))
    with pytest.raises(ValueError, match=re.escape(message)):
        model.init_state(context, None if given is None else torch.zeros(1, 2, given))


def test_needless_noise_is_refused():
    model = made()
    with pytest.raises(
        ValueError, match=re.escape("init_state: this model draws no noise; got width 8. Pass noise=None")
    ):
        model.init_state(model.encode(tokens(model, 1, 2)), torch.zeros(1, 2, 8))


def test_noise_without_spread_is_zeros_bit_for_bit():
    ids = tokens(made(), 2, 3)
    none, zeros = (run(made(state_init=start), ids).logits for start in (Normal(std=0.0), Zeros()))
    torch.testing.assert_close(none, zeros, **EXACT)


@pytest.mark.parametrize(
    ("changes", "classes"),
    [
        ({}, [0, 0, 0, 0, 0]),
        ({"injection": Add(when=FirstOnly())}, [0, 1, 1, 1, 1]),
        ({"signal": StepEmbedding(max=9)}, [0, 1, 2, 3, 4]),
        ({"signal": StepEmbedding(max=3), "beyond": ClampLast()}, [0, 1, 2, 2, 2]),
        ({"signal": StepEmbedding(max=3), "beyond": Cycle()}, [0, 1, 2, 0, 1]),
        ({"signal": StepEmbedding(max=3), "beyond": Cycle(), "injection": Add(when=FirstOnly())}, [0, 4, 5, 3, 4]),
    ],
    ids=["none", "first", "signal", "clamp", "cycle", "cycle-first"],
)
def test_operator_classes_tell_which_applications_are_the_same_function(changes, classes):
    spec = made(**changes).spec
    assert [spec.operator_class(0, t) for t in range(5)] == classes


def test_index_parts_name_what_depends_on_the_iteration():
    assert made().spec.index_parts == frozenset()
    assert made(injection=Add(when=FirstOnly())).spec.index_parts == {"injection"}
    assert made(signal=StepEmbedding(max=2)).spec.index_parts == {"embedding"}
    assert made(signal=AdaLN(freq_dim=4)).spec.index_parts == {"adaln"}


def test_iteration_ids_of_adaln_stand_for_the_steps_of_each_grid():
    model = made(signal=AdaLN(freq_dim=4), order=ModelLoop(num_steps=3), trained_depth=Grid(sizes=(0.5, 0.3, 0.2)))
    context = model.encode(tokens(model, 2, 3))
    pairs = torch.stack([context.times[0], context.step_sizes[0]], -1)
    expected = [(0, 0.5), (0.5, 0.3), (0.8, 0.2), (0, 1), (0, 0.5), (0.5, 0.5)]
    torch.testing.assert_close(pairs, torch.tensor(expected, dtype=torch.float64), **TWIN)
    assert [model.spec.grid(k) for k in (1, 2, 3)] == [(3,), (4, 5), (0, 1, 2)]
    for k in (0, 4):
        with pytest.raises(ValueError, match=rf"grid: k must be 1\.\.3, the steps of the trained grid\. Got {k}"):
            model.spec.grid(k)
    with pytest.raises(ValueError, match="Got 4"):
        model.spec.plan(4)
    run(model, tokens(model, 1, 3), plan=Plan.of((0, t) for t in model.spec.grid(2)))


def test_given_step_sizes_replace_the_grid_row_by_row():
    model = made(signal=AdaLN(freq_dim=4), order=ModelLoop(num_steps=2))
    sizes = torch.tensor([[0.5, 0.25], [0.1, 0.9]])
    context = model.encode(tokens(model, 2, 3), extras={"step_sizes": sizes})
    torch.testing.assert_close(context.step_sizes, sizes.double(), **EXACT)
    torch.testing.assert_close(context.times, torch.tensor([[0.0, 0.5], [0.0, 0.1]]).double(), rtol=1e-7, atol=0)
    for wrong in ([[0.5, 0.75], [0.1, 0.1]], [[0.5, 0.0], [0.1, 0.1]]):
        with pytest.raises(ValueError, match="step_sizes must be positive and sum to at most 1"):
            model.encode(tokens(model, 2, 3), extras={"step_sizes": torch.tensor(wrong)})


def test_value_embeddings_belong_to_stored_layers():
    model = made(blocks=(2,), **attention(value_embedding=True))
    assert len(model.value_tables) == 1 + 2 + 1
    ids = tokens(model, 1, 3)
    before = run(model, ids).logits
    with torch.no_grad():
        model.value_tables["2"].weight.mul_(2)  # of the second core layer
    assert not torch.equal(run(model, ids).logits, before)


def test_parameters_are_grouped():
    model = made(
        blocks=(2,), injection=Concat(order="embeds_first", init="identity"), projection=True, prelude_norm=LayerNorm(),
        exit_norm="own", **attention(position=Learned(max=9)),
    )  # fmt: skip
    layer = 4 * 8 * 8 + 3 * 8 * 12
    params, cost = model.spec.params, model.spec.cost
    assert (params.embedding, params.position) == (13 * 8, 9 * 8)
    assert params.prelude == layer + 2 * 8 + 2 * 8
    assert params.injection == 2 * 8 * 8
    assert params.core == (2 * (layer + 2 * 8),)
    assert params.coda == layer + 2 * 8 + 8 * 8 + 8
    assert (params.readout, params.head) == (8, 0)
    assert params.total == sum(p.numel() for p in model.parameters())
    assert cost.matmul_rec == 2 * layer + 2 * 8 * 8
    assert cost.matmul_once == 2 * layer + 8 * 8
    assert model.spec.max_positions == 9


def test_the_model_does_not_depend_on_training_mode():
    model = made(state_init=Normal(std=1.0), signal=StepEmbedding(max=2))
    ids = tokens(model, 2, 4)
    before = run(model, ids).logits
    torch.testing.assert_close(run(model.train(), ids).logits, before, **EXACT)


def test_states_of_an_update_with_its_own_fields_start_at_zero():
    from looplab.recurrence.update import EnergyGate

    model = made(update=EnergyGate(hidden=4))
    state = model.init_state(model.encode(tokens(model, 2, 3)), None)
    assert type(state)._fields == ("state", "energy")
    assert not state.energy.any()
    assert set(model.spec.state) == {"state", "energy"}
    assert not model.spec.state["energy"].read_by_coda
    assert len(states.leaves(state)) == 2


def test_the_envelope_has_two_layers_on_each_side_unless_told_otherwise():
    assert (Envelope().prelude, Envelope().coda) == (2, 2)
    assert (NoEnvelope().prelude, NoEnvelope().coda) == (0, 0)


def test_layers_without_rotation_see_order_by_the_mask_alone():
    """Two tokens before the last may change places where no layer rotates; one rotating layer tells them apart."""
    plain = {"envelope": NoEnvelope(), "injection": NoInjection()}
    ids = tokens(made(**plain), 1, 3)
    swapped = ids[:, [1, 0, 2]]
    assert not torch.equal(ids, swapped)
    for layers, alike in (((), False), ((0,), True)):
        model = made(unrotated_layers=layers, **plain)
        last = [run(model, text, num_steps=1).logits[0, -1] for text in (ids, swapped)]
        assert torch.allclose(*last, **TWIN) is alike
    with pytest.raises(ValueError, match=r"LoopedConfig.unrotated_layers must name stored layers 0\.\.2"):
        made(unrotated_layers=(3,))
