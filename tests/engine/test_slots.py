import json
import random
from pathlib import Path

import pytest
import torch

from contract.zoo import tiny
from looplab.engine.slots import PagedCache, bytes_per_token, depth_causal, layout, name_of, rule_of, shapes_of
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence.kv import Average, Modulo, Skip
from looplab.recurrence.kv.depth_indexed import DepthIndexed
from looplab.recurrence.plan import CODA, PRELUDE
from reference.kv import Row

GOLDEN = Path(__file__).parents[1] / "golden" / "cdb" / "kv_layouts.json"
TWINS = {
    "depth_indexed": ("refuse", 0),
    "last_exited": ("copy", 0),
    "single": ("single", 0),
    "first": ("first", 0),
    "first_then_shared(2)": ("anchor", 1),
    "first_then_shared(3)": ("anchor", 2),
}
HEADS, WIDTH, PAGE, DEEPEST, ROWS, LENGTH = 2, 3, 4, 4, 4, 9
LAYERS = {(PRELUDE, 0): (HEADS, WIDTH), (0, 0): (HEADS, WIDTH), (0, 1): (1, WIDTH), (CODA, 0): (HEADS, WIDTH)}


class World:
    """Rows of random depths, in a paged cache and in slow twins side by side."""

    def __init__(self, name, seed):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = PagedCache(
            LAYERS, rule_of(name), iterations={0: DEEPEST}, pages=30, page_tokens=PAGE, dtype=torch.float64
        )
        free = list(range(1, 30))
        self.random.shuffle(free)
        self.tables = torch.tensor([[free.pop() for _ in range(3)] for _ in range(ROWS)])
        self.cache.fresh(self.tables.flatten().tolist())
        self.twins = {layer: [Row(*TWINS[name]) for _ in range(ROWS)] for layer in LAYERS}

    def launch(self, rows, starts, tokens, block, iterations):
        """One application of some rows; every answer is compared with what the twins read."""
        positions = torch.tensor(starts)[:, None] + torch.arange(tokens)
        longest = max(starts) + tokens
        narrow = sum(starts) % 2 == 0  # otherwise whole pages, as exact numerics read them
        equal = narrow and tokens == 1 and min(starts) == max(starts)
        self.cache.begin(self.tables[rows], positions, visible=longest if narrow else None, equal=equal)
        if block >= 0:
            self.cache.launch(block, torch.tensor(iterations))
        for owner, layer in LAYERS:
            if owner == block:
                self.append(rows, starts, tokens, block, layer, iterations)

    def append(self, rows, starts, tokens, block, layer, iterations):
        heads = LAYERS[block, layer][0]
        keys, values = torch.randn(2, len(rows), heads, tokens, WIDTH, generator=self.generator, dtype=torch.float64)
        view = self.cache.view(block, layer, torch.tensor(iterations))
        seen_keys, seen_values, allowed = view.append(keys, values)
        for place, (row, start, iteration) in enumerate(zip(rows, starts, iterations, strict=True)):
            twin = self.twins[block, layer][row]
            for t in range(tokens):
                twin.write(start + t, iteration, (keys[place, :, t], values[place, :, t]))
            for t in range(tokens):
                sees = torch.ones(seen_keys.shape[2]) if allowed is None else allowed[place, 0, t]
                assert sees.nonzero().flatten().tolist() == list(range(start + t + 1))
                expected = [twin.read(p, iteration) for p in range(start + t + 1)]
                for seen, part in zip((seen_keys, seen_values), zip(*expected, strict=True), strict=True):
                    assert torch.equal(seen[place, :, : start + t + 1], torch.stack(part, dim=1))
        assert view.positions.tolist() == [list(range(seen_keys.shape[2]))] * len(rows)

    def done(self, row, tokens, depth):
        """Tokens of a row have become past ones."""
        for (block, _), twins in self.twins.items():
            twins[row].executed += [depth if block >= 0 else 1] * tokens


