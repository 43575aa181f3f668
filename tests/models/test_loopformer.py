import pytest
import torch

from contract.zoo import run, tokens
from looplab.models.base import PRESETS, build
from looplab.models.loopformer import config_of, key_map_of
from looplab.models.published import PUBLISHED, assemble
from looplab.recurrence.depth import Grid
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.plan import Plan
from tolerances import CACHED, EXACT, ROWS

FAMILY = PUBLISHED["loopformer"]
FACTS = {
    "model_type": "loopformer",
    "block_size": 17,
    "vocab_size": 41,
    "n_layer": 3,
    "n_head": 5,
    "n_embd": 35,
    "dropout": 0.0,
    "bias": False,
    "intermediate_dim": 22,
}


def weights():
    """A model of these settings, and its tensors under the original's names."""
    model = build(config_of(FACTS, {}), seed=2)
    return model, key_map_of(model.config).export(model.state_dict())


@pytest.fixture(scope="module")
def tiny():
    return build(PRESETS["tiny-loopformer"](), dtype=torch.float64)


def test_the_preset_has_the_published_count():
    spec = build(PRESETS["loopformer-3blk"](), device="meta").spec
    assert spec.params.total == 278_169_600
    assert (spec.params.embedding, spec.params.position, spec.params.head) == (103_022_592, 2_097_152, 0)
    assert spec.plan() == Plan.of((0, k) for k in range(8))


def test_the_preset_is_the_originals_default_configuration():
    released = {"block_size": 1024, "vocab_size": 50304, "n_layer": 3, "n_head": 32, "n_embd": 2048}
    assert config_of({**released, "intermediate_dim": 5120}, {}) == PRESETS["loopformer-3blk"]()


def test_settings_end_up_where_they_belong():
    c = config_of(FACTS, {})
    assert (c.dim, c.vocab, c.blocks, c.ffn.hidden, c.head.tied) == (35, 41, (3,), 22, True)
    assert (c.attention.heads, c.attention.kv_heads, c.attention.head_dim) == (5, 5, 7)
    assert (c.attention.position.max, c.signal.freq_dim) == (17, 256)
    assert c.trained_depth == Grid(sizes=(0.125,) * 8)
    assert (c.norm.affine, c.final_norm.affine) == (False, True)
    assert c.norm.eps == c.final_norm.eps == torch.finfo(torch.float32).eps
    assert config_of({**FACTS, "intermediate_dim": None}, {}).ffn.hidden == 140


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": True}, r"config\.json: bias must be false\. Got true"),
        ({"n_embd": 36}, r"config\.json: n_embd \(36\) must be a multiple of n_head \(5\)\. Got remainder 1"),
    ],
)
def test_settings_that_no_loopformer_has_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of({**FACTS, **changes}, {})


def test_the_key_map_covers_every_tensor_once_and_is_undone_by_its_inverse():
    model, exported = weights()
    ours = [name for rule in key_map_of(model.config).rules for name in rule.ours]
    assert sorted(ours) == sorted(model.state_dict())
    assert exported["transformer.h.blocks.2.attn.c_attn.weight"].shape == (105, 35)
    again = assemble(FAMILY, FACTS, exported)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), **EXACT)
    assert FAMILY.recognises(frozenset(exported))


@pytest.mark.parametrize("kept", ["transformer.wte.weight", "lm_head.weight", "both"])
def test_the_tied_matrix_may_be_stored_under_either_name(kept):
    model, exported = weights()
    table = exported.pop("transformer.wte.weight")
    names = ["transformer.wte.weight", "lm_head.weight"] if kept == "both" else [kept]
    stored = {f"gpt.{name}": tensor for name, tensor in exported.items()}
    stored |= {f"gpt.{name}": table.clone() for name in names}
    stored["gpt.transformer.h.blocks.0.attn.bias"] = torch.ones(1, 1, 17, 17)  # a mask
    torch.testing.assert_close(assemble(FAMILY, FACTS, stored).state_dict(), model.state_dict(), **EXACT)


def test_a_broken_tie_and_missing_tensors_are_named():
    _, exported = weights()
    with pytest.raises(ValueError, match=r"lm_head\.weight and transformer\.wte\.weight differ \(max 0\.\d+\)"):
        assemble(FAMILY, FACTS, {**exported, "lm_head.weight": torch.zeros(41, 35)})
    del exported["transformer.wte.weight"], exported["dt_embedder.mlp.2.bias"]
    with pytest.raises(ValueError, match=r"2 tensors missing \(dt_embedder\.mlp\.2\.bias, transformer\.wte\.weight\)"):
        assemble(FAMILY, FACTS, exported)


