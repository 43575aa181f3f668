"""Puzzles whose answer is a list of moves: stated, then asked, then one token per move.

    tokens   <what is wanted> <position> <moves> m_1 m_2 .. m_L <pad> ..
    labels                               m_1 m_2 m_3 ..   <end>

Labels stand at the position that answers, so a move is asked where all moves before it are known. A simulator plays the
reply: it is solved or not, and its first illegal move is found, whatever the reference would have done. Tokens and
symbols are one vocabulary.

Target of iteration k: the position after k moves where the position stands, and the first k moves where they are asked.

Reference: Shojaee et al., "The Illusion of Thinking", arXiv:2506.06941 (four puzzles scaled by one number). Deviation:
a move is one token, and an unsolvable problem is answered by the token `unsolvable` instead of counted as a failure.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import IGNORED, Example, Grade, Task, Trace

MARKS = ("<moves>", "<end>", "<pad>", "unsolvable")
ASK, END, PAD, UNSOLVABLE = range(len(MARKS))


@dataclass(frozen=True)
class Played:
    """What a simulator makes of a list of moves."""

    positions: tuple[Any, ...]
    """After 0, 1, .. legal moves."""
    solved: bool
    first_illegal: int | None
    """Number of the first illegal move, from 0; None: all are legal."""

    @property
    def legal_moves(self) -> int:
        """Moves before the first illegal one."""
        return len(self.positions) - 1


class MoveTask(Task):
    """What puzzles of moves share. Moves are token ids; a position is whatever the puzzle makes of it."""

    reference_paper = "arXiv:2506.06941"

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.tokens

    @abstractmethod
    def start(self, problem: Any) -> Any:
        """The first position."""

    @abstractmethod
    def play(self, problem: Any, position: Any, move: int) -> Any | None:
        """The position after a move; None where it is illegal."""

    @abstractmethod
    def solved(self, problem: Any, position: Any) -> bool:
        """Whether this is what is wanted."""

    @abstractmethod
    def solve(self, problem: Any) -> tuple[int, ...] | None:
        """The reference's moves; None where there is no solution."""

    @abstractmethod
    def wanted(self, problem: Any) -> list[int]:
        """Tokens of what is wanted."""

    @abstractmethod
    def placed(self, problem: Any, position: Any) -> list[int]:
        """Tokens of a position, equally many for all."""

    @abstractmethod
    def most_moves(self, difficulty: int) -> int:
        """Moves of the longest reference solution."""

    @abstractmethod
    def difficulty_of(self, problem: Any) -> int:
        """The difficulty a problem is of."""

    def num_steps(self, difficulty: int) -> int:
        return max(1, self.most_moves(difficulty))

    def example(self, problem: Any) -> Example:
        moves = self._answer(problem)
        stated = [*self.wanted(problem), *self.placed(problem, self.start(problem)), ASK]
        room = self.num_steps(self.difficulty_of(problem))
        blank = room - len(moves)
        labels = [IGNORED] * (len(stated) - 1) + [*moves, END] + [IGNORED] * blank
        return Example(
            tokens=np.array([*stated, *moves, *[PAD] * blank], np.int64),
            labels=np.array(labels, np.int64),
            answer=slice(len(stated) - 1, len(labels)),
        )

    def reference(self, problem: Any) -> Trace:
        """Positions after every move of the reference, and its moves (the label `unsolvable` where there are none)."""
        moves = self._answer(problem)
        return Trace(self.simulate(problem, moves).positions, moves)

    def simulate(self, problem: Any, moves: Sequence[int]) -> Played:
        """Plays moves until the first illegal one."""
        positions = [self.start(problem)]
        for number, move in enumerate(moves):
            after = self.play(problem, positions[-1], int(move))
            if after is None:
                return Played(tuple(positions), False, number)
            positions.append(after)
        return Played(tuple(positions), self.solved(problem, positions[-1]), None)

    def grade_reply(self, problem: Any, reply: Sequence[int], *, truncated: bool = False) -> Grade:
        """Grades a free reply of any length: moves up to `<end>`, or the token `unsolvable`.

        Args:
            truncated: The reply was cut by its length limit: it is counted apart, neither right nor wrong.
        """
        said, wanted = _ended(reply), self._answer(problem)
        right = sum(a == b for a, b in zip(said, wanted, strict=False))
        played = self.simulate(problem, said)
        return Grade(
            exact=not truncated and said == wanted,
            cells_right=right,
            cells_total=len(wanted),
            valid=not truncated and self._right(problem, said),
            first_illegal=None if self._gives_up(said) else played.first_illegal,
            truncated=truncated,
        )

    def grade(self, problem: Any, predicted: NDArray[np.int64]) -> Grade:
        """Symbols against the reference; `valid`: the moves up to `<end>`, played one after another, solve it."""
        compared = super().grade(problem, predicted)
        reply = self.grade_reply(problem, predicted.tolist())
        return replace(compared, valid=reply.valid, first_illegal=reply.first_illegal)

    def verify(self, problem: Any, predicted: NDArray[np.int64]) -> bool:
        """Whether the moves up to `<end>` solve it, by playing them."""
        return self._right(problem, _ended(predicted.tolist()))

    def trace_labels(self, problem: Any, k: int) -> NDArray[np.int64]:
        """The position after k moves where the position stands, and the first k moves where they are asked; all, and
        the end, from `num_steps` on."""
        example = self.example(problem)
        positions = self.reference(problem).values
        labels = example.labels.copy()
        stop = example.answer.start
        first = len(self.wanted(problem))
        labels[first:stop] = self.placed(problem, positions[min(k, len(positions) - 1)])
        if k < self.num_steps(self.difficulty_of(problem)):
            labels[stop + k :] = IGNORED
        return labels

    def check_limit(self, difficulty: int, max_new_tokens: int, *, tokens_per_move: int = 1) -> None:
        """Refuses a reply limit below the length of the answer, before anything is run.

        Args:
            tokens_per_move: 1 in this task's own vocabulary; 3 where a move is written `[disc, from, to]`.
        """
        moves = self.most_moves(difficulty)
        if moves * tokens_per_move > max_new_tokens:
            raise ValueError(
                f"{self.name} n={difficulty} needs {moves:,} moves (about {moves * tokens_per_move:,} tokens); "
                f"max_new_tokens is {max_new_tokens:,}. Items would be counted as truncated."
            )

    def show(self, problem: Any) -> str:
        """The problem, its moves and the positions they lead to."""
        trace = self.reference(problem)
        lines = [self._words(self.wanted(problem) + self.placed(problem, trace.values[0]))]
        for move, position in zip(trace.answer, trace.values[1:], strict=False):
            lines.append(f"{self.tokens[move]:>12}   {self._words(self.placed(problem, position))}")
        return "\n".join(lines if len(lines) > 1 else [*lines, self._words(list(trace.answer))])

    def _words(self, tokens: list[int]) -> str:
        return " ".join(self.tokens[token] for token in tokens)

    def _answer(self, problem: Any) -> tuple[int, ...]:
        moves = self.solve(problem)
        return (UNSOLVABLE,) if moves is None else moves

    def _gives_up(self, said: tuple[int, ...]) -> bool:
        return said == (UNSOLVABLE,)

    def _right(self, problem: Any, said: tuple[int, ...]) -> bool:
        if self._gives_up(said):
            return self.solve(problem) is None
        return self.simulate(problem, said).solved


def _ended(reply: Sequence[int]) -> tuple[int, ...]:
    """What was said before the end."""
    said = [int(token) for token in reply]
    return tuple(said[: said.index(END)] if END in said else said)
