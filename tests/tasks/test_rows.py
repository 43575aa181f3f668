from dataclasses import replace

import pytest
import torch

from looplab._config import from_dict, to_dict
from looplab.data.documents import DataError
from looplab.tasks.modular import Modular
from looplab.tasks.rows import TaskRows
from looplab.tasks.state_tracking import StateTracking

ROWS = TaskRows(task=StateTracking(train_length=4), rows=6)


def loader(config=ROWS, seed=0, vocab_size=11):
    return config.load(seed=seed, vocab_size=vocab_size)


def test_rows_are_numbered_over_the_steps():
    rows = loader()
    batch = rows.batch(3)
    again = rows.numbered(4, range(18, 24))
    assert torch.equal(batch.tokens, again.tokens) and torch.equal(batch.labels, again.labels)
    assert batch.tokens.shape == (6, 5) and batch.labels.shape == (6, 5, 5)
    assert batch.task == ROWS.task
    assert batch.positions[2].tolist() == [0, 1, 2, 3, 4]
    assert not torch.equal(batch.tokens, rows.batch(4).tokens)
    assert not torch.equal(batch.tokens, loader(seed=1).batch(3).tokens)


def test_a_process_makes_its_own_rows_of_the_batch():
    rows = loader()
    whole, part = rows.batch(3), rows.batch(3, rows=torch.tensor([4, 1]))
    assert part.rows.tolist() == [4, 1]
    assert torch.equal(part.tokens, whole.tokens[[4, 1]]) and torch.equal(part.labels, whole.labels[[4, 1]])
    assert part.start == whole.start
    with pytest.raises(ValueError, match="rows must be numbers from 0 to 5. Got \\[6\\]"):
        rows.batch(0, rows=torch.tensor([6]))


def test_a_step_has_one_of_the_difficulties():
    both = TaskRows(task=Modular(), rows=1, difficulties=(1, 3))
    rows = both.load(seed=0, vocab_size=100)
    lengths = [rows.batch(step).tokens.shape[1] for step in range(60)]
    assert set(lengths) == {both.task.length(1), both.task.length(3)}
    assert 15 < lengths.count(both.task.length(1)) < 45
    assert both.seq_len == both.task.length(3)


def test_training_rows_are_of_the_training_split():
    task = ROWS.task
    for row in loader().batch(0).tokens:
        assert task.split(4, task.decode(row.numpy())) == "train"


def test_resuming_with_another_task_is_refused():
    state = loader().state(5)
    loader().check(state)
    with pytest.raises(DataError, match="the task changed since step 5: was state_tracking-1-"):
        loader(replace(ROWS, task=StateTracking(train_length=4, identity=True)), vocab_size=12).check(state)


def test_a_model_with_too_few_tokens_is_refused():
    with pytest.raises(DataError, match="state_tracking has 11 tokens, but the model reads 10: give it as many."):
        loader(vocab_size=10)


def test_it_survives_the_round_trip_and_refuses_nonsense():
    assert from_dict(TaskRows, to_dict(ROWS)) == ROWS
    for fields, message in [
        ({"rows": 0}, "rows must be at least 1"),
        ({"difficulties": ()}, "must name at least one"),
        ({"difficulties": (0,)}, "difficulty must be at least 1"),
        ({"difficulties": (4, 8)}, r"must be among those that state_tracking trains at \(4\).* Got 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            replace(ROWS, **fields)
    with pytest.raises(ValueError, match="step must be at least 0"):
        loader().batch(-1)


def test_labels_of_intermediate_values_can_be_dropped():
    whole = ROWS.load(seed=0, vocab_size=11).batch(2)
    kept = replace(ROWS, answer_only=True).load(seed=0, vocab_size=11).batch(2)
    assert torch.equal(kept.tokens, whole.tokens)
    assert torch.equal(kept.labels[:, -1], whole.labels[:, -1])
    assert (kept.labels[:, :-1] == -100).all() and (whole.labels >= 0).all()
