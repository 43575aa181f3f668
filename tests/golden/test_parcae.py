"""Our Parcae against every tensor recorded from the original, by name."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from looplab.models.parcae import config, key_map
from looplab.models.published import PUBLISHED, assemble
from looplab.recurrence.aligned import run_aligned
from looplab.recurrence.gradient import FullBPTT, TruncatedBPTT
from looplab.recurrence.kv import Single
from looplab.recurrence.loop import forward, new_cache, run_plan
from looplab.recurrence.trace import Recorder
from tolerances import EXACT, PUBLISHED_GRADIENTS, PUBLISHED_OUTPUTS

HERE = Path(__file__).parent / "parcae"
CASES = {name: load_file(HERE / name / "io.safetensors") for name in ("diagonal", "linear")}
WEIGHTS = {name: load_file(HERE / name / "weights.safetensors") for name in CASES}
FACTS = {name: json.loads((HERE / name / "config.json").read_text()) for name in CASES}
INPUTS = {"input_ids", "labels", "prompt", "init_state_rand", "train_step"}
RECORDED = [(case, name) for case, io in CASES.items() for name in sorted(set(io) - INPUTS)]

pytestmark = pytest.mark.filterwarnings("ignore:kv_rule=:UserWarning")


@functools.cache
def model(case):
    return assemble(PUBLISHED["parcae"], FACTS[case], WEIGHTS[case])


def zeros(case, seq):
    return torch.zeros(CASES[case]["input_ids"].shape[0], seq, model(case).spec.noise_width)


def encoded(case, start):
    """Context of the recorded tokens, and the recorded state, or the one that zero noise gives."""
    io, made = CASES[case], model(case)
    context = made.encode(io["input_ids"])
    if start == "rand":
        return context, io["init_state_rand"]
    return context, made.init_state(context, zeros(case, io["input_ids"].shape[1]))


@functools.cache
def states(case, start):
    """States after 0 .. 7 iterations."""
    context, state = encoded(case, start)
    recorder = Recorder()
    with torch.no_grad():
        run_plan(model(case), model(case).spec.plan(7), context, state, recorder=recorder)
    return recorder.states


def read(case, start, steps):
    """Logits after some iterations."""
    with torch.no_grad():
        return model(case).head(model(case).coda(states(case, start)[steps], encoded(case, start)[0]))


@functools.cache
def trained(case, free, window):
    """Loss and gradient norms in the original's order, with `free` iterations before `window` ones with gradient."""
    made = model(case)
    context, state = encoded(case, "rand")
    state = run_plan(made, made.spec.plan(free + window), context, state, gradient=TruncatedBPTT(window=window))
    return scored(case, made.head(made.coda(state, context)))


@functools.cache
def trained_per_row():
    """The training row: n + k iterations of every sequence, the last `window` of them with gradient."""
    made, io = model("diagonal"), CASES["diagonal"]
    gradient = TruncatedBPTT(window=FACTS["diagonal"]["mean_backprop_depth"])
    context, state = encoded("diagonal", "rand")
    state = run_aligned(made, io["train_n"] + io["train_k"], context, state, gradient=gradient)
    logits = made.head(made.coda(state, context))
    return {"logits": logits.detach(), **scored("diagonal", logits)}


@functools.cache
def trained_as_masked():
    """The same as the original masks rows: first those without gradient, then those with."""
    made, io = model("diagonal"), CASES["diagonal"]
    free, window = io["train_n"], io["train_k"]
    active = [step < free for step in range(int(free.max()))] + [step < window for step in range(int(window.max()))]
    context, state = encoded("diagonal", "rand")
    gradient = TruncatedBPTT(window=int(window.max()))
    state = run_plan(made, made.spec.plan(len(active)), context, state, active=active, gradient=gradient)
    logits = made.head(made.coda(state, context))
    return {"logits": logits.detach(), **scored("diagonal", logits)}


