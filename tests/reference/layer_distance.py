"""Angular distance and block influence from their definitions, one token at a time.

arXiv:2403.17887 (arccos of the cosine between what enters and what leaves a run of layers, over pi) and
arXiv:2403.03853 (1 minus that cosine).
"""

import math


def distance(before, after):
    """(angular distance, block influence) of two lists of vectors, means over the tokens."""
    angles, falls = [], []
    for x, y in zip(before, after, strict=True):
        dot = sum(a * b for a, b in zip(x, y, strict=True))
        cosine = dot / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
        angles.append(math.acos(max(-1.0, min(1.0, cosine))) / math.pi)
        falls.append(1 - cosine)
    return sum(angles) / len(angles), sum(falls) / len(falls)
