"""A run of seconds: a small looped model on a few hundred bytes of text."""

import dataclasses
import json

from looplab.data.packing import PackedText, Packing
from looplab.models.looped import Envelope, LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives import NextToken
from looplab.recurrence.depth import PrefixDepth, UniformDepth
from looplab.recurrence.injection import Add
from looplab.recurrence.plan import Blocks, ModelLoop
from looplab.recurrence.signal import StepEmbedding
from looplab.recurrence.state_init import Normal
from looplab.training.config import Evaluation, RunConfig
from looplab.training.folder import claimed, locked
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Cosine
from looplab.training.trainer import Trainer

ENTRIES = [f"Entry {i}: the {w} fox jumps over {i * i} lazy dogs." for i, w in enumerate("abcdefghij" * 4)]
TEXT = "\n\n".join(ENTRIES)


def shape():
    """What all tiny models share."""
    return {
        "dim": 16,
        "vocab": 259,
        "envelope": Envelope(prelude=1, coda=0),
        "attention": Attention(heads=2, kv_heads=2, head_dim=8, position=Rope(base=10000.0)),
        "ffn": SwiGLU(hidden=16),
    }


def core(**changes):
    """One core with a random start, U{1..4} iterations."""
    fields = {
        "order": ModelLoop(num_steps=3),
        "blocks": (1,),
        "injection": Add(),
        "state_init": Normal(std=0.5),
        "trained_depth": UniformDepth(low=1, high=4),
    }
    return LoopedConfig(**{**shape(), **fields, **changes})


def two_blocks(**changes):
    """Two blocks of 2 iterations, trained at every prefix."""
    fields = {
        "order": Blocks(num_steps=(2, 2)),
        "blocks": (1, 1),
        "signal": StepEmbedding(max=2),
        "trained_depth": PrefixDepth(law=UniformDepth(low=1, high=4)),
    }
    return LoopedConfig(**{**shape(), **fields, **changes})


def tiny_run(folder, **changes):
    """A RunConfig of 6 steps on a file of 40 short documents in `folder`."""
    text = folder / "text.jsonl"
    if not text.exists():
        text.write_text("".join(json.dumps({"text": entry}) + "\n" for entry in ENTRIES))
    fields = {
        "recipe": "tiny",
        "model": two_blocks(),
        "data": PackedText(sources=(str(text),), packing=Packing(seq_len=12, rows=4)),
        "objective": NextToken(),
        "optimizer": AdamW(lr=1e-2),
        "schedule": Cosine(warmup_steps=2),
        "steps": 6,
        "evaluation": Evaluation(sources=(str(text),), every=3, batches=1),
        "log_every": 2,
        "save_every": 2,
    }
    return RunConfig(**{**fields, **changes})


def with_data(config, **changes):
    """The same run on another shape of batch."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


def broken_off(config, folder, *, steps):
    """The trainer of a run that was killed just after a checkpoint."""
    with locked(folder), claimed(folder, config):
        trainer = Trainer(config, folder)
        for _ in range(steps):
            trainer._train_step()
        trainer._save()
        trainer.metrics.close()
    return trainer


def metrics(folder, kind=None):
    """Lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in x.items() if k not in ("seconds", "peak_bytes")} for x in lines if kind in (None, x["kind"])
    ]
