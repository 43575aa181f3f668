import re

import pytest
import torch

from contract.zoo import NAMES, noise, positions_of, tiny, tokens
from looplab.recurrence import state as states
from looplab.recurrence.exit import (
    ArgmaxExit,
    FixedExit,
    FullExit,
    HazardExit,
    KLExit,
    LatentExit,
    ReplayExit,
    exit_points,
    forward_until,
)
from looplab.recurrence.kv import CopyLast, DepthIndexed, First, Single, Skip
from looplab.recurrence.kv.base import Cache, KVView
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.plan import PRELUDE
from reference import exits
from reference.kv import Row
from tiny import Mixing
from tolerances import CACHED, EXACT, ROWS

pytestmark = pytest.mark.filterwarnings("ignore:kv_rule=:UserWarning", "ignore:num_steps=:UserWarning")

STEPS = {"tiny-ouro": 4, "tiny-huginn": 6}
KV = {"copy": DepthIndexed(missing=CopyLast()), "single": Single(), "first": First()}
CASES = [
    *[("tiny-ouro", HazardExit(threshold=0.5), kind) for kind in KV],
    ("tiny-ouro", KLExit(threshold=0.15), "copy"),
    ("tiny-ouro", LatentExit(threshold=0.5, min_steps=2), "first"),
    ("tiny-huginn", LatentExit(threshold=0.3), "copy"),
    ("tiny-huginn", ArgmaxExit(times=3), "first"),
]


def cache_of(model, rule, *, rows=1, capacity=5, **options):
    return new_cache(model.spec, rows=rows, capacity=capacity, rule=rule, dtype=torch.float64, **options)


def early(name):
    """Whether tokens of a tiny model can stop before the end."""
    return len(exit_points(tiny(name).spec)) > 1


def extras_of(model, rows):
    return {"puzzle_ids": torch.arange(rows) % 2} if model.spec.extras.get("puzzle_ids") else None


@pytest.mark.parametrize("name", [name for name in NAMES if early(name)])
def test_without_a_cache_a_token_is_read_as_in_a_run_of_its_own_number_of_steps(name):
    model = tiny(name)
    ids = tokens(model, 3, 6)
    shape, last = tuple(ids.shape), max(exit_points(model.spec))
    depths = torch.randint(1, last + 1, shape, generator=torch.Generator().manual_seed(1))
    options = {"noise": noise(model, positions_of(torch.ones_like(ids))), "extras": extras_of(model, 3)}
    with torch.no_grad():
        found = forward_until(model, ids, ReplayExit(depths=depths), **options)
        assert torch.equal(found.steps, depths)
        for t in range(1, last + 1):
            steps = model.spec.default_steps
            steps = (t, *steps[1:]) if isinstance(steps, tuple) else t
            own, alone = depths == t, forward(model, ids, num_steps=steps, **options)
            torch.testing.assert_close(found.logits[own], alone.logits[own], **EXACT)
            torch.testing.assert_close(found.hidden[own], alone.hidden[own], **EXACT)
            for leaf, expected in zip(states.leaves(found.state), states.leaves(alone.state), strict=True):
                before = leaf.shape[1] - shape[1]
                torch.testing.assert_close(leaf[:, before:][own], expected[:, before:][own], **EXACT)
                deepest = depths.amax(dim=1) == t
                torch.testing.assert_close(leaf[deepest, :before], expected[deepest, :before], **EXACT)


@pytest.mark.parametrize("name", [name for name in NAMES if not early(name)])
def test_a_model_without_early_exit_points_runs_in_full_or_says_why_not(name):
    model = tiny(name)
    ids = tokens(model, 2, 5)
    options = {"noise": noise(model, positions_of(torch.ones_like(ids))), "extras": extras_of(model, 2)}
    found = forward_until(model, ids, FullExit(), **options)
    torch.testing.assert_close(found.logits, forward(model, ids, **options).logits, **EXACT)
    assert found.steps.unique().tolist() == list(exit_points(model.spec))
    if exit_points(model.spec) != {1: len(model.spec.plan())}:
        with pytest.raises(ValueError, match=re.escape("exit: latent(0.1) may stop early, but no shorter run of")):
            forward_until(model, ids, LatentExit(threshold=0.1), **options)


