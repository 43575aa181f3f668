"""Folders of published checkpoints: what opens, what is refused and how, what comes back, and what memory it takes."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers

from looplab.audit.result import AuditResult
from looplab.cli import audit as command
from looplab.cli import exit_codes, main
from looplab.interop import export, load
from looplab.interop.published import open_published
from looplab.models.base import PRESETS, build
from looplab.models.folder import save_folder
from looplab.models.published import PUBLISHED, assemble
from source import ROOT
from tolerances import EXACT

GOLDEN = ROOT / "tests" / "golden"
HUGINN, LLAMA, OLMO = GOLDEN / "huginn" / "full", GOLDEN / "retrofit" / "llama", GOLDEN / "retrofit" / "olmo"
DENSE = GOLDEN / "retrofit" / "dense"
FOLDERS = sorted({path.parent for path in GOLDEN.rglob("weights.safetensors")} - {DENSE})
"""Recorded checkpoints of published families."""
MINE = {"huginn": HUGINN, "mqa": HUGINN.parent / "mqa", "llama": LLAMA, "olmo": OLMO}

every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(GOLDEN)))


def settings_of(folder):
    return json.loads((folder / "config.json").read_bytes())


def checkpoint(tmp_path, source=HUGINN, *, facts=None, tensors=None, file="model.safetensors"):
    """A folder with the settings and weights of a recorded model, some of them changed."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings_of(source) | (facts or {})))
    save_file(load_file(source / "weights.safetensors") | (tensors or {}), folder / file)
    return folder