@pytest.mark.parametrize("name", TWINS)
def test_rows_at_any_mixture_of_iterations_read_what_their_slow_twins_read(name):
    world = World(name, 1)
    for row in range(ROWS):  # prompts of several tokens, all iterations
        tokens = world.random.randint(1, 5)
        world.launch([row], [0], tokens, PRELUDE, [0])
        for iteration in range(DEEPEST):
            world.launch([row], [0], tokens, 0, [iteration])
        world.launch([row], [0], tokens, CODA, [0])
        world.done(row, tokens, DEEPEST)
    lengths = [len(world.twins[0, 0][row].executed) for row in range(ROWS)]
    at = [(length, 0) for length in lengths]
    depths = [0] * ROWS
    mixed = 0
    while any(length < LENGTH for length, _ in at):
        rows = [row for row in range(ROWS) if at[row][0] < LENGTH and world.random.random() < 0.7]
        for row in rows:
            if at[row][1] == 0:
                depths[row] = DEEPEST if name == "depth_indexed" else world.random.randint(1, DEEPEST)
                world.launch([row], [at[row][0]], 1, PRELUDE, [0])
        if rows:
            world.launch(rows, [at[row][0] for row in rows], 1, 0, [at[row][1] for row in rows])
            mixed += len({at[row][1] for row in rows}) > 1
        for row in rows:
            length, steps = at[row]
            if steps + 1 < depths[row]:
                at[row] = (length, steps + 1)
                continue
            world.launch([row], [length], 1, CODA, [0])
            world.done(row, 1, depths[row])
            at[row] = (length + 1, 0)
    assert mixed


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text())["kv_layouts"], ids=str)
def test_cache_layers_are_numbered_as_recorded(case):
    cost = CostSpec(
        prelude=Group(layers=case["prelude"]),
        blocks=(Group(layers=case["core"]),),
        coda=Group(layers=case["coda"]),
        head=Group(),
    )
    slots = case["slots_per_layer"]
    name = f"first_then_shared({slots})" if case["policy"] == "first_then_shared" else case["policy"]
    found = layout(cost, rule_of(name), case["recurrent_steps"])
    assert list(found.prelude) == case["prelude_index"]
    assert [list(layers) for layers in found.core] == case["core_index"]
    assert list(found.coda) == case["coda_index"]
    assert found.layers == case["num_cache_layers"]


def test_padding_writes_to_page_zero_only():
    cache = PagedCache({(0, 0): (1, 2)}, rule_of("single"), iterations={0: 1}, pages=4, page_tokens=2)
    cache.fresh([1, 2, 3])
    own = torch.tensor([[True, True, True], [True, False, False]])
    cache.begin(torch.tensor([[1, 2], [3, 3]]), torch.tensor([[0, 1, 2], [0, 0, 0]]), own)
    cache.launch(0, torch.zeros(2, dtype=torch.long))
    ones = torch.ones(2, 1, 3, 2)
    _, values, allowed = cache.view(0, 0, torch.zeros(2, dtype=torch.long)).append(ones, ones)
    pool = cache.pools[0, 0][0].view(4, 2, 2)
    assert pool[1:].sum(dim=(1, 2)).tolist() == [4.0, 2.0, 2.0]
    assert allowed[1, 0].sum(-1).tolist() == [1, 1, 1]
    assert values[1, 0, 1].tolist() == [0.0, 0.0]


def test_a_copied_page_holds_all_slots_and_what_its_tokens_ran():
    cache = PagedCache(
        {(0, 0): (1, 2), (CODA, 0): (1, 2)}, rule_of("last_exited"), iterations={0: 3}, pages=4, page_tokens=2
    )
    for pool in cache.pools.values():
        pool.copy_(torch.arange(pool.numel()).view(pool.shape))
    cache.ran[0].copy_(torch.arange(8))
    cache.copy_page(1, 3)
    for pool, slots in ((cache.pools[0, 0], 3), (cache.pools[CODA, 0], 1)):
        every = pool.view(2, slots, 4, 4)
        assert torch.equal(every[:, :, 1], every[:, :, 3])
        assert not torch.equal(every[:, :, 1], every[:, :, 2])
    assert cache.ran[0].tolist() == [0, 1, 2, 3, 4, 5, 2, 3]


@pytest.mark.parametrize("name", TWINS)
def test_rules_keep_their_names(name):
    assert name_of(rule_of(name)) == name


def test_a_rule_that_is_not_served_is_refused_by_name():
    for rule in (Average(), Modulo(m=2), DepthIndexed(missing=Skip())):
        with pytest.raises(ValueError, match="must keep keys and values by one of"):
            name_of(rule)
    with pytest.raises(ValueError, match=r"kv_rule must be one of .* Got 'mod_m\(2\)'"):
        rule_of("mod_m(2)")


def test_depth_causal_rules_are_those_that_read_the_same_however_a_prompt_is_cut():
    assert [name for name in TWINS if depth_causal(rule_of(name))] == ["depth_indexed", "last_exited"]


def test_bytes_per_token_are_those_of_the_cost_model():
    model = tiny("tiny-huginn", dtype=torch.float32)
    for name, slots in (("depth_indexed", 4), ("single", 1), ("first_then_shared(2)", 2)):
        expected = 4 * (
            model.spec.cost.prelude.kv_width
            + slots * model.spec.cost.blocks[0].kv_width
            + model.spec.cost.coda.kv_width
        )
        assert bytes_per_token(shapes_of(model), rule_of(name), {0: 4}, torch.float32) == expected
