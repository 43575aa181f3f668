"""Our Huginn against every tensor recorded from the original, by name."""

import functools
import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from looplab.models.huginn import config, key_map
from looplab.models.published import PUBLISHED, assemble
from looplab.recurrence.exit import ArgmaxExit, LatentExit, Seen, forward_until
from looplab.recurrence.exit.latent import relative_change
from looplab.recurrence.exit.readout import divergence, entropy
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.recurrence.kv import CopyLast, DepthIndexed, Single, Skip
from looplab.recurrence.kv.depth_indexed import DepthIndexedCache
from looplab.recurrence.loop import forward, new_cache, run_plan
from looplab.recurrence.trace import Recorder
from tolerances import EXACT, PUBLISHED_GRADIENTS, PUBLISHED_OUTPUTS

HERE = Path(__file__).parent / "huginn"
CASES = {name: load_file(HERE / name / "io.safetensors") for name in ("full", "mqa")}
WEIGHTS = {name: load_file(HERE / name / "weights.safetensors") for name in CASES}
FACTS = {name: json.loads((HERE / name / "config.json").read_text()) for name in CASES}
INPUTS = {"input_ids", "labels", "prompt", "init_state_rand"}
RECORDED = [(case, name) for case, io in CASES.items() for name in sorted(set(io) - INPUTS)]
THRESHOLD, DEEPEST = 0.31, 7
"""Of the recorded adaptive passes."""

pytestmark = pytest.mark.filterwarnings("ignore:kv_rule=:UserWarning")


@functools.cache
def model(case):
    return assemble(PUBLISHED["huginn"], FACTS[case], WEIGHTS[case])


def encoded(case, start):
    """Context of the recorded tokens, and the start: zero, or the recorded state."""
    io = CASES[case]
    context = model(case).encode(io["input_ids"])
    return context, io["init_state_rand"] if start == "rand" else torch.zeros_like(context.embeds)


@functools.cache
def states(case, start):
    """States after 0 .. 7 iterations."""
    recorder = Recorder()
    with torch.no_grad():
        run_plan(model(case), model(case).spec.plan(DEEPEST), *encoded(case, start), recorder=recorder)
    return recorder.states


@functools.cache
def logits(case, start, steps):
    """Readout after some iterations."""
    with torch.no_grad():
        return model(case).head(model(case).coda(states(case, start)[steps], encoded(case, start)[0]))


def loss_of(case, read):
    return F.cross_entropy(read.flatten(0, 1), CASES[case]["labels"].flatten(), ignore_index=-100)


