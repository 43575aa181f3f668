"""The fourteen points of the contract, for every registered model. Exceptions are declared in the model's file."""

import itertools
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from contract.zoo import NAMES, depths, encode, excused, models_without_preset, noise, positions_of, run, tiny, tokens
from looplab._config import from_dict, to_dict
from looplab.models.base import PRESETS, build
from looplab.recurrence import state as states
from looplab.recurrence.gradient import CheckpointApplication, CheckpointUnit, FullBPTT, SegmentedDetach, TruncatedBPTT
from looplab.recurrence.kv import Anchor, Average, Cache, CopyLast, DepthIndexed, First, Modulo, Single, Skip
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward, new_cache, run_plan
from looplab.recurrence.plan import Plan
from looplab.recurrence.signal import AdaLN
from looplab.recurrence.trace import Recorder
from reference import unrolled
from tolerances import BF16_LOGITS, BF16_LOGITS_LONG, CACHED, EXACT, GRADIENTS, ROWS, TWIN

Cache.register(unrolled.KeepAll)  # the twin stands in for a cache without inheriting from one
pytestmark = pytest.mark.filterwarnings("ignore:num_steps=:UserWarning")
every_model = pytest.mark.parametrize("name", NAMES)


def test_every_registered_model_has_a_tiny_preset():
    assert models_without_preset() == []


@every_model
def test_exceptions_are_those_that_the_spec_of_the_model_implies(name):
    model = tiny(name)
    implied = {"causality": not model.spec.causal, "cache": not model.spec.kv_rules, "padding": not model.spec.padding}
    assert set(model.contract_exceptions) - {"bfloat16"} == {point for point, holds in implied.items() if holds}


@every_model
def test_01_shapes_types_and_finiteness_at_every_depth(name):
    model = tiny(name, dtype=torch.float32)
    for steps, rows, seq in itertools.product(depths(model), (1, 3), (1, 9)):
        ids = tokens(model, rows, seq)
        out = run(model, ids, num_steps=steps)
        assert out.logits.shape == (*ids.shape, model.spec.vocab[0])
        assert out.logits.dtype == torch.float32
        assert torch.isfinite(out.logits).all()
        assert out.hidden.shape[:2] == ids.shape


@every_model
def test_02_a_token_does_not_change_logits_before_it(name):
    model = tiny(name)
    excused(model, "causality")
    assert model.spec.causal
    ids = tokens(model, 2, 9)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % model.spec.vocab[0]
    for steps in depths(model, (0, 1, 3)):
        before, after = (run(model, x, num_steps=steps).logits for x in (ids, changed))
        torch.testing.assert_close(before[:, :5], after[:, :5], **EXACT)
        if steps:  # a state that starts as noise has seen no token yet
            assert not torch.equal(before[:, 5:], after[:, 5:])


@every_model
def test_03_step_runs_once_per_entry_and_a_prefix_of_a_long_run_is_a_short_run(name, monkeypatch):
    model = tiny(name)
    calls = []
    original = model.step
    monkeypatch.setattr(model, "step", lambda *a, **k: (calls.append(a[2:3]), original(*a, **k))[1])
    ids, plan = tokens(model, 2, 5), model.spec.plan()
    recorder, ledger = Recorder(), Ledger()
    run(model, ids, plan=plan, recorder=recorder, ledger=ledger)
    assert [block for (block,) in calls] == [block for block, _ in plan]
    assert ledger.row_applications == 2 * len(plan) and ledger.launches == len(plan)
    assert len(recorder.states) == len(plan) + 1
    for k in range(len(plan) + 1):
        short = run(model, ids, plan=plan[:k]).state
        for one, other in zip(states.leaves(recorder.states[k]), states.leaves(short), strict=True):
            torch.testing.assert_close(one, other, **EXACT)