def sharded(tmp_path, source=HUGINN, count=3):
    """The same in several files that an index names, tensors dealt out in turn."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    tensors = load_file(source / "weights.safetensors")
    files = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    homes = {name: files[index % count] for index, name in enumerate(tensors)}
    for file in files:
        part = {name: tensor for name, tensor in tensors.items() if homes[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return folder


def expected(source=HUGINN, family="huginn"):
    return assemble(PUBLISHED[family], settings_of(source), load_file(source / "weights.safetensors")).state_dict()


def refused(kind, text, path, **options):
    with pytest.raises(kind) as caught:
        load(path, **options)
    message = caught.value.args[0]
    assert text in message, message
    return message


def test_every_family_has_a_recorded_folder_which_names_it():
    # Of ifm no file was recorded; tests/models/test_ifm.py and tests/interop/test_assume.py make theirs.
    assert {load(folder).source.family for folder in FOLDERS} == set(PUBLISHED) - {"ifm"}


@every_folder
def test_export_restores_the_files_byte_by_byte(folder, tmp_path):
    loaded = load(folder)
    export(loaded, tmp_path / "again")
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["config.json", "weights.safetensors"]
    for name in ("config.json", "weights.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    again = load(tmp_path / "again").model.state_dict()
    torch.testing.assert_close(again, loaded.model.state_dict(), **EXACT)


@pytest.mark.parametrize("file", ["model.safetensors", "weights.safetensors"])
def test_a_folder_opens_by_its_settings(tmp_path, file):
    folder = checkpoint(tmp_path, file=file)
    save_file({"other": torch.zeros(2)}, folder / "optimizer.safetensors")  # not of the model, not read
    loaded = load(folder)
    assert loaded.facts == settings_of(HUGINN)
    assert (loaded.source.family, loaded.name, loaded.folder) == ("huginn", str(folder), folder)
    assert loaded.tokenizer is None and loaded.control is None
    assert not loaded.model.training and loaded.model.reference == PUBLISHED["huginn"].reference
    torch.testing.assert_close(loaded.model.state_dict(), expected(), **EXACT)


def test_a_shared_model_type_is_told_apart_by_the_tensors():
    assert {settings_of(folder)["model_type"] for folder in MINE.values()} == {"huginn_raven"}
    assert [load(folder).source.family for folder in MINE.values()] == ["huginn", "huginn", "retrofit", "retrofit"]


def test_without_a_model_type_the_tensors_name_the_family(tmp_path):
    folder = checkpoint(tmp_path, OLMO)
    facts = settings_of(OLMO)
    del facts["model_type"]
    (folder / "config.json").write_text(json.dumps(facts))
    assert load(folder).source.family == "retrofit"


def test_shards_are_those_of_the_index_and_come_back_as_they_were(tmp_path):
    folder = sharded(tmp_path)
    save_file({"stray": torch.zeros(1)}, folder / "model.safetensors")  # the index wins
    loaded = load(folder)
    torch.testing.assert_close(loaded.model.state_dict(), expected(), **EXACT)
    export(loaded, tmp_path / "again")
    files = {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert {path.name for path in (tmp_path / "again").iterdir()} == files
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_wrappers_around_names_are_read_and_come_back(tmp_path):
    folder = checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped, folder / "model.safetensors")
    loaded = load(folder)
    torch.testing.assert_close(loaded.model.state_dict(), expected(), **EXACT)
    export(loaded, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == wrapped.keys()
    torch.testing.assert_close(again, wrapped, **EXACT)


def test_a_stored_tie_is_checked_and_comes_back(tmp_path):
    table = load_file(HUGINN / "weights.safetensors")["transformer.wte.weight"]
    folder = checkpoint(tmp_path, tensors={"lm_head.weight": table.clone()})
    loaded = load(folder)
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.embedding.weight.data_ptr()
    export(loaded, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_tie_that_does_not_hold_is_refused_unless_it_is_denied(tmp_path):
    table = load_file(HUGINN / "weights.safetensors")["transformer.wte.weight"]
    other = table.clone()
    other[3, 5] += 0.31
    folder = checkpoint(tmp_path, tensors={"lm_head.weight": other})
    message = refused(ValueError, "load: config says tie_embeddings but lm_head.weight and transformer.wte.", folder)
    assert message.endswith("differ (max 0.31). Pass tie=False or fix the file")
    untied = load(folder, tie=False).model
    torch.testing.assert_close(untied.lm_head.weight.detach(), other, **EXACT)
    torch.testing.assert_close(untied.embedding.weight.detach(), table, **EXACT)


def test_a_denied_tie_needs_the_other_matrix(tmp_path):
    folder = checkpoint(tmp_path, facts={"tie_embeddings": False})
    refused(ValueError, "load: 1 tensor missing (lm_head.weight)", folder)
    assert load(folder, tie=True).model.config.head.tied


@pytest.mark.parametrize(("dtype", "type_"), [("bfloat16", torch.bfloat16), ("float64", torch.float64)])
def test_floating_tensors_are_cast(dtype, type_):
    model = load(HUGINN, dtype=dtype).model
    assert {tensor.dtype for tensor in model.state_dict().values()} == {type_}
    torch.testing.assert_close(model.final_norm.weight.detach(), expected()["final_norm.weight"].to(type_), **EXACT)


def test_a_bfloat16_file_comes_back_from_a_float32_model(tmp_path):
    halved = {name: tensor.bfloat16() for name, tensor in load_file(LLAMA / "weights.safetensors").items()}
    folder = checkpoint(tmp_path, LLAMA, tensors=halved)
    loaded = load(folder)
    assert {tensor.dtype for tensor in loaded.model.state_dict().values()} == {torch.float32}
    export(loaded, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_what_training_changed_is_exported(tmp_path):
    loaded = load(HUGINN)
    with torch.no_grad():
        loaded.model.core[1].attn.k.weight += 1
    export(loaded, tmp_path)
    before, after = (load_file(f / "weights.safetensors") for f in (HUGINN, tmp_path))
    fused = "transformer.core_block.1.attn.Wqkv.weight"
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [fused]
    assert torch.equal(after[fused][32:64], before[fused][32:64] + 1)
    assert torch.equal(after[fused][:32], before[fused][:32]) and torch.equal(after[fused][64:], before[fused][64:])


def test_the_model_owns_its_memory(tmp_path):
    """Nothing of it is still the mapped file, which may change or go away."""
    folder = checkpoint(tmp_path)
    model = load(folder).model
    size = (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * size)
    torch.testing.assert_close(model.state_dict(), expected(), **EXACT)


def test_a_rounded_rotary_table_is_told(tmp_path):
    table = load_file(HUGINN / "weights.safetensors")["freqs_cis"]
    folder = checkpoint(tmp_path, tensors={"freqs_cis": table.bfloat16()})
    with pytest.warns(UserWarning, match=r"freqs_cis of the file \(bfloat16\) differs .* by up to 1\.9e-03"):
        load(folder)


def test_settings_may_be_plain_yaml(tmp_path):
    folder = checkpoint(tmp_path)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "all_config.yaml").write_text(yaml.safe_dump(facts))
    family = dataclasses.replace(PUBLISHED["huginn"], config_files=("config.json", "all_config.yaml"))
    model, told, source = open_published(folder, family)
    assert told == facts and source.settings[0] == "all_config.yaml"
    torch.testing.assert_close(model.state_dict(), expected(), **EXACT)
    (folder / "all_config.yaml").write_text("a: !!python/object:os.system {}")
    with pytest.raises(ValueError, match=r"all_config\.yaml is not plain YAML"):
        open_published(folder, family)


def test_a_tokenizer_of_the_folder_is_read(tmp_path):
    folder = checkpoint(tmp_path)
    letters(97).save(str(folder / "tokenizer.json"))
    assert load(folder).tokenizer.encode("ab") == [1, 2]


def test_pickled_weights_name_the_way_out(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    file = folder / "pytorch_model.bin"
    assert refused(ValueError, "is a pickle", folder) == (
        f"load: {file} is a pickle; looplab does not unpickle. Convert it once: looplab convert {file} OUT"
    )


def test_a_folder_without_settings_or_weights_says_what_it_has(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "config.json").unlink()
    refused(FileNotFoundError, f"load: {folder} has no config.json. Found: model.safetensors", folder)
    refused(FileNotFoundError, f"load: {folder} has no config.json. Found", folder, family="huginn")
    (folder / "model.safetensors").unlink()
    shutil.copyfile(HUGINN / "config.json", folder / "config.json")
    refused(FileNotFoundError, f"load: {folder} has no *.safetensors. Found: config.json", folder)


def test_a_truncated_file_says_by_how_much(tmp_path):
    folder = checkpoint(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:100_000])
    message = refused(ValueError, "model.safetensors is truncated (header says ", folder)
    assert message.endswith("kB, file has 100.0 kB). Download it again")


def test_a_missing_shard_is_named(tmp_path):
    folder = sharded(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(FileNotFoundError, "has no model-00002-of-00003.safetensors, which model.safetensors.index.json", folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = sharded(tmp_path)
    tensors = load_file(folder / "model-00002-of-00003.safetensors")
    first = load_file(folder / "model-00001-of-00003.safetensors")
    name = min(first)
    save_file(tensors | {name: first[name]}, folder / "model-00002-of-00003.safetensors")
    refused(ValueError, f"must hold {name} once. Got it in model-00001-of-00003.safetensors and", folder)


def test_an_index_never_leads_out_of_the_folder(tmp_path):
    folder = sharded(tmp_path)
    outside = tmp_path / "outside.safetensors"
    save_file({"a": torch.zeros(1)}, outside)
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(FileNotFoundError, "has no ../outside.safetensors", folder)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"n_layers_in_coda": 3}, "load: 9 tensors missing (transformer.coda.2.attn.Wqkv.weight, "),
        ({"n_layers_in_coda": 1}, "load: 9 tensors unexpected (transformer.coda.1.attn.Wqkv.weight, "),
        (
            {"n_layers_in_prelude": 3, "n_layers_in_coda": 1},
            "transformer.prelude.2.norm_3.weight, ...), 9 unexpected (transformer.coda.1.attn.Wqkv.weight, ",
        ),
        (
            {"vocab_size": 96, "padded_vocab_size": 96},
            "load: 1 tensor of wrong shape (transformer.wte.weight: file [97, 32], model [96, 32])",
        ),
        ({"num_key_value_heads": 2, "qk_bias": False}, "8 tensors unexpected (transformer.coda.0.attn.qk_bias, "),
        ({"n_embd": "32"}, "load: config.json must have a whole number as n_embd. Got '32'."),
        ({"injection_type": "add"}, "load: config.json must have injection_type 'linear' for model_type"),
    ],
)
def test_settings_that_lie_about_the_weights_are_refused(tmp_path, facts, message):
    refused(ValueError, message, checkpoint(tmp_path, facts=facts))


def test_a_missing_size_is_named(tmp_path):
    folder = checkpoint(tmp_path)
    facts = settings_of(HUGINN)
    del facts["n_embd"]
    (folder / "config.json").write_text(json.dumps(facts))
    refused(ValueError, "load: config.json must have n_embd. Got none.", folder)


def test_numbers_that_are_not_finite_are_counted(tmp_path):
    bad = load_file(HUGINN / "weights.safetensors")["transformer.core_block.0.attn.Wqkv.weight"]
    bad[70, :12] = torch.nan  # among the rows of v
    folder = checkpoint(tmp_path, tensors={"transformer.core_block.0.attn.Wqkv.weight": bad})
    refused(ValueError, "load: 12 non-finite values in core.0.attn.v.weight", folder)


def test_an_unknown_newer_family_is_refused_with_the_known_ones(tmp_path):
    folder = checkpoint(tmp_path, facts={"model_type": "huginn_raven_2", "auto_map": {"AutoModel": "evil.Evil"}})
    message = refused(ValueError, "load: model_type 'huginn_raven_2' has no native implementation and remote", folder)
    known = message.partition("Known model types: ")[2].split(", ")
    assert {"huginn_raven", "ouro", "loopformer", "llama", "looplab"} <= set(known)


def test_tensors_of_no_variant_are_refused(tmp_path):
    folder = checkpoint(tmp_path)
    save_file({"transformer.wte.weight": torch.zeros(97, 32)}, folder / "model.safetensors")
    refused(ValueError, "of one family of model_type 'huginn_raven'. They fit none of huginn, retrofit.", folder)


def test_a_named_family_decides(tmp_path):
    refused(KeyError, "Unknown family 'hugin'. Did you mean 'huginn'?", HUGINN, family="hugin")
    assert load(HUGINN, family="huginn").source.family == "huginn"
    folder = checkpoint(tmp_path, facts={"rope_theta": 1e4})
    refused(ValueError, "16 tensors unexpected (transformer.coda.0.norm_3.weight, ", folder, family="retrofit")


def test_a_name_on_a_model_hub_is_not_downloaded(monkeypatch):
    monkeypatch.setattr("socket.socket", lambda *_, **__: pytest.fail("it opened a connection"))
    message = refused(KeyError, "Got 'tomg-group-umd/huginn-0125'.", "tomg-group-umd/huginn-0125")
    assert (
        "looplab downloads nothing; a model of a hub is opened from a local folder. "
        "Get one: hf download tomg-group-umd/huginn-0125 --local-dir DIR, then give DIR." in message
    )
    assert "downloads nothing" not in refused(KeyError, "Got 'nowhere'.", "nowhere")
    assert "downloads nothing" not in refused(KeyError, "Got './nowhere'.", "./nowhere")


def test_our_own_folders_have_no_tie_to_choose_and_no_other_way_back(tmp_path):
    save_folder(tmp_path / "own", build(PRESETS["tiny-huginn"]()))
    refused(ValueError, "load: tie must be None for a folder that looplab wrote.", tmp_path / "own", tie=True)
    with pytest.raises(ValueError, match="export: MODEL must come from a checkpoint of a published family"):
        export(load(tmp_path / "own"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


PEAK = """
import sys
from pathlib import Path
from looplab.interop import load
from looplab.models.published import PUBLISHED

