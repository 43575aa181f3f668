import dataclasses

import pytest
import torch
from torch import nn

from looplab.models.base import (
    MODELS,
    PRESETS,
    build,
    count_parameters,
    gather_index,
    longest_context,
    model_name,
    prepare,
)
from looplab.nn.rope import Learned, NoPE
from looplab.recurrence.kv import DepthIndexed
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.spec import ClampLast, Cycle, ParamCount, Refuse
from tiny import Mixing, tiny_spec

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])


def spec(**more):
    return dataclasses.replace(tiny_spec(ModelLoop(num_steps=4), 1, 4, **more), name="probe")


def told(*, of=None, ids=IDS, cache=None, positions=None, valid=None, extras=None):
    """What `prepare` says when it refuses."""
    with pytest.raises(ValueError, match="encode|cache") as caught:
        prepare(of or spec(), ids, cache, positions, None if valid is None else torch.tensor(valid).bool(), extras)
    return str(caught.value)


def test_equal_seeds_give_equal_weights_and_leave_the_random_state_alone():
    config = PRESETS["tiny-core"]()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = build(config, seed=1), build(config, seed=1), build(config, seed=2)
    assert torch.equal(torch.rand(3), expected)
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_models_are_built_in_eval_mode_in_the_type_and_on_the_device_asked_for():
    model = build(PRESETS["tiny-core"](), dtype=torch.bfloat16)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in build(PRESETS["tiny-core"](), device="meta").parameters()} == {"meta"}


def test_models_are_found_by_their_config():
    for name in MODELS:
        assert MODELS[name].reference
    assert model_name(PRESETS["tiny-core"]()) == "looped"
    assert model_name(PRESETS["tiny-dense"]()) == "dense"
    with pytest.raises(KeyError, match="No registered model has a config of type int. Known: dense, "):
        model_name(3)


@pytest.mark.parametrize(("token", "shown"), [(8, "8"), (-1, "-1"), (70001, "70001")])
def test_a_token_outside_the_vocabulary_is_named_with_its_place(token, shown):
    ids = IDS.clone()
    ids[1, 2] = token
    assert told(ids=ids) == f"encode: token id {shown} at row 1, position 2 is outside the vocabulary (8)"


def test_a_padded_embedding_does_not_widen_the_vocabulary():
    assert "outside the vocabulary (6)" in told(of=spec(vocab=(6, 64)))


def test_a_row_of_padding_only_is_refused():
    assert told(valid=[[1, 1, 1, 1], [0, 0, 0, 0]]) == "encode: row 1 has no valid token"


@pytest.mark.parametrize(
    ("supported", "valid", "said"),
    [
        ((), [[0, 1, 1, 1], [1, 1, 1, 1]], "left padding but probe supports none"),
        ((), [[1, 1, 1, 1], [1, 1, 1, 0]], "right padding but probe supports none"),
        ((), [[0, 1, 1, 1], [1, 1, 1, 0]], "left and right padding but probe supports none"),
        ((), [[1, 0, 1, 1], [1, 1, 1, 1]], "right padding but probe supports none"),
        (("left",), [[0, 1, 1, 1], [1, 1, 1, 0]], "right padding but probe supports left"),
        (("left",), [[0, 1, 1, 0], [1, 1, 1, 1]], "right padding but probe supports left"),
        (("right",), [[0, 1, 1, 0], [1, 1, 1, 1]], "left padding but probe supports right"),
    ],
)
def test_padding_on_a_side_that_is_not_handled_is_refused(supported, valid, said):
    probe = spec(padding=frozenset(supported))
    assert told(of=probe, valid=valid) == f"encode: valid has {said}. Send equal lengths"


@pytest.mark.parametrize(
    ("supported", "valid"),
    [
        ((), [[1, 1, 1, 1], [1, 1, 1, 1]]),
        (("left",), [[0, 0, 1, 1], [1, 1, 1, 1]]),
        (("right",), [[1, 0, 0, 0], [1, 1, 1, 1]]),
        (("left", "right"), [[0, 1, 1, 0], [1, 1, 0, 1]]),
    ],
)
def test_padding_that_is_handled_passes_and_no_padding_is_none(supported, valid):
    mask = torch.tensor(valid).bool()
    kept = prepare(spec(padding=frozenset(supported)), IDS, None, None, mask, None)[1]
    assert kept is None if bool(mask.all()) else torch.equal(kept, mask)


def test_too_many_tokens_are_refused():
    learned = ParamCount(position=12)
    assert told(of=spec(max_positions=3, params=learned)) == (
        "encode: 4 tokens, but probe has 3 learned positions. Shorten the prompt"
    )
    assert told(of=spec(max_positions=3)) == (
        "encode: 4 tokens, but probe has 3 positions (max_positions). Shorten the prompt"
    )
    at = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 9]])
    assert "10 tokens, but probe has 5" in told(of=spec(max_positions=5), positions=at)
    prepare(spec(max_positions=4), IDS, None, None, None, None)


