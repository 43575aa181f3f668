"""Slow twin of the draw of a token: plain lists, one row, every filter as it is defined. Imports nothing of looplab.

order     bias, repetition, presence and frequency, forbidden ends, temperature, top_k, top_p, min_p
"""

import hashlib
import math
import struct


def uniform(seed, choice, index):
    mask = (1 << 64) - 1
    packed = struct.pack("<QQQ", seed & mask, choice & mask, index & mask)
    (word,) = struct.unpack("<Q", hashlib.blake2b(packed, digest_size=8).digest())
    return (word >> 11) / 2**53


def adjusted(logits, *, bias=(), repetition=1.0, presence=0.0, frequency=0.0, prompt=(), output=(), forbidden=()):
    x = list(logits)
    for token, value in bias:
        x[token] += value
    for token in set(prompt) | set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= presence + frequency * list(output).count(token)
    for token in forbidden:
        x[token] = -math.inf
    return x


def law(x, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Probability of every token; greedy where the temperature is 0."""
    if temperature == 0:
        best = x.index(max(x))
        return [float(token == best) for token in range(len(x))]
    scaled = [value / temperature for value in x]
    best_first = sorted(range(len(x)), key=lambda token: (-scaled[token], token))
    allowed = best_first[:top_k] if top_k else best_first
    p = normalised({token: math.exp(scaled[token] - scaled[best_first[0]]) for token in allowed})
    nucleus, mass = [], 0.0
    for token in allowed:
        if nucleus and mass >= top_p:
            break
        nucleus.append(token)
        mass += p[token]
    floor = min_p * p[allowed[0]]
    p = normalised({token: p[token] for token in nucleus if p[token] >= floor})
    return [p.get(token, 0.0) for token in range(len(x))]


def normalised(masses):
    total = sum(masses.values())
    return {token: mass / total for token, mass in masses.items()}


def draw(p, u):
    """The first token whose cumulative probability exceeds u."""
    total = 0.0
    for token, mass in enumerate(p):
        total += mass
        if total > u * sum(p):
            return token
    raise AssertionError("u is below 1")
