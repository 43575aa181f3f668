"""What a looped model costs in training and in serving, as exact integers out of `looplab.nn.cost`.

    training, per token   sum_i (2 f_i + 4 b_i) (n_i + 2 a_i l_i T')     f forward, b backward executions of group i
                          T' = (T + 1) / 2 for "causal", T for "square"
    one core              6 n_once + (2 r_f + 4 r_b) n_rec + [12 l_once + (4 r_f + 8 r_b) l_core] a T' + 6 d V
    decode, per token     2 n_once + 2 r n_rec + 4 a t (l_once + r l_core) + 2 d V      at context length t

Norms, softmax, rotary and lookups count 0. Recomputation under checkpointing is work that is executed, not training
FLOPs. A forward-only application keeps nothing for the gradient; the core's weights are read at every application, so
at batch 1 a looped model saves parameters but no bandwidth unless the core stays in cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from looplab.nn.cost import KV_SLOTS, CostSpec, Pairs
from looplab.scaling.family import Shape


def row_flops(
    cost: CostSpec,
    num_steps: Mapping[int, int],
    window: Mapping[int, int],
    *,
    seq_len: int,
    pairs: Pairs = "causal",
    readouts: int = 1,
    reinjected: bool = True,
) -> int:
    """Training FLOPs of one row of `seq_len` tokens, forward and backward.

    Args:
        num_steps: Block -> forward applications.
        window: Block -> applications that carry gradient.
        readouts: Supervised loops: coda and head run forward and backward at each.
        reinjected: Whether the context enters every application. If not, a truncated gradient ends before the prelude.

    Raises:
        ValueError: A window outside 0..num_steps.
    """
    for block, kept in window.items():
        if not 0 <= kept <= num_steps[block]:
            raise ValueError(
                f"window must be 0 to num_steps ({num_steps[block]}). Got {kept} of block {block}. A window counts "
                "trailing applications that carry gradient."
            )
    whole = all(window[block] == steps for block, steps in num_steps.items())
    prelude = cost.prelude.forward(tokens=seq_len, pairs=pairs)
    loop = [cost.blocks[b].forward(tokens=seq_len, pairs=pairs) for b in num_steps]
    readout = cost.coda.forward(tokens=seq_len, pairs=pairs) + cost.head.forward(tokens=seq_len)
    forward = sum(f * n for f, n in zip(loop, num_steps.values(), strict=True))
    backward = sum(f * window[block] for f, block in zip(loop, num_steps, strict=True))
    return prelude * (3 if reinjected or whole else 1) + forward + 2 * backward + 3 * readouts * readout


def training_flops(
    shape: Shape, num_steps: int, window: int | None = None, *, seq_len: int, tokens: int, pairs: Pairs = "causal"
) -> int:
    """FLOPs of training on `tokens` tokens in rows of `seq_len`, loss at the last application; rounded down.

    Args:
        window: None: all applications carry gradient.
    """
    kept = num_steps if window is None else window
    return row_flops(shape.cost, {0: num_steps}, {0: kept}, seq_len=seq_len, pairs=pairs) * tokens // seq_len


def mean_flops(
    shape: Shape, num_steps: float | int, window: float | int, *, seq_len: int, tokens: int, pairs: Pairs = "causal"
) -> float:
    """`training_flops` at mean counts: FLOPs are linear in them, so means of a sampled depth give the exact mean."""
    at = {
        steps: row_flops(shape.cost, {0: steps[0]}, {0: steps[1]}, seq_len=seq_len, pairs=pairs)
        for steps in ((0, 0), (1, 0), (1, 1))
    }
    forward, backward = at[1, 0] - at[0, 0], at[1, 1] - at[1, 0]
    return (at[0, 0] + num_steps * forward + window * backward) * tokens / seq_len


@dataclass(frozen=True, kw_only=True)
class Device:
    """Hardware as its user states it; every time made from it is an estimate."""

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float = 0.0
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Device.{name} must be above 0. Got {getattr(self, name)}. State what it reaches.")


@dataclass(frozen=True, kw_only=True)
class ServingCost:
    """One generated token at a context length."""

    num_steps: int
    context: int
    batch: int
    decode_flops: int
    prefill_flops: int
    """Of a prompt that fills the context, head once."""
    kv_bytes_per_token: int
    bytes_read: float
    """Per token: all weights over the batch, and the keys and values that the applications read."""
    seconds: float | None = None
    """Estimate, per token."""
    price_per_million: float | None = None
    """Estimate, per million generated tokens."""


def serving_cost(
    shape: Shape,
    num_steps: int,
    *,
    context: int,
    batch: int = 1,
    kv_rule: str = "DepthIndexed",
    kv_size: int = 0,
    itemsize: int = 2,
    device: Device | None = None,
) -> ServingCost:
    """What one more token costs.

    Args:
        context: Tokens that the new one sees, itself included.
        kv_rule: Key of `looplab.nn.cost.KV_SLOTS`.
        kv_size: The rule's own number (Modulo m, Anchor n).
        itemsize: Bytes of one weight and of one key or value.

    Raises:
        ValueError: An unknown rule, or counts below 1.
    """
    if kv_rule not in KV_SLOTS:
        raise ValueError(f"kv_rule must be one of {', '.join(KV_SLOTS)}. Got {kv_rule!r}.")
    if min(num_steps, context, batch) < 1:
        raise ValueError(
            f"num_steps, context and batch must be 1 or more. Got {num_steps}, {context} and {batch}. Raise the least."
        )
    cost, steps = shape.cost, {0: num_steps}
    weights = shape.n_once + num_steps * shape.n_rec + cost.head.matmul
    keys = cost.prelude.kv_width + num_steps * cost.blocks[0].kv_width
    read = itemsize * (weights / batch + context * keys)
    decode = cost.forward(steps, tokens=1, past=context - 1)
    seconds = None
    if device is not None:
        bound = max(decode * batch / device.flops_per_second, read * batch / device.bytes_per_second)
        seconds = (bound + (1 + num_steps) * device.launch_seconds) / batch
    hourly = None if device is None else device.price_per_hour
    return ServingCost(
        num_steps=num_steps,
        context=context,
        batch=batch,
        decode_flops=decode,
        prefill_flops=cost.forward(steps, tokens=context, scored=1),
        kv_bytes_per_token=cost.kv_bytes_per_token(kv_rule, steps, itemsize=itemsize, size=kv_size),
        bytes_read=read,
        seconds=seconds,
        price_per_million=None if seconds is None or hourly is None else seconds * 1e6 * hourly / 3600,
    )
