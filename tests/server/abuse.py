"""Many clients at once, most of them badly behaved: what a server must survive."""

import asyncio
import json
import random

import httpx

PATH = "/v1/completions"
MALFORMED = (b"{", b"\xff", b"[]", b'{"prompt": {}}', b'{"temprature": 1}', b'{"a":' * 99)


async def abuse(live, count, *, prompts, tokens, seed=0, together=24):
    """Sends `count` requests of all kinds; returns (prompt, text) of those that were to be answered, and the statuses.

    Kinds: whole and streamed answers, clients that hang up in mid-stream or before anything, slow readers, malformed
    bodies, prompts that are too long.
    """
    moments = random.Random(seed)
    answered, statuses = [], []
    gate = asyncio.Semaphore(together)
    async with httpx.AsyncClient(base_url=live.url, timeout=300) as client:

        async def one(kind, prompt, wait):
            asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
            async with gate:
                if kind == "malformed":
                    data = MALFORMED[prompts.index(prompt) % len(MALFORMED)]
                    sent = await client.post(PATH, content=data, headers={"content-type": "application/json"})
                    assert 400 <= sent.status_code < 500, sent.text
                elif kind == "long":
                    sent = await client.post(PATH, json=asked | {"prompt": prompt * 20_000})
                    assert sent.status_code == 400 and sent.json()["error"]["code"] == "context_length_exceeded"
                elif kind == "whole":
                    sent = await patiently(client, asked)
                    answered.append((prompt, sent.json()["choices"][0]["text"]))
                elif kind == "cancelled":
                    leaving = asyncio.create_task(client.post(PATH, json=asked))
                    await asyncio.sleep(wait)
                    leaving.cancel()
                    await asyncio.gather(leaving, return_exceptions=True)
                    return
                else:
                    await streamed(client, kind, prompt, asked, wait)
                    return
                statuses.append(sent.status_code)

        async def streamed(client, kind, prompt, asked, wait):
            text = ""
            async with client.stream("POST", PATH, json=asked | {"stream": True}) as response:
                statuses.append(response.status_code)
                if response.status_code != 200:
                    assert response.status_code == 429
                    return
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        answered.append((prompt, text))
                    elif line:
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                        if kind == "hangup":
                            return
                        if kind == "slow":
                            await asyncio.sleep(wait)

        kinds = ("whole", "streamed", "hangup", "cancelled", "slow", "malformed", "long")
        jobs = [one(moments.choice(kinds), moments.choice(prompts), moments.uniform(0, 0.05)) for _ in range(count)]
        await asyncio.gather(*jobs)
    return answered, statuses


async def patiently(client, asked):
    """Asks again where the queue is full, as clients do."""
    while True:
        sent = await client.post(PATH, json=asked)
        if sent.status_code != 429:
            assert sent.status_code == 200, sent.text
            return sent
        await asyncio.sleep(0.05)