def test_padding_takes_no_position():
    probe = spec(max_positions=3)
    valid = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]).bool()
    positions, _ = prepare(probe, IDS, None, None, valid, None)
    assert positions.tolist() == [[0, 0, 1, 2], [0, 1, 2, 2]]
    packed = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
    assert torch.equal(prepare(probe, IDS, None, packed, None, None)[0], packed)


def new_cache(rows=2, capacity=8):
    return DepthIndexed().cache(rows=rows, capacity=capacity, iterations={0: 4})


def test_a_cache_of_other_rows_or_too_few_places_is_refused():
    assert told(cache=new_cache(rows=4)) == "cache has 4 rows, tokens have 2. Use cache.select(rows)"
    assert told(cache=new_cache(capacity=3)) == "cache: 4 tokens exceed capacity 3"
    padded = new_cache(rows=4)
    padded.padded = True
    assert told(cache=padded) == "cache has 4 rows, tokens have 2. Use cache.select(rows)"


def test_a_model_that_sees_both_ways_has_no_cache():
    assert told(of=spec(causal=False), cache=new_cache()) == "probe is not causal: no KV cache. Pass cache=None"


@pytest.mark.parametrize(
    ("accepted", "given", "message"),
    [
        ({}, ["a"], "encode: extras of probe must be: none. Got ['a']."),
        ({"a": True, "b": False}, ["b"], "encode: extras of probe must be: a, b. Got ['b']."),
        ({"a": True, "b": False}, ["a", "c"], "encode: extras of probe must be: a, b. Got ['a', 'c']."),
        ({"a": True}, [], "encode: extras of probe must be: a. Got []."),
    ],
)
def test_unknown_or_missing_extras_are_refused_with_the_accepted_keys(accepted, given, message):
    assert told(of=spec(extras=accepted), extras={name: torch.zeros(2) for name in given}) == message


def test_positions_go_on_where_the_cache_ends():
    cache = new_cache()
    valid = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    assert prepare(spec(), IDS, cache, None, valid, None)[0].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    cache.advance(4, {})
    positions, kept = prepare(spec(), IDS[:, :2], cache, None, None, None)
    assert positions.tolist() == [[2, 3], [4, 5]]
    assert kept is None
    assert cache.positions[:, :6].tolist() == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    plain = new_cache()
    prepare(spec(), IDS, plain, None, None, None)
    plain.advance(4, {})
    assert prepare(spec(), IDS[:, :1], plain, None, None, None)[0].tolist() == [[4], [4]]


def test_a_finished_row_may_be_padding_only_under_a_cache():
    cache = new_cache()
    prepare(spec(), IDS, cache, None, None, None)
    cache.advance(4, {})
    gone = torch.tensor([[False], [True]])
    assert prepare(spec(padding=frozenset({"right"})), IDS[:, :1], cache, None, gone, None)[1] is not None


@pytest.mark.parametrize(
    ("beyond", "limit", "read"),
    [
        (Refuse(), 3, [0, 2, 3, 7]),
        (ClampLast(), 3, [0, 2, 2, 2]),
        (Cycle(), 3, [0, 2, 0, 1]),
        (ClampLast(), None, [0, 2, 3, 7]),
    ],
)
def test_rows_read_the_entry_that_their_iteration_means(beyond, limit, read):
    probe = spec(max_iteration=limit, beyond=beyond)
    assert gather_index(probe, torch.tensor([0, 2, 3, 7])).tolist() == read


def test_every_storage_is_counted_once_outside_groups_first():
    a, b, c = nn.Linear(2, 3, bias=False), nn.Linear(5, 7, bias=False), nn.Linear(11, 13, bias=False)
    count = count_parameters(
        [[a.weight, b.weight], [b.weight, c.weight]], embedding=[a.weight], head=[a.weight], prelude=[]
    )
    assert (count.embedding, count.head, count.core) == (6, 0, (35, 143))
    assert count.total == 6 + 35 + 143


def test_the_longest_context_is_the_smaller_bound():
    assert longest_context(None, NoPE()) is None
    assert longest_context(9, NoPE()) == 9
    assert longest_context(None, Learned(max=5)) == 5
    assert longest_context(9, Learned(max=5)) == 5
    assert longest_context(3, Learned(max=5)) == 3


def test_a_model_without_a_gate_says_so():
    with pytest.raises(ValueError, match="tiny has no trained gate; exit rules available: acceleration, .*latent"):
        Mixing().halt(torch.zeros(1, 1, 12))
