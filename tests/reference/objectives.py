"""Slow twins of the objectives, on a linear core in plain Python numbers. Imports nothing of looplab.

core      h'[j] = a h[j] + b (e[j] + h[j - 1] + e[j - 1])      nothing before 0, h_0 = 0; vectors are lists
readout   logits[j] = U h[j];   gate[j] = w . h[j] + c

A trace is `trace[k][row][position]`: the state after k applications.
"""

import math


def trace(a, b, embeds, steps):
    """States after 0 .. steps applications, all rows."""
    width = len(embeds[0][0])
    found = [[[[0.0] * width for _ in row] for row in embeds]]
    for _ in range(steps):
        new = []
        for row, states in zip(embeds, found[-1], strict=True):
            both = [[h + e for h, e in zip(hs, es, strict=True)] for hs, es in zip(states, row, strict=True)]
            before = [[0.0] * width, *both[:-1]]
            new.append(
                [
                    [a * h + b * (e + p) for h, e, p in zip(hs, es, ps, strict=True)]
                    for hs, es, ps in zip(states, row, before, strict=True)
                ]
            )
        found.append(new)
    return found


def dot(x, y):
    return sum(p * q for p, q in zip(x, y, strict=True))


def log_softmax(x):
    top = max(x)
    total = top + math.log(sum(math.exp(v - top) for v in x))
    return [v - total for v in x]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def logits(state, readout):
    return [dot(column, state) for column in readout]


def scored(labels):
    """(row, position, label) of everything that has a label."""
    return [(r, j, y) for r, row in enumerate(labels) for j, y in enumerate(row) if y != -100]


def ce(states, readout, r, j, label):
    return -log_softmax(logits(states[r][j], readout))[label]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def mean_ce(states, readout, labels):
    return mean(ce(states, readout, *place) for place in scored(labels))


def every_iteration(states, readout, labels, weights):
    """`weights` of iterations 1 .. T."""
    losses = [mean_ce(s, readout, labels) for s in states[1:]]
    return dot(weights, losses) / sum(weights)


def exit_law(hazards):
    """Probability of stopping at each step, where the last takes the rest."""
    left, law = 1.0, []
    for hazard in hazards[:-1]:
        law.append(hazard * left)
        left *= 1 - hazard
    return [*law, left]


def hazards(states, gate, r, j):
    """After iterations 1 .. T."""
    w, c = gate
    return [sigmoid(dot(w, s[r][j]) + c) for s in states[1:]]


def expected_exit(states, readout, gate, labels, beta):
    total = []
    for r, j, y in scored(labels):
        law = exit_law(hazards(states, gate, r, j))
        expected = sum(p * ce(s, readout, r, j, y) for p, s in zip(law, states[1:], strict=True))
        total.append(expected + beta * sum(p * math.log(p) for p in law))
    return mean(total)


def bce(probability, target):
    return -target * math.log(probability) - (1 - target) * math.log(1 - probability)


def exit_gate(states, readout, gate, labels, divide_by):
    total = []
    for r, j, y in scored(labels):
        chances = hazards(states, gate, r, j)
        found = 0.0
        for k in range(2, len(states)):
            gain = max(0.0, ce(states[k - 1], readout, r, j, y) - ce(states[k], readout, r, j, y))
            found += bce(1 - chances[k - 1], sigmoid(50 * (gain - 0.005)))
        total.append(found / divide_by)
    return mean(total)


def norm(x):
    return math.sqrt(dot(x, x))


def minus(x, y):
    return [p - q for p, q in zip(x, y, strict=True)]


def terminal_fixed_point(states, readout, labels, weight):
    changes = []
    for r, j, _ in scored(labels):
        change = minus(states[-1][r][j], states[-2][r][j])
        changes.append(norm(change) / math.sqrt(len(change)))
    return mean_ce(states[-1], readout, labels) + weight * mean(changes)


def decoded_change(states, readout, labels, weight):
    changes = []
    for r, j, _ in scored(labels):
        laws = [[math.exp(v) for v in log_softmax(logits(s[r][j], readout))] for s in states[-2:]]
        changes.append(norm(minus(*laws)))
    return mean_ce(states[-1], readout, labels) + weight * mean(changes)


def latent_anchor(states, readout, labels, anchor, weight):
    drifts = []
    for r, j, _ in scored(labels):
        at = states[anchor][r][j]
        away = minus(states[-1][r][j], at)
        drifts.append(dot(away, away) / dot(at, at))
    return mean_ce(states[-1], readout, labels) + weight * mean(drifts)


def jacobian_penalty(states, readout, labels, a, b, directions, weight):
    """`directions[row][position]`: the drawn vectors, not normalised."""
    sizes = []
    for row in directions:
        length = math.sqrt(sum(dot(v, v) for v in row))
        unit = [[x / length for x in v] for v in row]
        after = [*unit[1:], [0.0] * len(unit[0])]
        u = [[a * x + b * y for x, y in zip(v, n, strict=True)] for v, n in zip(unit, after, strict=True)]
        sizes.append(sum(dot(v, v) for v in u))
    return (1 - weight) * mean_ce(states[-1], readout, labels) + weight * mean(sizes)


