from dataclasses import replace

import pytest
import torch

from contract.zoo import run, tokens
from looplab.models import vera
from looplab.models.base import PRESETS, build
from looplab.models.published import PUBLISHED, assemble
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.plan import Plan
from looplab.recurrence.trace import Recorder
from reference.vera import Vera as Twin
from tolerances import CACHED, EXACT, GRADIENTS, ROWS, TWIN

FAMILY = PUBLISHED["vera"]
FACTS = {
    "dim": 12,
    "n_heads": 3,
    "n_kv_heads": 1,
    "vocab_size": 23,
    "n_perception_layers": 1,
    "n_reasoning_blocks": 2,
    "max_reasoning_iters": 2,
    "n_thought_tokens": 2,
    "ffn_hidden": 10,
    "norm_eps": 1e-5,
    "max_seq_len": 16,
    "rope_thetas_lang": [100.0, 5000.0],
    "rope_thetas_op": [10.0, 300.0],
    "n_branches": 3,
    "branch_router_hidden": 5,
    "use_verifier": True,
    "verifier_hidden": 7,
    "energy_temperature": 0.8,
    "operator_ids": [1, 4, 7],
    "dropout": 0.0,
    "use_lighthouse": False,
}


def made(seed=2, **changes):
    """A model of these settings with every tensor away from its start, and its tensors under the original names."""
    config = replace(FAMILY.config(FACTS, {}), **changes)
    model = build(config, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model, FAMILY.key_map(config).export(model.state_dict())


@pytest.fixture(scope="module")
def tiny():
    return build(PRESETS["tiny-vera"](), dtype=torch.float64)


@pytest.mark.parametrize(
    ("preset", "changes", "total"),
    [
        ("vera-543m", {}, 543_361_703),
        ("vera-543m", {"verifier": None}, 542_769_958),
        ("vera-90m", {}, 71_152_415),
    ],
)
def test_presets_have_the_counts_of_the_authors_code(preset, changes, total):
    spec = build(replace(PRESETS[preset](), **changes), device="meta").spec
    assert spec.params.total == total
    assert spec.plan() == Plan.of((block, t) for block in range(2) for t in range(4))


def test_the_big_preset_is_the_originals_default_configuration():
    released = {
        "dim": 1536, "n_heads": 24, "n_kv_heads": 4, "vocab_size": 32000, "n_perception_layers": 16,
        "n_reasoning_blocks": 2, "max_reasoning_iters": 4, "n_thought_tokens": 32, "ffn_hidden": 4352,
        "norm_eps": 1e-6, "max_seq_len": 2048, "rope_thetas_lang": [500.0, 10_000.0, 500_000.0],
        "rope_thetas_op": [50.0, 500.0, 5_000.0], "n_branches": 2, "branch_router_hidden": 256, "use_verifier": True,
        "verifier_hidden": 384, "energy_temperature": 1.0, "operator_ids": [],
    }  # fmt: skip
    ours = PRESETS["vera-543m"]()
    assert FAMILY.config(released, {}) == replace(ours, init=vera.Init())


@pytest.mark.parametrize("routing", ["hard", "soft"])
@pytest.mark.parametrize("plan", ["[0.0 0.1 1.0 1.1]", "[0.1 0.0 1.1 1.1 0.0]"])
def test_states_logits_and_gradients_equal_the_slow_twins(routing, plan):
    model, foreign = made(routing=routing)
    plan, ids = Plan.parse(plan), torch.tensor([[1, 20, 4, 4, 9]])
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in foreign.items()}
    slow, trace = Twin(weights, FACTS, hard=routing == "hard").run(ids[0].tolist(), {1, 4, 7}, plan)
    recorder = Recorder()
    out = run(model, ids, plan=plan, recorder=recorder)
    assert model.operator_table[ids].any() and not model.operator_table[ids].all()
    torch.testing.assert_close(out.logits[0], slow, **TWIN)
    for state, expected in zip(recorder.states, trace, strict=True):
        torch.testing.assert_close(state.x[0], expected["x"], **TWIN)
        torch.testing.assert_close(state.thoughts[0], expected["thoughts"], **TWIN)
        torch.testing.assert_close([state.gated0[0], state.gated1[0]], expected["gated"], **TWIN)
        torch.testing.assert_close(model.halt(state)[0], expected["score"], **TWIN)
        if expected["energy"] is not None:
            torch.testing.assert_close(state.energy[0, :, 0], expected["energy"], **TWIN)

    fast = out.logits.square().mean() + model.halt(out.state).sum()
    slow = slow.square().mean() + trace[-1]["score"]
    found = torch.autograd.grad(fast, list(model.parameters()), allow_unused=True)
    ours = dict(zip([name for name, _ in model.named_parameters()], found, strict=True))
    zeros = {name: torch.zeros_like(p) if ours[name] is None else ours[name] for name, p in model.named_parameters()}
    expected = torch.autograd.grad(slow, list(weights.values()), allow_unused=True)
    for (name, weight), gradient in zip(weights.items(), expected, strict=True):
        got = FAMILY.key_map(model.config).export(zeros)[name]
        expect = torch.zeros_like(weight) if gradient is None else gradient
        torch.testing.assert_close(got, expect, **GRADIENTS, msg=lambda text, name=name: f"{name}: {text}")


