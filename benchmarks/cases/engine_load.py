"""Models, requests and the steady window of the engine's benchmarks.

window   opens after 2 R answers while requests still wait, closes when the waiting line first runs empty
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from looplab.engine.engine import Engine
from looplab.engine.request import DepthParams, Request, RequestEnded, SamplingParams, TokenSaid
from looplab.engine.stats import EngineStats, check_ledger
from looplab.models.base import build
from looplab.models.looped import Envelope, LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.injection import Concat, NoInjection
from looplab.recurrence.plan import ModelLoop

VOCAB = 4096
"""Small, and contexts short, so that matrix products are measured and not the reading of the cache."""
LAWS = {
    "equal": ((2,), (1.0,)),
    "spread": ((1, 2, 3, 4), (0.2, 0.3, 0.3, 0.2)),
    "bimodal": ((1, 4), (0.5, 0.5)),
    "tail": ((1, 2, 4), (0.7, 0.2, 0.1)),
}
"""Steps of decoded tokens and their shares, of models with 4 steps. Of 16 steps: floor of N(8, 3^2), cut to 2 .. 16."""


class Numbers:
    """A tokenizer whose texts nobody reads."""

    bos = eos = pad = chat_template = None
    vocab = VOCAB

    def encode(self, text: str, special: bool = True) -> list[int]:
        """No text is ever encoded."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """No text."""
        return ""

    def written(self, token: int) -> str | None:
        """Nor a name."""
        return None


def model_of(name: str, device: str = "cpu", dtype: str = "float32") -> Any:
    """`loop-DIM`: four layers, 4 steps. `sandwich-DIM`: one layer, two layers 16 times, one layer.

    A layer has 12.25 DIM^2 weights.
    """
    kind, dim = name.split("-")
    width = int(dim)
    attention = Attention(heads=width // 64, kv_heads=width // 64, head_dim=64, position=Rope(base=10000.0))
    loop = kind == "loop"
    steps = 4 if loop else 16
    return build(
        LoopedConfig(
            dim=width,
            vocab=VOCAB,
            attention=attention,
            ffn=SwiGLU(hidden=int(2.75 * width)),
            blocks=(4,) if loop else (2,),
            envelope=NoEnvelope() if loop else Envelope(prelude=1, coda=1),
            injection=NoInjection() if loop else Concat(),
            order=ModelLoop(num_steps=steps),
            trained_depth=FixedDepth(num_steps=steps),
            head=Head(tied=True),
            max_positions=256,
        ),
        dtype=getattr(torch, dtype),
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests whose tokens' depths are known, so that all arms run the same ones."""

    prompts: tuple[tuple[int, ...], ...]
    depths: tuple[tuple[int, ...], ...]
    """Per request, of every token after the first."""

    @property
    def decoded(self) -> int:
        """Tokens after the first ones."""
        return sum(len(own) for own in self.depths)

    @property
    def mean(self) -> float:
        """Mean depth of decoded tokens."""
        return sum(sum(own) for own in self.depths) / self.decoded


def load_of(law: str, steps: int, *, requests: int, prompt: int, outputs: int, seed: int) -> Load:
    """A batch of requests of equal length."""
    random = np.random.default_rng(seed)
    prompts = random.integers(0, VOCAB, (requests, prompt))
    shape = (requests, outputs - 1)
    if steps == 16 and law == "spread":
        depths = np.clip(np.floor(random.normal(8, 3, shape)), 2, 16).astype(int)
    else:
        values, shares = LAWS[law]
        depths = np.minimum(random.choice(values, size=shape, p=shares) * steps // 4, steps)
    return Load(
        prompts=tuple(tuple(map(int, row)) for row in prompts), depths=tuple(tuple(map(int, row)) for row in depths)
    )


@dataclass
class Run:
    """What one arm did with a load."""

    tokens: list[list[int]]
    seconds: float
    decode_seconds: float
    """Seconds inside core and coda launches."""
    stats: EngineStats
    window_seconds: float
    window_tokens: int
    window_rows: int
    """Rows of core launches inside the window, and the launches."""
    window_launches: int


def run(engine: Engine, load: Load, *, full: bool) -> Run:
    """Sends everything at once and ticks until all is answered.

    Args:
        full: Every token runs all steps; otherwise the recorded depths.
    """
    residents = engine.config.max_resident or 1
    said: list[list[int]] = [[] for _ in load.prompts]
    ended = 0

    def listen(place: int) -> Any:
        def take(event: Any) -> None:
            nonlocal ended
            if isinstance(event, TokenSaid):
                said[place].append(event.token)
            elif isinstance(event, RequestEnded):
                ended += 1
            elif type(event).__name__ == "RequestFailed":
                raise RuntimeError(f"{event.code}: {event.message}")

        return take

    steps = max(engine.profile.facts.max_steps)
    for place, (prompt, own) in enumerate(zip(load.prompts, load.depths, strict=True)):
        depth = DepthParams(num_steps=steps) if full else DepthParams(replay=(own,), max_steps=steps)
        sampling = SamplingParams(max_tokens=len(own) + 1, temperature=0.0, ignore_eos=True)
        engine.submit(Request(tokens=prompt, sampling=sampling, depth=depth), listen(place))
    start = time.perf_counter()
    opened: tuple[float, EngineStats] | None = None
    closed: tuple[float, EngineStats] | None = None
    while ended < len(load.prompts):
        engine.step()
        if opened is None and ended >= 2 * residents and engine.waiting:
            opened = (time.perf_counter(), engine.stats())
        elif opened is not None and closed is None and not engine.waiting:
            closed = (time.perf_counter(), engine.stats())
    seconds = time.perf_counter() - start
    stats = engine.stats()
    check_ledger(stats)
    if opened is None or closed is None:
        raise ValueError("engine: too few requests for a steady window; give at least four times the residents")
    return Run(
        tokens=said,
        seconds=seconds,
        decode_seconds=stats.launch_seconds["core"] + stats.launch_seconds["coda"],
        stats=stats,
        window_seconds=closed[0] - opened[0],
        window_tokens=closed[1].output_tokens - opened[1].output_tokens,
        window_rows=closed[1].launch_rows["core"] - opened[1].launch_rows["core"],
        window_launches=closed[1].launches["core"] - opened[1].launches["core"],
    )
