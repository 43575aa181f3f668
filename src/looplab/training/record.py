"""The RunRecord of a finished run: what scaling laws and studies read of it."""

import json
import platform
from typing import Any

import looplab
from looplab._config import config_hash, to_dict
from looplab.records import RunRecord
from looplab.recurrence.depth.fixed import FixedDepth
from looplab.recurrence.spec import LoopSpec
from looplab.training.checkpoint import Progress
from looplab.training.config import RunConfig


def run_record(
    config: RunConfig,
    spec: LoopSpec,
    progress: Progress,
    *,
    run_id: str,
    loss: float,
    data: Any,
    held_out: str,
    device: str,
    processes: str = "",
) -> RunRecord:
    """The record of a run that came to its end.

    `num_steps` and `window` are means over the draws, in the unit of the law: iterations, or applications under
    PrefixDepth. `loss` is that of the full plan, `data` the loader, `held_out` the hash of what was evaluated.
    """
    law, full = spec.trained_depth, spec.default_steps
    prefix = law.of_prefix  # type: ignore[attr-defined]
    steps = max(1, progress.step)
    core = {layer for block in spec.blocks for layer in block.layers}
    readable = next(part for part in spec.state.values() if part.read_by_coda)
    return RunRecord(
        run_id=run_id,
        config_hash=config_hash(config),
        version=looplab.__version__,
        status="finished",
        seed=config.seed,
        num_steps=progress.depth_sum / steps,
        window=progress.window_sum / steps,
        depth_law="fixed" if isinstance(law, FixedDepth) else json.dumps(to_dict(law), sort_keys=True),
        n_once=spec.cost.matmul_once,
        n_rec=spec.cost.matmul_rec,
        width=readable.width,
        layers_once=spec.cost.prelude.layers + spec.cost.coda.layers,
        layers_core=len(core),
        seq_len=config.data.seq_len,
        vocab_size=spec.vocab[0],
        tokens=progress.tokens,
        unique_tokens=min(progress.tokens, data.num_tokens),
        train_flops=progress.ledger.flops_forward + progress.ledger.flops_backward,
        flops_pairs="causal" if spec.causal else "square",
        loss=loss,
        loss_split=held_out,
        tokenizer=data.tokenizer_hash,
        eval_steps=float(len(spec.plan()) if prefix else full[0] if isinstance(full, tuple) else full),
        seconds=progress.seconds,
        hardware=f"{platform.machine()} {device}, {progress.threads or config.threads} threads"
        + (f", {processes}" if processes else ""),
    )