def progressive(states, readout, labels, alpha, n, k):
    return (1 - alpha) * mean_ce(states[-1], readout, labels) + alpha * mean_ce(states[n + k], readout, labels)


def kl(teacher, student):
    """KL of two vectors of logits."""
    p, q = log_softmax(teacher), log_softmax(student)
    return sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True))


def prefix_distillation(states, readout, labels, weight, layout, sub_states=None):
    """`sub_states[row]`: trace of the row's shorter word alone, which begins after operation 1 + row mod (n - 1)."""
    answers, distances = [], []
    for r, row in enumerate(labels):
        n = max(j for j, y in enumerate(row) if y != -100)
        begin = 1 + r % max(1, n - 1)
        for k in range(1, len(states)):
            if k >= n:
                answers.append(ce(states[k], readout, r, n, row[n]))
            if layout == "answer" and k < n:
                distances.append(kl(logits(states[k][r][k], readout), logits(states[k][r][n], readout)))
            if layout == "window" and begin + k <= n:
                teacher = logits(sub_states[r][k][0][k], readout)
                distances.append(kl(teacher, logits(states[k][r][begin + k], readout)))
    return mean(answers) + weight * mean(distances)


def progress(states, readout, moves, free, advance):
    """Mean over scored (iteration, position) of the cross-entropy of the value of the last min(k, j) operations."""
    total = []
    for k in range(free + 1, len(states)):
        for r, row in enumerate(moves):
            for j in range(len(row) + 1):
                value = 0
                for move in row[max(0, j - k) : j]:
                    value = advance(value, move)
                total.append(ce(states[k], readout, r, j, value))
    return mean(total)


def halting(states, gate, free, hazard):
    """Mean over scored (iteration, position); with `hazard` terms after the end of a word count as 0."""
    total = []
    for k in range(free + 1, len(states)):
        for r, row in enumerate(states[k]):
            for j in range(len(row)):
                done, before = k >= j, k - 1 >= j
                chance = hazards(states, gate, r, j)[k - 1]
                total.append(0.0 if hazard and before else bce(chance, 1.0 if done else 0.0))
    return mean(total)


def cumulated(law):
    found, total = [], 0.0
    for p in law:
        total += p
        found.append(total)
    return found


def step_gate(states, teacher, student, labels, shift):
    """The lookahead gate (shift 1) or the same-step gate (shift 0)."""
    total = []
    for r, j, _ in scored(labels):
        wanted, own = hazards(states, teacher, r, j), hazards(states, student, r, j)
        last = len(wanted)
        asked = range(1 + shift, last)  # steps that have a hazard of the student
        fit = mean(bce(own[t - 1 - shift], wanted[t - 1]) for t in asked)
        law = exit_law(wanted)
        folded = cumulated([sum(law[: 1 + shift]), *law[1 + shift :]])
        found = cumulated(exit_law([*(own[t - 1 - shift] for t in asked), 1.0]))
        total.append(fit + mean(abs(x - y) for x, y in zip(folded, found, strict=True)))
    return mean(total)


def pre_loop_gate(states, embeds, teacher, weight, bias, labels):
    total = []
    for r, j, _ in scored(labels):
        law = exit_law(hazards(states, teacher, r, j))
        own = log_softmax([dot(w, embeds[r][j]) + c for w, c in zip(weight, bias, strict=True)])
        distance = sum(q * (math.log(q) - p) for q, p in zip(law, own, strict=True))
        apart = mean(abs(x - y) for x, y in zip(cumulated(law), cumulated([math.exp(p) for p in own]), strict=True))
        total.append(distance + apart)
    return mean(total)


def threshold_gate(states, weight, bias, threshold, shift):
    """Gates under the rule |s_t - s_{t-1}| / |s_t| < threshold, every position scored.

    `states`: "steps + 1, rows, tokens, dim", from before the loop on. `shift`: steps ahead; None: not in the loop.
    """
    losses = []
    for r, row in enumerate(states[0]):
        for i in range(len(row)):
            run = [state[r][i] for state in states]
            scores = []
            for before, now in zip(run, run[1:], strict=False):
                moved = math.sqrt(sum((a - b) ** 2 for a, b in zip(now, before, strict=True)))
                scores.append(math.log(moved / math.sqrt(sum(a * a for a in now))))
            steps = len(scores)
            if shift is None:
                depth = next((t for t in range(1, steps) if scores[t - 1] < math.log(threshold)), steps)
                logits = [_dot(line, run[0]) + b for line, b in zip(weight, bias, strict=True)]
                total = math.log(sum(math.exp(z) for z in logits))
                law = [math.exp(z - total) for z in logits]
                apart = sum(abs(sum(law[:t]) - (t >= depth)) for t in range(1, steps + 1)) / steps
                losses.append(-math.log(law[depth - 1]) + apart)
                continue
            for t in range(1, steps - shift):
                error = abs(_dot(weight[0], run[t]) + bias[0] - scores[t + shift - 1])
                losses.append(error * error / 2 if error < 1 else error - 0.5)
    return sum(losses) / len(losses)


def _dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))
