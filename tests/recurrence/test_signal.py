import pytest
import torch

from looplab._config import from_dict, to_dict
from looplab.nn.attention import Attention
from looplab.nn.layer import Layer
from looplab.nn.linear import Init
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import PreNorm, RMSNorm
from looplab.nn.rope import Rope
from looplab.recurrence.signal import AdaLN, NoSignal, PerIterationLoRA, Signal, StepEmbedding
from reference import layers
from tolerances import BLOCK_GRADIENTS, BLOCKS, EXACT, ROWS


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


DIM, INIT = 6, Init(std=0.5)
ATTENTION, FFN = Attention(heads=2, kv_heads=1, head_dim=4, position=Rope(base=100.0)), SwiGLU(hidden=9)
LINEARS = Layer.linears(DIM, ATTENTION, FFN)
LORA = PerIterationLoRA(rank=2, targets=("q", "o", "up", "down"), max=4)
ALL = [NoSignal(), StepEmbedding(max=4), AdaLN(freq_dim=8), LORA]
ITERATION = torch.tensor([3, 0, 2])
TIMES = torch.tensor([[0.0, 0.25, 0.5, 0.75], [0.0, 0.5, 0.8, 1.0], [0.0, 0.1, 0.3, 0.6]], dtype=torch.float64)
STEPS = torch.tensor([[0.25] * 4, [0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)


def layer():
    torch.manual_seed(0)
    made = Layer(DIM, attention=ATTENTION, ffn=FFN, norm=RMSNorm(), placement=PreNorm(), init=INIT)
    return made.double()


def state(rows=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, DIM, generator=generator, dtype=torch.float64)


def scope(rows=3):
    return ATTENTION.scope(torch.arange(4).expand(rows, -1), dtype=torch.float64)


def shaken(module):
    torch.manual_seed(2)
    for parameter in module.double().parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.5)
    return module


def test_a_step_embedding_adds_the_vector_of_each_rows_iteration():
    signal = StepEmbedding(max=4).build(DIM, INIT).double()
    u = state()
    added = signal(u, ITERATION) - u
    for row, t in enumerate(ITERATION):
        torch.testing.assert_close(added[row], signal.table[t].expand(4, -1), **BLOCKS)


def test_a_zero_step_embedding_leaves_every_bit():
    signal = StepEmbedding(max=4).build(DIM, INIT).double()
    signal.table.data.zero_()
    torch.testing.assert_close(signal(state(), ITERATION), state(), **EXACT)


def test_time_codes_and_gains_equal_the_twin_in_values_and_gradients():
    code, gains = shaken(AdaLN(freq_dim=8).build(DIM, INIT)), shaken(AdaLN(freq_dim=8).build_layer(DIM, LINEARS, INIT))
    weights = dict(code.named_parameters())
    slow = torch.stack(
        [
            layers.time_mlp(layers.time_code(TIMES[row, t], 8), weights, "time")
            + layers.time_mlp(layers.time_code(STEPS[row, t], 8), weights, "step_size")
            for row, t in enumerate(ITERATION)
        ]
    )
    fast = code(TIMES, STEPS, ITERATION)
    torch.testing.assert_close(fast, slow, **BLOCKS)
    chunks = (gains.map.weight @ (slow / (1 + torch.exp(-slow))).T).T + gains.map.bias
    modulation = gains(fast)
    for i, gain in enumerate((modulation.attn_gate, modulation.ffn_gate, modulation.attn_scale, modulation.ffn_scale)):
        torch.testing.assert_close(gain[:, 0], chunks[:, i * DIM : (i + 1) * DIM], **BLOCKS)
    inputs = [*code.parameters(), *gains.parameters()]
    both = (torch.cat(modulation, -1).pow(3).sum(), chunks.pow(3).sum())
    for a, b in zip(*(torch.autograd.grad(y, inputs) for y in both), strict=True):
        torch.testing.assert_close(a, b, **BLOCK_GRADIENTS)


def test_a_low_rank_change_that_has_not_been_trained_leaves_every_bit():
    deltas = LORA.build_layer(DIM, LINEARS, INIT).double()(ITERATION)
    assert set(deltas) == {"q", "o", "up", "down"}
    torch.testing.assert_close(layer()(state(), scope(), deltas=deltas), layer()(state(), scope()), **EXACT)


def test_a_low_rank_change_equals_the_changed_weights_of_each_rows_iteration():
    made, lora = layer(), shaken(LORA.build_layer(DIM, LINEARS, INIT))
    together = made(state(), scope(), deltas=lora(ITERATION))
    for row, t in enumerate(ITERATION):
        weights = dict(made.named_parameters())
        for name in LORA.targets:
            key = f"{'attn' if name in 'qo' else 'ffn'}.{name}.weight"
            weights[key] = weights[key] + lora.b[name][t] @ lora.a[name][t]
        alone = torch.func.functional_call(made, weights, (state()[row : row + 1], scope(1)))
        torch.testing.assert_close(together[row : row + 1], alone, **BLOCKS)


def test_mixed_rows_equal_single_rows():
    embedding = StepEmbedding(max=4).build(DIM, INIT).double()
    code, gains = shaken(AdaLN(freq_dim=8).build(DIM, INIT)), shaken(AdaLN(freq_dim=8).build_layer(DIM, LINEARS, INIT))
    lora, made = shaken(LORA.build_layer(DIM, LINEARS, INIT)), layer()

    def run(rows):
        u = embedding(state()[rows], ITERATION[rows])
        modulation = gains(code(TIMES[rows], STEPS[rows], ITERATION[rows]))
        return made(u, scope(len(u)), modulation=modulation, deltas=lora(ITERATION[rows]))

    together = run(slice(None))
    for row in range(3):
        torch.testing.assert_close(together[row : row + 1], run(slice(row, row + 1)), **ROWS)


def test_parameter_and_matmul_counts():
    assert sum(p.numel() for _ in range(2) for p in StepEmbedding(max=4).build(640, INIT).parameters()) == 5120
    lora = LORA.build_layer(DIM, LINEARS, INIT)
    per_iteration = sum(p.numel() for p in lora.parameters()) // LORA.max
    assert LORA.matmul_params(LINEARS) == per_iteration
    code, gains = AdaLN(freq_dim=8).build(DIM, INIT), AdaLN(freq_dim=8).build_layer(DIM, LINEARS, INIT)
    matrices = [sum(p.numel() for p in m.parameters() if p.dim() == 2) for m in (code, gains)]
    assert AdaLN(freq_dim=8).matmul_params_per_row(DIM, 3) == matrices[0] + 3 * matrices[1]
    for config in (NoSignal(), StepEmbedding(max=4)):
        assert (config.matmul_params(LINEARS), config.matmul_params_per_row(DIM, 3)) == (0, 0)


def test_what_a_signal_says_of_itself():
    assert [c.index_part for c in ALL] == [None, "embedding", "adaln", "lora"]
    assert [c.limit for c in ALL] == [None, 4, None, 4]
    assert NoSignal().build(DIM, INIT) is None
    assert NoSignal().build_layer(DIM, LINEARS, INIT) is None
    assert LORA.build(DIM, INIT) is None
    assert StepEmbedding(max=4).build_layer(DIM, LINEARS, INIT) is None


def test_a_bfloat16_code_keeps_its_type():
    code = AdaLN(freq_dim=8).build(DIM, INIT).bfloat16()
    assert code(TIMES, STEPS, ITERATION).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepEmbedding(max=0), r"StepEmbedding\.max must be at least 1\. Got 0"),
        (lambda: AdaLN(freq_dim=7), r"AdaLN\.freq_dim must be even and at least 2\. Got 7"),
        (lambda: PerIterationLoRA(rank=0, targets=("q",), max=2), r"PerIterationLoRA\.rank must be at least 1\. Got 0"),
        (lambda: PerIterationLoRA(rank=1, targets=("q",), max=0), r"PerIterationLoRA\.max must be at least 1\. Got 0"),
        (
            lambda: PerIterationLoRA(rank=1, targets=(), max=2),
            r"targets must name at least one map, each once\. Got \(\)",
        ),
        (
            lambda: PerIterationLoRA(rank=1, targets=("qate",), max=2).build_layer(DIM, LINEARS, INIT),
            r"targets must be among down, gate, k, o, q, up, v\. Got 'qate'\. Did you mean 'gate'\?",
        ),
    ],
)
def test_a_bad_value_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("config", ALL, ids=repr)
def test_a_choice_survives_json(config):
    assert from_dict(Signal, to_dict(config)) == config
