"""`looplab retrofit`: what it prints, writes, and refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file

from interop.dense_sources import LAYERS, saved, write
from looplab import load
from looplab.cli import exit_codes, main
from looplab.cli.retrofit import LAWS, _law
from looplab.recurrence.boundary import OwnNorm
from looplab.recurrence.depth import PoissonLognormal, UniformDepth, Unknown
from looplab.recurrence.halting import HazardGate
from looplab.recurrence.state_init import Normal

QUICK = ("--tokens", "100", "--quiet")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A llama whose layers 3 and 4 do next to nothing."""
    folder = tmp_path_factory.mktemp("source")
    model = saved(folder, "llama")
    with torch.no_grad():
        for layer in (3, 4):
            model.model.layers[layer].self_attn.o_proj.weight.mul_(1e-3)
            model.model.layers[layer].mlp.down_proj.weight.mul_(1e-3)
    write(folder, model)
    return folder


def everything(folder):
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_planted_run_is_chosen_and_the_model_opens(planted, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["retrofit", str(planted), "--core", "auto:2", "--prelude", "1", "--coda", "1", "--out", str(out), *QUICK]
    assert main(command) == exit_codes.DONE
    text = capsys.readouterr().out
    assert f"{LAYERS} layers of llama as 1-2-1; layers dropped: 1-2." in text
    assert "runs of 2 layers, least angular distance first (100 tokens of builtin:train)" in text
    assert f"next: looplab audit {out}" in text
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "figures", "model.safetensors", "report.html", "retrofit.json", "tables.tex", "tokenizer.json",
    ]  # fmt: skip
    loaded = load(str(out))
    assert loaded.facts["trained"]["retrofit"]["cut"]["core"] == [[3], [4]]
    assert loaded.tokenizer.bos == 1
    record = json.loads((out / "retrofit.json").read_bytes())
    assert record["distance"]["tokens"] == 100
    stored = load_file(out / "model.safetensors")
    assert record["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert f"{record['parameters']:,} (source {record['source_parameters']:,})" in text
    assert main(["describe", str(out)]) == exit_codes.DONE
    assert main(command) == exit_codes.BUSY
    assert "OUT must be a new or empty folder" in capsys.readouterr().err


def test_a_dry_run_says_the_same_and_writes_nothing(planted, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = everything(planted)
    command = ["retrofit", str(planted), "--core", "auto:2", "--prelude", "1", "--coda", "1", *QUICK]
    assert main([*command, "--out", str(tmp_path / "out"), "--dry-run"]) == exit_codes.DONE
    dry = capsys.readouterr().out
    assert dry.endswith("Dry run: nothing was written.\n")
    assert everything(planted) == before and not list(tmp_path.iterdir())
    assert main([*command, "--out", str(tmp_path / "out")]) == exit_codes.DONE
    wet = capsys.readouterr().out
    assert dry.splitlines()[:-1] == wet.splitlines()[: len(dry.splitlines()) - 1]


def test_options_reach_the_model(planted, tmp_path):
    out = tmp_path / "out"
    command = ["retrofit", str(planted), "--core", "1:5", "--init", "average:2", "--injection", "concat-normal"]
    command += ["--state-init", "normal", "--boundary", "own-norm", "--halt", "hazard", "--num-steps", "3"]
    command += ["--trained-depth", "uniform:1:4", "--dtype", "bfloat16", "--tokens", "0", "--out", str(out)]
    assert main(command) == exit_codes.DONE
    config = load(str(out)).model.config
    assert (config.blocks, config.envelope.prelude, config.envelope.coda) == ((2,), 1, 1)
    assert config.injection.init == "normal" and config.state_init == Normal(std="like_init")
    assert (config.boundary, config.halt) == (OwnNorm(), HazardGate())
    assert (config.order.default_steps, config.trained_depth) == (3, UniformDepth(low=1, high=4))
    assert load_file(out / "model.safetensors")["core.0.attn.q.weight"].dtype == torch.bfloat16
    record = json.loads((out / "retrofit.json").read_bytes())
    assert record["distance"] is None and not (out / "figures").exists()


def test_another_text_is_measured_and_named(planted, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("some words to measure on " * 8)
    command = ["retrofit", str(planted), "--core", "2:3", "--text", str(tmp_path / "mine.txt"), "--dry-run", "--json"]
    assert main(command) == exit_codes.DONE
    table = json.loads(capsys.readouterr().out)["distance"]
    assert table["text"] == str(tmp_path / "mine.txt") and table["tokens"] == 64  # its longest context


def test_json_is_the_record(planted, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["retrofit", str(planted), "--core", "2:4", "--out", str(out), "--json", *QUICK]) == exit_codes.DONE
    assert json.loads(capsys.readouterr().out) == json.loads((out / "retrofit.json").read_bytes())


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--core", "2:4", "--coda", "5"], exit_codes.USAGE, "core 2:4 and coda 5 overlap; the model has 6 layers"),
        (["--core", "2-4"], exit_codes.USAGE, "retrofit: --core must be A:B, such as 10:18"),
        (["--core", "auto:7"], exit_codes.USAGE, "retrofit: prelude 0, core auto:7 and coda 0 overlap"),
        (["--core", "auto:2", "--tokens", "0"], exit_codes.USAGE, "--tokens must be at least 1 with --core auto:N"),
        (["--core", "2:4", "--init", "mean:2"], exit_codes.USAGE, "--init must be copy or average:N"),
        (["--core", "2:4", "--trained-depth", "fixed:1:2"], exit_codes.USAGE, "--trained-depth must be fixed:N, "),
        (["--core", "2:4", "--num-steps", "0"], exit_codes.USAGE, "--num-steps must be at least 1. Got 0"),
        (["--core", "2:4", "--text", "none.txt"], exit_codes.DATA, "--text none.txt: no such file"),
        (["--core", "2:4", "--tokenizer", "bytes"], exit_codes.DATA, "--tokenizer must have at most 90 ids"),
        (["--core", "2:4", "--state-init", "zeros", "--injection", "add-zero"], exit_codes.USAGE, "must be embeds"),
    ],
)  # fmt: skip
def test_refusals_are_one_line_and_a_code(planted, options, code, said, tmp_path, capsys):
    assert main(["retrofit", str(planted), *options, "--out", str(tmp_path / "out"), "--quiet"]) == code
    text = capsys.readouterr().err
    assert said in text and text.count("\n") == 1 and text.startswith("retrofit: ")
    assert not (tmp_path / "out").exists()


def test_the_model_and_the_folder_are_named_where_they_are_missing(planted, tmp_path, capsys):
    assert main(["retrofit", "text-core", "--core", "0:1", "--dry-run"]) == exit_codes.MODEL
    assert "CHECKPOINT must be a dense model of llama, mistral, olmo2" in capsys.readouterr().err
    assert main(["retrofit", "text-denze", "--core", "0:1", "--dry-run"]) == exit_codes.MODEL
    assert "Did you mean 'text-dense'" in capsys.readouterr().err
    assert main(["retrofit", str(planted), "--core", "0:1"]) == exit_codes.USAGE
    assert "--out must be a folder. Got none" in capsys.readouterr().err


def test_a_source_without_a_tokenizer_needs_one_named(tmp_path, capsys):
    saved(tmp_path / "source", "qwen3", tokenizer=False, vocab_size=260)
    command = ["retrofit", str(tmp_path / "source"), "--core", "2:4", "--out", str(tmp_path / "out"), "--quiet"]
    assert main(command) == exit_codes.USAGE
    assert "--tokenizer must be given where CHECKPOINT has no tokenizer.json" in capsys.readouterr().err
    assert main([*command, "--tokenizer", "bytes", "--tokens", "60"]) == exit_codes.DONE
    assert load(str(tmp_path / "out")).tokenizer.name == "bytes"


def test_every_law_of_depth_has_a_form():
    assert _law("poisson-lognormal:8:64") == PoissonLognormal(rate=8.0, max_steps=64)
    assert _law("unknown") == Unknown()
    forms = {"fixed": "fixed:2", "uniform": "uniform:1:3", "poisson": "poisson:4:16"}
    assert {type(_law(form)).__name__ for form in forms.values()} == {"FixedDepth", "UniformDepth", "PoissonDepth"}
    assert LAWS.keys() == {*forms, "poisson-lognormal", "unknown"}
