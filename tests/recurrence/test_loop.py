import dataclasses
import re
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.zoo import noise, run, tiny, tokens
from looplab.recurrence import state as states
from looplab.recurrence.depth import FixedDepth, PrefixDepth, UniformDepth, Unknown
from looplab.recurrence.kv import DepthIndexed, Single
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import depth_plan, forward, new_cache, run_plan, walk
from looplab.recurrence.plan import Blocks, LayerLoop, ModelLoop, Plan, PlanNode, Sequential, TwoLevel
from tiny import Mixing, tiny_spec
from tolerances import CACHED, EXACT, ROWS

IDS = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 0, 1], [2, 2, 3, 3, 4]])


def test_a_forward_is_encode_steps_coda_and_head():
    model = Mixing(dtype=torch.float64)
    out = forward(model, IDS)
    context = model.encode(IDS)
    state = model.init_state(context, None)
    for block, iteration in model.spec.plan():
        state = model.step(state, context, block, torch.full((3,), iteration))
    torch.testing.assert_close(out.state, state, **EXACT)
    torch.testing.assert_close(out.hidden, model.coda(state, context), **EXACT)
    torch.testing.assert_close(out.logits, model.head(out.hidden), **EXACT)
    assert out.plan == model.spec.plan()
    torch.testing.assert_close(out.context.embeds, context.embeds, **EXACT)


@pytest.mark.parametrize(("keep", "kept"), [(None, 5), (0, 0), (2, 2), (5, 5), (9, 5)])
def test_logits_are_made_for_the_tokens_asked_for(keep, kept):
    model = Mixing()
    whole, ledger = forward(model, IDS).logits, Ledger()
    out = forward(model, IDS, logits_to_keep=keep, ledger=ledger)
    assert ledger.head_tokens == 3 * kept
    if kept == 0:
        assert out.logits is None
    else:
        torch.testing.assert_close(out.logits, whole[:, 5 - kept :], **EXACT)


def test_steps_and_plan_together_are_refused():
    with pytest.raises(ValueError, match="forward: give num_steps or plan, not both"):
        forward(Mixing(), IDS, num_steps=2, plan=Plan.parse("[0.0]"))


@pytest.mark.parametrize(
    "steps",
    [
        2.5,
        -1,
        True,
        "4",
        torch.tensor(2),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([True, False, True]),
        torch.tensor([1, 2]),
        torch.tensor([[1], [2], [3]]),
        torch.tensor([1, -1, 2]),
    ],
    ids=str,
)
def test_depths_that_are_no_counts_are_refused(unchecked, steps):
    shown = steps if isinstance(steps, torch.Tensor) else repr(steps)
    message = f"num_steps must be an int >= 0 or Int[batch]. Got {shown}"
    with pytest.raises(ValueError, match=re.escape(message)):
        forward(Mixing(), IDS, num_steps=steps)


@pytest.mark.parametrize(
    ("order", "blocks", "counts", "written"),
    [
        (ModelLoop(num_steps=4), 1, (2, 0), ["10", "10"]),
        (Blocks(num_steps=(4, 4)), 2, (1, 2), ["11", "01", "11", "01"]),
        (LayerLoop(num_steps=2), 2, (2, 1), ["11", "10", "11", "10"]),
        (TwoLevel(h=2, l=1), 2, (1, 2), ["11", "11", "01", "01"]),
    ],
)
def test_a_row_takes_part_in_the_applications_of_its_own_plan(order, blocks, counts, written):
    spec = tiny_spec(order, blocks, 4)
    plan, active = depth_plan(spec, torch.tensor(counts), 2)
    assert plan == spec.plan(max(counts))
    shown = ["11" if mask is None else "".join(str(int(m)) for m in mask) for mask in active]
    assert shown == written


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3))
@settings(max_examples=10, deadline=None)
def test_rows_of_their_own_depth_equal_rows_alone(counts):
    model = Mixing(dtype=torch.float64)
    together = forward(model, IDS, num_steps=torch.tensor(counts))
    for row, steps in enumerate(counts):
        alone = forward(model, IDS[row : row + 1], num_steps=steps)
        torch.testing.assert_close(together.state[row : row + 1], alone.state, **ROWS)
        torch.testing.assert_close(together.logits[row : row + 1], alone.logits, **ROWS)


