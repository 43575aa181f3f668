"""Queues of ready rows, and which block runs next. No torch."""

from collections import deque
from collections.abc import Sequence

from looplab.engine.residents import Token


class RowQueue:
    """Rows that wait for a launch of one kind.

    Args:
        hold_ended: A row whose choice has ended keeps its place until a launch reaches it, as in the reference
            implementation; else it leaves at once.
    """

    def __init__(self, hold_ended: bool = False):
        self.rows: deque[Token] = deque()
        self.hold_ended = hold_ended
        self.passed = 0
        """Consecutive core launches that went to other blocks while rows waited here."""

    def __len__(self) -> int:
        return len(self.rows)

    def put_tail(self, rows: Sequence[Token]) -> None:
        """Rows that join."""
        self.rows.extend(rows)

    def put_head(self, rows: Sequence[Token]) -> None:
        """Rows that come first, in their order."""
        self.rows.extendleft(reversed(rows))

    def remove(self, row: Token) -> None:
        """A row whose choice has ended, or was put back."""
        if not self.hold_ended:
            self.rows.remove(row)

    def take(self, most: int) -> list[Token]:
        """The first rows."""
        rows = self.rows
        if len(rows) <= most:
            taken = list(rows)
            rows.clear()
        else:
            taken = [rows.popleft() for _ in range(most)]
        return [row for row in taken if not row.dead] if self.hold_ended else taken

    def take_equal(self, most: int) -> list[Token]:
        """The first row and those after it at the same iteration."""
        if not self.rows:
            return []
        steps = self.rows[0].steps
        taken = [row for row in self.rows if row.steps == steps][:most]
        chosen = set(map(id, taken))
        self.rows = deque(row for row in self.rows if id(row) not in chosen)
        return [row for row in taken if not row.dead]


def choose_block(queues: Sequence[RowQueue], launch_rows: int) -> int:
    """The block of the next core launch, -1 where none has rows.

    The one that was passed over in more than 2 * blocks launches in a row, longest first; else the fullest launch, of
    equals the later block. So a row waits at most 3 * blocks launches for the turn of its block.
    """
    if len(queues) == 1:
        return 0 if queues[0].rows else -1
    best, best_rank = -1, (0, 0)
    for block, queue in enumerate(queues):
        if queue.rows:
            overdue = queue.passed if queue.passed > 2 * len(queues) else 0
            rank = (overdue, min(len(queue.rows), launch_rows))
            if rank >= best_rank:
                best, best_rank = block, rank
    for block, queue in enumerate(queues):
        queue.passed = queue.passed + 1 if queue.rows and block != best else 0
    return best