def test_the_loop_ends_with_the_last_token():
    model, ledger = tiny("tiny-ouro"), Ledger()
    depths = torch.tensor([[1, 2, 1], [3, 1, 2]])
    found = forward_until(model, tokens(model, 2, 3), ReplayExit(depths=depths), ledger=ledger)
    assert found.plan == model.spec.plan(3)
    assert ledger.applications == {0: 2 * 3} and ledger.launches == 3


@pytest.mark.parametrize(("keep", "kept"), [(None, 4), (0, 0), (1, 1), (9, 4)])
def test_logits_are_made_for_the_tokens_asked_for(keep, kept):
    model, ledger = tiny("tiny-ouro"), Ledger()
    ids, rule = tokens(model, 2, 4), HazardExit(threshold=0.5)
    whole = forward_until(model, ids, rule)
    found = forward_until(model, ids, rule, logits_to_keep=keep, ledger=ledger)
    assert ledger.head_tokens == 2 * kept and found.hidden.shape == whole.hidden.shape
    if kept:
        torch.testing.assert_close(found.logits, whole.logits[:, 4 - kept :], **ROWS)
    else:
        assert found.logits is None


def test_gradients_reach_every_step_that_is_read():
    model = Mixing(blocks=1, dtype=torch.float64)
    ids, depths = torch.tensor([[0, 1, 2]]), torch.tensor([[1, 3, 2]])
    loss = forward_until(model, ids, ReplayExit(depths=depths)).logits.logsumexp(-1).sum()
    found = torch.autograd.grad(loss, model.inner)[0]
    parts = [forward(model, ids, num_steps=int(t)).logits[0, i].logsumexp(-1) for i, t in enumerate(depths[0])]
    torch.testing.assert_close(found, torch.autograd.grad(sum(parts), model.inner)[0], **CACHED)


@pytest.mark.parametrize(
    ("name", "rule"), [("tiny-ouro", HazardExit(threshold=0.5)), ("tiny-huginn", LatentExit(threshold=0.3))], ids=str
)
def test_left_padding_changes_neither_steps_nor_logits(name, rule):
    model = tiny(name)
    ids = tokens(model, 3, 7)
    valid = torch.arange(7) >= torch.tensor([[0], [2], [5]])
    with torch.no_grad():
        together = forward_until(
            model, ids, rule, noise=noise(model, positions_of(valid)), valid=valid, num_steps=STEPS[name]
        )
        for row in range(3):
            own = ids[row : row + 1, valid[row]]
            draw = noise(model, positions_of(torch.ones_like(own)), [row])
            alone = forward_until(model, own, rule, noise=draw, num_steps=STEPS[name])
            assert torch.equal(together.steps[row, valid[row]], alone.steps[0])
            torch.testing.assert_close(together.logits[row, valid[row]], alone.logits[0], **CACHED)


@torch.no_grad()
def test_nothing_waits_for_padding():
    model, ledger = tiny("tiny-ouro"), Ledger()
    ids, valid = tokens(model, 2, 4), torch.tensor([[False, False, True, True], [True, True, True, True]])
    depths = torch.tensor([[4, 4, 2, 1], [1, 2, 1, 1]])
    found = forward_until(model, ids, ReplayExit(depths=depths), valid=valid, ledger=ledger)
    assert torch.equal(found.steps[valid], depths[valid]) and ledger.launches == 2
    cache = cache_of(model, KV["copy"], rows=2)
    for valid, depths in [([[True], [True]], [[2], [1]]), ([[True], [False]], [[1], [4]])]:
        ledger, rule = Ledger(), ReplayExit(depths=torch.tensor(depths))
        forward_until(model, ids[:, :1], rule, valid=torch.tensor(valid), cache=cache, ledger=ledger)
    assert ledger.launches == 1, "a row that is past its end does not hold the others"


