from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from looplab._config import from_dict, to_dict
from looplab.nn.attention import RMS, Attention
from looplab.nn.linear import Init, LowRank
from looplab.nn.rope import ALiBi, FallingBias, Learned, NoPE, RelativeBias, Rope
from reference import attention as reference
from tolerances import BLOCK_GRADIENTS, BLOCKS, CACHED, EXACT


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


DIM = 12
SMALL = Attention(heads=4, kv_heads=2, head_dim=6, position=Rope(base=100.0))
MHA = replace(SMALL, kv_heads=4)
HEAD_NORM = RMS(affine=True, over="head", eps=1e-5)

CASES = {
    "rope": SMALL,
    "interleaved": replace(SMALL, position=Rope(base=100.0, pairing="interleaved")),
    "multi_query": replace(SMALL, kv_heads=1),
    "multi_head": MHA,
    "norm_after_rope": replace(SMALL, qk_norm=HEAD_NORM),
    "norm_before_rope": replace(SMALL, qk_norm=HEAD_NORM, position=Rope(base=100.0, order="after_norm")),
    "norm_over_all_heads": replace(
        SMALL, qk_norm=RMS(affine=True, over="full", eps=1e-5), position=Rope(base=100.0, order="after_norm")
    ),
    "norm_without_weight": replace(SMALL, qk_norm=RMS(affine=False, over="head", eps=2**-23)),
    "qk_bias": replace(MHA, qk_bias=True),
    "qkv_bias": replace(SMALL, qkv_bias=True),
    "window": replace(SMALL, window=2),
    "output_gate": replace(SMALL, output_gate=True),
    "value_embedding": replace(SMALL, value_embedding=True),
    "softcap": replace(SMALL, softcap=0.7),
    "softcap_window_bias": replace(SMALL, softcap=0.7, window=3, position=RelativeBias(max=2)),
    "nope": replace(SMALL, position=NoPE()),
    "learned": replace(SMALL, position=Learned(max=9)),
    "alibi": replace(SMALL, position=ALiBi()),
    "relative_bias": replace(SMALL, position=RelativeBias(max=3)),
    "falling_bias": replace(SMALL, position=FallingBias(max=2, slope=0.7)),
    "relative_bias_window": replace(SMALL, position=RelativeBias(max=2), window=2),
    "full": replace(SMALL, causal=False),
    "full_alibi": replace(SMALL, causal=False, position=ALiBi()),
    "full_window": replace(SMALL, causal=False, window=2),
    "full_softcap": replace(SMALL, causal=False, softcap=0.7),
}


def built(config, dim=DIM, seed=0):
    """The module in float64, every parameter redrawn at a size that makes softmax neither flat nor one-hot."""
    module = config.build(dim, Init()).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return module


def data(batch=2, seq=5, dim=DIM, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, seq, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, torch.arange(seq).expand(batch, -1)


def twin(module, x, positions, **options):
    config = module.config
    position = config.position
    if isinstance(position, Rope):
        options |= {"rope": (position.base, position.pairing), "rope_first": position.order == "before_norm"}
    if isinstance(position, ALiBi):
        slopes = reference.alibi_slopes(config.heads)
        options |= {"bias": lambda h, d: -slopes[h] * abs(d)}
    if isinstance(position, FallingBias):
        last = position.max - 1
        options |= {
            "bias": lambda h, d: module.bias.table[h, min(abs(d), last)] - position.slope * max(0, abs(d) - last)
        }
    if isinstance(position, RelativeBias):
        options |= {"bias": lambda h, d: module.bias.table[h, min(abs(d), position.max - 1)]}
    return reference.attention(
        x,
        dict(module.named_parameters()),
        positions,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm=None if config.qk_norm is None else (config.qk_norm.over, config.qk_norm.eps),
        window=config.window,
        softcap=config.softcap,
        causal=config.causal,
        **options,
    )


def run(module, x, positions, valid=None, document_ids=None, **options):
    scope = module.config.scope(positions, valid, document_ids=document_ids, dtype=x.dtype)
    return module(x, scope, **options)


def same(fast, slow, inputs):
    """Outputs and the gradients of a non-linear function of them."""
    torch.testing.assert_close(fast, slow, **BLOCKS)
    pairs = zip(*(torch.autograd.grad(y.pow(3).sum(), inputs, allow_unused=True) for y in (fast, slow)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, **BLOCK_GRADIENTS)


class AppendOnly:
    """A cache of one layer and one row length: what came, in order; `allowed` as the contract has it."""

    def __init__(self, positions, valid=None):
        self.all_positions, self.all_valid = positions, valid
        self.keys = self.values = None

    @property
    def positions(self):
        return self.all_positions[:, : 0 if self.keys is None else self.keys.shape[2]]

    def append(self, keys, values):
        old = 0 if self.keys is None else self.keys.shape[2]
        self.keys = keys if old == 0 else torch.cat([self.keys, keys], 2)
        self.values = values if old == 0 else torch.cat([self.values, values], 2)
        batch, _, seq, _ = keys.shape
        visible = old + seq
        if seq == 1 and self.all_valid is None:
            return self.keys, self.values, None
        allowed = torch.ones(seq, visible, dtype=torch.bool).tril(old).expand(batch, 1, seq, visible)
        if self.all_valid is not None:
            allowed = allowed & self.all_valid[:, None, None, :visible]
            allowed = allowed | (torch.eye(visible, dtype=torch.bool)[old:] & ~allowed.any(-1, keepdim=True))
        return self.keys, self.values, allowed


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_twin_in_outputs_and_gradients(name):
    module = built(CASES[name])
    x, positions = data()
    options = {}
    if CASES[name].value_embedding:
        options["value_embeds"] = torch.randn(2, 5, 2 * 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *options.values(), *module.parameters()]
    same(run(module, x, positions, **options), twin(module, x, positions, **options), inputs)


@pytest.mark.parametrize("name", ["rope", "window", "alibi", "softcap", "relative_bias", "full"])
def test_padding_on_either_side_equals_the_twin_and_a_row_without_tokens_stays_finite(name):
    module = built(CASES[name])
    valid = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    x, _ = data(batch=3)
    positions = (valid.long().cumsum(1) - 1).clamp(min=0)
    fast, slow = run(module, x, positions, valid), twin(module, x, positions, valid=valid)
    same(fast, slow, [x, *module.parameters()])
    assert fast.isfinite().all()


@pytest.mark.parametrize("name", ["rope", "window", "alibi", "full"])
def test_tokens_of_one_document_do_not_see_another(name):
    module = built(CASES[name])
    documents = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 7]])
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]])
    x, _ = data()
    fast = run(module, x, positions, document_ids=documents)
    same(fast, twin(module, x, positions, documents=documents), [x, *module.parameters()])
    alone = run(module, x[:1, 2:], positions[:1, 2:])
    torch.testing.assert_close(fast[:1, 2:], alone, **BLOCKS)