def status(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
    return int(line.split()[1]) * 1024

PUBLISHED["huginn"]
load(sys.argv[1])  # what the first load imports and allocates
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
kept = load(sys.argv[2], dtype=sys.argv[3])
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux")
@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.5)])
def test_memory_peaks_at_the_weights_and_one_shard(tmp_path, dtype, share):
    facts = settings_of(HUGINN) | {"n_embd": 512, "n_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1536}
    facts |= {"n_layers_in_recurrent_block": 8, "vocab_size": 4096, "padded_vocab_size": 4096, "num_attention_heads": 8}
    family = PUBLISHED["huginn"]
    config = family.config(facts, {})
    tensors = family.key_map(config).export(build(config).state_dict())
    (tmp_path / "config.json").write_text(json.dumps(facts))
    size, shards, homes = sum(t.nbytes for t in tensors.values()), 8, {}
    names, filled, part = list(tensors), 0, {}
    for name in names:  # shards of about equal size, as they are published
        homes[name] = f"model-{filled * shards // size}.safetensors"
        filled += tensors[name].nbytes
    for file in sorted(set(homes.values())):
        part = {name: tensors[name].clone() for name in names if homes[name] == file}
        save_file(part, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    largest = max((tmp_path / file).stat().st_size for file in set(homes.values()))
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(HUGINN), str(tmp_path), dtype], capture_output=True, text=True, check=True
    )
    slack = 8 * 2**20  # what the allocator keeps of what was given back
    assert size > 100 * 2**20 and largest < size / 4
    assert int(run.stdout) < share * size + largest + slack
    assert int(run.stdout) > share * size - slack  # the measure sees the weights