class ByDefinition(Cache):
    """A cache of one row that keeps every entry and reads each by its definition (tests/reference/kv.py)."""

    def __init__(self, kind, **options):
        super().__init__(Single(), rows=1, dtype=torch.float64, device="cpu", **options)
        self.kind, self.layers, self.ran = kind, {}, []

    def slot(self, iteration):
        raise AssertionError

    past = slot

    def view(self, block, layer, iteration):
        row = self.layers.setdefault((block, layer), Row(self.kind if block > PRELUDE else "first"))
        return DefinedView(self, block, layer, iteration, None, row)

    def close(self, tokens, ran):
        """The call's tokens become past tokens, each of which ran `ran` iterations."""
        for (block, _), row in self.layers.items():
            row.executed += [ran if block > PRELUDE else 1] * tokens
        self.length += tokens


class DefinedView(KVView):
    def __init__(self, cache, block, layer, iteration, active, row):
        super().__init__(cache, block, layer, iteration, active)
        self.row = row

    def append(self, keys, values):
        t = 0 if self.iteration is None else int(self.iteration)
        start, count = self.cache.length, keys.shape[2]
        for offset in range(count):
            self.row.write(start + offset, t, (keys[0, :, offset], values[0, :, offset]))
        seen = [self.row.read(p, t) for p in range(start + count)]
        self._end = start + count
        both = [torch.stack([entry[part] for entry in seen], dim=1)[None] for part in (0, 1)]
        index = torch.arange(start + count)
        allowed = (index <= torch.arange(start, start + count)[:, None])[None, None]
        return both[0], both[1], allowed


def token_by_token(model, ids, prompt, kind, rule, max_steps, item):
    """One row: the prompt in full, then one token after another, each until the twin of its rule says stop."""
    cache = ByDefinition(kind, capacity=len(ids), iterations={0: max_steps})
    stop, number, steps, read = exits.RULES[rule.name], getattr(rule, rule.number), [], []
    for call in [ids[:prompt], *(ids[at : at + 1] for at in range(prompt, len(ids)))]:
        context = model.encode(call[None], cache)
        state = model.init_state(context, noise(model, context.positions, [item]))
        states, logits, scores, t = [state[0, 0].tolist()], [], [], 0
        while t < max_steps:
            state, t = model.step(state, context, 0, torch.tensor([t]), cache), t + 1
            states.append(state[0, 0].tolist())
            if rule.reads_score:
                scores.append(float(model.halt(state)[0, 0]))
            if rule.reads_logits:
                logits.append([model.head(model.coda(state, context, cache))[0, 0].tolist()])
            if len(call) == 1 and t >= rule.min_steps and stop(t, number, states, logits, scores):
                break
        read.append(model.head(model.coda(state, context, cache))[0])
        steps += [t] * len(call)
        cache.close(len(call), t)
    return steps, torch.cat(read)


def decoded(model, ids, valid, prompt, kv, rule, max_steps, *, ledger=None):
    """All rows together, left-padded: (steps, logits) of every token, and the cache."""
    rows, length = ids.shape
    cache = cache_of(model, kv, rows=rows, capacity=length, num_steps=max_steps)
    places, steps, logits = positions_of(valid), [], []
    for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, length))]:
        span = slice(start, stop)
        out = forward_until(
            model,
            ids[:, span],
            rule,
            num_steps=max_steps,
            noise=noise(model, places[:, span]),
            valid=valid[:, span] if start == 0 else None,
            cache=cache,
            ledger=ledger if start else None,
        )
        steps.append(out.steps)
        logits.append(out.logits)
    return torch.cat(steps, dim=1), torch.cat(logits, dim=1), cache


