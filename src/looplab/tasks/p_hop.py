"""p hops of induction: from the last letter, p times to the place after the latest earlier copy of the present letter.

    find(i) = largest j <= i with x_{j-1} = x_i;        i_0 = L - 1,  i_k = find(i_{k-1});   answer x_{i_p}

    <bos> x_0 .. x_{L-1} p(two digits) =

Chains that fall off the front are drawn again. Deviation: no two neighbours are equal. With x_{i-1} = x_i a hop would
stay where it is for ever, and of uniform strings over four letters nearly every chain of 16 hops does.

Reference: Sanford, Hsu, Telgarsky: "Transformers, Parallel Computation, and Logarithmic Depth", arXiv:2402.09268.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Task, Trace, check_trained

BOS, ASK = 0, 1
FIRST_DIGIT = 2
DIGITS = 2
FIRST_LETTER = FIRST_DIGIT + 10


@dataclass(frozen=True)
class Hops:
    """A string, and the number of hops."""

    letters: tuple[int, ...]
    hops: int


@TASKS.register("p_hop")
@dataclass(frozen=True, kw_only=True)
class PHop(Task):
    """The letter that p hops of induction lead to."""

    reference_paper = "arXiv:2402.09268"
    size: int = 128
    """Letters of the string."""
    alphabet: int = 4
    """Number of different letters."""
    train: tuple[int, ...] = (2,)
    """Numbers of hops to train at; tests go to 8 times the largest."""

    def __post_init__(self) -> None:
        if not 3 <= self.alphabet <= 26:
            raise ValueError(f"PHop.alphabet must be from 3 to 26. Got {self.alphabet}. 4 is usual.")
        check_trained(self, self.train)

    def check(self, difficulty: int) -> None:
        """Refuses more hops than the string commonly holds: one takes about `alphabet` letters."""
        super().check(difficulty)
        most = min(self.size // self.alphabet, 10**DIGITS - 1)
        if difficulty > most:
            raise ValueError(
                f"difficulty must be at most {most} for {self.name} with size {self.size} and alphabet "
                f"{self.alphabet}. Got {difficulty}. Raise size."
            )

    @property
    def tokens(self) -> tuple[str, ...]:
        return ("<bos>", "=", *map(str, range(10)), *self.symbols)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(chr(ord("a") + letter) for letter in range(self.alphabet))

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        further = {max(self.train) * factor for factor in (2, 4, 8)}
        return tuple(sorted({*self.train, *(p for p in further if p <= self.size // self.alphabet)}))

    def length(self, difficulty: int) -> int:
        return self.size + DIGITS + 2

    def chance(self, difficulty: int) -> float:
        return 1 / self.alphabet

    def draw(self, difficulty: int, draws: Draws) -> Hops:
        while True:
            steps = draws.integers(self.alphabet - 1, self.size) + 1
            steps[0] = draws.integer(self.alphabet)
            problem = Hops(tuple((np.cumsum(steps) % self.alphabet).tolist()), difficulty)
            if _chain(problem)[-1] is not None:
                return problem

    def canonical(self, problem: Hops) -> bytes:
        """Letters renamed in the order in which they come; without the number of hops."""
        names: dict[int, int] = {}
        return bytes(names.setdefault(letter, len(names)) for letter in problem.letters)

    def example(self, problem: Hops) -> Example:
        digits = [FIRST_DIGIT + int(d) for d in f"{problem.hops:0{DIGITS}}"]
        tokens = np.array([BOS, *(FIRST_LETTER + letter for letter in problem.letters), *digits, ASK], np.int64)
        labels = np.full(len(tokens), IGNORED, np.int64)
        labels[-1] = self.reference(problem).answer
        return Example(tokens=tokens, labels=labels, answer=slice(len(tokens) - 1, len(tokens)))

    def trace_labels(self, problem: Hops, k: int) -> NDArray[np.int64]:
        """At the last position the letter after k hops."""
        example, values = self.example(problem), self.reference(problem).values
        example.labels[-1] = problem.letters[values[min(k, problem.hops)]]
        return example.labels

    def decode(self, tokens: NDArray[np.int64]) -> Hops:
        word = [int(t) for t in tokens]
        letters, digits = word[1 : self.size + 1], word[self.size + 1 : -1]
        legal = len(word) == self.length(1) and (word[0], word[-1]) == (BOS, ASK)
        legal = legal and all(FIRST_LETTER <= t < len(self.tokens) for t in letters)
        if not (legal and all(FIRST_DIGIT <= t < FIRST_LETTER for t in digits)):
            raise ValueError(
                f"p_hop: tokens must be <bos>, {self.size} letters, {DIGITS} digits and =. Got {word}. Write them so."
            )
        hops = int("".join(str(t - FIRST_DIGIT) for t in digits))
        return Hops(tuple(t - FIRST_LETTER for t in letters), hops)

    def reference(self, problem: Hops) -> Trace:
        """Every place on the way; the search of each hop goes back letter by letter."""
        chain = _chain(problem)
        places = tuple(place for place in chain if place is not None)
        if len(places) < len(chain):
            raise ValueError(f"p_hop: the chain must stay in the string. Got {problem.hops} hops. Ask for fewer.")
        return Trace(places, problem.letters[places[-1]])

    def verify(self, problem: Hops, predicted: NDArray[np.int64]) -> bool:
        """One pass from the front notes where every place leads; then p look-ups."""
        latest: dict[int, int] = {}
        leads = []
        for place, letter in enumerate(problem.letters):
            leads.append(latest.get(letter, -1))
            latest[letter] = place + 1
        place = len(leads) - 1
        for _ in range(problem.hops):
            place = leads[place]
        return predicted.tolist() == [problem.letters[place]]


def _chain(problem: Hops) -> list[int | None]:
    """Places after 0, 1, .. hops, None once there is no earlier copy."""
    letters = problem.letters
    place: int | None = len(letters) - 1
    chain = [place]
    for _ in range(problem.hops):
        if place is not None:
            copies = (j for j in range(place, 0, -1) if letters[j - 1] == letters[place])
            place = next(copies, None)
        chain.append(place)
    return chain
