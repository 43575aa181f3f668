"""Slow twin of exit rules: one token at a time, its whole history in lists. Imports nothing of looplab.

history   states s_0 .. s_t, each a list of numbers;  logits l_1 .. l_t, each a list of cells of lists;
          scores g_1 .. g_t: numbers, or pairs
stops     whether the rule says stop after step t, by its formula
step      first t with min_steps <= t <= max_steps where it does; max_steps if it never does
"""

import math


def norm(x):
    return math.sqrt(sum(v * v for v in x))


def minus(x, y):
    return [a - b for a, b in zip(x, y, strict=True)]


def softmax(x):
    top = max(x)
    parts = [math.exp(v - top) for v in x]
    return [p / sum(parts) for p in parts]


def full(t, number, states, logits, scores):
    return False


def fixed(t, number, states, logits, scores):
    return t >= number


def hazard(t, number, states, logits, scores):
    """1 - prod (1 - l) is the sum of the exit probabilities, written another way; 1 is never reached on purpose."""
    left = 1.0
    for score in scores[:t]:
        left *= 1 - 1 / (1 + math.exp(-score))
    return number < 1 and 1 - left >= number


def latent(t, number, states, logits, scores):
    return norm(minus(states[t], states[t - 1])) < number * norm(states[t])


def acceleration(t, number, states, logits, scores):
    def small(k):
        if k < 3:
            return False
        bend = [a - 2 * b + c for a, b, c in zip(states[k], states[k - 1], states[k - 2], strict=True)]
        return norm(bend) < number * norm(states[k])

    return small(t) and small(t - 1)


def kl(t, number, states, logits, scores):
    if t < 2:
        return False
    total = 0.0
    for before, now in zip(logits[t - 2], logits[t - 1], strict=True):
        total += sum(p * math.log(p / q) for p, q in zip(softmax(before), softmax(now), strict=True))
    return total < number


def entropy(t, number, states, logits, scores):
    if t < 2:
        return False
    found = [-sum(p * math.log(p) for cell in at for p in softmax(cell)) for at in logits[t - 2 : t]]
    return abs(found[1] - found[0]) < number


def argmax(t, number, states, logits, scores):
    if t < number:
        return False
    tops = [[cell.index(max(cell)) for cell in at] for at in logits[t - number : t]]
    return all(top == tops[0] for top in tops)


def replay(t, number, states, logits, scores):
    return t >= number


def trained(t, number, states, logits, scores):
    """`number`: whether the trained rival is q_continue (0: it is zero)."""
    halt, go_on = scores[t - 1]
    return halt > (go_on if number else 0)


RULES = {f.__name__: f for f in (full, fixed, hazard, latent, acceleration, kl, entropy, argmax, replay, trained)}


def step(name, number, states, logits, scores, *, max_steps, min_steps=1):
    """The step after which a token stops; `logits` and `scores` may be functions of t that make them when asked."""
    for t in range(min_steps, max_steps):
        if RULES[name](t, number, states, logits, scores):
            return t
    return max_steps
