"""Training on a device: float32, bf16 and compiled bf16, through the trainer itself.

    tokens_s   tokens of the second half of the run over its seconds, so compilation is not in it
    flops_s    FLOPs that the ledger counts, over the same seconds
    peak_mb    of the device's allocator (CUDA); of the run (CPU)

The loss must stay finite, and the float32 and bf16 losses must agree to 2 %, before a number is printed.
"""

import argparse
import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.models import table
from benchmarks.timing import report
from looplab.data.packing import PackedText, Packing
from looplab.models.looped import Envelope, LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives import NextToken
from looplab.recurrence.depth import UniformDepth
from looplab.recurrence.injection import Add
from looplab.recurrence.plan import ModelLoop
from looplab.training.config import RunConfig
from looplab.training.folder import METRICS
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Cosine
from looplab.training.trainer import train

ARMS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "fp32", "compile": False},
    "bf16": {"precision": "bf16", "compile": False},
    "bf16, compiled": {"precision": "bf16", "compile": True},
}


def config(dim: int, rows: int, seq: int, steps: int) -> RunConfig:
    """One prelude layer, a core of four that runs 1 to 8 times, one coda layer."""
    model = LoopedConfig(
        dim=dim,
        vocab=259,
        attention=Attention(heads=dim // 64, kv_heads=dim // 64, head_dim=64, position=Rope(base=10000.0)),
        ffn=SwiGLU(hidden=int(2.75 * dim)),
        blocks=(4,),
        envelope=Envelope(prelude=1, coda=1),
        injection=Add(),
        order=ModelLoop(num_steps=4),
        trained_depth=UniformDepth(low=1, high=8),
    )
    return RunConfig(
        recipe="device",
        model=model,
        data=PackedText(packing=Packing(rows=rows, seq_len=seq)),
        objective=NextToken(),
        optimizer=AdamW(lr=1e-3),
        schedule=Cosine(warmup_steps=max(1, steps // 10)),
        steps=steps,
        save_every=steps,
    )


def main() -> None:
    """Trains every arm and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--out")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    base = config(options.dim, options.rows, options.seq, options.steps)
    for name in options.arms:
        with tempfile.TemporaryDirectory() as folder:
            if options.device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
            train(dataclasses.replace(base, **ARMS[name]), folder, device=options.device)
            lines = [json.loads(line) for line in Path(folder, METRICS).read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "train"]
        late = steps[len(steps) // 2 :]
        seconds = math.fsum(line["seconds"] for line in late)
        flops = sum(
            sum(line["ledger"][f"flops_{part}"] for part in ("forward", "backward", "recompute")) for line in late
        )
        peak = torch.cuda.max_memory_allocated() if options.device.startswith("cuda") else late[-1]["peak_bytes"]
        rows.append(
            {
                "arm": name, "loss": math.fsum(line["loss"] for line in late) / len(late),
                "tokens_s": len(late) * options.rows * options.seq / seconds, "flops_s": flops / seconds,
                "peak_mb": peak / 2**20,
            }
        )  # fmt: skip
    losses = [row["loss"] for row in rows]
    if not all(math.isfinite(loss) for loss in losses) or max(losses) > 1.02 * min(losses):
        raise AssertionError(f"training_device: losses must be finite and agree to 2 %. Got {losses}.")
    print(table(rows))
    report("training_device", {"rows": rows, "load": os.getloadavg()[0]}, options.out)


if __name__ == "__main__":
    main()
