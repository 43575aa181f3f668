"""Dense checkpoints as native layers: the library's logits, and refusals by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from interop.dense_sources import FAMILIES, LAYERS, saved
from looplab.interop.dense_source import FAMILIES as KNOWN
from looplab.interop.dense_source import dense_config, open_dense
from looplab.models.base import build
from looplab.models.dense import Dense
from looplab.models.folder import save_folder
from looplab.recurrence.loop import forward
from tolerances import EXACT, RETROFIT_LOGITS

TOKENS = torch.randint(3, 90, (2, 23), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_native_layers_give_the_librarys_logits(family, tmp_path):
    model = saved(tmp_path, family)
    source = open_dense(str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(forward(source.model(), TOKENS).logits, model(TOKENS).logits, **RETROFIT_LOGITS)
    assert source.config.layers == LAYERS


def test_every_family_is_tried():
    assert {FAMILIES[name][0].lower() for name in FAMILIES} == set(KNOWN)


def test_smollm3_layers_without_rotary_are_found(tmp_path):
    saved(tmp_path, "smollm3")
    assert open_dense(str(tmp_path)).config.unrotated_layers == (2, 5)


def test_a_folder_of_shards_is_read_one_tensor_at_a_time(tmp_path):
    model = saved(tmp_path, "qwen3", shards=True)
    source = open_dense(str(tmp_path))
    assert len(source.shards.files) > 2
    torch.testing.assert_close(
        source.tensors["layers.3.attn.q_norm.weight"], model.model.layers[3].self_attn.q_norm.weight
    )
    assert source.hashes().keys() == set(source.shards.files)
    assert source.largest_shard < source.nbytes


def test_our_own_dense_model_opens_under_its_own_names():
    source = open_dense("text-dense")
    assert source.family.name == "dense"
    assert source.tokenizer() == ("bytes", {})
    assert set(source.tensors) == set(source.model().state_dict())


def test_special_ids_of_the_tokenizer_are_kept(tmp_path):
    saved(tmp_path, "llama")
    file, ids = open_dense(str(tmp_path)).tokenizer()
    assert file == tmp_path / "tokenizer.json"
    assert ids == {"bos": 1, "eos": 2, "pad": 0}
    file.unlink()
    assert open_dense(str(tmp_path)).tokenizer() is None


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"attention_bias": True}, "attention_bias .* must be False. Got True"),
        ("llama", {"mlp_bias": True}, "mlp_bias .* must be False. Got True"),
        ("llama", {"hidden_act": "relu"}, "hidden_act .* must be 'silu' or 'gelu'. Got 'relu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type .* must be 'default' or 'llama3'. Got 'linear'",
        ),
        ("qwen2", {"max_window_layers": 2}, "layer_types .* must be the same for all layers"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}},
            "partial_rotary_factor .* must be 1. Got 0.5",
        ),
    ],
)
def test_a_setting_without_a_native_place_is_refused_by_name(family, changes, said, tmp_path):
    saved(tmp_path, family, **changes)
    with pytest.raises(ValueError, match=said):
        open_dense(str(tmp_path))


def test_another_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"must be a dense model of llama, mistral, .*Got 'gpt2'\. Take"):
        open_dense(str(tmp_path))
    with pytest.raises(ValueError, match="Got 'looped'"):
        open_dense("text-core")
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no readable config\.json"):
        open_dense(str(tmp_path))


def test_missing_tensors_are_told_by_name(tmp_path):
    saved(tmp_path, "mistral")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 tensor missing \(layers\.2\.mlp\.up_proj\.weight\)"):
        open_dense(str(tmp_path))


def test_a_tie_that_does_not_hold_is_refused(tmp_path):
    saved(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.25
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"differ \(max 0\.25\)"):
        open_dense(str(tmp_path))


def test_a_native_folder_keeps_layers_without_rotary(tmp_path):
    model = saved(tmp_path / "theirs", "smollm3")
    ours = open_dense(str(tmp_path / "theirs")).model()
    save_folder(tmp_path / "ours", ours)
    again = open_dense(str(tmp_path / "ours"))
    assert again.config == dense_config(model.config)
    torch.testing.assert_close(forward(again.model(), TOKENS).logits, forward(ours, TOKENS).logits, **EXACT)
    assert isinstance(build(again.config, device="meta"), Dense)
    shutil.rmtree(tmp_path)