@every_model
def test_04_a_row_sees_neither_other_rows_nor_their_iteration_nor_their_padding(name):
    model = tiny(name)
    ids = tokens(model, 3, 6)
    valid = torch.ones_like(ids, dtype=torch.bool)
    if "padding" not in model.contract_exceptions:
        valid[0, :2] = False
        valid[2, 4:] = False
    drawn = noise(model, positions_of(valid), [7, 8, 9])
    context = encode(model, ids, valid=valid)
    state = model.init_state(context, drawn)
    highest = (model.spec.max_iteration or 8) - 1
    iteration = torch.tensor([0, min(2, highest), min(5, highest)])
    for block in range(len(model.spec.blocks)):
        together = model.step(state, context, block, iteration)
        for row in range(3):
            one = slice(row, row + 1)
            alone_context = encode(model, ids[one], valid=valid[one])
            alone = model.step(states.select(state, one), alone_context, block, iteration[one])
            for a, b in zip(states.leaves(states.select(together, one)), states.leaves(alone), strict=True):
                keep = valid[row] if a.shape[1] == len(valid[row]) else slice(None)  # a state longer than its tokens
                torch.testing.assert_close(a[:, keep], b[:, keep], **ROWS, msg=f"row {row} depends on its neighbours")
        permuted = [2, 0, 1]
        moved = model.step(
            states.select(state, permuted),
            encode(model, ids[permuted], valid=valid[permuted]),
            block,
            iteration[permuted],
        )
        for a, b in zip(states.leaves(states.select(together, permuted)), states.leaves(moved), strict=True):
            torch.testing.assert_close(a, b, **ROWS)


@every_model
def test_05_the_same_arguments_give_the_same_bits(name):
    model = tiny(name, dtype=torch.float32)
    ids = tokens(model, 2, 7)
    first = run(model, ids, items=[3, 4]).logits
    run(model, tokens(model, 5, 4, seed=9))
    torch.testing.assert_close(run(model, ids, items=[3, 4]).logits, first, **EXACT)
    if model.spec.noise_width:
        assert not torch.equal(run(model, ids, items=[3, 5]).logits[1], first[1])
        swapped = run(model, ids[[1, 0]], items=[4, 3]).state
        straight = run(model, ids, items=[3, 4]).state
        torch.testing.assert_close(states.leaves(swapped)[0][0], states.leaves(straight)[0][1], rtol=1e-5, atol=1e-5)


@every_model
@pytest.mark.parametrize(
    "strategy",
    [
        FullBPTT(),
        TruncatedBPTT(window=2),
        SegmentedDetach(every=2),
        CheckpointApplication(),
        CheckpointApplication(inner=TruncatedBPTT(window=2)),
        CheckpointUnit(),
        CheckpointUnit(inner=TruncatedBPTT(window=2)),
    ],
    ids=lambda s: str(s).split("(")[0] + ("+" if getattr(s, "inner", None) else ""),
)
def test_06_gradients_equal_those_of_a_plain_loop_with_the_same_cuts(name, strategy):
    model = tiny(name)
    ids = tokens(model, 2, 5)
    plan = model.spec.plan()
    drawn = noise(model, positions_of(torch.ones_like(ids, dtype=torch.bool)))

    def loss_of(state, context):
        return model.head(model.coda(state, context)).square().mean()

    def fast():
        context = encode(model, ids)
        losses = []
        ended = (lambda s, k: losses.append(loss_of(s, context))) if isinstance(strategy, SegmentedDetach) else None
        state = run_plan(
            model, plan, context, model.init_state(context, drawn), gradient=strategy, on_segment_end=ended
        )
        return sum(losses) if losses else loss_of(state, context)

    cuts = {type(strategy).__name__: strategy}
    inner = cuts.get("CheckpointApplication", strategy)
    inner = getattr(inner, "inner", inner)
    detach, score = unrolled.cuts(len(plan), window=getattr(inner, "window", None), every=getattr(inner, "every", None))

    def slow():
        context = encode(model, ids)
        return unrolled.loss(model, plan, context, model.init_state(context, drawn), detach, score, loss_of)

    found = [torch.autograd.grad(f(), list(model.parameters()), allow_unused=True) for f in (fast, slow)]
    for (label, _), one, other in zip(model.named_parameters(), *found, strict=True):
        if other is None:
            assert one is None or not one.any(), f"{label} has a gradient that the plain loop lacks"
            continue
        assert one is not None, f"{label} has no gradient"
        torch.testing.assert_close(one, other, **GRADIENTS, msg=lambda text, label=label: f"{label}: {text}")