@functools.cache
def trained(case, free, window):
    """Loss and gradients by the original's names, after `free` iterations without and `window` with gradient."""
    made = model(case)
    context, state = encoded(case, "rand")
    state = run_plan(made, made.spec.plan(free + window), context, state, gradient=TruncatedBPTT(window=window))
    loss = loss_of(case, made.head(made.coda(state, context)))
    names, parameters = zip(*made.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    return loss.detach(), key_map(made.config).export(dict(zip(names, found, strict=True)))


def trace(case):
    """Adapter output and the output of every core layer in the first iteration."""
    made, seen = model(case), []
    modules = [made.injections[0], *made.core]
    handles = [m.register_forward_hook(lambda module, args, output: seen.append(output)) for m in modules]
    with torch.no_grad():
        made.step(encoded(case, "rand")[1], encoded(case, "rand")[0], 0, torch.zeros(2, dtype=torch.long))
    for handle in handles:
        handle.remove()
    return torch.stack(seen)


@functools.cache
def decoded(case, rule):
    """Greedy tokens after the prompt, and the logits of the last position at each of them."""
    made, prompt = model(case), CASES[case]["prompt"]
    cache = new_cache(made.spec, rows=2, capacity=14, num_steps=4, rule=rule)
    tokens, read, fed = [], [], prompt
    with torch.no_grad():
        for _ in range(7):
            zeros = torch.zeros(2, fed.shape[1], made.spec.noise_width)
            read.append(forward(made, fed, num_steps=4, noise=zeros, cache=cache).logits[:, -1])
            fed = read[-1].argmax(-1, keepdim=True)
            tokens.append(fed)
    return torch.cat(tokens[:-1], 1), torch.stack(read)


class AlwaysLast(DepthIndexedCache):
    """As soon as one past token lacks an entry at this iteration, every past token shows its deepest one."""

    def past(self, block, store, iteration, end):
        last = self.executed[block][0, : self.length] - 1
        if self.length == 0 or int(last.min()) >= self.uniform:
            return store[self.uniform, :, :, :end]
        slots = [*last.tolist(), self.uniform]
        return torch.stack([store[slot, :, :, at] for at, slot in enumerate(slots)], dim=2)


RULES = {
    "latest_m4": DepthIndexed(missing=CopyLast()),
    "available_m4": DepthIndexed(missing=CopyLast()),
    "always_last_m4": DepthIndexed(missing=CopyLast()),
    "skip": DepthIndexed(missing=Skip()),
    "compress_s4": Single(),
}


@functools.cache
def adaptive(case, rule):
    """Tokens of row 0 one by one, each until its state hardly moves: steps, values of the signal, logits."""
    made = model(case)
    cache = new_cache(made.spec, rows=1, capacity=12, num_steps=DEEPEST, rule=RULES[rule])
    if rule == "always_last_m4":
        cache.__class__ = AlwaysLast
    steps, values, read = [], torch.full((12, DEEPEST), -1.0), []
    exit_rule, start = LatentExit(threshold=THRESHOLD), torch.zeros(1, 1, made.spec.noise_width)
    for at, token in enumerate(CASES[case]["input_ids"][0, :12]):
        with watched(made) as seen, torch.no_grad():
            out = forward_until(made, token.view(1, 1), exit_rule, num_steps=DEEPEST, noise=start, cache=cache)
        steps.append(int(out.steps))
        read.append(out.logits[0, 0])
        found = torch.stack([torch.zeros_like(out.state), *seen])
        values[at, : len(seen)] = relative_change(found[1:], found[:-1])[:, 0, 0]
    return {"steps": torch.tensor(steps), "values": values, "logits": torch.stack(read)}


@contextmanager
def watched(made):
    """The states that `step` returns inside it."""
    step, found = made.step, []

    def stepping(*given, **named):
        found.append(step(*given, **named))
        return found[-1]

    made.step = stepping
    try:
        yield found
    finally:
        del made.step


def exit_signal(case, signal, start):
    """The original's exit statistics, from our states and readouts."""
    found = torch.stack(states(case, start))
    before, after = found[:-1], found[1:]
    if signal == "latent_diff":
        return relative_change(after, before)
    if signal == "cosine":
        return 1 - (after * before).sum(-1) / after.norm(dim=-1) / before.norm(dim=-1)
    last = torch.stack([logits(case, start, steps)[:, -1] for steps in range(1, DEEPEST + 1)])
    if signal == "argmax_stable":
        return repeated(case, start, last)
    if signal == "entropy_diff":
        found = entropy(last.log_softmax(-1)[..., None, :])
        return (found - torch.cat([torch.full((1, 2), 100.0), found[:-1]])).abs()  # the original starts at 100
    columns, probabilities = last.shape[-1], last.softmax(-1)
    if signal == "minp_kl":
        rare = probabilities < 0.1 * probabilities.amax(-1, keepdim=True)
        probabilities = torch.where(rare, 1 / columns, probabilities)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    now = probabilities.log()
    earlier = torch.cat([torch.full((1, 2, columns), 1 / columns).log(), now[:-1]])  # the original starts uniform
    return divergence(earlier[..., None, :], now[..., None, :])


def repeated(case, start, last):
    """How often the top token of the last position came again, by the memory of our `argmax`, which counts it too."""
    rule, counts = ArgmaxExit(times=DEEPEST), []
    memory = rule.start(model(case).spec, states(case, start)[0][:, -1:])
    for step, now in enumerate(last, 1):
        seen = Seen(torch.full((2,), step), states(case, start)[step][:, -1:], None, now[:, None, None])
        _, memory = rule.observe(memory, seen)
        counts.append(memory.times[:, 0] - 1)
    return torch.stack(counts)


def ours(case, name):
    """What we make of the tensor that was recorded under this name."""
    if name == "prelude_out":
        return encoded(case, "zero")[0].injected
    if name == "core_trace_rand_step1":
        return trace(case)
    if name == "loss_zero_r4":
        return loss_of(case, logits(case, "zero", 4))
    if match := re.fullmatch(r"states_(zero|rand)", name):
        return torch.stack(states(case, match[1])[1 : len(CASES[case][name]) + 1])
    if match := re.fullmatch(r"logits_(zero|rand)_r(\d)", name):
        return logits(case, match[1], int(match[2]))
    if match := re.fullmatch(r"gradloss_(\d)_(\d)", name):
        return trained(case, int(match[1]), int(match[2]))[0]
    if match := re.fullmatch(r"grad_adapter_(\d)_(\d)", name):
        return trained(case, int(match[1]), int(match[2]))[1]["transformer.adapter.weight"]
    if match := re.fullmatch(r"gradnorm_(\d)_(\d)", name):
        gradients = trained(case, int(match[1]), int(match[2]))[1]
        return torch.stack([gradients[n].norm() for n in sorted(gradients)])
    if match := re.fullmatch(r"decode_(full|shared)_(tokens|logits)", name):
        rule = DepthIndexed() if match[1] == "full" else Single()
        return decoded(case, rule)[match[2] == "logits"]
    if match := re.fullmatch(r"adaptive_(\w+)_(steps|values|logits)", name):
        return adaptive(case, match[1])[match[2]]
    match = re.fullmatch(r"exit_(\w+)_(zero|rand)_(token|mean|last)", name)
    signal = exit_signal(case, match[1], match[2])
    return signal.mean(-1) if match[3] == "mean" else signal


@pytest.mark.parametrize(("case", "name"), RECORDED, ids=lambda x: x)
def test_every_recorded_tensor_is_ours(case, name):
    recorded = CASES[case][name]
    tolerance = PUBLISHED_GRADIENTS if name.startswith("gradnorm") else PUBLISHED_OUTPUTS
    if not recorded.is_floating_point():
        tolerance = EXACT
    torch.testing.assert_close(ours(case, name), recorded, **tolerance, equal_nan="cosine" in name)


def test_gradients_are_listed_for_every_parameter_of_the_file():
    stored = set(WEIGHTS["full"]) - {"freqs_cis"}
    assert set(trained("full", 2, 2)[1]) == stored
    assert len(CASES["full"]["gradnorm_2_2"]) == len(stored) == 75


def test_the_tolerance_tells_a_slip_from_rounding():
    """The other order of the adapter's halves, and one norm fewer, are far outside."""
    made = model("full")
    context, state = encoded("full", "rand")
    recorded = CASES["full"]["core_trace_rand_step1"][0]
    with torch.no_grad():
        swapped = made.injections[0](context.injected, state, torch.zeros(2, dtype=torch.long))
        assert float((swapped - recorded).abs().max()) > 1
        deep = states("full", "rand")[4]
        assert float((made.head(made.final_norm(deep)) - CASES["full"]["logits_rand_r4"]).abs().max()) > 0.1


@pytest.mark.parametrize("case", CASES)
def test_the_config_has_what_the_file_says(case):
    made = config(FACTS[case], {})
    assert made == model(case).config
    assert made.attention.kv_heads == FACTS[case]["num_key_value_heads"]
    assert made.order.num_steps == 7 and str(made.trained_depth) == "PoissonLognormal(7, max_steps=512)"
    assert made.max_positions == 32 and made.head.tied