@pytest.mark.parametrize("name", ["tiny-blocks", "tiny-core", "tiny-layer-loop", "tiny-two-level", "tiny-no-envelope"])
def test_rows_of_their_own_depth_equal_rows_alone_with_and_without_a_cache(name):
    model = tiny(name)
    ids, counts = tokens(model, 3, 5), torch.tensor([2, 0, 1])
    at = torch.arange(5).expand(3, -1)
    drawn = noise(model, at)
    with torch.no_grad():
        plain = forward(model, ids, num_steps=counts, noise=drawn)
        cache = new_cache(model.spec, rows=3, capacity=5, num_steps=2, dtype=torch.float64)
        pieces = []
        for start, end in ((0, 3), (3, 4), (4, 5)):  # under Refuse: a row that always stops early lacks nothing
            part = None if drawn is None else drawn[:, start:end]
            pieces.append(forward(model, ids[:, start:end], num_steps=counts, noise=part, cache=cache).logits)
        for row, steps in enumerate(counts.tolist()):
            alone = run(model, ids[row : row + 1], items=[row], num_steps=steps)
            for one, other in zip(
                states.leaves(states.select(plain.state, [row])), states.leaves(alone.state), strict=True
            ):
                torch.testing.assert_close(one, other, **ROWS)
            torch.testing.assert_close(torch.cat(pieces, 1)[row : row + 1], alone.logits, **CACHED)


def warned(spec, steps, rows=3):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        depth_plan(spec, steps, rows)
    return [str(w.message) for w in caught]


def test_a_depth_beyond_the_trained_one_is_warned_of():
    spec = tiny_spec(ModelLoop(num_steps=4), 1, 4, trained_depth=FixedDepth(num_steps=4))
    message = "is beyond the trained depth FixedDepth(4); results are out of distribution"
    assert warned(spec, 8) == [f"num_steps=8 {message}"]
    assert warned(spec, torch.tensor([1, 9, 3])) == [f"num_steps=9 {message}"]
    assert warned(spec, 4) == warned(spec, None) == warned(spec, torch.tensor([4, 4, 0])) == []


@pytest.mark.parametrize(
    ("order", "blocks", "law", "inside", "outside"),
    [
        (Blocks(num_steps=(4, 4)), 2, FixedDepth(num_steps=4), [4, (4, 4), (0, 4)], [5, (4, 5)]),
        (Blocks(num_steps=(4, 4)), 2, PrefixDepth(law=UniformDepth(low=1, high=8)), [4, (2, 6)], [5, (4, 5)]),
        (TwoLevel(h=2, l=3), 2, FixedDepth(num_steps=2), [2, (2, 3), (1, 4)], [3, (2, 4)]),
        (ModelLoop(num_steps=4), 1, UniformDepth(low=1, high=16), [0, 16], [17]),
        (ModelLoop(num_steps=4), 1, Unknown(), [1000], []),
        (Sequential(), 2, FixedDepth(num_steps=1), [1], []),
    ],
)
def test_beyond_means_more_applications_of_a_block_than_were_trained(order, blocks, law, inside, outside):
    spec = tiny_spec(order, blocks, 4, trained_depth=law)
    assert all(warned(spec, steps) == [] for steps in inside)
    assert all(len(warned(spec, steps)) == 1 for steps in outside)