@every_model
def test_07_a_tied_loop_equals_an_untied_stack_of_copies(name):
    model = tiny(name)
    ids = tokens(model, 2, 5)
    drawn = noise(model, positions_of(torch.ones_like(ids, dtype=torch.bool)))
    plan = model.spec.plan()
    expected = run(model, ids, plan=plan).logits
    copies = [build(model.config, dtype=torch.float64) for _ in plan]
    for copy in copies:
        copy.load_state_dict(model.state_dict())
    context = encode(model, ids)
    state = model.init_state(context, drawn)
    for copy, (block, iteration) in zip(copies, plan, strict=True):
        state = copy.step(state, context, block, torch.full((2,), iteration))
    logits = model.head(model.coda(state, context))
    torch.testing.assert_close(logits, expected, **TWIN)
    weights = torch.autograd.grad(expected.sum(), list(model.parameters()), allow_unused=True)
    pieces = [
        torch.autograd.grad(logits.sum(), list(m.parameters()), allow_unused=True, retain_graph=True)
        for m in (model, *copies)
    ]
    for index, (label, _) in enumerate(model.named_parameters()):
        if weights[index] is None:
            continue
        parts = [piece[index] for piece in pieces if piece[index] is not None]
        torch.testing.assert_close(sum(parts), weights[index], **GRADIENTS, msg=lambda t, label=label: f"{label}: {t}")


@every_model
def test_07_ties_survive_loading_and_moving(name):
    model = tiny(name)
    config = model.config
    if model.spec.params.head:
        assert model.lm_head.weight.data_ptr() != model.embedding.weight.data_ptr()
        return
    other = build(config, seed=1, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    for moved in (other, other.to(torch.float32), other.to(torch.bfloat16)):
        assert moved.lm_head.weight.data_ptr() == moved.embedding.weight.data_ptr()


@every_model
def test_08_cached_decoding_equals_full_recomputation_token_by_token(name):
    model = tiny(name)
    excused(model, "cache")
    ids = tokens(model, 2, 7)
    for steps in depths(model, (0, 1, 3)):
        with torch.no_grad():
            full = run(model, ids, num_steps=steps).logits
            cache = new_cache(model.spec, rows=2, capacity=7, num_steps=steps, dtype=torch.float64)
            pieces = []
            for start, end in ((0, 3), (3, 5), (5, 6), (6, 7)):  # chunked prefill, then token by token
                at = torch.arange(start, end).expand(2, -1)
                drawn = noise(model, at)
                pieces.append(forward(model, ids[:, start:end], num_steps=steps, noise=drawn, cache=cache).logits)
            torch.testing.assert_close(torch.cat(pieces, 1), full, **CACHED)
            expected = model.spec.cost.kv_bytes_per_token(
                "DepthIndexed", model.spec.plan(steps).iterations(), itemsize=8
            )
            assert cache.nbytes == expected * 7 * 2


@every_model
def test_08_left_padded_rows_decode_like_rows_alone(name):
    model = tiny(name)
    excused(model, "cache")
    ids = tokens(model, 2, 7)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, :3] = False
    with torch.no_grad():
        full = run(model, ids, valid=valid).logits
        alone = run(model, ids[:1, 3:]).logits
        torch.testing.assert_close(full[:1, 3:], alone, **CACHED)
        cache = new_cache(model.spec, rows=2, capacity=7, dtype=torch.float64)
        at = positions_of(valid)
        pieces = []
        for start, end in ((0, 5), (5, 6), (6, 7)):
            drawn = noise(model, at[:, start:end])
            out = forward(model, ids[:, start:end], noise=drawn, cache=cache, valid=valid[:, start:end])
            pieces.append(out.logits)
        got = torch.cat(pieces, 1)
        torch.testing.assert_close(got[valid], full[valid], **CACHED)


