"""Folders that leave questions open: who answers them, what a recording decides, and where the answer is told."""

import itertools
import json
import re

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers

from looplab.audit.result import AuditResult
from looplab.cli import audit, exit_codes, main
from looplab.interop import export, load
from looplab.interop.assume import RECORDED, answer, written
from looplab.interop.load_check import load_check
from looplab.models.base import build
from looplab.models.ifm import OPEN, RECIPES, TINY, family
from looplab.models.published import PUBLISHED
from looplab.recurrence.loop import forward
from reference import ifm as twin
from tolerances import PUBLISHED_OUTPUTS

READINGS = [dict(zip(OPEN, answers, strict=True)) for answers in itertools.product(*OPEN.values())]
ARMS = {
    "raw": {**RECIPES["tiny-ifm-ouro"][1], **TINY},
    "huginn": {**RECIPES["tiny-ifm-split-hl"][1], **TINY},
}

every_reading = pytest.mark.parametrize("reading", READINGS, ids=written)


def checkpoint(tmp_path, arm="raw", *, dtype=torch.bfloat16):
    """A folder as the authors write it: sections model and tokenizer, an index, tensors under their names."""
    read_as = family(READINGS[0])
    model = build(read_as.config({"model": ARMS[arm]}, {}), seed=5)
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    tensors = read_as.key_map(model.config).export(model.state_dict())
    folder, file = tmp_path / arm, "model-00001-of-00001.safetensors"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": ARMS[arm], "tokenizer": {"path": "tokenizer"}}))
    save_file({name: tensor.detach().to(dtype) for name, tensor in tensors.items()}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    return folder


def record(folder, reading, *, last=False, arm="raw", noise=True, seq=6):
    """Logits of the original under a reading, beside the weights."""
    m = ARMS[arm]
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, m["vocab_size"], (2, seq), generator=generator)
    z = torch.randn(2, seq, m["model_dim"], generator=generator)
    (file,) = folder.glob("model-*.safetensors")
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    logits = twin.logits(m, tensors, ids, z * m["model_dim"] ** -0.5, **reading)
    recorded = {"tokens": ids, "logits": logits[:, -1].contiguous() if last else logits}
    save_file(recorded | ({"noise": z} if arm == "huginn" and noise else {}), folder / RECORDED)
    return ids, logits


def refused(message, *arguments, **options):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(*arguments, **options)


def test_without_an_answer_nothing_is_opened(tmp_path):
    refused(
        "load: assume must answer what files of ifm leave open: gate (fc1 or fc3), rope (interleaved or half). "
        "Got None. Pass assume='gate=fc1,rope=interleaved', as the published code computes, or put recorded logits "
        "in logits.safetensors.",
        checkpoint(tmp_path),
    )


@pytest.mark.parametrize("wrong", ["gate=fc1", "gate=fc2,rope=half", "gate=fc1,gate=fc1,rope=half", "fc1,half", ""])
def test_an_assumption_answers_every_question_once(tmp_path, wrong):
    told = f"leave open: gate (fc1 or fc3), rope (interleaved or half). Got {wrong!r}."
    refused(told, checkpoint(tmp_path), assume=wrong)


@every_reading
def test_an_assumption_is_followed_and_marked(tmp_path, reading):
    folder = checkpoint(tmp_path)
    ids, logits = record(folder, reading)
    (folder / RECORDED).unlink()
    loaded = load(folder, assume=written(reading))
    with torch.no_grad():
        torch.testing.assert_close(forward(loaded.model, ids).logits, logits, **PUBLISHED_OUTPUTS)
    mark = f"Read as {written(reading)} by assumption, which nothing has checked."
    assert (loaded.facts["reading"], loaded.model.notes[0]) == (mark, mark)
    assert set(PUBLISHED["ifm"].notes) < set(loaded.model.notes)


@every_reading
@pytest.mark.parametrize("arm", ARMS)
def test_a_recording_decides_between_the_readings(tmp_path, reading, arm):
    folder = checkpoint(tmp_path, arm)
    record(folder, reading, arm=arm, last=reading["rope"] == "half")
    loaded = load(folder)
    assert loaded.facts["reading"].startswith(f"Read as {written(reading)}, which fits {RECORDED} (relative errors: ")
    assert loaded.model.notes[0] == loaded.facts["reading"]
    assert loaded.model.state_dict().keys() == load(folder, assume=written(reading)).model.state_dict().keys()
    for other in READINGS:
        assert written(other) in loaded.facts["reading"]


def test_an_assumption_that_the_recording_contradicts_is_refused(tmp_path):
    folder = checkpoint(tmp_path)
    record(folder, READINGS[0])
    refused(f"must fit one reading, with a relative error up to 0.06. Got {written(READINGS[1])} 0.", folder,
            assume=written(READINGS[1]))  # fmt: skip
    assert "which fits" in load(folder, assume=written(READINGS[0])).facts["reading"]


def test_a_recording_that_no_reading_fits_is_refused(tmp_path):
    folder = checkpoint(tmp_path)
    ids, logits = record(folder, READINGS[0])
    save_file({"tokens": ids, "logits": logits.roll(1, dims=-1)}, folder / RECORDED)
    refused(f"load: {RECORDED} of {folder} must fit one reading", folder)


