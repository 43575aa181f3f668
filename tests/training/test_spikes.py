import random
import statistics

from looplab.training import trainer as trainers
from looplab.training.spikes import LENGTH, Spikes
from looplab.training.trainer import Trainer, train
from training.tiny_run import broken_off, metrics, tiny_run


def filled(length=LENGTH):
    """A rule that has seen losses 1, 2, 1, 2, .. and gradients of norm 1."""
    spikes = Spikes()
    for number in range(length):
        assert not spikes.add(1.0 + number % 2, 1.0)
    return spikes


def test_a_loss_six_deviations_above_the_median_is_a_spike():
    # median 1.5, MAD 0.5
    assert not filled().add(4.5, 1.0)
    assert filled().add(4.5001, 1.0)
    assert not filled().add(-100.0, 1.0)


def test_a_gradient_twenty_times_the_median_is_a_spike():
    assert not filled().add(1.0, 20.0)
    assert filled().add(1.0, 20.001)


def test_nothing_stands_out_before_there_is_enough_to_compare_with():
    assert not filled(LENGTH - 1).add(1000.0, 1000.0)


def test_only_the_last_steps_count():
    spikes = filled()
    for _ in range(LENGTH):
        spikes.add(100.0, 1.0)
    assert not spikes.add(100.0, 1.0)
    assert spikes.add(101.0, 1.0)  # all alike: any rise stands out


def test_the_rule_is_the_equation_on_random_numbers():
    chance, spikes, seen, found = random.Random(0), Spikes(), [], []
    for _ in range(3 * LENGTH):
        loss, norm = chance.expovariate(1.0), chance.lognormvariate(0.0, 1.5)
        last = seen[-LENGTH:]
        wanted = False
        if len(last) == LENGTH:
            middle = statistics.median(one for one, _ in last)
            deviation = statistics.median(abs(one - middle) for one, _ in last)
            wanted = loss > middle + 6 * deviation or norm > 20 * statistics.median(two for _, two in last)
        found.append(spikes.add(loss, norm))
        assert found[-1] == wanted
        seen.append((loss, norm))
    assert 0 < sum(found) < LENGTH


def test_a_resumed_run_remembers_the_steps_before(tmp_path):
    config = tiny_run(tmp_path)
    train(config, tmp_path / "straight")
    broken_off(config, tmp_path / "resumed", steps=4)
    trainer = Trainer(config, tmp_path / "resumed")
    lines = metrics(tmp_path / "straight", "train")[:4]
    assert list(trainer.spikes._losses) == [line["loss"] for line in lines]
    assert list(trainer.spikes._norms) == [line["grad_norm"] for line in lines]
    trainer.metrics.close()


def test_a_skipped_step_is_not_remembered():
    spikes = Spikes()
    line = {"kind": "train", "skipped": False, "loss": 1.0, "grad_norm": 2.0}
    spikes.reread([line, {"kind": "eval"}, {**line, "skipped": True, "loss": "nan"}])
    assert list(spikes._losses) == [1.0]


def test_spikes_are_recorded_and_counted(tmp_path, monkeypatch):
    class Every(Spikes):
        def add(self, loss, norm):
            super().add(loss, norm)
            return len(self._losses) > 4

    monkeypatch.setattr(trainers, "Spikes", Every)
    train(tiny_run(tmp_path), tmp_path / "run")
    assert [line["spike"] for line in metrics(tmp_path / "run", "train")] == [False] * 4 + [True] * 2
    state = (tmp_path / "run" / "step_6" / "state.json").read_text()
    assert '"spikes": 2' in state
