"""The only tolerances of tests, each with its reason. Keyword arguments of `torch.testing.assert_close`.

A tolerance is never widened in the change that needs it.
"""

from looplab._tolerances import SELF_TEST

EXACT = {"rtol": 0.0, "atol": 0.0}
"""The same operations in the same order: the same bits."""

TWIN = {"rtol": 1e-12, "atol": 1e-13}
"""float64 outputs against a slow twin, values of order 1."""

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

BF16_LOGITS_LONG = 0.06
"""The same up to 140 executed layers, and for models that declare that their rounding errors add up."""

BLOCKS = {"rtol": 1e-12, "atol": 1e-13}
"""float64, one block against its slow twin, values of order 1: a few dozen sums in another order."""

BLOCK_GRADIENTS = {"rtol": 1e-10, "atol": 1e-12}
"""The same for gradients, which sum over all tokens of the batch."""

TEMPERATURE = {"rtol": 1e-4, "atol": 0.0}
"""Fitted temperature against golden section: float32 logits stop at |beta f'| <= 1e-6."""

TEMPERATURE_LOSS = {"rtol": 0.0, "atol": 1e-9}
"""Its loss in float64: quadratic in the error of the temperature."""

SCORES = {"rtol": 1e-10, "atol": 1e-12}
"""float64 token statistics from streamed moments against sums written out over the vocabulary."""

FLOAT32_SCORES = {"rtol": 2e-5, "atol": 2e-6}
"""The same with float32 exponentials, logits of order 10."""

RECORDED = {"rtol": 1e-4, "atol": 1e-6}
"""Against numbers that original float32 code recorded, where the definition is the same."""

RECORDED_SHARES = {"rtol": 1e-9, "atol": 1e-12}
"""Recorded bootstraps over recorded draws and document sums: the same float64 arithmetic in another order."""

REFIT_NATS = 1e-4
"""Largest loss difference in nats between an expanded refit and an exact one (spec bound)."""

CHUNKED = {"rtol": 1e-12, "atol": 1e-13}
"""float64 losses and gradients summed over chunks or micro-batches instead of at once (spec bound 1e-12)."""

DIFFERENCES = {"rtol": 1e-7, "atol": 1e-9}
"""float64 central differences with a step of 1e-5: truncation error of order 1e-10, rounding of order 1e-11."""

SPLIT = {"rtol": 1e-5, "atol": 1e-6}
"""float32 losses and gradients of a batch cut into micro-batches: the same sums in another order."""

BF16_LOSS = 0.02
"""Relative error of a loss near log(vocab) under bfloat16 autocast, a handful of layers."""

LOSS32 = {"rtol": 1e-6, "atol": 0.0}
"""Sums of losses from the same float32 logits: float64 sums of float32 exponentials, by another formula."""

BATCHED32 = {"rtol": 1e-5, "atol": 0.0}
"""Mean losses of a float32 model whose rows were launched in batches of another size."""

ROWS_FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
"""float32, the same row alone, among others, padded or decoded token by token: other sizes of matrix products."""

GEOMETRY = {"rtol": 1e-9, "atol": 1e-10}
"""float64 statistics of a few hundred vectors against definitions written out as loops."""

FRECHET = {"rtol": 1e-6, "atol": 1e-7}
"""The same through two square roots of a matrix by SciPy, which lose half the digits of small eigenvalues."""

SLOPES = {"rtol": 1e-3, "atol": 1e-3}
"""Derivatives of float32 loss sums of tens of nats against their difference quotients at a distance of 2e-3."""

PUBLISHED_OUTPUTS = {"rtol": 1e-4, "atol": 2e-5}
"""States and logits that a published implementation recorded in float32 on a CPU (spec bound)."""

PUBLISHED_GRADIENTS = {"rtol": 1e-3, "atol": 1e-7}
"""Gradient norms of the same (spec bound); zero where a parameter is unused."""

AVERAGED = {"rtol": 1e-6, "atol": 1e-6}
"""float32 means of a few numbers of order 1, summed in another order."""

RETROFIT_LOGITS = {"rtol": 0.0, "atol": 1e-5}
"""float32 logits of another library against our layers of the same weights (bound of the retrofit's specification)."""

EVAL_SCORES = {"rtol": 0.0, "atol": 1e-5}
"""Log-likelihoods of short continuations in float32, against plain code or lm-eval's own backend (nats)."""
EVAL_TEXTS = {"rtol": 1e-6, "atol": 1e-5}
"""The same of whole texts: hundreds of nats, summed in another order."""

FAST = {"rtol": 0.0, "atol": 1e-4}
"""float32 log-probabilities of the engine under numerics="fast" against decoding one row (spec bound on logits)."""
