from dataclasses import replace

import pytest
import torch
from torch import Tensor

from contract.zoo import tiny
from engine.stage_driver import BucketRunner, DelayedRunner, Driver, Text
from looplab.engine.config import EngineConfig
from looplab.engine.request import DepthParams, RefusedError, SamplingParams
from looplab.engine.runner import TorchRunner
from looplab.engine.sampling import Draw, draw
from looplab.engine.slots import rule_of
from looplab.engine.stages import Job, Row, Span
from looplab.models.base import PRESETS, build
from looplab.recurrence.exit import ReplayExit, exit_rule, forward_until
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.plan import Blocks
from looplab.recurrence.state import standard_noise
from tolerances import CACHED, FAST

pytestmark = pytest.mark.filterwarnings("ignore:kv_rule=:UserWarning", "ignore:num_steps=:UserWarning")

CHUNK, PAGE = 8, 4


def runner_of(model, **options):
    settings = {"max_model_len": 32, "page_tokens": PAGE, "prefill_chunk": CHUNK, "num_pages": 200, "max_resident": 8}
    return TorchRunner(model, EngineConfig(**{**settings, **options}))


def texts_of(count, *, depth=None, sampling=None, seed=0, vocab=60):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        length = int(torch.randint(1, 20, (), generator=generator))
        prompt = tuple(torch.randint(0, vocab, (length,), generator=generator).tolist())
        one = {} if sampling is None else {"sampling": sampling}
        made.append(
            Text(
                prompt,
                int(torch.randint(1, 9, (), generator=generator)),
                depth=depth or DepthParams(),
                seed=number,
                **one,
            )
        )
    return made


@torch.no_grad()
def alone(runner, text):
    """The same text by `recurrence.loop`, one token at a time: tokens, log-probabilities, depths."""
    model, spec = runner.model, runner.spec
    depth, prefill_steps = runner.resolve(text.depth)
    most = max(len(section) for section in runner._sections)
    dtype = next(model.parameters()).dtype
    rule = rule_of(runner.kv_rule)
    steps = tuple(len(section) for section in runner._sections) if isinstance(spec.order, Blocks) else most
    if spec.kv_rules == (spec.kv_rule,):
        rule = spec.kv_rule
    if spec.grid is not None:  # ids of one number of steps are not those of another
        steps = depth.num_steps
    cache = new_cache(spec, rows=1, capacity=len(text.prompt) + text.length, num_steps=steps, rule=rule, dtype=dtype)

    def options(at: Tensor):
        noise = None if not spec.noise_width else standard_noise(0, [0], at, spec.noise_width).to(dtype)
        return {"positions": at, "noise": noise, "cache": cache, "logits_to_keep": 1}

    for start in range(0, len(text.prompt), CHUNK):
        span = torch.tensor([text.prompt[start : start + CHUNK]])
        out = forward(
            model, span, plan=runner._plan(prefill_steps), **options(start + torch.arange(span.shape[1])[None])
        )
    said, depths, logprobs = [], [], []
    while True:
        logits = out.logits[:, 0]
        want = Draw(text.sampling, text.seed, text.choice, len(said), [*text.prompt, *said], len(text.prompt))
        token = int(draw(logits, [want]))
        said.append(token)
        logprobs.append(float(logits.float().log_softmax(-1)[0, token]))
        if len(said) == text.length:
            return said, logprobs, depths
        at = torch.tensor([[len(text.prompt) + len(said) - 1]])
        token = torch.tensor([[token]])
        known = depth.num_steps or (depth.replay[text.choice][len(said) - 1] if depth.replay else None)
        if known is None and depth.exit_rule == "full":
            known = depth.max_steps
        if known is not None:
            depths.append(known)
            out = forward(model, token, plan=runner._plan(known), **options(at))
        else:
            named = exit_rule(depth.exit_rule, depth.exit_threshold, min_steps=depth.min_steps)
            out = forward_until(model, token, named, num_steps=depth.max_steps, **options(at))
            depths.append(int(out.steps))