@every_model
def test_08_readonly_leaves_the_cache_as_it_was_and_crop_then_decode_is_exact(name):
    model = tiny(name)
    excused(model, "cache")
    ids = tokens(model, 2, 6)
    at = torch.arange(6).expand(2, -1)
    drawn = noise(model, at)

    def piece(start, end):
        return {"noise": None if drawn is None else drawn[:, start:end], "cache": cache}

    with torch.no_grad():
        cache = new_cache(model.spec, rows=2, capacity=6, dtype=torch.float64)
        forward(model, ids[:, :4], **piece(0, 4))
        with cache.readonly():
            peek = forward(model, ids[:, 4:5], **piece(4, 5)).logits
        assert cache.length == 4
        again = forward(model, ids[:, 4:6], **piece(4, 6)).logits
        torch.testing.assert_close(peek, again[:, :1], **CACHED)
        cache.crop(3)
        redone = forward(model, ids[:, 3:6], **piece(3, 6)).logits
        torch.testing.assert_close(redone[:, 1:], again, **CACHED)
        cache.reorder(torch.tensor([1, 0]))
        cache.crop(5)
        swapped_noise = None if drawn is None else drawn[[1, 0], 5:6]
        swapped = forward(model, ids[[1, 0], 5:6], noise=swapped_noise, cache=cache).logits
        torch.testing.assert_close(swapped[[1, 0]], again[:, 1:], **CACHED)


INEXACT = {
    "copy": DepthIndexed(missing=CopyLast()),
    "skip": DepthIndexed(missing=Skip()),
    "single": Single(),
    "first": First(),
    "average": Average(),
    "modulo": Modulo(m=2),
    "anchor": Anchor(n=1),
}
every_inexact_rule = pytest.mark.parametrize(("twin", "rule"), INEXACT.items(), ids=INEXACT.keys())


@pytest.mark.parametrize("name", ["tiny-core", "tiny-no-envelope"])  # the twin covers plans of one block
@every_inexact_rule
def test_08_rows_that_stop_at_their_own_depth_follow_the_rule_as_the_twin_does(name, rule, twin):
    model = tiny(name)
    ids = tokens(model, 2, 5)
    counts = [torch.tensor([2, 4]), torch.tensor([4, 1]), torch.tensor([3, 3])]
    spans = [(0, 2), (2, 3), (3, 5)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = new_cache(model.spec, rows=2, capacity=5, num_steps=4, rule=rule, dtype=torch.float64)
        for (start, end), steps in zip(spans, counts, strict=True):
            at = torch.arange(start, end).expand(2, -1)
            got = forward(model, ids[:, start:end], num_steps=steps, noise=noise(model, at), cache=cache).logits
            for row in range(2):
                pieces = [(span, int(count[row])) for span, count in zip(spans, counts, strict=True)]
                slow = unrolled.decode_under(
                    twin,
                    model,
                    ids[row],
                    pieces,
                    end,
                    noise=lambda at, row=row: noise(model, at, [row]),
                    size=rule.size,
                )
                torch.testing.assert_close(got[row], slow, **CACHED)


@pytest.mark.filterwarnings("ignore:kv_rule=:UserWarning")
@every_inexact_rule
def test_08_left_padded_rows_decode_like_rows_alone_under_every_rule(twin, rule):
    model = tiny("tiny-core")
    ids = tokens(model, 2, 7)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, :3] = False

    def decoded(ids, valid, spans, items):
        at, pieces = positions_of(valid), []
        cache = new_cache(model.spec, rows=len(ids), capacity=7, rule=rule, dtype=torch.float64)
        for start, end in spans:
            span = slice(start, end)
            drawn = noise(model, at[:, span], items)
            pieces.append(forward(model, ids[:, span], noise=drawn, cache=cache, valid=valid[:, span]).logits)
        return torch.cat(pieces, 1)

    with torch.no_grad():
        together = decoded(ids, valid, ((0, 5), (5, 6), (6, 7)), [0, 1])
        alone = decoded(ids[:1, 3:], valid[:1, 3:], ((0, 2), (2, 3), (3, 4)), [0])
        full = run(model, ids, valid=valid).logits
    torch.testing.assert_close(together[:1, 3:], alone, **CACHED)
    if rule in (DepthIndexed(missing=CopyLast()), DepthIndexed(missing=Skip())):  # nothing is missing here
        torch.testing.assert_close(together[valid], full[valid], **CACHED)
    else:
        assert not torch.allclose(together[valid], full[valid], **CACHED)


