"""`looplab scaling cost`: what training and serving a shape costs, for several num_steps side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from looplab.cli import exit_codes
from looplab.cli.exit_codes import UserError, user_error
from looplab.nn.cost import KV_SLOTS
from looplab.scaling import Device, read_family, serving_cost, training_flops
from looplab.scaling.cost import ServingCost
from looplab.scaling.family import Shape

KV_RULES = {"depth_indexed": "DepthIndexed", "single": "Single", "first": "First", "average": "Average"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Print parameters, FLOPs, key-value bytes and bytes read per token, for several num_steps side by side.

    Counts are exact. Times and prices are estimates from a device that you describe with --flops-per-second and
    --bytes-per-second; without them none is printed.
    """

    family: str = "iso-depth:20,2,2"
    """Rule for shapes: iso-depth:EXECUTED,PRELUDE,CODA, iso-stored:PRELUDE,CORE,CODA or fully-looped:CORE."""
    width: int = 640
    """Width of the model."""
    num_steps: tuple[int, ...] = (1, 2, 4, 8)
    """Iterations."""
    window: int | None = None
    """Trailing iterations that carry gradient. Default: all."""
    vocab_size: int = 32_064
    """Size of the vocabulary."""
    seq_len: int = 2048
    """Tokens of a training row."""
    pairs: Literal["causal", "square"] = "causal"
    """Attention pairs: counted exactly, or T^2 as papers do."""
    context: int = 2048
    """Context length at which a token is generated."""
    batch: int = 1
    """Rows that share a read of the weights."""
    kv_rule: Literal["depth_indexed", "single", "first", "average"] = "depth_indexed"
    """Which keys and values are kept."""
    bytes_per_number: int = 2
    """Of weights, keys and values."""
    flops_per_second: float | None = None
    """What the device reaches."""
    bytes_per_second: float | None = None
    """Bandwidth of its memory."""
    launch_seconds: float = 0.0
    """Overhead of one launch; a token takes one for each iteration and one more."""
    price_per_hour: float | None = None
    """Price of the device."""


def main(argv: Sequence[str]) -> int:
    """Runs the action and returns its exit code."""
    options = tyro.cli(Options, args=list(argv), prog="looplab scaling cost")
    device = None
    if options.flops_per_second is not None or options.bytes_per_second is not None:
        if options.flops_per_second is None or options.bytes_per_second is None:
            raise UserError(
                "--flops-per-second and --bytes-per-second describe a device together. Got one. Give both.",
                exit_codes.USAGE,
            )
        with user_error(exit_codes.USAGE, (ValueError,)):
            device = Device(
                flops_per_second=options.flops_per_second,
                bytes_per_second=options.bytes_per_second,
                launch_seconds=options.launch_seconds,
                price_per_hour=options.price_per_hour,
            )
    rule = KV_RULES[options.kv_rule]
    assert rule in KV_SLOTS
    columns: list[list[str]] = []
    with user_error(exit_codes.USAGE, (ValueError,)):
        family = read_family(options.family, vocab_size=options.vocab_size)
        for steps in options.num_steps:
            shape = family.shape(options.width, steps)
            served = serving_cost(
                shape,
                steps,
                context=options.context,
                batch=options.batch,
                kv_rule=rule,
                itemsize=options.bytes_per_number,
                device=device,
            )
            window = steps if options.window is None else min(options.window, steps)
            trained = training_flops(
                shape, steps, window, seq_len=options.seq_len, tokens=options.seq_len, pairs=options.pairs
            )
            columns.append(_column(shape, steps, window, trained / options.seq_len, served))
    print(f"{family.name} at width {options.width}; training {options.pairs} pairs; context {options.context}")
    names = ["num_steps", "window", "n_once", "n_rec", "training FLOPs/token", "decode FLOPs/token", "prefill FLOPs"]
    names += ["KV bytes/token", "bytes read/token", "seconds/token (estimate)", "price/1M tokens (estimate)"]
    for line in zip(names, *columns, strict=True):
        if any(cell != "-" for cell in line[1:]):
            print(f"{line[0]:<28}" + "".join(f"{cell:>18}" for cell in line[1:]))
    return exit_codes.DONE


def _column(shape: Shape, steps: int, window: int, trained: float, served: ServingCost) -> list[str]:
    whole = (steps, window, shape.n_once, shape.n_rec)
    return [
        *(f"{value:,}" for value in whole),
        f"{trained:,.0f}",
        f"{served.decode_flops:,}",
        f"{served.prefill_flops:,}",
        f"{served.kv_bytes_per_token:,}",
        f"{served.bytes_read:,.0f}",
        "-" if served.seconds is None else f"{served.seconds:.3g}",
        "-" if served.price_per_million is None else f"{served.price_per_million:.4g}",
    ]
