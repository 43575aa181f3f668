"""No Python work per token or row: the number of dispatched operators depends on neither."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contract.zoo import NAMES, encode, noise, tiny
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.plan import Sequential


class Operators(TorchDispatchMode):
    """Counts what is dispatched inside it, by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(model, rows, seq):
    """Part of the contract -> operators of one call."""
    ids = torch.ones(rows, model.spec.fixed_length or seq, dtype=torch.long)
    parts = {}
    with torch.no_grad():
        with Operators() as parts["encode"]:
            context = encode(model, ids)
        state = model.init_state(context, noise(model, context.positions, dtype=torch.float32))
        for block in range(len(model.spec.blocks)):
            with Operators() as parts[f"step {block}"]:
                state = model.step(state, context, block, torch.zeros(rows, dtype=torch.long))
        with Operators() as parts["coda"]:
            hidden = model.coda(state, context)
        with Operators() as parts["head"]:
            model.head(hidden)
    return {name: part.count for name, part in parts.items()}


@pytest.mark.parametrize("name", NAMES)
def test_operators_depend_neither_on_tokens_nor_on_rows(name):
    model = tiny(name, dtype=torch.float32)
    few = operators(model, 2, 5)
    assert all(count.total() > 0 for part, count in few.items() if part.startswith("step"))
    assert operators(model, 6, 5) == few
    assert operators(model, 2, 30) == few


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-core", "tiny-ouro"])
def test_a_decoded_token_takes_as_many_operators_after_many_tokens_as_after_few(name):
    model = tiny(name, dtype=torch.float32)
    counts = []
    for past, rows in ((3, 1), (40, 1), (3, 4)):
        cache = new_cache(model.spec, rows=rows, capacity=64)
        for length in (past, 1):
            ids = torch.ones(rows, length, dtype=torch.long)
            places = cache.length + torch.arange(length).expand(rows, length)
            with torch.no_grad(), Operators() as seen:
                forward(model, ids, cache=cache, noise=noise(model, places, dtype=torch.float32))
        counts.append(seen.count)
    assert counts[0] == counts[1] == counts[2]
    assert (
        "aten.cat.default" not in counts[0]
        or not isinstance(model.spec.order, Sequential)
        or (counts[0]["aten.index_put_.default"] == 0)
    )
