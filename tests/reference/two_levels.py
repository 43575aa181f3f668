"""Slow twin of a two-level recurrence, from arXiv:2510.04871: plain nested loops over layers that are handed in."""


def two_levels(low, high, e, *, low_layers, high_layers, h, l, repeats, inject):  # noqa: E741
    """(high, low) after `h` high cycles of `l` low steps each.

    Args:
        low_layers: Functions that one low step runs in order, `repeats` times over; likewise `high_layers`.
        inject: (state, e) -> what the layers read.
    """

    def run(layers, x):
        for _ in range(repeats):
            for layer in layers:
                x = layer(x)
        return x

    for _ in range(h):
        for _ in range(l):
            low = run(low_layers, inject(low + high, e))
        high = run(high_layers, inject(high + low, e))
    return high, low