def test_caches_are_refused_where_they_make_no_sense():
    spec = dataclasses.replace(tiny_spec(ModelLoop(num_steps=4), 1, 4), name="inkling")
    for changed, rule, message in (
        (spec, Single(), "cache: inkling supports DepthIndexed only; got Single()"),
        (dataclasses.replace(spec, causal=False), None, "inkling is not causal: no KV cache. Pass cache=None"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            new_cache(changed, rows=1, capacity=2, rule=rule)


def test_another_rule_than_the_trained_one_is_warned_of():
    spec = tiny_spec(ModelLoop(num_steps=4), 1, 4, kv_rules=(DepthIndexed(), Single()))
    with pytest.warns(UserWarning, match=r"kv_rule=Single\(\) is not the trained rule DepthIndexed\(Refuse\(\)\)"):
        assert new_cache(spec, rows=1, capacity=2, rule=Single()).rule == Single()
    cache = new_cache(spec, rows=2, capacity=3, num_steps=7)
    assert (cache.rule, cache.rows, cache.capacity, cache.iterations) == (DepthIndexed(), 2, 3, {0: 7})


def test_a_cache_made_for_fewer_steps_is_refused_before_anything_is_written():
    model = tiny("tiny-core")
    ids = tokens(model, 1, 2)
    cache = new_cache(model.spec, rows=1, capacity=4, num_steps=2, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(ValueError, match="cache holds 2 iterations of block 0, the plan runs 3"):
        run(model, ids, num_steps=3, cache=cache)
    assert cache.length == 0


def test_a_plan_with_an_index_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match="embedding has 4 iterations; iteration 4 asked for"):
        forward(Mixing(steps=4), IDS, plan=Plan.parse("[0.4]"))


def trie(plans):
    """The trie of named plans."""
    nodes = {(): PlanNode(None)}
    for name, plan in plans.items():
        for k in range(1, len(plan) + 1):
            path = plan.applications[:k]
            if path not in nodes:
                nodes[path] = PlanNode(path[-1])
                nodes[path[:-1]].children.append(nodes[path])
        nodes[plan.applications].wanted.append(name)
    return nodes[()]


plans = st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=5), min_size=1, max_size=5)


@given(plans)
@settings(max_examples=20, deadline=None)
def test_a_walk_equals_every_plan_alone_to_the_bit_and_makes_every_prefix_once(drawn):
    model = Mixing()
    named = {str(i): Plan.of(pairs) for i, pairs in enumerate(drawn)}
    root = trie(named)
    context = model.encode(IDS)
    state = model.init_state(context, None)
    found, ledger = {}, Ledger()

    def visit(node, reached):
        assert not torch.is_grad_enabled()
        found.update(dict.fromkeys(node.wanted, reached))

    walk(model, context, state, root, visit, ledger=ledger)
    prefixes = {plan.applications[:k] for plan in named.values() for k in range(1, len(plan) + 1)}
    assert ledger.launches == root.size() == len(prefixes)
    with torch.no_grad():
        for name, plan in named.items():
            torch.testing.assert_close(found[name], run_plan(model, plan, context, state), **EXACT)


def test_a_walk_holds_no_more_states_than_the_trie_is_deep():
    model = Mixing(steps=8, blocks=1)
    context = model.encode(IDS)
    alive, most = weakref.WeakSet(), 0
    original = model.step

    def step(state, *args):
        nonlocal most
        new = original(state, *args)
        alive.add(new)
        most = max(most, len(alive))
        return new

    model.step = step
    chain = trie({"all": ModelLoop(num_steps=8).plan(8, 1)})
    seen = []
    visit = lambda node, state: seen.append(len(alive))  # noqa: E731
    assert walk(model, context, model.init_state(context, None), chain, visit) == 1
    assert most == 2  # what goes in and what comes out
    assert seen == [1]
    most = 0
    fan = trie({str(i): Plan.parse(f"[0.0 0.1 0.{i} 0.5]") for i in range(2, 8)})
    largest = walk(model, context, model.init_state(context, None), fan, lambda node, state: None)
    assert largest == 2
    assert most <= 3


def test_a_walk_refuses_an_index_that_the_model_lacks():
    model = Mixing(steps=4, blocks=1)
    context = model.encode(IDS)
    with pytest.raises(ValueError, match="embedding has 4 iterations; iteration 4 asked for"):
        walk(
            model, context, model.init_state(context, None), trie({"a": Plan.parse("[0.4]")}), lambda node, state: None
        )


def test_a_hook_before_every_application_changes_the_state_it_starts_from():
    model = Mixing(dtype=torch.float64)
    tokens = torch.tensor([[0, 1, 2, 3]])
    context = model.encode(tokens)
    start = model.init_state(context, None)
    plan = model.spec.plan(2)
    places = []

    def patch(state, done):
        places.append(done)
        return state + done

    patched = run_plan(model, plan, context, start, before=patch)
    state = start
    for done, (block, iteration) in enumerate(plan):
        state = model.step(state + done, context, block, torch.tensor([iteration]))
    assert places == list(range(len(plan)))
    assert torch.equal(patched, state)
