"""Drives the stages of a runner without a scheduler: rows in random order, as mixed as the widths allow."""

import random
from dataclasses import dataclass, field

import torch

from looplab.engine.request import DepthParams, SamplingParams
from looplab.engine.runner import TorchRunner
from looplab.engine.stages import Job, Row, Span


@dataclass
class Text:
    """One choice of one request, and what became of it."""

    prompt: tuple[int, ...]
    length: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0, logprobs=2))
    depth: DepthParams = field(default_factory=DepthParams)
    choice: int = 0
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """Chosen steps of every token after the first, the last block's."""
    ran: list[int] = field(default_factory=list)
    """Steps that were run for them."""
    error: str = ""
    seat: int = -1
    pages: tuple[int, ...] = ()
    read: int = 0
    steps: int = 0
    chosen: int = 0
    sections: tuple[int, ...] = ()
    """Steps of every block, of the token last run, where a launch is the whole plan."""

    @property
    def over(self) -> bool:
        """Nothing is left to draw."""
        return bool(self.error) or len(self.tokens) == self.length

    def take(self, drawn) -> None:
        """One more token."""
        if drawn.error:
            self.error = drawn.error
            return
        self.tokens.append(drawn.token)
        if drawn.logprob is not None:
            self.logprobs.append(drawn.logprob.logprob)


class Driver:
    """Runs texts to their ends."""

    def __init__(self, runner, *, width: int, seed: int = 0, residents: int | None = None):
        self.runner, self.width, self.random = runner, width, random.Random(seed)
        self.free = list(range(1, runner.facts.pages))
        self.random.shuffle(self.free)
        self.seats = list(range(residents or runner.config.max_resident))
        self.ready = {block: [] for block in range(runner.facts.blocks)}
        self.done: list[Text] = []
        self.mixed = 0
        """Core launches whose rows were at different iterations."""

    def run(self, texts: list[Text]) -> list[Text]:
        """All texts, from their prompts to their last tokens."""
        waiting, prompts, over = list(texts), [], 0
        while over < len(texts):
            while waiting and self.seats:
                prompts.append(self.seat(waiting.pop(0)))
            stages = [name for name, rows in (("prompt", prompts), ("coda", self.done)) if rows]
            stages += [block for block, rows in self.ready.items() if rows]
            stage = self.random.choice(stages)
            if stage == "prompt":
                over += self.prefill(prompts)
            elif stage == "coda":
                over += self.coda()
            else:
                self.core(stage)
        return texts

    def wait(self, ticket: int):
        """The results of a launch, asked for until they are there."""
        found = None
        while found is None:
            found = self.runner.poll(ticket, wait=False)
        return found

    def seat(self, text: Text) -> Text:
        """Gives a text a seat and all its pages."""
        text.seat = self.seats.pop(self.random.randrange(len(self.seats)))
        size = self.runner.facts.page_tokens
        text.pages = tuple(self.free.pop() for _ in range(-(-(len(text.prompt) + text.length) // size)))
        depth, steps = self.runner.resolve(text.depth)
        self.runner.open(
            text.seat,
            Job(
                request="r",
                choice=text.choice,
                tokens=text.prompt,
                sampling=text.sampling,
                seed=text.seed,
                depth=depth,
                prefill_steps=steps,
            ),
        )
        return text

    def prefill(self, prompts: list[Text]) -> int:
        """The next spans of some prompts."""
        chosen = self.random.sample(prompts, self.random.randint(1, len(prompts)))
        spans = []
        for text in chosen:
            stop = min(len(text.prompt), text.read + self.runner.config.prefill_chunk)
            last = stop == len(text.prompt)
            spans.append(Span(text.seat, text.read, stop, text.pages, (text.seat,) if last else (), None))
        found = self.wait(self.runner.prefill(spans))
        first, over = [], 0
        for text, span, result in zip(chosen, spans, found, strict=True):
            text.read = span.stop
            if not span.seats:
                assert not result.drawn
                continue
            prompts.remove(text)
            text.take(result.drawn[0])
            if text.over:
                over += self.leave(text)
            else:
                first.append(text)
        if first:
            rows = [Row(text.seat, len(text.prompt), 0, text.pages) for text in first]
            self.runner.encode(rows, [text.tokens[0] for text in first])
            self.ready[0] += first
        return over

    def core(self, block: int) -> None:
        """One launch over some of the ready rows."""
        rows = self.pick(self.ready[block])
        self.mixed += len({text.steps for text in rows}) > 1
        decisions = self.runner.core(block, [self.row(text) for text in rows])
        for text, decision in zip(rows, decisions, strict=True):
            whole = self.runner.facts.whole
            text.steps = decision.depths[-1] if whole else text.steps + 1
            if not decision.chosen:
                self.ready[block].append(text)
                continue
            text.chosen = decision.depths[-1] if whole else decision.chosen
            text.sections = decision.depths
            if not whole and block + 1 < self.runner.facts.blocks:
                text.steps = 0
                self.ready[block + 1].append(text)
            else:
                self.done.append(text)

    def coda(self) -> int:
        """One readout of some of the rows that left the loop."""
        rows = self.pick(self.done)
        ticket = self.runner.coda(
            [self.row(text)._replace(successor=len(text.tokens) + 1 < text.length) for text in rows]
        )
        over = 0
        for text, drawn in zip(rows, self.wait(ticket), strict=True):
            text.depths.append(text.chosen)
            text.ran.append(text.steps)
            text.steps = 0
            text.take(drawn)
            if text.over:
                over += self.leave(text)
            else:
                self.ready[0].append(text)
        return over

    def row(self, text: Text) -> Row:
        """The token that a text is at."""
        return Row(text.seat, len(text.prompt) + len(text.tokens) - 1, text.steps, text.pages)

    def pick(self, rows: list[Text]) -> list[Text]:
        """Some of the rows, in any order; they leave the list."""
        chosen = self.random.sample(rows, self.random.randint(1, min(self.width, len(rows))))
        for text in chosen:
            rows.remove(text)
        return chosen

    def leave(self, text: Text) -> int:
        """Frees seat and pages."""
        self.runner.close(text.seat)
        self.seats.append(text.seat)
        self.free += text.pages
        self.random.shuffle(self.free)
        return 1


class BucketRunner(TorchRunner):
    """Launches of 1, 2, 4, 8, 16, .. rows, the rest of them padding, over a page 0 that is full of NaN."""

    padding = 0

    def _padded(self, rows: int) -> int:
        bucket = 1 << (rows - 1).bit_length()
        self.padding += bucket - rows
        return bucket

    def _announce(self, rows, positions):
        with torch.inference_mode():
            for pool in self.cache.pools.values():
                every = pool.view(2, -1, self.facts.pages, self.facts.page_tokens * pool.shape[2])
                every[:, :, 0] = torch.nan
        return super()._announce(rows, positions)


class DelayedRunner:
    """Another runner, whose results can be seen only when they have been asked for `ticks` times."""

    def __init__(self, runner, ticks: int):
        self._runner, self._ticks = runner, ticks
        self._asked: dict[int, int] = {}
        self.refused = 0

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def poll(self, ticket: int, *, wait: bool):
        """As the runner does, later."""
        self._asked[ticket] = self._asked.get(ticket, 0) + 1
        if not wait and self._asked[ticket] <= self._ticks:
            self.refused += 1
            return None
        return self._runner.poll(ticket, wait=wait)
