import json

import pytest
import torch

from looplab.training import trainer as trainers
from looplab.training.threads import fastest_threads
from looplab.training.trainer import train
from training.test_trainer import Said
from training.tiny_run import broken_off, tiny_run


@pytest.mark.parametrize(
    ("seconds", "best"), [((3.0, 2.0, 4.0), 2), ((1.0, 1.0, 1.0), 1), ((3.0, 2.0, 1.0), 3)], ids=str
)
def test_the_fastest_number_is_kept(seconds, best):
    assert fastest_threads(lambda threads: seconds[threads - 1], cores=3) == best


def test_matrix_products_are_timed_with_that_many_threads_and_the_number_put_back(monkeypatch):
    before, seen, inner = torch.get_num_threads(), set(), torch.Tensor.__matmul__
    monkeypatch.setattr("looplab.training.threads.PRODUCTS", 1)
    monkeypatch.setattr("looplab.training.threads.SIZE", 4)
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: seen.add(torch.get_num_threads()) or inner(a, b))
    assert fastest_threads(cores=2) in (1, 2)
    assert seen == {1, 2}
    assert torch.get_num_threads() == before


def test_a_run_says_and_keeps_the_number_that_it_began_with(tmp_path, monkeypatch):
    config, said, numbers = tiny_run(tmp_path, threads="auto"), Said(), []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(trainers, "fastest_threads", lambda: 2)
    broken_off(config, tmp_path / "run", steps=2)
    monkeypatch.setattr(trainers, "fastest_threads", lambda: 1)
    record = train(config, tmp_path / "run", display=said)
    assert record.hardware.endswith("cpu, 2 threads")
    assert json.loads((tmp_path / "run" / "step_6" / "state.json").read_text())["progress"]["threads"] == 2
    assert not any("thread" in line for line in said.lines)
    train(config, tmp_path / "new", display=said)
    assert numbers == [2, 2, 1]
    assert "Fastest here: 1 thread." in said.lines
