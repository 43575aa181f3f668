"""Our Ouro against every tensor recorded from the original, by name."""

import functools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from looplab.models.ouro import key_map_of
from looplab.models.published import PUBLISHED, assemble
from looplab.objectives.expected_exit import log_exit_law
from looplab.recurrence.exit import HazardExit, Seen, forward_until
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.trace import Recorder
from tolerances import EXACT, PUBLISHED_GRADIENTS, PUBLISHED_OUTPUTS

HERE = Path(__file__).parent / "ouro"
CASES = {name: load_file(HERE / name / "io.safetensors") for name in ("full", "grouped")}
WEIGHTS = {name: load_file(HERE / name / "weights.safetensors") for name in CASES}
FACTS = {name: json.loads((HERE / name / "config.json").read_text()) for name in CASES}
INPUTS = {"input_ids", "labels", "prompt", "pad_mask"}
RECORDED = [(case, name) for case, io in CASES.items() for name in sorted(set(io) - INPUTS)]

pytestmark = pytest.mark.filterwarnings("ignore:num_steps=6 is beyond the trained depth:UserWarning")


@functools.cache
def model(case):
    return assemble(PUBLISHED["ouro"], FACTS[case], WEIGHTS[case])


def rolled(case, tokens, **options):
    """States after every loop, their logits and their gate's logits, each with the loop as first axis."""
    recorder = Recorder()
    made = model(case)
    context = forward(made, tokens, recorder=recorder, logits_to_keep=0, **options).context
    states = recorder.states[1:]
    logits = torch.stack([made.head(made.coda(state, context)) for state in states])
    return torch.stack(states), logits, torch.stack([made.halt(state) for state in states])


@functools.cache
def loops(case, steps):
    with torch.no_grad():
        return rolled(case, CASES[case]["input_ids"], num_steps=steps)


def exit_distribution(gate):
    """Probability of stopping at each loop, as the training objective has it."""
    return log_exit_law(gate).exp()


def exit_steps(case, gate, threshold):
    """Index of the loop at which `hazard` stops each token, where all loops have run."""
    rule, state = HazardExit(threshold=threshold), torch.zeros(*gate.shape[1:], 1)
    memory, found = rule.start(model(case).spec, state), torch.full(gate.shape[1:], -1)
    for loop, score in enumerate(gate):
        stop, memory = rule.stops(memory, Seen(torch.full(gate.shape[1:2], loop + 1), state, score), len(gate))
        found = torch.where((found < 0) & stop, loop, found)
    return found


@functools.cache
def until(case, threshold):
    """One pass in which `hazard` says where each token is read."""
    with torch.no_grad():
        return forward_until(model(case), CASES[case]["input_ids"], HazardExit(threshold=threshold))


def chosen(values, steps):
    """Per token, the value of its own loop: L B T ... and B T."""
    index = steps[None, :, :, None].expand(1, -1, -1, values.shape[-1])
    return values.gather(0, index)[0]


def weighted(logits, gate):
    return (exit_distribution(gate)[..., None] * logits).sum(0)


