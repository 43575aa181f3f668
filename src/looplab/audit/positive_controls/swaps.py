"""Products of swaps in S5, the 120 permutations of five things: what a state tracker has to follow.

    p_n = 1/120 sum_chi d^2 r^n      n independent uniform swaps make the identity with probability p_n

over the irreducible characters of S5: degree d, and r = the character at a swap over d, by which a uniform swap acts.

Reference: Diaconis, "Group Representations in Probability and Statistics" (1988), chapter 3.
"""

import math
from itertools import permutations

import numpy as np

from looplab._types import Integer
from looplab.audit.positive_controls.letters import Ids, document_set
from looplab.data.documents import DocumentSet

ELEMENTS = tuple(permutations(range(5)))
"""Element g sends x to ELEMENTS[g][x]; element 0 is the identity."""
SIZE = len(ELEMENTS)
CHARACTERS = ((1, 1.0), (1, -1.0), (4, 1 / 2), (4, -1 / 2), (5, 1 / 5), (5, -1 / 5), (6, 0.0))
"""(d, r) of the seven irreducible characters."""


def products() -> Integer[np.ndarray, "elements elements"]:
    """[g, h]: the element that does h first, then g."""
    number = {element: i for i, element in enumerate(ELEMENTS)}
    return np.array([[number[tuple(g[x] for x in h)] for h in ELEMENTS] for g in ELEMENTS])


def return_probability(swaps: int) -> float:
    """Probability that a product of this many independent uniform swaps is the identity."""
    return sum(degree**2 * ratio**swaps for degree, ratio in CHARACTERS) / SIZE


def calibrated_loss(right: float) -> float:
    """Loss, at the best temperature, of a sure guess of an element that is right with probability `right`."""
    if right <= 1 / SIZE:
        return math.log(SIZE)
    wrong = 1 - right
    return -right * math.log(right) - (wrong * math.log(wrong / (SIZE - 1)) if wrong > 0 else 0.0)


def swap_documents(seed: int, *, count: int, swaps: int, same: bool = False) -> DocumentSet:
    """Texts of one letter, the product; the prompt is the swaps and a letter that means nothing.

    Args:
        same: One swap, again and again; the letter that means nothing keeps such documents apart.
    """
    random = np.random.default_rng([seed, 3])
    table = products()
    choices = [i for i, element in enumerate(ELEMENTS) if sum(x != element[x] for x in range(5)) == 2]
    drawn = np.broadcast_to(random.choice(choices, size=(count, 1 if same else swaps)), (count, swaps))
    rows: list[tuple[Ids, Ids]] = []
    for row, letter in zip(drawn.tolist(), random.integers(SIZE, size=count).tolist(), strict=True):
        answer = 0
        for swap in row:
            answer = int(table[answer, swap])
        rows.append(([*row, letter], [answer]))
    return document_set("swaps", rows)