def letters(size):
    """A tokenizer of single characters with at most `size` ids."""
    characters = ["?", *"abcdefghijklmnopqrstuvwxyz0123456789 "]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters[:size])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "m.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"item {i} has {i * 7919 % 1000}"}) for i in range(60)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MINE, "skip-adapter", "dense"])
def test_an_audit_of_a_folder_ends_in_a_verdict(name, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "write_report", lambda result, folder, beside: folder)  # drawing is tested in report/
    source = MINE.get(name, DENSE if name == "dense" else OLMO)
    folder = checkpoint(tmp_path, source, facts={"initial_state_mode": name} if name == "skip-adapter" else None)
    letters(97).save(str(folder / "tokenizer.json"))
    argv = [str(folder), "--data", f"math={text}", "--replicates", "1000", "--max-tokens", "16", "--quiet"]
    argv += ["--grid", "1,2", "--probes", "temperature", "--controls", "none", "--init-seeds", "1", "--control", "none"]
    assert main(["audit", *argv, "--out", str(tmp_path / "out")]) == exit_codes.DONE
    printed = capsys.readouterr().out
    result = AuditResult.load(tmp_path / "out")
    assert printed.startswith(f"audit of {folder.name}\n")
    assert len(result.domains[0].schedules) > 2
    assert re.search(r"^On math, .+\.$", printed, re.MULTILINE), printed
    words = "inconclusive (gap too small)" if name == "dense" else "not identifiable (the block has no iteration index)"
    if name == "skip-adapter":  # its first iteration is another function
        words = "distinct       raw"
    assert words in printed, printed
