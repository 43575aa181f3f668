"""Next-token loss written out token by token. Imports nothing of looplab."""

import math


def loss_sums(logits, labels, *, smoothing=0.0):
    """(sum of smoothed cross-entropies, sum of squared log-partitions, number of labels) over all labels but -100.

    Args:
        logits: Rows of positions of scores, nested lists.
        labels: Rows of labels.
    """
    ce = z = 0.0
    count = 0
    for row, targets in zip(logits, labels, strict=True):
        for scores, label in zip(row, targets, strict=True):
            if label == -100:
                continue
            top = max(scores)
            partition = top + math.log(sum(math.exp(s - top) for s in scores))
            own = partition - scores[label]
            spread = sum(partition - s for s in scores) / len(scores)
            ce += (1 - smoothing) * own + smoothing * spread
            z += partition**2
            count += 1
    return ce, z, count
