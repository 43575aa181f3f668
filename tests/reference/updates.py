"""What applications do to a state, from the definitions: one token after another, nothing left out but zero vectors."""

import math


def _norm(x):
    return math.sqrt(sum(a * a for a in x))


def _cosine(x, y):
    if min(_norm(x), _norm(y)) < 1e-12:
        return None
    return sum(a * b for a, b in zip(x, y, strict=True)) / (_norm(x) * _norm(y))


def measures(states, j):
    """(relative, state cosine, update cosine) of application j of one token; `states[k]` is the list after k."""
    before, after = states[j], states[j + 1]
    update = [b - a for a, b in zip(before, after, strict=True)]
    earlier = None if j == 0 else [b - a for a, b in zip(states[j - 1], before, strict=True)]
    return (
        None if _norm(before) < 1e-12 else _norm(update) / _norm(before),
        _cosine(after, before),
        None if earlier is None else _cosine(update, earlier),
    )


def document_means(documents, j):
    """Per measure, the means over tokens of every document that has one; a document is a list of tokens' states."""
    found = []
    for measure in range(3):
        means = []
        for tokens in documents:
            values = [v for v in (measures(states, j)[measure] for states in tokens) if v is not None]
            if values:
                means.append(sum(values) / len(values))
        found.append(means)
    return found
