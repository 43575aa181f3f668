import dataclasses
import json
import re

import pytest

from looplab._config import to_dict
from looplab.data.packing import Packing
from looplab.models.base import build
from looplab.models.folder import save_folder
from looplab.objectives import Needs, NextToken
from looplab.objectives.every_iteration import EveryIteration
from looplab.objectives.exit_gate import ExitGate
from looplab.objectives.lookahead_gate import LookaheadGateLoss
from looplab.objectives.terminal_fixed_point import TerminalFixedPoint
from looplab.recurrence.depth import UniformDepth, Unknown
from looplab.recurrence.gradient import CheckpointApplication, SegmentedDetach, TruncatedBPTT
from looplab.recurrence.halting import HazardGate
from looplab.recurrence.injection import NoInjection
from looplab.recurrence.state_init import FromEmbeds
from looplab.training.config import Evaluation, RunConfig, differences
from looplab.training.optimizer import AdamW
from training.tiny_run import core, tiny_run, with_data


def through_json(config):
    return json.loads(json.dumps(to_dict(config)))


def test_it_survives_the_round_trip(tmp_path):
    for model in (core(), core(trained_depth=UniformDepth(low=2, high=3))):
        config = tiny_run(tmp_path, model=model, gradient=TruncatedBPTT(window=2))
        assert RunConfig.read(through_json(config)) == config


def test_an_unknown_model_gets_a_suggestion(tmp_path):
    data = through_json(tiny_run(tmp_path))
    data["model"]["kind"] = "LopedConfig"
    with pytest.raises(
        KeyError, match=r"Unknown choice 'LopedConfig' for RunConfig.model. Did you mean 'LoopedConfig'\?"
    ):
        RunConfig.read(data)


def test_a_misspelt_key_gets_a_suggestion(tmp_path):
    data = through_json(tiny_run(tmp_path))
    data["model"]["dimm"] = 3
    with pytest.raises(KeyError, match=r"Unknown config key 'dimm' for RunConfig.model. Did you mean 'dim'\?"):
        RunConfig.read(data)


def test_fp16_is_refused(tmp_path):
    data = through_json(tiny_run(tmp_path)) | {"precision": "fp16"}
    with pytest.raises(TypeError, match="RunConfig.precision must be one of 'fp32', 'bf16'. Got 'fp16'."):
        RunConfig.read(data)


def test_changes_are_named_with_both_values(tmp_path):
    old = tiny_run(tmp_path, objective=NextToken(z_loss=0.1))
    new = tiny_run(
        tmp_path, objective=NextToken(z_loss=0.05), optimizer=AdamW(lr=0.5), gradient=TruncatedBPTT(window=7)
    )
    assert list(differences(old, new)) == [
        "objective.z_loss was 0.1, is 0.05",
        "optimizer.lr was 0.01, is 0.5",
        "gradient was FullBPTT(), is TruncatedBPTT(window=7)",
    ]


def test_steps_logging_and_evaluation_may_change(tmp_path):
    old = tiny_run(tmp_path)
    new = dataclasses.replace(old, steps=9, log_every=1, save_every=5, keep=4, evaluation=Evaluation(every=7))
    assert not list(differences(old, new))
    kept = {f.name for f in dataclasses.fields(RunConfig) if f.metadata.get("may_change_on_resume")}
    assert kept == {"steps", "log_every", "save_every", "keep", "keep_every", "state_norms", "evaluation"}


def test_segments_without_a_loss_each_are_refused(tmp_path):
    message = (
        "SegmentedDetach(every=3) needs a loss at iterations 3, 6, ..; NextToken scores only the last. "
        "Use EveryIteration or TruncatedBPTT(window=3)."
    )
    with pytest.raises(ValueError, match="SegmentedDetach") as caught:
        tiny_run(tmp_path, gradient=SegmentedDetach(every=3))
    assert str(caught.value) == message


def test_segments_fit_an_objective_that_scores_every_iteration(tmp_path):
    class Everywhere(NextToken):
        needs = Needs(states="every")

    assert tiny_run(tmp_path, gradient=SegmentedDetach(every=3), objective=Everywhere()).gradient.every == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: tiny_run(p, steps=0), "RunConfig.steps must be at least 1. Got 0."),
        (lambda p: tiny_run(p, clip_norm=0.0), "RunConfig.clip_norm must be positive, or None. Got 0.0."),
        (lambda p: tiny_run(p, seed=-1), r"RunConfig.seed must be from 0 to 2\*\*63 - 1. Got -1."),
        (
            lambda p: tiny_run(p, micro_batches=3),
            r"RunConfig.micro_batches must divide data.packing.rows \(4\). Got 3.",
        ),
        (lambda p: tiny_run(p, threads=0), "RunConfig.threads must be at least 1. Got 0."),
        (lambda p: tiny_run(p, keep_every=0), "RunConfig.keep_every must be at least 1. Got 0."),
        (lambda p: tiny_run(p, model=core(trained_depth=Unknown())), "RunConfig.model.trained_depth must be a law"),
        (
            lambda p: tiny_run(p, model=core(max_positions=8)),
            r"seq_len must be at most model.max_positions \(8\). Got 12",
        ),
        (lambda p: with_data(tiny_run(p), packing=Packing(seq_len=0, rows=4)), "Packing.seq_len must be at least 1"),
        (lambda p: Evaluation(batches=0), "Evaluation.batches must be at least 1. Got 0."),
        (lambda p: Evaluation(depths=(0, 1)), r"Evaluation.depths must be at least 1 application each. Got \(0, 1\)."),
        (lambda p: TruncatedBPTT(window=0), r"^TruncatedBPTT.window must be at least 1. Got 0.$"),
        (
            lambda p: UniformDepth(low=0, high=3),
            "^UniformDepth.low must be at least 1. Got 0. "
            "A model with no iteration is num_steps=0 at evaluation only.$",
        ),
    ],
)
def test_bad_options_are_refused(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path)


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("precision", "fp16", "RunConfig.precision must be one of 'fp32', 'bf16'. Got 'fp16'."),
        ("compile", "yes", "RunConfig.compile must be one of 'auto', True, False. Got 'yes'."),
        ("depth_per", "row", "RunConfig.depth_per must be one of 'batch', 'micro_batch', 'sequence'. Got 'row'."),
        ("threads", "all", "RunConfig.threads must be a number or 'auto'. Got 'all'."),
    ],
)
def test_an_unknown_word_is_refused(tmp_path, name, word, message):
    config = tiny_run(tmp_path)
    # Past the type checks of the test run, which users do not have.
    object.__setattr__(config, name, word)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        config.__post_init__()
    written = {**through_json(tiny_run(tmp_path)), name: word}
    with pytest.raises(TypeError, match=rf"^RunConfig.{name} must be .* Got '{word}'.$"):
        RunConfig.read(written)


