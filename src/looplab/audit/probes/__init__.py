"""Readout probes: refits of what stands between the hidden state and the loss, and the token statistics beside them.

Everything streams: hidden states are spooled, `head` turns chunks of them into logits, and no logits outlive a chunk.
"""

from looplab.audit.probes.affine import Affine, fit_affine
from looplab.audit.probes.full_rank import FullRank, fit_full_rank
from looplab.audit.probes.scores import ReadoutScores, TokenScores, cells_right, divergence, token_nll, token_scores
from looplab.audit.probes.stream import LOGIT_BYTES, Head, LogitChunks, leading_tokens
from looplab.audit.probes.temperature import Temperature, exact_refit, fit_temperature

__all__ = [
    "LOGIT_BYTES",
    "Affine",
    "FullRank",
    "Head",
    "LogitChunks",
    "ReadoutScores",
    "Temperature",
    "TokenScores",
    "cells_right",
    "divergence",
    "exact_refit",
    "fit_affine",
    "fit_full_rank",
    "fit_temperature",
    "leading_tokens",
    "token_nll",
    "token_scores",
]