def test_a_number_of_steps_is_as_many_equal_steps_to_time_one(tiny):
    ids = tokens(tiny, 2, 6)
    for steps in (1, 3, 8):
        sizes = torch.full((2, steps), 1 / steps, dtype=torch.float64)
        given = run(tiny, ids, plan=Plan.of((0, k) for k in range(steps)), extras={"step_sizes": sizes})
        torch.testing.assert_close(run(tiny, ids, num_steps=steps).logits, given.logits, **ROWS)
    stopped = run(tiny, ids, plan=tiny.spec.plan()[:3]).logits
    assert not torch.allclose(stopped, run(tiny, ids, num_steps=3).logits), "three of eight steps end at time 3/8"
    with pytest.raises(ValueError, match=r"grid: k must be 1\.\.8, the steps of the trained grid\. Got 9"):
        run(tiny, ids, num_steps=9)


def test_rows_on_grids_of_their_own_equal_rows_alone(tiny):
    ids = tokens(tiny, 4, 5)
    counts = [8, 3, 0, 3]
    out = run(tiny, ids, num_steps=torch.tensor(counts))
    assert len(out.plan) == 8 + 3
    for row, steps in enumerate(counts):
        alone = run(tiny, ids[row : row + 1], num_steps=steps).logits
        torch.testing.assert_close(out.logits[row : row + 1], alone, **ROWS)


def test_a_coarser_grid_decodes_with_as_many_slots_as_steps(tiny):
    ids = tokens(tiny, 2, 6)
    with torch.no_grad():
        cache = new_cache(tiny.spec, rows=2, capacity=6, num_steps=3, dtype=torch.float64)
        pieces = [forward(tiny, ids[:, a:b], num_steps=3, cache=cache).logits for a, b in ((0, 4), (4, 5), (5, 6))]
        torch.testing.assert_close(torch.cat(pieces, 1), run(tiny, ids, num_steps=3).logits, **CACHED)
        per_token = tiny.spec.cost.kv_bytes_per_token("DepthIndexed", {0: 3}, itemsize=8)
        assert cache.nbytes == 2 * 6 * per_token
        cache.crop(5)
        for other in (2, 8):
            with pytest.raises(ValueError, match=r"plan under a cache must run|cache holds 3 iterations"):
                forward(tiny, ids[:, 5:], num_steps=other, cache=cache)


def test_rows_may_take_steps_of_their_own(tiny):
    ids = tokens(tiny, 2, 5)
    sizes = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.3]], dtype=torch.float64)
    plan = Plan.of((0, k) for k in range(3))
    together = run(tiny, ids, plan=plan, extras={"step_sizes": sizes}).logits
    for row in range(2):
        one = slice(row, row + 1)
        alone = run(tiny, ids[one], plan=plan, extras={"step_sizes": sizes[one]}).logits
        torch.testing.assert_close(together[one], alone, **ROWS)


@pytest.mark.parametrize(
    ("sizes", "got"), [([0.5, 0.75], "1.25"), ([0.5, 0.0], "0"), ([0.5, -0.25], "-0.25")], ids=["past", "zero", "back"]
)
def test_step_sizes_that_go_past_the_end_or_back_are_refused(tiny, sizes, got):
    with pytest.raises(ValueError, match=rf"^step_sizes must be positive and sum to at most 1 \(got {got}\)\. Divide"):
        tiny.encode(tokens(tiny, 1, 3), extras={"step_sizes": torch.tensor([sizes])})


def test_other_extras_are_refused_by_name(tiny):
    with pytest.raises(ValueError, match=r"extras of looped must be: document_ids, step_sizes\. Got \['steps'\]"):
        tiny.encode(tokens(tiny, 1, 3), extras={"steps": torch.ones(1, 2)})


def test_positions_past_the_table_are_refused(tiny):
    with pytest.raises(
        ValueError, match=r"encode: 33 tokens, but looped has 32 learned positions\. Shorten the prompt"
    ):
        tiny.encode(torch.zeros(1, 33, dtype=torch.long))