@pytest.mark.parametrize(("name", "rule", "kind"), CASES, ids=str)
@torch.no_grad()
def test_cached_decoding_equals_the_twin_that_decodes_single_rows_token_by_token(name, rule, kind):
    model, prompt = tiny(name), 4
    ids = tokens(model, 3, 8)
    valid = torch.arange(8) >= torch.tensor([[0], [1], [2]])
    steps, logits, _ = decoded(model, ids, valid, prompt, KV[kind], rule, STEPS[name])
    for row in range(3):
        first = 8 - int(valid[row].sum())
        own = token_by_token(model, ids[row, first:], prompt - first, kind, rule, STEPS[name], row)
        assert steps[row, first:].tolist() == own[0]
        torch.testing.assert_close(logits[row, first:], own[1], **CACHED)
    assert len(steps[:, prompt:].unique()) > 1, "a case in which all tokens stop together shows little"


@torch.no_grad()
def test_the_ledger_counts_the_applications_that_ran():
    model, rule, ledger = tiny("tiny-huginn"), LatentExit(threshold=0.3), Ledger()
    ids = tokens(model, 3, 9)
    valid = torch.ones_like(ids, dtype=torch.bool)
    steps, _, cache = decoded(model, ids, valid, 5, KV["copy"], rule, 6, ledger=ledger)
    ran = steps[:, 5:]
    assert ledger.row_applications == int(ran.sum()) < 3 * 4 * 6
    assert ledger.launches == int(ran.amax(dim=0).sum())
    assert ledger.readouts == ledger.head_tokens == ledger.encoded_tokens == 3 * 4
    assert torch.equal(cache.executed[0], steps)
    cost, flops = model.spec.cost, 0
    for at in range(4):
        for row in range(3):
            flops += cost.forward({0: int(ran[row, at])}, tokens=1, past=5 + at)
    assert ledger.flops_forward == flops


@torch.no_grad()
def test_the_readouts_of_decisions_are_counted():
    model, rule, ledger = tiny("tiny-ouro"), KLExit(threshold=0.15), Ledger()
    ids = tokens(model, 3, 9)
    steps, _, _ = decoded(model, ids, torch.ones_like(ids, dtype=torch.bool), 5, KV["copy"], rule, 4, ledger=ledger)
    ran = steps[:, 5:]
    # One after every step of a running row but the forced last, and the one that the token is read from.
    decisions = int(ran.clamp(max=3).sum())
    assert ledger.readouts == ledger.head_tokens == decisions + 3 * 4
    uncached = Ledger()
    out = forward_until(model, ids, rule, ledger=uncached)
    assert uncached.readouts == 3 * len(out.plan) and uncached.head_tokens == 3 * 9 * (min(3, len(out.plan)) + 1)


@pytest.mark.parametrize("kind", ["copy", "first"])
@torch.no_grad()
def test_readouts_for_decisions_leave_nothing_in_the_cache(kind):
    """A replay of the same steps reads no logits, and ends with the same bits in the cache."""
    model, rule = tiny("tiny-huginn"), KLExit(threshold=0.02)
    ids = tokens(model, 3, 7)
    caches = [cache_of(model, KV[kind], rows=3, capacity=7, num_steps=6) for _ in range(2)]
    for start, stop in [(0, 5), *((at, at + 1) for at in range(5, 7))]:
        draw = noise(model, torch.arange(start, stop).expand(3, -1))
        given = {"num_steps": 6, "noise": draw}
        out = forward_until(model, ids[:, start:stop], rule, cache=caches[0], **given)
        again = forward_until(model, ids[:, start:stop], ReplayExit(depths=out.steps), cache=caches[1], **given)
        torch.testing.assert_close(again.logits, out.logits, **EXACT)
    first, second = caches
    assert (first.length, first.padded, first.nbytes) == (second.length, second.padded, second.nbytes)
    assert torch.equal(first.executed[0], second.executed[0]) and len(first.executed[0].unique()) > 1
    assert first._slots.keys() == second._slots.keys()
    for name, pair in first._slots.items():
        for one, other in zip(pair, second._slots[name], strict=True):
            torch.testing.assert_close(one, other, **EXACT)


