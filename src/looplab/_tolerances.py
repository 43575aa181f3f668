"""Bounds that the package itself enforces: self-tests of an audit and of adapters.

Each is a maximum absolute difference, relative to max(1, max abs logit). `tests/tolerances.py` imports this table and
adds what only tests need.
"""

SELF_TEST = {"float64": 1e-11, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Audit self-tests, by dtype of the checkpoint's forward."""

RECORDED_LOGITS = 0.06
"""Relative RMS of logits up to which a reading of a checkpoint fits recorded ones: bfloat16 over up to 140 layers."""
