import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from looplab.training.average import WeightAverage
from looplab.training.config import RunConfig
from looplab.training.trainer import Trainer, train
from tolerances import EXACT
from training.tiny_run import broken_off, metrics, tiny_run


def net():
    made = nn.Linear(2, 2)
    made.register_buffer("shift", torch.zeros(2))
    made.bias.requires_grad_(False)
    return made


def test_the_average_is_the_equation_of_trained_parameters_alone():
    made = net()
    average = WeightAverage(made, 0.9)
    assert list(average.tensors) == ["weight"]
    wanted = made.weight.detach().clone()
    for value in (1.0, -2.0, 5.0):
        with torch.no_grad():
            made.weight.fill_(value)
        average.update()
        wanted = 0.9 * wanted + 0.1 * value
    torch.testing.assert_close(average.tensors["weight"], wanted)


def test_the_average_is_kept_in_float32_and_leaves_the_weights_as_they_were():
    made = net().to(torch.bfloat16)
    average, own = WeightAverage(made, 0.99), made.weight.detach().clone()
    assert average.tensors["weight"].dtype == torch.float32
    average.tensors["weight"].fill_(0.5)

    def fail():
        with average.in_place():
            assert (made.weight == 0.5).all()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    torch.testing.assert_close(made.weight.detach(), own, **EXACT)


def test_evaluation_and_the_final_model_have_the_averages_and_training_does_not_notice(tmp_path):
    with_average, without = (tiny_run(tmp_path, ema=ema) for ema in (0.5, None))
    record = train(with_average, tmp_path / "a")
    train(without, tmp_path / "b")
    assert metrics(tmp_path / "a", "train") == metrics(tmp_path / "b", "train")
    assert metrics(tmp_path / "a", "eval") != metrics(tmp_path / "b", "eval")
    step, final = tmp_path / "a" / "step_6", tmp_path / "a" / "model"
    own, averages, last = (
        load_file(step / "model.safetensors"),
        load_file(step / "ema.safetensors"),
        load_file(final / "model.safetensors"),
    )
    assert not any(torch.equal(own[name], averages[name]) for name in averages)
    for name, tensor in averages.items():
        torch.testing.assert_close(last[name], tensor, **EXACT)
    assert json.loads((final / "config.json").read_text())["trained"]["ema"] == 0.5
    trainer = Trainer(with_average, tmp_path / "a")
    with trainer.average.in_place():
        assert trainer.held_out.evaluate(trainer.step.model).loss == record.loss
    trainer.metrics.close()


def test_a_resumed_run_goes_on_with_its_average(tmp_path):
    config = tiny_run(tmp_path, ema=0.9)
    train(config, tmp_path / "whole")
    broken_off(config, tmp_path / "part", steps=4)
    train(config, tmp_path / "part")
    one, two = (load_file(tmp_path / name / "step_6" / "ema.safetensors") for name in ("whole", "part"))
    torch.testing.assert_close(one, two, **EXACT)


@pytest.mark.parametrize("ema", [0.0, 1.0, -0.5])
def test_a_decay_that_averages_nothing_is_refused(tmp_path, ema):
    with pytest.raises(ValueError, match=f"RunConfig.ema must be between 0 and 1, or None. Got {ema}. 0.999 is usual."):
        tiny_run(tmp_path, ema=ema)
    assert RunConfig.__dataclass_fields__["ema"].default is None