@torch.no_grad()
def test_two_levels_decode_with_exits_after_high_cycles():
    model = tiny("tiny-two-level")
    ids = tokens(model, 2, 5)
    draw = noise(model, positions_of(torch.ones_like(ids)))
    depths = torch.tensor([[2, 2, 2, 1, 2], [2, 2, 2, 2, 1]])

    def decode(rows):
        cache = cache_of(model, KV["copy"], rows=len(rows), capacity=5)
        found, ledger = [], Ledger()
        for start, stop in [(0, 3), (3, 4), (4, 5)]:
            span = slice(start, stop)
            given = None if draw is None else draw[rows, span]
            rule = ReplayExit(depths=depths[rows, span])
            out = forward_until(
                model, ids[rows, span], rule, noise=given, cache=cache, ledger=ledger if start else None
            )
            found.append(out.logits)
        return torch.cat(found, dim=1), ledger, cache

    together, ledger, cache = decode([0, 1])
    high, low = model.spec.order.default_steps
    assert ledger.applications == {0: low * int(depths[:, 3:].sum()), 1: int(depths[:, 3:].sum())}
    assert torch.equal(cache.executed[1], depths) and torch.equal(cache.executed[0], low * depths)
    for row in (0, 1):
        torch.testing.assert_close(together[row], decode([row])[0][0], **CACHED)
    assert high == 2


@torch.no_grad()
def test_a_prompt_runs_in_full_whatever_the_rule():
    model, ids = tiny("tiny-ouro"), torch.tensor([[1, 2, 3]])
    cache = cache_of(model, KV["copy"])
    found = forward_until(model, ids, FixedExit(num_steps=1), cache=cache, logits_to_keep=1)
    assert found.steps.tolist() == [[4, 4, 4]] and found.logits.shape[1] == 1 and cache.length == 3
    torch.testing.assert_close(found.logits[:, 0], forward(model, ids).logits[:, -1], **CACHED)


@torch.no_grad()
def test_a_cache_that_wants_every_entry_refuses_early_stops():
    model, ids = tiny("tiny-ouro"), torch.tensor([[1]])
    cache = cache_of(model, DepthIndexed())
    with pytest.raises(ValueError, match=re.escape("exit: latent(0.5) may stop early, but the cache is DepthIndexed")):
        forward_until(model, ids, LatentExit(threshold=0.5), cache=cache)
    assert cache.length == 0
    for rule in (FullExit(), HazardExit(threshold=1.0), FixedExit(num_steps=2)):
        forward_until(model, ids, rule, cache=cache)
    skipping = cache_of(model, DepthIndexed(missing=Skip()))
    forward_until(model, ids, LatentExit(threshold=0.5), cache=skipping)


@torch.no_grad()
def test_a_cache_of_fewer_iterations_refuses_a_deeper_run():
    model, ids = tiny("tiny-ouro"), torch.tensor([[1]])
    cache = cache_of(model, Single(), num_steps=2)
    with pytest.raises(ValueError, match="cache holds 2 iterations of block 0, the plan runs 4"):
        forward_until(model, ids, LatentExit(threshold=0.5), cache=cache)


def test_a_rule_that_the_model_cannot_answer_is_refused_before_anything_runs():
    model, ledger = tiny("tiny-huginn"), Ledger()
    ids = torch.tensor([[1, 2]])
    with pytest.raises(
        ValueError, match=f"^{model.spec.name} has no trained gate; exit rules available: acceleration,"
    ):
        forward_until(model, ids, HazardExit(threshold=0.5), ledger=ledger)
    with pytest.raises(ValueError, match="must be at most num_steps, 2. Got 3"):
        forward_until(model, ids, LatentExit(threshold=0.5, min_steps=3), num_steps=2, ledger=ledger)
    assert ledger == Ledger()


def test_a_depth_beyond_the_trained_one_is_said():
    model = tiny("tiny-ouro")
    with pytest.warns(UserWarning, match="num_steps=6 is beyond the trained depth FixedDepth"):
        forward_until(model, torch.tensor([[1, 2]]), LatentExit(threshold=0.1), num_steps=6)
