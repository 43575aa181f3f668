"""Progress-aligned recurrence written out, item by item and iteration by iteration, in plain Python."""

import math


def window_target(generators, word, j, k):
    """Items in slots after the last min(k, j) operations ending at position j, from the identity."""
    items = list(range(len(generators[0])))
    for operation in word[max(0, j - k) : j]:
        items = [items[source] for source in generators[operation]]
    return items


def cross_entropy(logits, label):
    """-log softmax(logits)[label]."""
    top = max(logits)
    return top + math.log(sum(math.exp(x - top) for x in logits)) - logits[label]


def loss(logits, words, generators, *, free, iterations, slots):
    """Mean over scored (iteration, position) of the summed cross-entropy of the slots.

    logits[k][row][position] are the columns after free + k + 1 iterations; position 0 is <bos>.
    """
    total, count = 0.0, 0
    for k in range(iterations):
        for row, word in enumerate(words):
            for position in range(len(word) + 1):
                items = window_target(generators, word, position, free + k + 1)
                columns = logits[k][row][position]
                symbols = len(columns) // slots
                for slot in range(slots):
                    total += cross_entropy(columns[slot * symbols : (slot + 1) * symbols], items[slot])
                count += 1
    return total / count
