"""Memory of models: recomputation, rollouts, loading. Counts are bytes; nothing is timed.

Each case returns rows (what, measured, expected or rival) and fails where a count is not what it must be.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from looplab.models.base import build
from looplab.models.looped import LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.recurrence import state as states
from looplab.recurrence.depth import Unknown
from looplab.recurrence.gradient import CheckpointApplication, CheckpointUnit, GradientStrategy, TruncatedBPTT
from looplab.recurrence.injection import Add
from looplab.recurrence.loop import run_plan
from looplab.recurrence.plan import LayerLoop, ModelLoop, PlanNode, PlanOrder

ROWS, TOKENS, DIM = 4, 256, 128


def shape(order: PlanOrder, layers: int, **changes: Any) -> LoopedConfig:
    """A looped model of width 128."""
    fields: dict[str, Any] = {
        "dim": DIM,
        "vocab": 512,
        "attention": Attention(heads=4, kv_heads=4, head_dim=32, position=Rope(base=10000.0)),
        "ffn": SwiGLU(hidden=344),
        "order": order,
        "blocks": (layers,),
        "trained_depth": Unknown(),
    }
    return LoopedConfig(**{**fields, **changes})


def held(model: Any, num_steps: int, gradient: GradientStrategy) -> int:
    """Bytes that autograd keeps of the loop: unique storages without parameters and context."""
    context = model.encode(torch.zeros(ROWS, TOKENS, dtype=torch.long))
    state = model.init_state(context, None).detach().clone().requires_grad_()
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *states.leaves(context))}
    found: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        end = run_plan(model, model.spec.plan(num_steps), context, state, gradient=gradient)
    total = sum(storage.nbytes() for storage in found.values())
    del end
    return total


def checkpoint_application(options: Any) -> list[dict[str, Any]]:
    """Saved bytes of recomputation are applications in the window * B T D * itemsize, within 2 %."""
    model, state = build(shape(ModelLoop(num_steps=8), 2, injection=Add())), ROWS * TOKENS * DIM * 4
    rows = []
    for window in (1, 2, 4, 8):
        bytes_ = held(model, 8, CheckpointApplication(inner=TruncatedBPTT(window=window)))
        assert abs(bytes_ / (window * state) - 1) <= 0.02, f"{bytes_} bytes for a window of {window}"
        without = held(model, 8, TruncatedBPTT(window=window))
        rows.append({"case": f"window {window}", "bytes": bytes_, "formula": window * state, "not recomputed": without})
    return rows


def checkpoint_layerloop(options: Any) -> list[dict[str, Any]]:
    """Boundaries of a layer loop are those of R = 1 with the same stored layers."""
    rows, once = [], 0
    for loops in (1, 2, 4):
        model = build(shape(LayerLoop(num_steps=loops), 4))
        found = held(model, loops, CheckpointUnit())
        once = once or found
        assert found == once, f"R = {loops} keeps {found} bytes, R = 1 {once}"
        single = held(model, loops, CheckpointApplication())
        rows.append({"case": f"R = {loops}", "bytes": found, "every application": single})
    return rows


def rollout_memory(options: Any) -> list[dict[str, Any]]:
    """Peak memory of a rollout that keeps readouts alone does not depend on num_steps."""
    from looplab.recurrence.loop import walk

    model, rows = build(shape(ModelLoop(num_steps=4), 2, injection=Add())), []
    for steps in (4, 32):
        root = node = PlanNode(None)
        for application in model.spec.plan(steps):
            child = PlanNode(application, wanted=["x"])
            node.children.append(child)
            node = child
        losses = []

        def roll(root: PlanNode = root, losses: list[float] = losses) -> None:
            with torch.no_grad():
                context = model.encode(torch.zeros(ROWS, TOKENS, dtype=torch.long))
                start = model.init_state(context, None)

            def visit(node: PlanNode, state: Any) -> None:
                losses.append(float(model.head(model.coda(state, context)).logsumexp(-1).mean()))

            walk(model, context, start, root, visit)

        rows.append({"case": f"num_steps {steps}", "peak bytes": _peak(roll), "readouts": len(losses)})
    first, last = (row["peak bytes"] for row in rows)
    assert last <= 1.01 * first, f"{first} bytes at 4 steps, {last} at 32"
    return rows


def load_memory(options: Any) -> list[dict[str, Any]]:
    """Peak host memory of the first load of a process is at most the weights and one shard.

    Counted from the state after `import looplab`: nothing was loaded or built before.
    """
    with tempfile.TemporaryDirectory(prefix="looplab-load-") as folder:
        weights, shard = _write_ouro(Path(folder), dim=1024, layers=options.layers)
        done = subprocess.run(
            [sys.executable, "-c", _LOADER, folder], capture_output=True, text=True, check=True, timeout=300
        )
    before, peak = map(int, done.stdout.split()[:2])
    rise = peak - before
    row = {"case": "ouro folder", "peak rise": rise, "weights": weights, "one shard": shard}
    row["of weights + shard"] = round(rise / (weights + shard), 3)
    assert rise <= weights + shard, f"loading took {rise} bytes for {weights} of weights and shards of {shard}"
    return [row]


# VmHWM begins anew in a new program; ru_maxrss would go on from that of its parent.
_LOADER = """
import sys
from pathlib import Path
import looplab, looplab.models.ouro, looplab.interop.checkpoint
import torch
def memory(what):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(what))
    return 1024 * int(line.split()[1])
before = memory("VmHWM")
loaded = looplab.load(sys.argv[1])
print(before, memory("VmHWM"))
"""


def _write_ouro(folder: Path, *, dim: int, layers: int) -> tuple[int, int]:
    """A folder as Ouro's, written one layer at a time; bytes of all weights and of the largest shard."""
    facts: dict[str, Any] = {
        "model_type": "ouro", "hidden_size": dim, "intermediate_size": 4 * dim, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8192, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "total_ut_steps": 4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
        "head_dim": dim // 16, "hidden_act": "silu", "early_exit_threshold": 1.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts))
    from looplab.models.published import PUBLISHED

    family = PUBLISHED["ouro"]
    config = family.config(facts, {})
    with torch.device("meta"):
        foreign = family.key_map(config).export(family.build(config).state_dict())
    by_file: dict[str, list[str]] = {}
    for name in foreign:
        layer = next((part for part in name.split(".") if part.isdigit()), "rest")
        by_file.setdefault(f"model-{layer}.safetensors", []).append(name)
    largest = total = 0
    for file, names in by_file.items():
        tensors = {name: torch.full(foreign[name].shape, 0.01) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        size = sum(t.nbytes for t in tensors.values())
        largest, total = max(largest, size), total + size
    index = {"metadata": {"total_size": total}, "weight_map": {n: f for f, names in by_file.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total, largest


def _peak(run: Any) -> int:
    """Largest number of bytes that a call held at once, as the allocator reports it."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


CASES = {
    "checkpoint_application": checkpoint_application,
    "checkpoint_layerloop": checkpoint_layerloop,
    "rollout_memory": rollout_memory,
    "load_memory": load_memory,
}
