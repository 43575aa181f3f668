"""Rows leave queues in order, and no block waits for ever."""

import random

from looplab.engine.queues import RowQueue, choose_block
from looplab.engine.request import DepthParams, Request
from looplab.engine.residents import Group, Token


def row(steps=0):
    request = Request(id="a", tokens=(1,))
    group = Group(
        request=request,
        depth=DepthParams(),
        seed=0,
        prefill_steps=1,
        keys=(),
        root=b"",
        arrival=0.0,
        limit=4,
        rank=(5, 0),
    )
    made = Token(group.choices[0], 0)
    made.steps = steps
    return made


def fill(*sizes):
    queues = [RowQueue() for _ in sizes]
    for queue, size in zip(queues, sizes, strict=True):
        queue.rows.extend(row() for _ in range(size))
    return queues


def test_survivors_come_first_and_newcomers_last():
    queue, rows = RowQueue(), [row() for _ in range(5)]
    queue.put_tail(rows[:2])
    queue.put_head(rows[2:4])
    queue.put_tail(rows[4:])
    assert queue.take(4) == [rows[2], rows[3], rows[0], rows[1]] and list(queue.rows) == [rows[4]]


def test_equal_iterations_are_taken_over_the_heads_of_others():
    queue = RowQueue()
    rows = [row(1), row(0), row(1), row(1)]
    queue.rows.extend(rows)
    assert queue.take_equal(2) == [rows[0], rows[2]]
    assert list(queue.rows) == [rows[1], rows[3]]


def test_an_ended_row_leaves_at_once_or_keeps_its_place():
    for hold, expected in ((False, [1, 2]), (True, [1])):
        queue, rows = RowQueue(hold_ended=hold), [row(), row(), row()]
        queue.rows.extend(rows)
        queue.remove(rows[0])
        rows[0].dead = True
        assert [rows.index(row) for row in queue.take(2)] == expected


def test_the_fullest_launch_goes_first_and_of_equals_the_later_block():
    assert choose_block(fill(0, 0), 4) == -1
    assert choose_block(fill(3, 2), 4) == 0
    assert choose_block(fill(9, 4), 4) == 1, "a launch takes four: both are full"


def test_a_block_that_was_passed_over_long_enough_is_next():
    queues = fill(1, 9)
    chosen = [choose_block(queues, 4) for _ in range(6)]
    assert chosen == [1, 1, 1, 1, 1, 0], "after more than 2 * 2 launches"


def test_no_block_is_passed_over_in_more_than_three_launches_per_block(unchecked):
    rng, worst, crowd = random.Random(0), 0, [row() for _ in range(7)]
    for blocks in (2, 3, 5):
        queues = fill(*[1] * blocks)
        for _ in range(400):
            for queue in queues:  # the head stays, and others join by chance
                while len(queue.rows) > 1:
                    queue.rows.pop()
                queue.rows.extend(crowd if rng.random() < 0.3 else [])
            choose_block(queues, 8)
            worst = max(worst, max(queue.passed for queue in queues) / blocks)
    assert 2 < worst <= 3