def test_low_rank_changes_equal_changed_weights_row_by_row():
    config = CASES["output_gate"]
    module = built(config)
    x, positions = data()
    low_rank = {
        name: LowRank(*(0.2 * torch.randn(s, dtype=torch.float64) for s in ((2, 3, i), (2, o, 3))))
        for name, (i, o) in config.linears(DIM).items()
    }
    assert set(low_rank) == {"q", "k", "v", "o", "g"}
    same(
        run(module, x, positions, deltas=low_rank),
        twin(module, x, positions, low_rank=low_rank),
        [x, *module.parameters(), *(t for pair in low_rank.values() for t in pair if t.requires_grad)],
    )


def test_grouped_heads_equal_all_heads_with_repeated_keys_and_values():
    grouped, full = built(SMALL), built(MHA)
    full.load_state_dict(grouped.state_dict() | {n: full.state_dict()[n] for n in ("k.weight", "v.weight")})
    for name in ("k", "v"):
        repeated = getattr(grouped, name).weight.unflatten(0, (2, 6)).repeat_interleave(2, 0).flatten(0, 1)
        getattr(full, name).weight.data.copy_(repeated)
    x, positions = data()
    torch.testing.assert_close(run(grouped, x, positions), run(full, x, positions), **BLOCKS)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.causal and not c.value_embedding])
def test_a_token_does_not_see_the_future(name):
    module = built(CASES[name])
    x, positions = data()
    changed = x.detach().clone()
    changed[:, 3] += 1
    before, after = run(module, x, positions), run(module, changed, positions)
    torch.testing.assert_close(before[:, :3], after[:, :3], **EXACT)
    assert (before[:, 3] - after[:, 3]).abs().max() > 1e-3


@pytest.mark.parametrize("pieces", [[1] * 7, [3, 1, 3], [4, 3]], ids=str)
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.causal and not c.value_embedding])
def test_cached_decoding_equals_full_recomputation(name, pieces):
    module = built(CASES[name])
    x, positions = data(seq=7)
    view, outputs, start = AppendOnly(positions), [], 0
    for count in pieces:
        piece = slice(start, start + count)
        scope = module.config.scope(positions[:, piece], cached=True, dtype=x.dtype)
        outputs.append(module(x[:, piece], scope, view))
        start += count
    torch.testing.assert_close(torch.cat(outputs, 1), run(module, x, positions), **CACHED)


@pytest.mark.parametrize("name", ["rope", "window", "relative_bias", "softcap"])
def test_cached_decoding_of_padded_rows_equals_full_recomputation(name):
    module = built(CASES[name])
    valid = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    positions = (valid.long().cumsum(1) - 1).clamp(min=0)
    x, _ = data(seq=7)
    view, outputs = AppendOnly(positions, valid), []
    for piece in (slice(0, 3), slice(3, 4), slice(4, 7)):
        scope = module.config.scope(positions[:, piece], cached=True, dtype=x.dtype)
        outputs.append(module(x[:, piece], scope, view))
    torch.testing.assert_close(torch.cat(outputs, 1), run(module, x, positions, valid), **CACHED)