def test_a_recording_that_several_readings_fit_is_refused(tmp_path):
    folder = checkpoint(tmp_path)
    record(folder, READINGS[0], seq=1)  # one token sees itself alone, so rotary makes no difference
    refused(f"load: {RECORDED} of {folder} must fit one reading", folder)
    assert "gate=fc1" in load(folder, assume="rope=half, gate=fc1").facts["reading"]


def test_recordings_that_cannot_be_compared_are_named(tmp_path):
    folder = checkpoint(tmp_path, "huginn")
    ids, logits = record(folder, READINGS[0], arm="huginn", noise=False)
    refused("logits.safetensors must hold noise for a model with a random start. Got none. Add standard normal", folder)
    save_file({"tokens": ids}, folder / RECORDED)
    refused("logits.safetensors must hold tokens and logits. Got tokens. Add logits.", folder)
    folder = checkpoint(tmp_path)
    save_file({"tokens": ids, "logits": logits[:, :4].contiguous()}, folder / RECORDED)
    refused("logits of logits.safetensors must have shape [2, 6, 64]. Got [2, 4, 64].", folder)


@every_reading
def test_an_export_gives_back_the_bytes_of_the_file(tmp_path, reading):
    folder = checkpoint(tmp_path)
    export(load(folder, assume=written(reading)), tmp_path / "out")
    for path in folder.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_mixture_is_refused_before_anything_is_asked(tmp_path):
    folder = checkpoint(tmp_path)
    (file,) = folder.glob("model-*.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    save_file(load_file(file) | {"layers.0.moe.router.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    refused("load: layers of an ifm file must be dense. Got layers.0.moe.router.weight. Mixture checkpoints are not",
            folder)  # fmt: skip
    assert "load: layers of an ifm file must be dense" in load_check(folder, assume="gate=fc1,rope=half").problems[0]


def test_a_look_without_opening_says_what_is_open_and_what_is_assumed(tmp_path):
    folder = checkpoint(tmp_path)
    found = load_check(folder)
    assert (found.family, found.loads, len(found.problems)) == ("ifm", False, 1)
    assert found.problems[0].startswith("load: assume must answer what files of ifm leave open: gate (fc1 or fc3), ")
    assert found.parameters == 19_168  # names and sizes are known all the same
    found = load_check(folder, assume="gate=fc3,rope=half")
    assert found.loads
    assert "Read as gate=fc3,rope=half by assumption, which nothing has checked." in found.notes
    record(folder, READINGS[0])
    found = load_check(folder)
    assert found.loads
    assert f"Whether {RECORDED} fits is found when the model is opened." in found.notes


def test_commands_take_the_assumption_and_tell_it(tmp_path, capsys):
    folder = checkpoint(tmp_path)
    assert main(["describe", str(folder)]) == exit_codes.MODEL
    told = capsys.readouterr().err
    assert "--assume must answer what files of ifm leave open" in told
    assert "Pass --assume 'gate=fc1,rope=interleaved'" in told
    assert main(["describe", str(folder), "--assume", "gate=fc1,rope=half", "--json"]) == exit_codes.DONE
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes[0] == "Read as gate=fc1,rope=half by assumption, which nothing has checked."
    assert main(["load-check", str(folder), "--assume", "gate=fc1,rope=half"]) == exit_codes.DONE
    assert "gate=fc1,rope=half by assumption" in capsys.readouterr().out


@pytest.mark.slow
def test_an_audit_of_a_folder_ends_in_a_verdict_and_carries_the_assumption(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(audit, "write_report", lambda result, folder, beside: folder)  # drawing is tested in report/
    folder = checkpoint(tmp_path)
    (folder / "tokenizer").mkdir()  # where the authors put it
    letters = {c: i for i, c in enumerate("?abcdefghijklmnopqrstuvwxyz0123456789 ")}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    text = tmp_path / "m.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"item {i} has {i * 7919 % 1000}"}) for i in range(60)))
    argv = [str(folder), "--data", f"math={text}", "--replicates", "1000", "--max-tokens", "16", "--quiet"]
    argv += ["--grid", "1,2", "--probes", "temperature", "--controls", "none", "--init-seeds", "1", "--control", "none"]
    argv += ["--out", str(tmp_path / "out")]
    assert main(["audit", *argv, "--assume", "gate=fc1,rope=half"]) == exit_codes.DONE
    assert "not identifiable (the block has no iteration index)" in capsys.readouterr().out
    result = AuditResult.load(tmp_path / "out")
    assert result.model.notes[0] == "Read as gate=fc1,rope=half by assumption, which nothing has checked."
    # The weights are the same, the function is not: the numbers in the folder are not those of this reading.
    assert main(["audit", *argv, "--assume", "gate=fc1,rope=interleaved"]) == exit_codes.BUSY
    assert "notes" in capsys.readouterr().err


def test_an_assumption_where_nothing_is_open_is_refused(tmp_path):
    huginn = PUBLISHED["huginn"]
    assert answer(huginn, tmp_path) is huginn
    with pytest.raises(ValueError, match="assume must be None: files of huginn leave nothing open"):
        answer(huginn, tmp_path, "gate=fc1")
    refused("load: assume must be None for a folder of no published family. Got 'gate=fc1'.", "text-core",
            assume="gate=fc1")  # fmt: skip