HAZARD = DepthParams(exit_rule="hazard", exit_threshold=0.5)
LATENT = DepthParams(exit_rule="latent", exit_threshold=0.8)
CASES = {
    "ouro-hazard-copy": ("tiny-ouro", "last_exited", HAZARD),
    "ouro-hazard-single": ("tiny-ouro", "single", HAZARD),
    "ouro-hazard-first": ("tiny-ouro", "first", HAZARD),
    "ouro-latent-anchor": ("tiny-ouro", "first_then_shared(2)", replace(LATENT, exit_threshold=1.0, min_steps=2)),
    "ouro-two-steps": ("tiny-ouro", "depth_indexed", DepthParams(num_steps=2)),
    "ouro-kl": ("tiny-ouro", "last_exited", DepthParams(exit_rule="kl", exit_threshold=0.15, max_steps=3)),
    "huginn-latent-copy": ("tiny-huginn", "last_exited", LATENT),
    "huginn-argmax-first": ("tiny-huginn", "first", DepthParams(exit_rule="argmax", exit_threshold=2.0)),
    "huginn-full": ("tiny-huginn", "single", DepthParams()),
    "core-acceleration": (
        "tiny-core",
        "first_then_shared(3)",
        DepthParams(exit_rule="acceleration", exit_threshold=1.5, min_steps=4),
    ),
    "core-replay": ("tiny-core", "last_exited", DepthParams(replay=((3, 1, 4, 2, 2, 1, 3, 4),))),
    "blocks-replay": ("tiny-blocks", "last_exited", DepthParams(replay=((3, 1, 4, 2, 2, 1, 3, 4),))),
    "blocks-full": ("tiny-blocks", "single", DepthParams()),
    "dense": ("tiny-dense", "depth_indexed", DepthParams()),
    "layer-loop": ("tiny-layer-loop", "depth_indexed", DepthParams()),
    "layer-loop-replay": ("tiny-layer-loop", "single", DepthParams(replay=((1, 2, 1, 1, 2, 1, 1, 2),))),
    "two-level": ("tiny-two-level", "last_exited", DepthParams(exit_rule="latent", exit_threshold=0.9)),
    "loopformer-two-steps": ("tiny-loopformer", "depth_indexed", DepthParams(num_steps=2)),
    "vera": ("tiny-vera", "depth_indexed", DepthParams()),
}  # fmt: skip


MORE = {"core-acceleration": 6}
"""Steps beyond those of the model itself."""


NIGHTLY = (
    "ouro-hazard-first",
    "ouro-two-steps",
    "huginn-full",
    "blocks-full",
    "layer-loop",
    "core-acceleration",
    "vera",
    "two-level",
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] if case in NIGHTLY else []) for case in CASES]
)
def test_rows_of_a_crowd_say_what_they_say_alone(case):
    name, kv_rule, depth = CASES[case]
    runner = runner_of(tiny(name), kv_rule=kv_rule, allow_costly_exit=True, max_steps=MORE.get(case))
    driver = Driver(runner, width=4)
    texts = driver.run(texts_of(5, depth=depth))
    assert len(driver.free) == 199
    if not runner.facts.whole:
        assert driver.mixed
    assert not any(text.error for text in texts)
    for text in texts:
        tokens, logprobs, depths = alone(runner, text)
        assert text.tokens == tokens
        assert text.depths == depths
        torch.testing.assert_close(torch.tensor(text.logprobs), torch.tensor(logprobs), rtol=1e-5, atol=1e-5)
    early = {depth for text in texts for depth in text.depths}
    assert len(early) > 1 or depth.exit_rule is None