def scored(case, logits):
    made, labels = model(case), CASES[case]["labels"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    names, parameters = zip(*made.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    zero = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    theirs = key_map(made.config).export(dict(zip(names, zero, strict=True)))
    return {"loss": loss.detach(), "gradnorm": torch.stack([theirs[name].norm() for name in sorted(theirs)])}


@functools.cache
def decoded(case, rule):
    """Logits after the prompt and after each of 6 greedy tokens, and these tokens."""
    made, ids = model(case), CASES[case]["prompt"]
    rows, seq = ids.shape
    rule = {"full": made.spec.kv_rule, "shared": Single()}[rule]
    cache = new_cache(made.spec, rows=rows, capacity=seq + 6, num_steps=4, rule=rule)
    logits, tokens = [], []
    for _ in range(7):
        with torch.no_grad():
            out = forward(made, ids, num_steps=4, noise=zeros(case, ids.shape[1]), cache=cache, logits_to_keep=1)
        logits.append(out.logits[:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
        tokens.append(ids)
    return {"logits": torch.stack(logits), "tokens": torch.cat(tokens[:6], dim=1)}


def divided(case, totals):
    """(n, k) of drawn depths, as the gradient window divides them: without gradient, with."""
    strategy = TruncatedBPTT(window=FACTS[case]["mean_backprop_depth"])
    k = torch.tensor([strategy.gradient_count(int(total)) for total in totals.flatten()]).view_as(totals)
    return totals - k, k


def drawn_per_batch(case):
    """(n, k) of the original's sampler with one depth per batch. It runs n + k iterations, more than it drew: n is the
    whole draw, not what lies before the window."""
    totals = torch.cat([poisson(FACTS[case]["mean_recurrence"], (1,), step) for step in range(12)])
    return torch.stack([totals, divided(case, totals)[1]], dim=1)


def drawn_per_sequence(case):
    """n and k of 8 sequences at each step."""
    totals = torch.stack([poisson(FACTS[case]["mean_recurrence"], (8,), step) for step in range(12)])
    return dict(zip("nk", divided(case, totals), strict=True))


def poisson(mean, shape, step):
    """The original's draws, from its generator; the law is `PoissonDepth`, whose own draws are counter-based."""
    generator = torch.Generator().manual_seed(514229 + step)
    return torch.poisson(torch.full(shape, float(mean)), generator=generator).clamp(min=1).long()


def injection(case):
    return model(case).injections[0]


def adapted(case):
    context, state = encoded(case, "rand")
    with torch.no_grad():
        return injection(case)(state, context.injected, torch.zeros(state.shape[0], dtype=torch.long))


OURS = {
    r"prelude_out": lambda case: encoded(case, "zero")[0].injected.detach(),
    r"injection_decay": lambda case: injection(case).rule.decay()[0].detach(),
    r"injection_dt": lambda case: injection(case).rule.decay()[1].detach(),
    r"adapter_out_rand_step1": adapted,
    r"states_(zero|rand)": lambda case, start: torch.stack(states(case, start)[1:]),
    r"projected_rand_r(\d)": lambda case, steps: model(case).project(states(case, "rand")[int(steps)]).detach(),
    r"logits_(zero|rand)_r(\d)": lambda case, start, steps: read(case, start, int(steps)),
    r"grad(loss|norm)_(\d)_(\d)": lambda case, what, n, k: trained(case, int(n), int(k))[
        {"loss": "loss", "norm": "gradnorm"}[what]
    ],
    r"train_(logits|loss|gradnorm)": lambda case, what: trained_per_row()[what],
    r"train_(n|k)": lambda case, what: drawn_per_sequence(case)[what][int(CASES[case]["train_step"]), :2],
    r"decode_(full|shared)_(logits|tokens)": lambda case, rule, what: decoded(case, rule)[what],
    r"sampler_per_batch_n_k": drawn_per_batch,
    r"sampler_per_sequence_(n|k)": lambda case, what: drawn_per_sequence(case)[what],
}
"""What we have for a recorded tensor, by pattern of its name."""


def ours(case, name):
    (found,) = [(match, make) for pattern, make in OURS.items() if (match := re.fullmatch(pattern, name))]
    match, make = found
    return make(case, *match.groups())


@pytest.mark.parametrize(("case", "name"), RECORDED)
def test_every_recorded_tensor_is_reproduced(case, name):
    expected, found = CASES[case][name], ours(case, name)
    bound = PUBLISHED_GRADIENTS if "gradnorm" in name else PUBLISHED_OUTPUTS
    torch.testing.assert_close(found, expected, **(bound if expected.is_floating_point() else EXACT))


def test_nothing_that_was_recorded_is_left_out():
    assert {name: len(io) for name, io in CASES.items()} == {"diagonal": 38, "linear": 30}
    for pattern in OURS:
        assert any(re.fullmatch(pattern, name) for _, name in RECORDED), pattern


@pytest.mark.parametrize("case", CASES)
def test_inputs_are_what_the_readme_says(case):
    io = CASES[case]
    assert torch.equal(io["prompt"], io["input_ids"][:, :8])
    assert io["labels"].shape == io["input_ids"].shape and (io["labels"] == -100).any()
    assert torch.equal(states(case, "zero")[0], torch.zeros_like(io["init_state_rand"]))


def test_rows_with_their_own_depth_stop_where_the_original_freezes_them():
    io, made = CASES["diagonal"], model("diagonal")
    context, state = encoded("diagonal", "rand")
    for row, depth in enumerate((io["train_n"] + io["train_k"]).tolist()):
        with torch.no_grad():
            logits = made.head(made.coda(run_plan(made, made.spec.plan(depth), context, state), context))
        torch.testing.assert_close(logits[row], io["train_logits"][row], **PUBLISHED_OUTPUTS)


@pytest.mark.parametrize("case", CASES)
def test_the_trained_law_reaches_every_depth_that_was_drawn(case):
    if FACTS[case]["recurrent_iteration_method"] == "per-batch":
        ran = CASES[case]["sampler_per_batch_n_k"].sum(dim=1)
    else:
        ran = CASES[case]["sampler_per_sequence_n"] + CASES[case]["sampler_per_sequence_k"]
    assert set(ran.flatten().tolist()) <= set(model(case).spec.trained_depth.support())


@pytest.mark.parametrize("case", CASES)
def test_scales_of_the_start_strategy_are_the_recorded_ones(case):
    facts, made = FACTS[case], model(case).config
    assert made.embed_scale == facts["emb_scale"]
    assert made.head.logit_scale == facts["logit_scale"]
    assert made.state_init.std == pytest.approx(facts["like_init_state_std"], rel=1e-15)


@pytest.mark.parametrize("case", CASES)
def test_rotary_angles_are_those_of_the_file(case):
    table = key_map(model(case).config).computed["freqs_cis"]()
    torch.testing.assert_close(table, WEIGHTS[case]["freqs_cis"], **PUBLISHED_OUTPUTS)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_names_and_bytes(case):
    shapes = {name: tuple(tensor.shape) for name, tensor in WEIGHTS[case].items()}
    exported = key_map(config(FACTS[case], shapes)).export(model(case).state_dict())
    assert exported.keys() == WEIGHTS[case].keys() - {"freqs_cis"}
    for name, tensor in exported.items():
        assert torch.equal(tensor.view(torch.int32), WEIGHTS[case][name].view(torch.int32)), name


def test_running_rows_so_that_they_end_together_is_what_the_original_does_with_masks():
    for name, value in trained_as_masked().items():
        bound = PUBLISHED_GRADIENTS if name == "gradnorm" else PUBLISHED_OUTPUTS
        torch.testing.assert_close(trained_per_row()[name], value, **bound)


def test_gradients_of_a_window_that_covers_everything_are_full_ones():
    context, state = encoded("diagonal", "rand")
    made = model("diagonal")
    state = run_plan(made, made.spec.plan(4), context, state, gradient=FullBPTT())
    full = scored("diagonal", made.head(made.coda(state, context)))["gradnorm"]
    torch.testing.assert_close(full, trained("diagonal", 0, 4)["gradnorm"], **EXACT)