@every_model
def test_09_config_and_weights_round_trip_and_foreign_weights_are_refused_by_name(name):
    model = tiny(name)
    config = model.config
    assert from_dict(type(config), to_dict(config)) == config
    other = build(config, seed=3, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    ids = tokens(model, 1, 4)
    torch.testing.assert_close(run(other, ids).logits, run(model, ids).logits, **EXACT)
    foreign = {**model.state_dict(), "core.99.attn.q.weight": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"core\.99\.attn\.q\.weight"):
        other.load_state_dict(foreign)


@every_model
def test_10_counted_flops_equal_pytorchs_counter(name):
    model = tiny(name)
    ids = tokens(model, 2, 6)
    plan = model.spec.plan()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = run(model, ids, plan=plan).logits
    applications = {b: sum(1 for block, _ in plan if block == b) for b in range(len(model.spec.blocks))}
    options = {"tokens": ids.shape[1], "rows": 2, "pairs": "square"}
    assert counter.get_total_flops() == model.spec.cost.forward(applications, **options)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(model, ids, plan=plan).logits.sum().backward()
    both = model.spec.cost.forward(applications, **options) + model.spec.cost.backward(applications, **options)
    signal = getattr(model.config, "signal", None)
    if isinstance(signal, AdaLN):  # nothing differentiates the sinusoids that the two time codes read
        both -= len(plan) * 2 * 2 * 2 * signal.freq_dim * model.config.width
    assert counter.get_total_flops() == both
    assert logits.shape[0] == 2


@every_model
def test_10_parameter_groups_add_up_to_all_parameters(name):
    model = tiny(name)
    assert model.spec.params.total == sum(p.numel() for p in model.parameters())
    assert sum(block.params for block in model.spec.blocks) == sum(model.spec.params.core)


@every_model
def test_11_every_parameter_gets_a_finite_gradient(name):
    model = tiny(name)
    ids = tokens(model, 3, 9)
    out = run(model, ids)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    if model.spec.halt is not None:  # the next-token loss reads no stopping score
        loss = loss + model.halt(out.state).square().mean()
    loss.backward()
    labels = [label for label, _ in model.named_parameters()]
    assert all(any(label.startswith(start) for label in labels) for start in model.idle_parameters)
    for label, parameter in model.named_parameters():
        if label.startswith(tuple(model.idle_parameters)):
            assert parameter.grad is None, f"{label} is not idle"
            continue
        assert parameter.grad is not None, f"{label} gets no gradient"
        assert torch.isfinite(parameter.grad).all() and parameter.grad.any(), f"{label}: {parameter.grad.abs().max()}"


@every_model
def test_13_bfloat16_stays_close_to_float32(name):
    model = tiny(name, dtype=torch.float32)
    ids = tokens(model, 4, 16)
    with torch.no_grad():
        exact = run(model, ids).logits
        rounded = run(model.to(torch.bfloat16), ids).logits
    error = (rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    bound = BF16_LOGITS_LONG if "bfloat16" in model.contract_exceptions else BF16_LOGITS
    assert error <= bound, f"relative RMS {error:.4f}"


@every_model
def test_13_padding_on_either_side_changes_nothing(name):
    model = tiny(name)
    excused(model, "padding")
    ids = tokens(model, 1, 5)
    alone = run(model, ids).logits
    for left, right in ((3, 0), (0, 3), (2, 2)):
        padded = torch.nn.functional.pad(ids, (left, right))
        valid = torch.nn.functional.pad(torch.ones_like(ids, dtype=torch.bool), (left, right))
        logits = run(model, padded, valid=valid).logits
        torch.testing.assert_close(logits[:, left : left + 5], alone, **ROWS)


@every_model
def test_operators_per_application_do_not_grow_with_tokens_or_rows(name):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Count.calls += 1
            return function(*args, **(kwargs or {}))

    model = tiny(name, dtype=torch.float32)
    counts = []
    for rows, seq in ((1, 4), (1, 32), (6, 32)):
        context = encode(model, tokens(model, rows, seq))
        state = model.init_state(context, noise(model, context.positions, dtype=torch.float32))
        Count.calls = 0
        with torch.no_grad(), Count():
            model.step(state, context, 0, torch.zeros(rows, dtype=torch.long))
        counts.append(Count.calls)
    assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_builds_on_the_meta_device_and_round_trips(name):
    config = PRESETS[name]()
    assert from_dict(type(config), to_dict(config)) == config
    model = build(config, device="meta")
    assert model.spec.params.total == sum(p.numel() for p in model.parameters())
    assert Plan.parse(str(model.spec.plan())) == model.spec.plan()