@torch.no_grad()
def alone_by_layers(runner, text, threshold):
    """Tokens and depths of a layer-loop whose every layer stops by itself, written as plain loops."""
    model = runner.model
    cache = new_cache(
        model.spec,
        rows=1,
        capacity=len(text.prompt) + text.length,
        num_steps=4,
        rule=rule_of(runner.kv_rule),
        dtype=torch.float64,
    )
    for start in range(0, len(text.prompt), CHUNK):
        out = forward(
            model, torch.tensor([text.prompt[start : start + CHUNK]]), num_steps=4, cache=cache, logits_to_keep=1
        )
    said, depths, logits = [int(out.logits[0, -1].argmax())], [], None
    while len(said) < text.length:
        context = model.encode(torch.tensor([said[-1:]]), cache)
        state, counts = model.init_state(context, None), {}
        for block in range(len(model.spec.blocks)):
            for t in range(4):
                cache.launch(t)
                before, state = state, model.step(state, context, block, torch.tensor([t]), cache)
                counts[block] = t + 1
                if float((state - before).norm() / state.norm()) < threshold:
                    break
        logits = model.head(model.coda(state, context, cache))
        cache.advance(1, counts)
        said.append(int(logits[0, -1].argmax()))
        depths.append(tuple(counts.values()))
    return said, depths


def test_layers_of_a_layer_loop_are_left_one_by_one_and_joined_again():
    runner = runner_of(tiny("tiny-layer-loop"), kv_rule="last_exited", max_steps=4)
    depth = DepthParams(exit_rule="latent", exit_threshold=0.5)
    texts = Driver(runner, width=4).run(texts_of(6, depth=depth))
    seen = set()
    for text in texts:
        tokens, depths = alone_by_layers(runner, text, 0.5)
        assert text.tokens == tokens
        if depths:
            assert text.sections == depths[-1]
            seen.add(depths[-1])
    assert len(seen) > 1
    assert any(len(set(depths)) > 1 for depths in seen)


SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, logprobs=0)
BITS = {
    "tiny-ouro": ("last_exited", HAZARD),
    "tiny-huginn": ("single", LATENT),
    "tiny-blocks": ("last_exited", DepthParams(replay=((3, 1, 4, 2, 2, 1, 3, 4),))),
    "tiny-layer-loop": ("single", DepthParams(exit_rule="latent", exit_threshold=0.5)),
    "tiny-dense": ("depth_indexed", DepthParams()),
}


@pytest.mark.parametrize("name", BITS)
def test_exact_numerics_leave_no_bit_to_the_neighbours(name):
    kv_rule, depth = BITS[name]
    widths = (3, 8, 32) if name == "tiny-ouro" else (8,)
    count = 8 if name == "tiny-ouro" else 4
    options = {"kv_rule": kv_rule, "numerics": "exact", "max_resident": 34, "num_pages": 400}
    runner = runner_of(tiny(name, dtype=torch.float32), launch_rows=max(widths), **options)
    lonely = Driver(runner, width=1, residents=1).run(texts_of(count, depth=depth, sampling=SAMPLED))
    for width in widths:
        crowd = Driver(runner, width=width, seed=width).run(texts_of(count, depth=depth, sampling=SAMPLED))
        for alone_, text in zip(lonely, crowd, strict=True):
            assert text.tokens == alone_.tokens
            assert text.logprobs == alone_.logprobs
            assert text.depths == alone_.depths


def test_float32_crowds_of_any_width_stay_within_the_tolerance_of_one_row():
    model = tiny("tiny-ouro", dtype=torch.float32)
    runner = runner_of(model, kv_rule="last_exited", max_resident=34, num_pages=400)
    expected = [alone(runner, text) for text in texts_of(6, depth=HAZARD)]
    for width in (1, 3, 32):
        texts = Driver(runner, width=width, seed=width).run(texts_of(6, depth=HAZARD))
        for text, (tokens, logprobs, depths) in zip(texts, expected, strict=True):
            assert (text.tokens, text.depths) == (tokens, depths)
            torch.testing.assert_close(torch.tensor(text.logprobs), torch.tensor(logprobs), **FAST)


def test_a_probe_that_finds_other_bits_refuses_and_names_the_stage(monkeypatch):
    model = tiny("tiny-ouro", dtype=torch.float32)
    step = model.step

    def leaky(state, *args, **kwargs):
        return step(state, *args, **kwargs) + state.mean() * 1e-3

    monkeypatch.setattr(model, "step", leaky)
    with pytest.raises(ValueError, match="numerics must be fast .* in core of block 0 the bits of a row change"):
        runner_of(model, numerics="exact")