def test_rows_of_other_iterations_see_their_own_index(tiny):
    ids = tokens(tiny, 2, 4)
    context = tiny.encode(ids)
    state = tiny.init_state(context, None)
    together = tiny.step(state, context, 1, torch.tensor([0, 2]))
    for row, iteration in enumerate((0, 2)):
        alone = tiny.step(state, context, 1, torch.full((2,), iteration))
        torch.testing.assert_close(together.thoughts[row], alone.thoughts[row], **ROWS)
        torch.testing.assert_close(together.x[row], alone.x[row], **ROWS)
    assert not torch.allclose(together.thoughts[0], together.thoughts[1])


def test_thoughts_never_see_a_token(tiny):
    one, other = (run(tiny, tokens(tiny, 1, 6, seed=seed)) for seed in (0, 1))
    torch.testing.assert_close(one.state.thoughts, other.state.thoughts, **EXACT)
    assert not torch.allclose(one.logits, other.logits)


@pytest.mark.filterwarnings("ignore:kv_rule=:UserWarning")
def test_a_prompt_under_every_rule_is_the_same_and_then_rules_differ(tiny):
    ids = tokens(tiny, 1, 6)
    full, later = run(tiny, ids).logits, {}
    with torch.no_grad():
        for rule in tiny.spec.kv_rules:
            cache = new_cache(tiny.spec, rows=1, capacity=6, rule=rule, dtype=torch.float64)
            torch.testing.assert_close(forward(tiny, ids[:, :4], cache=cache).logits, full[:, :4], **CACHED)
            later[str(rule)] = forward(tiny, ids[:, 4:], cache=cache).logits
    exact = [name for name, logits in later.items() if torch.allclose(logits, full[:, 4:], **CACHED)]
    assert exact == [str(rule) for rule in tiny.spec.kv_rules[:3]]


def test_the_verifier_judges_the_row_whatever_pads_it_and_however_it_was_read(tiny):
    ids = tokens(tiny, 1, 5)
    alone = tiny.halt(run(tiny, ids).state)
    assert alone.shape == (1,)
    for left, right in ((2, 0), (0, 3)):
        padded = torch.nn.functional.pad(ids, (left, right))
        valid = torch.nn.functional.pad(torch.ones_like(ids, dtype=torch.bool), (left, right))
        torch.testing.assert_close(tiny.halt(run(tiny, padded, valid=valid).state), alone, **ROWS)
    with torch.no_grad():
        cache = new_cache(tiny.spec, rows=1, capacity=5, dtype=torch.float64)
        forward(tiny, ids[:, :4], cache=cache)
        torch.testing.assert_close(tiny.halt(forward(tiny, ids[:, 4:], cache=cache).state), alone, **CACHED)


def test_a_model_without_verifier_says_so_and_lists_what_lies_idle():
    model = build(replace(PRESETS["tiny-vera"](), verifier=None, routing="hard"), dtype=torch.float64)
    assert model.spec.halt is None
    with pytest.raises(ValueError, match="vera has no trained gate"):
        model.halt(None)
    run(model, tokens(model, 2, 5)).logits.square().mean().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {n for n, _ in model.named_parameters() if n.startswith(tuple(model.idle_parameters))}
    assert {"thoughts.router.up.weight", "bridge.verifier.weight", "core.1.layer.attn.k.weight"} <= without