@functools.cache
def gradients():
    """Loss of the weighted logits, and gradients under the original's names."""
    io = CASES["full"]
    _, logits, gate = rolled("full", io["input_ids"])
    mixed = weighted(logits, gate)[:, :-1]
    loss = F.cross_entropy(mixed.flatten(0, 1), io["labels"][:, 1:].flatten(), ignore_index=-100)
    named = dict(model("full").named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    return loss.detach(), key_map_of(model("full").config).export(dict(zip(named, grads, strict=True)))


@functools.cache
def decoded(threshold):
    """Six greedy tokens with a cache: the tokens, the logits they were taken from, the cache."""
    made, tokens = model("full"), CASES["full"]["prompt"]
    cache = new_cache(made.spec, rows=2, capacity=tokens.shape[1] + 6)
    picked, read = [], []
    with torch.no_grad():
        while len(picked) <= 6:
            _, logits, gate = rolled("full", tokens, cache=cache)
            last = torch.full(gate.shape[1:], len(gate) - 1)
            read.append(chosen(logits, last if threshold is None else exit_steps("full", gate, threshold))[:, -1])
            tokens = read[-1].argmax(-1)[:, None]
            picked.append(tokens)
    return torch.cat(picked[:6], 1), torch.stack(read), cache


def last_entry(which):
    """What the last position of row 0 left in the cache, one entry per loop * layers + layer."""
    made, (_, _, cache) = model("full"), decoded(None)
    example = torch.zeros(2, 4, 1, 8)
    layers = [cache.storage(0, layer, example)[which][:, 0, :, cache.length - 1] for layer in range(len(made.core))]
    return torch.stack(layers, 1).flatten(0, 1)


def layer_trace():
    """Outputs of all layers for row 0, in the order they ran."""
    made, found = model("full"), []
    hooks = [layer.register_forward_hook(lambda _, __, output: found.append(output[0])) for layer in made.core]
    with torch.no_grad():
        forward(made, CASES["full"]["input_ids"])
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


def padded():
    io = CASES["full"]
    with torch.no_grad():
        return forward(model("full"), io["input_ids"], valid=io["pad_mask"].bool())


def reproduced(case, name):
    """Our value of a recorded tensor."""
    if name.startswith("exit_step_q"):
        return until(case, float(name.removeprefix("exit_step_q"))).steps - 1
    states, logits, gate = loops(case, 6 if name.startswith("ut6") else 4)
    found = {
        "loop_states": lambda: states,
        "loop_logits": lambda: logits,
        "gate_logits": lambda: gate,
        "ut6_last_state": lambda: states[-1],
        "ut6_logits": lambda: logits[-1],
        "ut6_gate_logits": lambda: gate,
        "layer_trace_row0": layer_trace,
        "exit_pdf": lambda: exit_distribution(gate),
        "exit_cdf": lambda: exit_distribution(gate).cumsum(0),
        "exit_logits_q0.5": lambda: until(case, 0.5).logits,
        "weighted_logits": lambda: weighted(logits, gate),
        "loss_weighted": lambda: gradients()[0],
        "gradnorm_weighted": lambda: torch.stack([grad.norm() for _, grad in sorted(gradients()[1].items())]),
        "grad_gate_weight": lambda: gradients()[1]["model.early_exit_gate.weight"],
        "pad_logits": lambda: padded().logits,
        "pad_position_ids": lambda: padded().context.positions,
        "decode_tokens": lambda: decoded(None)[0],
        "decode_logits": lambda: decoded(None)[1],
        "decode_q0.5_tokens": lambda: decoded(0.5)[0],
        "decode_q0.5_logits": lambda: decoded(0.5)[1],
        "cache_keys_row0_last": lambda: last_entry(0),
        "cache_values_row0_last": lambda: last_entry(1),
    }
    return found[name]()


@pytest.mark.parametrize(("case", "name"), RECORDED, ids=lambda part: part)
def test_every_recorded_tensor_is_reproduced(case, name):
    expected, found = CASES[case][name], reproduced(case, name)
    if name == "pad_logits":
        valid = CASES[case]["pad_mask"].bool()
        expected, found = expected[valid], found[valid]
    bound = PUBLISHED_GRADIENTS if name.startswith("grad") else PUBLISHED_OUTPUTS
    torch.testing.assert_close(found, expected, **(bound if expected.is_floating_point() else EXACT))


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_the_names_and_bytes_of_the_file(case):
    exported = key_map_of(model(case).config).export(model(case).state_dict())
    assert exported.keys() == WEIGHTS[case].keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, WEIGHTS[case][name]), name


def test_nothing_that_was_recorded_is_left_out():
    assert {name: len(io) for name, io in CASES.items()} == {"full": 31, "grouped": 3}