def test_launches_fall_into_tiles_where_only_wider_ones_change_bits(monkeypatch):
    model = tiny("tiny-ouro", dtype=torch.float32)
    step = model.step

    def wide(state, *args, **kwargs):
        return step(state, *args, **kwargs) + (1e-3 if len(state) > 8 else 0.0)

    monkeypatch.setattr(model, "step", wide)
    runner = runner_of(model, numerics="exact", launch_rows=16, max_resident=20, kv_rule="last_exited")
    lonely = Driver(runner, width=1, residents=1).run(texts_of(12, depth=HAZARD))
    crowd = Driver(runner, width=16).run(texts_of(12, depth=HAZARD))
    assert [text.logprobs for text in crowd] == [text.logprobs for text in lonely]


def test_the_whole_plan_in_one_launch_says_the_same_as_iteration_by_iteration():
    model = tiny("tiny-huginn")
    texts = [
        Driver(runner_of(model, kv_rule="last_exited", segments=segments), width=4).run(texts_of(6, depth=LATENT))
        for segments in ("iteration", "plan")
    ]
    for one, other in zip(*texts, strict=True):
        assert (one.tokens, one.depths) == (other.tokens, other.depths)
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), **CACHED)


def test_an_exit_that_is_read_one_step_late_costs_one_step():
    model = tiny("tiny-ouro")
    texts = Driver(runner_of(model, kv_rule="last_exited", offset_one=True), width=4).run(texts_of(9, depth=HAZARD))
    pairs = {(chosen, ran) for text in texts for chosen, ran in zip(text.depths, text.ran, strict=True)}
    assert all(ran == min(chosen + 1, 4) for chosen, ran in pairs)
    assert len(pairs) > 2


