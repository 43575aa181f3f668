"""Server and engine together, asked by the clients that people use: the openai package, and lm-eval."""

import asyncio
import json
from pathlib import Path

import pytest

import looplab
from looplab.engine.config import EngineConfig
from looplab.interop.eval_tasks import builtin_tasks
from looplab.interop.lm_eval import LooplabLM
from looplab.interop.serving import open_engine
from server.abuse import abuse
from server.live import serving
from tolerances import EVAL_SCORES

MODEL = "text-core"
PROMPT = "Return the "


@pytest.fixture(scope="module")
def loaded():
    return looplab.load(MODEL)


@pytest.fixture(scope="module")
def server(loaded):
    engine = open_engine(loaded, EngineConfig(num_pages=400, launch_rows=4))
    engine.start()
    with serving(engine, names=(MODEL,)) as live:
        yield live


@pytest.fixture(scope="module")
def client(server):
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.slow
def test_the_openai_client_gets_completions(client, server):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2, extra_body={"return_depths": True})
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and len(choice.logprobs.tokens) == 12
    assert whole.usage.prompt_tokens == len(PROMPT) and whole.usage.completion_tokens == 12
    assert choice.model_extra["depths"] == [8] * 12
    depth = whole.usage.model_extra["depth"]
    assert depth["histogram"] == {"8": 11} and depth["applications"] == depth["full_depth_applications"] == 88
    for i, logprob in enumerate(choice.logprobs.token_logprobs):
        assert logprob == max(choice.logprobs.top_logprobs[i].values()), "greedy tokens are the likeliest"
    streamed = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in streamed if part.choices) == choice.text
    assert streamed[-1].usage.model_extra["depth"] == depth
    stop = choice.text[5]
    cut = client.completions.create(**asked, stop=[stop])
    assert cut.choices[0].text == choice.text[: choice.text.index(stop)] and cut.choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_seeds_choices_and_depths(client, server):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 1.0}
    first = client.completions.create(**asked, n=3, seed=5)
    again = client.completions.create(**asked, n=3, seed=5)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) > 1
    free = client.completions.create(**asked)
    seed = free.choices[0].model_extra["seed"]
    assert client.completions.create(**asked, seed=seed).choices[0].text == free.choices[0].text
    shallow = client.completions.create(**asked, extra_body={"num_steps": 2, "return_depths": True})
    assert shallow.choices[0].model_extra["depths"] == [2] * 10
    early = client.completions.create(**asked, extra_body={"exit_rule": "latent", "exit_threshold": 0.9})
    depth = early.usage.model_extra["depth"]
    assert depth["exit_rule"] == "latent" and depth["applications"] < depth["full_depth_applications"]
    assert sum(int(steps) * tokens for steps, tokens in depth["histogram"].items()) == depth["applications"]


@pytest.mark.slow
def test_errors_reach_the_client_as_its_own(client):
    from openai import BadRequestError, NotFoundError

    with pytest.raises(BadRequestError, match=r"temperature must be in \[0, 2\]; got 3") as error:
        client.completions.create(model=MODEL, prompt="a", temperature=3)
    assert (error.value.code, error.value.param, error.value.type) == (
        "invalid_value", "temperature", "invalid_request_error",
    )  # fmt: skip
    with pytest.raises(NotFoundError, match="no model foo"):
        client.completions.create(model="foo", prompt="a")
    with pytest.raises(BadRequestError, match="the tokenizer has no chat template"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert [model.id for model in client.models.list()] == [MODEL]


@pytest.mark.slow
def test_the_asynchronous_client_gets_the_same(client, server):
    from openai import AsyncOpenAI

    asked = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    prompts = ["def f(", "import ", "The value of ", "class A"]
    alone = [client.completions.create(**asked, prompt=prompt).choices[0].text for prompt in prompts]

    async def together():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:

            async def streamed(prompt):
                parts = await other.completions.create(**asked, prompt=prompt, stream=True)
                return "".join([part.choices[0].text async for part in parts])

            return await asyncio.gather(*map(streamed, prompts))

    assert asyncio.run(together()) == alone


@pytest.mark.slow
def test_the_client_comes_again_after_a_full_queue(server):
    from openai import OpenAI

    config = server.engine.config
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as patient:
        answers = patient.completions.create(model=MODEL, prompt=["a"] * 40, max_tokens=2, temperature=0)
    assert len(answers.choices) == 40 > config.max_resident
    assert len({choice.text for choice in answers.choices}) == 1, "an answer depends on its neighbours"


@pytest.mark.slow
def test_lm_eval_scores_over_http_what_it_scores_in_process(loaded, server):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    lines = (Path(builtin_tasks()) / "looplab_next_line.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    pairs = [(one["text"], choice) for one in map(json.loads, lines) for choice in one["choices"]]
    asked = [Instance("loglikelihood", {}, pair, 0, ("next_line", i, 1)) for i, pair in enumerate(pairs)]
    wanted = LooplabLM(loaded).loglikelihood(asked)
    url = f"{server.url}/v1/completions"
    remote = LocalCompletionsAPI(base_url=url, model=MODEL, batch_size=5, max_length=256, max_retries=1)
    assert remote.tokenizer_backend == "remote"
    found = remote.loglikelihood(asked)
    for (score, greedy), (own, own_greedy) in zip(found, wanted, strict=True):
        assert score == pytest.approx(own, abs=EVAL_SCORES["atol"], rel=EVAL_SCORES["rtol"]) and greedy == own_greedy
    shallow = LooplabLM(loaded, num_steps=2).loglikelihood(asked[:2])
    assert abs(shallow[0][0] - wanted[0][0]) > 1e-3, "the comparison could not tell depths apart"


PROMPTS = ["def f(", "import ", "The value of ", "class A", "Return the ", "if x:"]


def survives(server, client, count):
    """No wrong token, no lost request, nothing held at the end."""
    wanted = {
        prompt: client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in PROMPTS
    }
    answered, statuses = asyncio.run(abuse(server, count, prompts=PROMPTS, tokens=8))
    assert answered and all(text == wanted[prompt] for prompt, text in answered), "a neighbour changed an answer"
    assert set(statuses) <= {200, 400, 429}
    server.wait_until(lambda: not server.app.state.front.running, 60)
    server.wait_until(lambda: server.engine.stats().residents == 0, 60)
    stats = server.engine.stats()
    assert (stats.waiting, stats.active_pages, stats.quarantined_pages) == (0, 0, 0)


@pytest.mark.slow
def test_badly_behaved_clients_harm_nobody(server, client):
    survives(server, client, 40)


@pytest.mark.nightly
def test_two_thousand_badly_behaved_clients_harm_nobody(server, client):
    import psutil

    survives(server, client, 200)
    before = psutil.Process().memory_info().rss
    survives(server, client, 1_800)
    assert psutil.Process().memory_info().rss < 1.05 * before, "memory grows with requests"
