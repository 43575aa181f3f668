"""Point 14 of the contract: parts compile without a graph break, and one graph serves all iterations and depths.

It runs in a process of its own, because run-time checks of annotations cannot be traced.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch
sys.path.insert(0, sys.argv[1])
from contract.zoo import NAMES, encode as encoded, noise, tiny, tokens
from looplab.recurrence import state as states

found = {}
for name in NAMES:
    torch._dynamo.reset()
    model = tiny(name, dtype=torch.float32)
    ids = tokens(model, 2, 8)
    graphs = {}

    def counted(part):
        def backend(graph, inputs):
            graphs[part] = graphs.get(part, 0) + 1
            return graph.forward
        return backend

    with torch.no_grad():
        context = encoded(model, ids)
        state = model.init_state(context, noise(model, context.positions, dtype=torch.float32))
        encode = torch.compile(model.encode, fullgraph=True, backend=counted("encode"))
        step = torch.compile(model.step, fullgraph=True, backend=counted("step"))
        coda = torch.compile(model.coda, fullgraph=True, backend=counted("coda"))
        head = torch.compile(model.head, fullgraph=True, backend=counted("head"))
        highest = (model.spec.max_iteration or 8) - 1
        extras = {"puzzle_ids": ids.sum(dim=1) % 2} if model.spec.extras.get("puzzle_ids") else None
        error = float((encode(ids, extras=extras).embeds - context.embeds).abs().max())
        for iteration in ([0, 0], [1, 1], [2, 2], [3, 3], [0, 2]):
            index = torch.tensor(iteration).clamp(max=highest)
            for one, other in zip(states.leaves(step(state, context, 0, index)),
                                  states.leaves(model.step(state, context, 0, index))):
                error = max(error, float((one - other).abs().max()))
        hidden = coda(state, context)
        error = max(error, float((head(hidden) - model.head(model.coda(state, context))).abs().max()))
    found[name] = {**graphs, "error": error}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_14_every_part_compiles_to_one_graph_for_all_iterations_and_mixed_rows():
    tests = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tests)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found
    for name, result in found.items():
        error = result.pop("error")
        assert result == {"encode": 1, "step": 1, "coda": 1, "head": 1}, f"{name}: {result}"
        assert error <= 1e-5, f"{name}: {error}"