def test_plain_causal_attention_needs_no_mask_and_one_new_token_none_either():
    """A mask that need not exist costs memory that grows with the square of the length."""
    positions = torch.arange(5)[None]
    assert SMALL.scope(positions).mask is None
    assert replace(SMALL, window=2).scope(positions, cached=True).mask is None
    assert replace(SMALL, window=2).scope(positions).mask is not None
    masks = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "scaled_dot_product" in str(function):
                masks.append((kwargs or {}).get("attn_mask"))
            return function(*args, **(kwargs or {}))

    module = SMALL.build(DIM, Init())
    with Watch(), torch.no_grad():
        view = AppendOnly(torch.arange(6)[None])
        module(torch.randn(1, 5, DIM), SMALL.scope(positions))
        module(torch.randn(1, 5, DIM), SMALL.scope(positions, cached=True), view)
        module(torch.randn(1, 1, DIM), SMALL.scope(torch.tensor([[5]]), cached=True), view)
    assert [m is None for m in masks] == [True, False, True]


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_operators_depends_on_neither_length_nor_rows(name):
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    config = CASES[name]
    module = config.build(DIM, Init())
    counts = set()
    for batch, seq in ((1, 4), (3, 4), (1, 33), (2, 65)):
        positions = torch.arange(seq).expand(batch, -1)
        values = torch.randn(batch, seq, 12) if config.value_embedding else None
        with Count() as count, torch.no_grad():
            scope = config.scope(positions, torch.ones(batch, seq, dtype=torch.bool))
            module(torch.randn(batch, seq, DIM), scope, value_embeds=values)
        counts.add(count.calls)
    assert len(counts) == 1, f"operators per call: {sorted(counts)}"


@pytest.mark.parametrize("name", ["rope", "output_gate", "value_embedding", "window", "softcap"])
def test_matmul_params_and_width_give_the_flops_that_pytorch_counts(name):
    config = CASES[name]
    module, x = config.build(40, Init()), torch.randn(2, 8, 40)
    scope = config.scope(torch.arange(8).expand(2, -1))
    values = torch.randn(2, 8, 12) if config.value_embedding else None
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x, scope, value_embeds=values)
    assert counter.get_total_flops() == 2 * config.matmul_params(40) * 16 + 4 * config.width * 2 * 8 * 8


def test_widths_are_those_of_the_cost_formulas():
    assert (SMALL.width, SMALL.kv_width) == (24, 24)
    assert MHA.kv_width == 48
    assert SMALL.linears(DIM) == {"q": (12, 24), "k": (12, 12), "v": (12, 12), "o": (24, 12)}


def test_float32_and_bfloat16_keep_their_type():
    for dtype in (torch.float32, torch.bfloat16):
        module = CASES["norm_after_rope"].build(DIM, Init()).to(dtype)
        x, positions = data()
        assert run(module, x.detach().to(dtype), positions).dtype == dtype


def test_a_scope_can_be_cut_by_rows():
    """Depth batching selects rows of the context: every tensor of a scope has the row as first axis."""
    config = replace(SMALL, window=3)
    scope = config.scope(torch.arange(5).expand(3, -1))
    for leaf in (scope.positions, *scope.rotary, scope.mask):
        assert leaf.shape[0] == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, r"heads \(6\) must be a multiple of kv_heads \(4\)"),
        ({"qk_bias": True, "heads": 8}, r"attention\.qk_bias .* kv_heads must equal heads \(8\)\. Got 2"),
        ({"head_dim": 15}, r"attention\.head_dim must be even for Rope\. Got 15"),
        ({"window": 0}, r"attention\.window must be at least 1 .* Got 0"),
        ({"softcap": 0.0}, r"attention\.softcap must be positive\. Got 0"),
        ({"head_dim": 0}, r"attention\.head_dim must be at least 1\. Got 0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **fields)


def test_what_a_call_cannot_mean_is_refused():
    x, positions = data()
    with pytest.raises(ValueError, match="value_embeds must be None for a layer without a gate"):
        run(built(SMALL), x, positions, value_embeds=torch.randn(2, 5, 12, dtype=torch.float64))
    with pytest.raises(ValueError, match="document_ids must be None under a cache"):
        SMALL.scope(positions, document_ids=positions, cached=True)


@pytest.mark.parametrize(
    ("config", "field", "value", "message"),
    [
        (SMALL, "position", "rope", r"attention\.position: .* Got 'rope'"),
        (HEAD_NORM, "over", "token", r"RMS\.over must be 'head' or 'full'\. Got 'token'"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_where_types_are_not_checked(config, field, value, message):
    config = replace(config)
    object.__setattr__(config, field, value)
    with pytest.raises(ValueError, match=message):
        config.__post_init__()


@pytest.mark.parametrize("name", CASES)
def test_a_config_survives_json(name):
    assert from_dict(Attention, to_dict(CASES[name])) == CASES[name]
