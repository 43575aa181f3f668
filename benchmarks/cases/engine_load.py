"""Models, requests and the steady window of the engine's benchmarks.

window   opens after 2 R answers while requests still wait, closes when the waiting line first runs empty
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from looplab.engine.engine import Engine
from looplab.engine.request import DepthParams, Request, RequestEnded, RequestFailed, SamplingParams, TokenSaid
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


def model_of(name: str, device: str = "cpu", dtype: str = "float32", positions: int = 256) -> Any:
    """`loop-DIM`: four layers, 4 steps. `sandwich-DIM`: one layer, two layers 16 times, one layer.

    A layer has 12.25 DIM^2 weights.

    Args:
        positions: Longest text.
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
            injection=NoInjection() if loop else Concat(order="state_first", init="normal"),
            order=ModelLoop(num_steps=steps),
            trained_depth=FixedDepth(num_steps=steps),
            head=Head(tied=True),
            max_positions=positions,
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


def load_of(
    law: str, steps: int, *, requests: int, prompt: int, outputs: int, seed: int, shared: int = 0, spread: bool = False
) -> Load:
    """A batch of requests.

    Args:
        shared: First tokens of a prompt that all have in common.
        spread: Outputs are not of equal length, but evenly from half to one and a half times `outputs`.
    """
    random = np.random.default_rng(seed)
    prompts = random.integers(0, VOCAB, (requests, prompt))
    prompts[:, :shared] = prompts[:1, :shared]
    lengths = random.integers(outputs // 2, outputs + outputs // 2 + 1, requests) if spread else [outputs] * requests
    shape = (requests, max(lengths) - 1)
    if steps == 16 and law == "spread":
        depths = np.clip(np.floor(random.normal(8, 3, shape)), 2, 16).astype(int)
    else:
        values, shares = LAWS[law]
        depths = np.minimum(random.choice(values, size=shape, p=shares) * steps // 4, steps)
    return Load(
        prompts=tuple(tuple(map(int, row)) for row in prompts),
        depths=tuple(tuple(map(int, row[: length - 1])) for row, length in zip(depths, lengths, strict=True)),
    )


@dataclass(frozen=True)
class Trail:
    """When a request came, got its seat and said its tokens, in seconds of one clock."""

    arrived: float
    opened: float
    said: tuple[float, ...]

    def latencies(self) -> dict[str, float]:
        """Milliseconds: to the first token, per later token, from arrival to the end per token, waiting for a seat."""
        first, last, tokens = self.said[0], self.said[-1], len(self.said)
        return {
            "ttft_ms": 1e3 * (first - self.arrived),
            "tpot_ms": 1e3 * (last - first) / max(1, tokens - 1),
            "latency_ms": 1e3 * (last - self.arrived) / tokens,
            "queue_ms": 1e3 * (self.opened - self.arrived),
        }


@dataclass
class Run:
    """What one arm did with a load."""

    tokens: list[list[int]]
    depths: list[list[int]]
    """Steps of every token after the first."""
    trails: list[Trail]
    seconds: float
    stats: EngineStats
    engine: Engine
    window_seconds: float = 0.0
    """Of the steady window, as all that follows; 0: there was none."""
    window_tokens: int = 0
    window_rows: int = 0
    """Rows of core launches inside the window, and the launches."""
    window_launches: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second, of the steady window where there is one."""
        if self.window_seconds:
            return self.window_tokens / self.window_seconds
        return self.stats.output_tokens / self.seconds

    @property
    def decode_seconds(self) -> float:
        """Seconds inside core and coda launches."""
        return self.stats.launch_seconds["core"] + self.stats.launch_seconds["coda"]


class Drive:
    """An engine under a load, one tick after the other.

    Args:
        depth: Place of a request -> its depth parameters.
        arrivals: Seconds after the start at which requests come, in order; None: all at once.
        clock: `time.process_time` leaves out what others do on the machine.
    """

    def __init__(
        self,
        engine: Engine,
        load: Load,
        depth: Callable[[int], DepthParams],
        *,
        arrivals: Sequence[float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.engine, self.load, self.depth, self.clock = engine, load, depth, clock
        self.said: list[list[int]] = [[] for _ in load.prompts]
        self.steps: list[list[int]] = [[] for _ in load.prompts]
        self.times: list[list[float]] = [[] for _ in load.prompts]
        self.opened: dict[int, float] = {}
        self.came: list[float] = []
        self.ended = self.tokens = 0
        self._takes_in(engine.runner)
        self.began = clock()
        self.arrivals = None if arrivals is None else [self.began + seconds for seconds in arrivals]
        if arrivals is None:
            for _ in load.prompts:
                self._submit(clock())

    @property
    def over(self) -> bool:
        """Whether all requests have been answered."""
        return self.ended == len(self.load.prompts)

    def tick(self) -> None:
        """Sends what is due, and one tick of the engine."""
        while self.arrivals is not None and len(self.came) < len(self.arrivals):
            due = self.arrivals[len(self.came)]
            wait = due - self.clock()
            if wait > 0 and self.ended < len(self.came):
                break
            if wait > 0:  # nothing to do
                time.sleep(wait)
            self._submit(due)
        self.engine.step()

    def finish(self) -> Run:
        """Ticks until all is answered; the run without a window."""
        while not self.over:
            self.tick()
        seconds = self.clock() - self.began
        stats = self.engine.stats()
        check_ledger(stats)
        trails = [
            Trail(came, self.opened[place], tuple(times))
            for place, (came, times) in enumerate(zip(self.came, self.times, strict=True))
        ]
        return Run(self.said, self.steps, trails, seconds, stats, self.engine)

    def _submit(self, arrived: float) -> None:
        place = len(self.came)
        self.came.append(arrived)
        outputs = len(self.load.depths[place]) + 1
        self.engine.submit(
            Request(
                tokens=self.load.prompts[place],
                sampling=SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True),
                depth=self.depth(place),
                id=str(place),
            ),
            lambda event: self._hear(place, event),
        )

    def _hear(self, place: int, event: Any) -> None:
        if isinstance(event, TokenSaid):
            if self.said[place]:
                self.steps[place].append(event.steps)
            self.said[place].append(event.token)
            self.tokens += 1
            self.times[place].append(self.clock())
        elif isinstance(event, RequestEnded):
            self.ended += 1
        elif isinstance(event, RequestFailed):
            raise RuntimeError(f"{event.code}: {event.message}")

    def _takes_in(self, runner: Any) -> None:
        """Notes when requests get their first seat."""
        open_seat = runner.open

        def noted(seat: int, job: Any) -> None:
            self.opened.setdefault(int(job.request), self.clock())
            open_seat(seat, job)

        runner.open = noted


def replayed(engine: Engine, load: Load, *, full: bool) -> Callable[[int], DepthParams]:
    """The recorded depths of every request, or all steps."""
    steps = max(engine.profile.facts.max_steps)
    if full:
        return lambda place: DepthParams(num_steps=steps)
    return lambda place: DepthParams(replay=(load.depths[place],), max_steps=steps)


def run(engine: Engine, load: Load, *, full: bool, clock: Callable[[], float] = time.perf_counter) -> Run:
    """Sends everything at once and ticks until all is answered.

    Args:
        full: Every token runs all steps; otherwise the recorded depths.
    """
    residents = engine.config.max_resident or 1
    drive = Drive(engine, load, replayed(engine, load, full=full), clock=clock)
    opened: tuple[float, EngineStats] | None = None
    closed: tuple[float, EngineStats] | None = None
    while not drive.over:
        drive.tick()
        if opened is None and drive.ended >= 2 * residents and engine.waiting:
            opened = (clock(), engine.stats())
        elif opened is not None and closed is None and not engine.waiting:
            closed = (clock(), engine.stats())
    found = drive.finish()
    if opened is None or closed is None:
        raise ValueError("engine: too few requests for a steady window; give at least four times the residents")
    return replace(
        found,
        window_seconds=closed[0] - opened[0],
        window_tokens=closed[1].output_tokens - opened[1].output_tokens,
        window_rows=closed[1].launch_rows["core"] - opened[1].launch_rows["core"],
        window_launches=closed[1].launches["core"] - opened[1].launches["core"],
    )