def read_prompt(runner, tokens, spans, *, prompt_logprobs=2, seats=(0,)):
    """Reads one prompt in these spans; logits of its tokens and what was drawn."""
    sampling = SamplingParams(temperature=1.0, logprobs=1)
    for choice, seat in enumerate(seats):
        depth, steps = runner.resolve(DepthParams())
        runner.open(
            seat,
            Job(request="r", choice=choice, tokens=tokens, sampling=sampling, seed=5, depth=depth, prefill_steps=steps),
        )
    pages = tuple(range(1, 1 + -(-len(tokens) // PAGE)))
    found = []
    for start, stop in spans:
        last = seats if stop == len(tokens) else ()
        (one,) = runner.poll(
            runner.prefill([Span(seats[0], start, stop, pages, tuple(last), prompt_logprobs)]), wait=True
        )
        found.append(one)
    return found


def test_log_probabilities_of_a_prompt_are_those_of_one_forward_pass():
    model = tiny("tiny-huginn", dtype=torch.float32)
    runner = runner_of(model)
    tokens = tuple(torch.randint(0, 60, (19,), generator=torch.Generator().manual_seed(3)).tolist())
    found = read_prompt(runner, tokens, [(0, 8), (8, 16), (16, 19)])
    at = torch.arange(19)[None]
    with torch.no_grad():
        out = forward(model, torch.tensor([tokens]), noise=standard_noise(0, [0], at, model.spec.noise_width))
    law = out.logits[0].log_softmax(-1)
    told = [one for part in found for one in part.logprobs]
    assert [one.token for one in told] == list(tokens[1:])
    assert [len(part.logprobs) for part in found] == [8, 8, 2]
    expected = law[torch.arange(18), torch.tensor(tokens[1:])]
    torch.testing.assert_close(torch.tensor([one.logprob for one in told]), expected, **FAST)
    assert [one.top[0][0] for one in told] == law[:18].argmax(-1).tolist()


def test_choices_of_one_prompt_draw_by_their_own_numbers():
    model = tiny("tiny-ouro")
    tokens = (3, 1, 4, 1, 5)
    seats = tuple(range(8))
    drawn = read_prompt(runner_of(model), tokens, [(0, 5)], seats=seats, prompt_logprobs=None)[0].drawn
    logits = forward(model, torch.tensor([tokens]), logits_to_keep=1).logits[0]
    params = SamplingParams(temperature=1.0)
    assert [one.token for one in drawn] == [int(draw(logits, [Draw(params, 5, choice, 0)])) for choice in seats]
    assert len({one.token for one in drawn}) > 1


def test_packed_prompts_read_as_they_do_one_by_one():
    model = tiny("tiny-ouro", dtype=torch.float32)
    ends = []
    for together in (True, False):
        runner = runner_of(model)
        spans = []
        for seat, length in enumerate((3, 8, 7, 5)):
            depth, steps = runner.resolve(DepthParams(num_steps=3 if seat == 2 else None))
            tokens = tuple(range(seat, seat + length))
            greedy = SamplingParams(temperature=0.0, logprobs=1)
            runner.open(
                seat,
                Job(request="r", choice=0, tokens=tokens, sampling=greedy, seed=0, depth=depth, prefill_steps=steps),
            )
            spans.append(Span(seat, 0, length, (1 + 2 * seat, 2 + 2 * seat), (seat,), None))
        batches = [spans] if together else [[span] for span in spans]
        ends.append([one for batch in batches for one in runner.poll(runner.prefill(batch), wait=True)])
    for one, other in zip(*ends, strict=True):
        assert one.drawn[0].token == other.drawn[0].token
        assert abs(one.drawn[0].logprob.logprob - other.drawn[0].logprob.logprob) < FAST["atol"]


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_numbers_that_are_not_finite_end_their_own_text_only(numerics):
    model = tiny("tiny-ouro", dtype=torch.float32)
    runner = runner_of(model, kv_rule="last_exited", numerics=numerics, num_pages=60)
    clean = Driver(runner, width=4).run(texts_of(6, depth=HAZARD, vocab=50))
    with torch.no_grad():
        model.embedding.weight[63] = torch.nan
    texts = texts_of(6, depth=HAZARD, vocab=50)
    texts[2].prompt = (1, 63, 2)
    ill = Text((5, 6, 7), 6, depth=HAZARD, seed=3)
    driver = Driver(runner, width=4)
    driver.run([*texts, ill])
    assert texts[2].error == "non-finite logits at token 2, step 4"
    assert not texts[2].tokens
    for one, other in zip(clean, texts, strict=True):
        if other is not texts[2]:
            assert one.tokens == other.tokens
            assert numerics == "fast" or one.logprobs == other.logprobs
    # Every page that the text held is handed out again and read.
    again = Driver(runner, width=4).run(texts_of(6, depth=HAZARD, vocab=50))
    assert [text.tokens for text in again] == [text.tokens for text in clean]


def test_a_row_of_not_finite_state_fails_in_its_readout():
    model = tiny("tiny-ouro", dtype=torch.float32)
    runner = runner_of(model, kv_rule="last_exited")
    text = Driver(runner, width=1).seat(Text((1, 2, 3), 4, depth=HAZARD))
    span = Span(text.seat, 0, 3, text.pages, (text.seat,), None)
    runner.poll(runner.prefill([span]), wait=True)
    runner.encode([Row(text.seat, 3, 0, text.pages)], [5])
    with torch.inference_mode():
        runner._state[text.seat] = torch.inf
    runner.core(0, [Row(text.seat, 3, 0, text.pages)])
    (drawn,) = runner.poll(runner.coda([Row(text.seat, 3, 1, text.pages, successor=True)]), wait=True)
    assert drawn.error == "non-finite logits at token 3, step 1"


@pytest.mark.parametrize("name", ["tiny-ouro", "tiny-layer-loop"])
def test_rows_of_padding_and_a_poisoned_page_zero_change_nothing(name):
    model = tiny(name)
    depth = DepthParams(exit_rule="latent", exit_threshold=0.6)
    plain = Driver(runner_of(model, kv_rule="last_exited"), width=4).run(texts_of(6, depth=depth))
    options = {"max_model_len": 32, "page_tokens": PAGE, "prefill_chunk": CHUNK, "num_pages": 200, "max_resident": 8}
    bucketed = BucketRunner(model, EngineConfig(kv_rule="last_exited", **options))
    padded = Driver(bucketed, width=4).run(texts_of(6, depth=depth))
    assert bucketed.padding
    for one, other in zip(plain, padded, strict=True):
        assert (one.tokens, one.depths) == (other.tokens, other.depths)


@pytest.mark.parametrize("ticks", [0, 1, 3])
def test_results_that_come_late_are_the_same(ticks):
    model = tiny("tiny-ouro")
    expected = Driver(runner_of(model, kv_rule="last_exited"), width=4).run(texts_of(4, depth=HAZARD))
    runner = DelayedRunner(runner_of(model, kv_rule="last_exited"), ticks)
    texts = Driver(runner, width=4).run(texts_of(4, depth=HAZARD))
    assert [text.tokens for text in texts] == [text.tokens for text in expected]
    assert (runner.refused > 0) == (ticks > 0)


def test_recorded_depths_and_forced_tokens_take_the_place_of_rule_and_draw():
    model = tiny("tiny-ouro")
    runner = runner_of(model, kv_rule="last_exited")
    text = Driver(runner, width=1).seat(Text((1, 2, 3), 4, depth=HAZARD))
    runner.poll(runner.prefill([Span(text.seat, 0, 3, text.pages, (text.seat,), None)]), wait=True)
    runner.encode([Row(text.seat, 3, 0, text.pages)], [9])
    left = [runner.core(0, [Row(text.seat, 3, t, text.pages, depths=(3,))])[0].chosen for t in range(3)]
    assert left == [0, 0, 3]
    row = Row(text.seat, 3, 3, text.pages, successor=True, forced=17)
    (drawn,) = runner.poll(runner.coda([row]), wait=True)
    assert drawn.token == 17
    assert runner._texts[text.seat] == [1, 2, 3, 9, 17]
    cache = new_cache(model.spec, rows=1, capacity=8, rule=rule_of("last_exited"), dtype=torch.float64)
    with torch.no_grad():
        forward(model, torch.tensor([[1, 2, 3]]), cache=cache)
        out = forward_until(model, torch.tensor([[9]]), ReplayExit(depths=torch.tensor([[3]])), cache=cache)
    law = out.logits[0, -1].float().log_softmax(-1)
    assert drawn.logprob.logprob == pytest.approx(float(law[17]), abs=1e-6)


@pytest.mark.parametrize("noise", ["zeros", "position", "request"])
def test_first_states_follow_the_policy(noise):
    model = tiny("tiny-core")
    runner = runner_of(model, noise=noise, seed=7)
    text = Driver(runner, width=1).seat(Text((1, 2, 3), 2, seed=-4))
    (one,) = runner.poll(runner.prefill([Span(text.seat, 0, 3, text.pages, (text.seat,), None)]), wait=True)
    at, width = torch.arange(3)[None], model.spec.noise_width
    seeds = {"position": 7, "request": -4 % 2**64}
    z = torch.zeros(1, 3, width) if noise == "zeros" else standard_noise(seeds[noise], [0], at, width)
    with torch.no_grad():
        expected = forward(model, torch.tensor([[1, 2, 3]]), noise=z.double()).logits[0, -1].float().log_softmax(-1)
    assert one.drawn[0].logprob.logprob == pytest.approx(float(expected.max()), abs=1e-6)


def test_global_random_numbers_are_neither_read_nor_drawn():
    model = tiny("tiny-core")
    runner = runner_of(model, kv_rule="last_exited")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = Driver(runner, width=4).run(texts_of(4, sampling=SAMPLED))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other = Driver(runner, width=4).run(texts_of(4, sampling=SAMPLED))
    assert [text.tokens for text in one] == [text.tokens for text in other]


def test_what_a_request_leaves_open_is_filled_in():
    runner = runner_of(tiny("tiny-ouro"), kv_rule="last_exited", exit_rule="hazard", exit_threshold=0.7, exit_delay=1)
    assert runner.resolve(DepthParams()) == (
        DepthParams(exit_rule="hazard", exit_threshold=0.7, min_steps=1, max_steps=4, exit_delay=1),
        4,
    )
    assert runner.resolve(DepthParams(num_steps=2)) == (DepthParams(num_steps=2), 2)
    latent = DepthParams(exit_rule="latent", exit_threshold=0.1, max_steps=3)
    assert runner.resolve(latent) == (
        DepthParams(exit_rule="latent", exit_threshold=0.1, min_steps=1, max_steps=3, exit_delay=1),
        3,
    )


EARLY = {"exit_rule": "hazard", "exit_threshold": 0.5}


@pytest.mark.parametrize(
    ("options", "depth", "code", "message"),
    [
        ({}, {"num_steps": 5}, "invalid_depth", "num_steps must be in 1..4; got 5"),
        ({}, {"min_steps": 3, "max_steps": 2}, "invalid_depth", "min_steps must be at most max_steps, 2; got 3"),
        ({}, {"exit_rule": "nope"}, "exit_unavailable", "no exit rule nope"),
        ({}, {"exit_rule": "hazard", "exit_threshold": 1.5}, "invalid_value", "threshold must be in"),
        ({}, {"exit_rule": "hazard"}, "invalid_value", "needs a threshold"),
        ({"kv_rule": "depth_indexed"}, EARLY, "exit_refused", "depth_indexed forbids exits"),
        ({"kv_rule": "depth_indexed"}, {"replay": ((1,),)}, "exit_refused", "depth_indexed forbids exits"),
        ({"kv_rule": "first_then_shared(2)"}, EARLY, "exit_refused", "needs min_steps of at least 2"),
    ],
)  # fmt: skip
def test_a_depth_that_cannot_be_served_is_refused(options, depth, code, message):
    runner = runner_of(tiny("tiny-ouro"), **{"kv_rule": "last_exited", **options})
    with pytest.raises(RefusedError, match=message) as caught:
        runner.resolve(DepthParams(**depth))
    assert caught.value.code == code


def test_rules_that_pay_a_readout_at_every_step_are_loaded_only_where_asked():
    model = build(replace(PRESETS["tiny-huginn"](), vocab=4000, padded_vocab=None))
    kl = DepthParams(exit_rule="kl", exit_threshold=0.1)
    with pytest.raises(
        RefusedError, match="kl needs coda and head every step: bound .*x; start with --allow-costly-exit"
    ):
        runner_of(model, kv_rule="last_exited").resolve(kl)
    assert runner_of(model, kv_rule="last_exited", allow_costly_exit=True).resolve(kl)[1] == 4


def test_models_and_configurations_that_cannot_be_served_are_refused():
    with pytest.raises(ValueError, match="one token per position. Got hrm, which is not causal"):
        runner_of(tiny("tiny-hrm"))
    with pytest.raises(ValueError, match="max_model_len must be at most 64, the positions of looped. Got 65. Lower it"):
        runner_of(tiny("tiny-huginn"), max_model_len=65)
    with pytest.raises(ValueError, match="kv_rule: dense supports DepthIndexed. Got single"):
        runner_of(tiny("tiny-dense"), kv_rule="single")
    with pytest.raises(RefusedError, match="depth_indexed forbids exits"):
        runner_of(tiny("tiny-ouro"), exit_rule="hazard", exit_threshold=0.5)


def test_sizes_that_are_left_open_are_found():
    runner = TorchRunner(tiny("tiny-ouro"), EngineConfig())
    assert (runner.config.launch_rows, runner.config.max_resident, runner.config.min_coda_rows) == (16, 24, 8)
    assert runner.config.max_model_len == runner.facts.max_tokens == 4096
    assert runner.facts.pages == runner.config.num_pages > 4096 // 16
