"""The only tolerances of tests, each with its reason. Keyword arguments of `torch.testing.assert_close`.

A tolerance is never widened in the change that needs it.
"""

from looplab._tolerances import SELF_TEST

EXACT = {"rtol": 0.0, "atol": 0.0}
"""The same operations in the same order: the same bits."""

TWIN = {"rtol": 1e-9, "atol": 1e-11}
"""float64 against a slow twin: another order of sums, a few hundred operations deep."""

ROWS = {"rtol": 1e-11, "atol": 1e-12}
"""float64, the same row alone and in a batch: matrix products may sum in another order, nothing else differs."""

CACHED = {"rtol": 1e-10, "atol": 1e-11}
"""float64, cached decoding against full recomputation: attention sums over pieces of other lengths."""

NATIVE = SELF_TEST
"""By dtype, relative to max(1, largest |logit|): the bounds that self-tests of the package enforce."""

GRADIENTS = {"rtol": 1e-10, "atol": 1e-12}
"""float64 gradients against a slow twin."""

BF16_LOGITS = 0.02
"""Relative RMS of logits, bfloat16 against float32 of the same weights, up to 32 executed layers."""

BLOCKS = {"rtol": 1e-12, "atol": 1e-13}
"""float64, one block against its slow twin, values of order 1: a few dozen sums in another order."""

BLOCK_GRADIENTS = {"rtol": 1e-10, "atol": 1e-12}
"""The same for gradients, which sum over all tokens of the batch."""