def test_a_config_of_no_model_is_refused(tmp_path):
    with pytest.raises(KeyError, match="No registered model has a config of type int"):
        tiny_run(tmp_path, model=3)


def test_a_window_on_a_core_without_injection_is_refused_unless_allowed(tmp_path):
    model = core(trained_depth=UniformDepth(low=2, high=5), injection=NoInjection(), state_init=FromEmbeds())
    message = (
        "TruncatedBPTT(window=4) on a core without injection leaves 'embed' without gradient when num_steps > 4. "
        "Use FullBPTT, add an injection, or set allow_untrained_prelude=True."
    )
    for gradient in (TruncatedBPTT(window=4), CheckpointApplication(inner=TruncatedBPTT(window=4))):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            tiny_run(tmp_path, model=model, gradient=gradient)
        tiny_run(tmp_path, model=model, gradient=gradient, allow_untrained_prelude=True)
    tiny_run(tmp_path, model=model, gradient=TruncatedBPTT(window=5))


def test_segments_are_for_objectives_that_score_every_state(tmp_path):
    tiny_run(tmp_path, gradient=SegmentedDetach(every=3), objective=EveryIteration())
    with pytest.raises(ValueError, match="TerminalFixedPoint scores only the last. Use EveryIteration"):
        tiny_run(tmp_path, gradient=SegmentedDetach(every=3), objective=TerminalFixedPoint())


def test_a_model_that_the_objective_cannot_train_is_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape("ExitGate: model 'looped' has no halt().")):
        tiny_run(tmp_path, model=core(), objective=ExitGate())
    gated = core(halt=HazardGate(), trained_depth=UniformDepth(low=2, high=3))
    count = len(list(build(gated, device="meta").parameters())) - 2
    message = f'ExitGate expects a frozen language model; {count} tensors require grad. Set train_only=("gate",).'
    with pytest.raises(ValueError, match="ExitGate") as caught:
        tiny_run(tmp_path, model=gated, objective=ExitGate())
    assert str(caught.value) == message
    config = tiny_run(tmp_path, model=gated, objective=ExitGate(), train_only=("gate",))
    trained = {name for name, p in config.build_model().named_parameters() if p.requires_grad}
    assert trained == {"gate.weight", "gate.bias"}
    assert RunConfig.read(through_json(config)) == config


def test_train_only_names_parameters(tmp_path):
    with pytest.raises(
        ValueError, match="train_only must name parameters of the model. Got 'cord'. Did you mean 'core'"
    ):
        tiny_run(tmp_path, train_only=("cord",), model=core())
    with pytest.raises(ValueError, match="train_only must name"):
        tiny_run(tmp_path, train_only=("core", "gate"))


def test_a_gate_beside_the_model_is_not_a_run(tmp_path):
    gated = core(halt=HazardGate())
    with pytest.raises(ValueError, match="RunConfig.objective must train the model. Got LookaheadGateLoss"):
        tiny_run(tmp_path, model=gated, objective=LookaheadGateLoss())


def test_a_run_begins_at_the_weights_of_a_folder(tmp_path):
    parent = build(core(), seed=7)
    save_folder(tmp_path / "parent", parent)
    same = tiny_run(tmp_path, model=core(), start=str(tmp_path / "parent")).build_model()
    assert all((a == b).all() for a, b in zip(same.parameters(), parent.parameters(), strict=True))
    gated = core(halt=HazardGate())
    config = tiny_run(tmp_path, model=gated, start=str(tmp_path / "parent"), train_only=("gate",))
    made = config.build_model()
    assert all((p == dict(made.named_parameters())[name]).all() for name, p in parent.named_parameters())
    fresh = dict(config.build_model(resumed=True).named_parameters())  # the checkpoint's weights come later
    assert not (fresh["embedding.weight"] == dict(made.named_parameters())["embedding.weight"]).all()
    with pytest.raises(ValueError, match=r"2 tensors missing \(gate.bias, ...\)"):
        tiny_run(tmp_path, model=gated, start=str(tmp_path / "parent")).build_model()
    with pytest.raises(FileNotFoundError, match=r"nowhere has no config.json"):
        tiny_run(tmp_path, start=str(tmp_path / "nowhere")).build_model()