def test_operators_are_tokens_of_digits_signs_and_brackets_alone():
    vocabulary = {"▁12": 0, "a1": 1, "+": 2, "▁": 3, " (x": 4, "≤": 5, "))": 6, "": 7, "the": 8}
    assert vera.operator_ids(vocabulary) == (0, 2, 5, 6)


def test_operators_rotate_by_bases_of_their_own(tiny):
    ids = tokens(tiny, 1, 5)
    plain = build(replace(tiny.config, operators=()), dtype=torch.float64)
    plain.load_state_dict(tiny.state_dict())
    assert not torch.allclose(run(plain, ids).logits, run(tiny, ids).logits)
    others = replace(tiny.config, operators=(), operator_bases=(7.0, 8.0, 9.0))
    same = build(others, dtype=torch.float64)
    same.load_state_dict(tiny.state_dict())
    torch.testing.assert_close(run(same, ids).logits, run(plain, ids).logits, **EXACT)


def test_the_key_map_covers_every_tensor_once_and_is_undone_by_its_inverse():
    model, exported = made()
    ours = [name for rule in FAMILY.key_map(model.config).rules for name in rule.ours]
    assert sorted(ours) == sorted(model.state_dict())
    assert exported["reasoning_blocks.1.melt_kv.U_z.weight"].shape == (12, 12)
    stored = {f"_orig_mod.{name}": tensor for name, tensor in exported.items()}
    stored["_orig_mod.output.weight"] = exported["tok_embeddings.weight"].clone()
    again = assemble(FAMILY, FACTS, stored)
    assert again.config == model.config
    written = FAMILY.key_map(again.config).export(again.state_dict())
    assert written.keys() == exported.keys()
    for name, tensor in exported.items():
        assert written[name].numpy().tobytes() == tensor.numpy().tobytes(), name
    assert FAMILY.recognises(frozenset(exported))


def test_a_file_without_verifier_and_one_with_a_broken_tie():
    _, exported = made()
    rest = {name: tensor for name, tensor in exported.items() if not name.startswith("verifier.")}
    assert assemble(FAMILY, {**FACTS, "use_verifier": False}, rest).verifier is None
    with pytest.raises(ValueError, match=r"4 tensors missing \(verifier\.net\.0\.weight, verifier\.net\.2\.bias, "):
        assemble(FAMILY, FACTS, rest)
    with pytest.raises(ValueError, match=r"output\.weight and tok_embeddings\.weight differ"):
        assemble(FAMILY, FACTS, {**exported, "output.weight": torch.zeros(23, 12)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_melt_kv": False}, r"use_melt_kv must be True\. Got False\. It is not built here"),
        ({"halt_mode": "sigmoid"}, r"halt_mode must be 'energy'\. Got 'sigmoid'"),
        ({"thought_read_mode": "independent"}, r"thought_read_mode must be 'causal_cross'"),
        ({"n_heads": 5}, r"heads must cut dim \(12\) into heads of even width\. Got 5"),
        ({"n_kv_heads": 2}, r"heads \(3\) must be a multiple of kv_heads \(2\)"),
        ({"operator_ids": [23]}, r"operators must be token ids below vocab \(23\)\. Got 23"),
        ({"rope_thetas_op": [10.0]}, r"language_bases and operator_bases must be equally many"),
    ],
)
def test_settings_that_are_not_built_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FAMILY.config({**FACTS, **changes}, {})


def test_settings_that_are_missing_are_named():
    facts = {name: value for name, value in FACTS.items() if name != "operator_ids"}
    with pytest.raises(
        ValueError, match=r"must have operator_ids, .* Write those of looplab\.models\.vera\.operator_ids"
    ):
        FAMILY.config(facts, {})
    del facts["norm_eps"]
    with pytest.raises(ValueError, match=r"must have norm_eps, operator_ids\. Write"):
        FAMILY.config(facts, {})


def test_noise_and_long_prompts_are_refused(tiny):
    context = tiny.encode(tokens(tiny, 1, 3))
    with pytest.raises(ValueError, match=r"draws no noise; got width 4\. Pass noise=None"):
        tiny.init_state(context, torch.zeros(1, 3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"encode: 65 tokens, but vera has 64 positions"):
        tiny.encode(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match=r"embedding has 3 iterations; iteration 3 asked for"):
        tiny.spec.plan(4)
