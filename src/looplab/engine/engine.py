"""Continuous depth batching behind one object: requests go in from any thread, events come out.

    Engine(model, tokenizer, config)
        .generate(prompts, sampling, depth=)      answers, in order
        .start(); .submit(request) -> Handle      the same while a thread of its own runs it
        .drain(seconds); .close()

One thread ticks the scheduler and alone touches model, pages and texts. Others leave requests and questions in its
inbox. Without `start` the caller of `generate` is that thread. If it dies, every open request fails with code internal.

Source: continuous depth batching, arXiv:2608.09444.
"""

import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from looplab.engine.check import check
from looplab.engine.config import EngineConfig
from looplab.engine.gates import GateExit, PreLoopExit
from looplab.engine.live import Handle, Live
from looplab.engine.probe import predict
from looplab.engine.profile import Profile, served_kv_rule
from looplab.engine.reports import Finished, Report
from looplab.engine.request import (
    BusyError,
    ChoiceEnded,
    Completion,
    DepthParams,
    DepthUsage,
    Event,
    PromptRead,
    RefusedError,
    Request,
    RequestEnded,
    RequestFailed,
    SamplingParams,
    TokenLogprob,
    TokenSaid,
    Usage,
)
from looplab.engine.runner import TorchRunner
from looplab.engine.scheduler import Scheduler
from looplab.engine.stats import EngineStats
from looplab.engine.tokenizer import ServedTokenizer
from looplab.engine.verdict import ReuseResult
from looplab.models.folder import weight_hash
from looplab.recurrence.exit.base import ExitRule

T = TypeVar("T")
BEAT_SECONDS = 1.0
"""An idle thread looks up so often."""
SILENT_SECONDS = 30.0
"""A thread that has not ticked for longer is not ready."""
CHECK_EVERY = 1000
"""Ticks between two looks at the integrity of pages and queues."""
RATE_SECONDS = 10.0
"""Span over which the rate of tokens is taken."""
Answers = Sequence[str] | Sequence[Sequence[int]]


class Engine:
    """A looped model that answers many requests at once.

    Args:
        model: In eval mode.
        name: What answers call the model.
        gates: Exit rules of gates that were trained beside the model, by the name that requests use.
        reuse: What the reuse audit found of this checkpoint.
    Raises:
        ValueError: The model cannot be served, or the configuration contradicts itself or the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: ServedTokenizer,
        config: EngineConfig | None = None,
        *,
        name: str = "model",
        gates: Mapping[str, ExitRule] | None = None,
        reuse: Sequence[ReuseResult] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.model, self.tokenizer, self.name, self.clock = model, tokenizer, name, clock
        asked = config or EngineConfig()
        kept, why = served_kv_rule(model.spec, asked.kv_rule)
        self.runner = TorchRunner(model, replace(asked, kv_rule=kept), eos=tokenizer.eos, gates=gates or {})
        self.profile = Profile(
            spec=model.spec,
            config=self.runner.config,
            facts=self.runner.facts,
            kv_rule=self.runner.kv_rule,
            kv_reason=why,
            numerics=self.runner.numerics,
            noise=self.runner.noise,
            bytes_per_token=self.runner.bytes_per_token,
            vocab=model.spec.vocab[0],
            weights=weight_hash(model),
            gates=gate_hashes(self.runner.rules),
            rules=tuple(self.runner.rules),
            refused_rules=self.runner.refused_rules,
            drafts_refused=self.runner.drafts_refused,
            verdicts=tuple(reuse),
        )
        if asked.min_coda_rows is None:
            self._predict(None)
        self.config = self.profile.config
        self.facts = self.profile.check_facts()
        self.scheduler = Scheduler(
            self.config,
            self.runner.facts,
            self.runner,
            on_event=self._report,
            judge=self._judge,
            clock=clock,
            root=self.profile.root(),
        )
        self.error: BaseException | None = None
        """What ended the thread, where something did."""
        self._live: dict[str, Live] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending, self._pending_tokens = 0, 0  # in the inbox
        self._waiting, self._waiting_tokens = 0, 0  # as of the last tick
        self._ids: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopping = self._draining = False
        self._beat = clock()
        self._ticks = 0
        self._said: deque[tuple[float, int]] = deque()

    def predict(self) -> None:
        """Times launches, so that `describe` says what early exits come to, where m was given; before `start`."""
        self._predict(self.config.min_coda_rows)

    def _predict(self, coda_rows: int | None) -> None:
        law, depths = self.profile.depth_law()
        found = predict(self.runner, self.profile.config, law, depths, coda_rows=coda_rows)
        self.runner.padding = 0  # probes are over
        if found is not None:
            config = replace(self.profile.config, min_coda_rows=found.coda_rows)
            self.profile = replace(self.profile, config=config, prediction=found)

    # From any thread.

    def start(self) -> None:
        """Starts the engine's thread."""
        if self._thread is not None:
            raise RuntimeError("engine: start was called before. Make a new engine.")
        self._thread = threading.Thread(target=self._run, name="looplab-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Handle:
        """Takes a request.

        Args:
            on_event: Called from the engine's thread with every event; it must not block. None: iterate the handle.
        Raises:
            RefusedError: The request cannot be served, whatever the load.
            BusyError: It cannot be served now.
        """
        self.check(request)
        depth, prefill_steps = self.runner.resolve(request.depth)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(31)
        name = request.id or secrets.token_hex(12)
        tokens = len(request.tokens)
        handle = Handle(name, seed, self.cancel)
        live = Live(replace(request, id=name), depth, prefill_steps, seed, on_event or handle.put)
        with self._lock:
            self._admit(name, tokens)
            self._ids.add(name)
            self._pending, self._pending_tokens = self._pending + 1, self._pending_tokens + tokens
            self._inbox.put(lambda: self._add(live))
        return handle

    def cancel(self, id: str) -> None:
        """Ends a request; harmless where it is over."""
        self._inbox.put(lambda: self._end(id))

    def check(self, request: Request) -> None:
        """Raises RefusedError for a request that can never be served."""
        check(request, self.facts)
        blocks = self.profile.facts.blocks
        if request.depth.replay is not None and blocks > 1:
            raise RefusedError(
                "invalid_depth",
                f"replay must be of a model of one looped block; got {blocks}: recorded depths are sums over them",
                "replay",
            )
        self.profile.check_reuse(self.runner.resolve(request.depth)[0])

    def stats(self) -> EngineStats:
        """Counters and lengths, as of between two ticks."""
        return self._ask(self._stats)

    def describe(self) -> dict[str, Any]:
        """What an operator or a client may want to know of the engine before the first request."""
        return {"name": self.name} | self.profile.describe()

    @property
    def alive(self) -> bool:
        """Whether the engine can still answer: its thread runs, or none was started."""
        return self.error is None and (self._thread is None or self._thread.is_alive())

    @property
    def ready(self) -> bool:
        """Whether a request that came now would be taken."""
        started = self._thread is not None and self.alive and not self._draining
        return started and self.clock() - self._beat < SILENT_SECONDS and self._waiting < self.config.max_waiting

    @property
    def draining(self) -> bool:
        """Whether the engine takes nothing new."""
        return self._draining

    def drain(self, seconds: float) -> bool:
        """Takes nothing new, and waits until all is answered; what is not by then fails with code not_ready.

        Returns:
            Whether everything was answered.
        """
        self._draining = True
        end = self.clock() + seconds
        while self._ids and self.alive and self.clock() < end:
            time.sleep(0.01)
        done = not self._ids
        if not done and self.alive:
            self._ask(self._end_all)
        return done

    def close(self) -> None:
        """Stops the thread; open requests fail with code not_ready."""
        with self._lock:
            self._draining = True
        if self._thread is None:
            self._take_inbox()
            self._end_all()
            return
        self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Answers,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        depth: int | ExitRule | DepthParams | None = None,
        n: int = 1,
        prompt_logprobs: int | None = None,
    ) -> list[Completion]:
        """Answers to prompts (texts or token ids), `n` per prompt, in order.

        Args:
            sampling: One for all, or one per prompt.
            depth: Steps of every token, an exit rule that the engine has, or None for the engine's default.
        Raises:
            RefusedError: A prompt or parameter that cannot be served.
            RuntimeError: A request failed; the message is its own.
        """
        params = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else sampling
        if len(params) != len(prompts):
            raise ValueError(
                f"generate: sampling must be one, or one per prompt. Got {len(params)} for {len(prompts)}."
            )
        requests = [
            Request(
                tokens=self._read(prompt),
                sampling=one,
                depth=depth_params(depth),
                n=n,
                prompt_logprobs=prompt_logprobs,
            )
            for prompt, one in zip(prompts, params, strict=True)
        ]
        for request in requests:
            self.check(request)
        answers = [_Answer() for _ in requests]
        open_: deque[tuple[Request, _Answer]] = deque(zip(requests, answers, strict=True))
        while open_ or not all(answer.over for answer in answers):
            while open_:
                try:
                    request, answer = open_[0]
                    answer.request = self.submit(request, answer.put).id
                except BusyError:
                    if self._draining or not self.alive:
                        raise
                    break
                open_.popleft()
            if self._thread is None:
                self.step()
            else:
                time.sleep(0.001)
        return [done for answer in answers for done in answer.completions()]

    def _read(self, prompt: Any) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    # On the engine's thread; without one, on the caller's.

    def step(self) -> bool:
        """One look at the inbox and one tick; whether anything was done. Not for callers of `start`."""
        took = self._take_inbox()
        ticked = self.scheduler.tick()
        self._beat = self.clock()
        self._look()
        self._ticks += 1
        if not ticked or self._ticks % CHECK_EVERY == 0:
            self.scheduler.check_integrity()
        return took or ticked

    @property
    def waiting(self) -> int:
        """Requests that hold no seat yet, as of the last tick."""
        return self._waiting

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    self._wait()
            self._take_inbox()
            self._end_all()
        except BaseException as error:
            with self._lock:  # nothing enters the inbox from here on
                self.error = error
            self._take_inbox()
            for live in list(self._live.values()):
                live.on_event(RequestFailed(code="internal", message=f"the engine stopped: {error}"))
            self._live.clear()
            self._ids.clear()
            if not isinstance(error, Exception):
                raise

    def _take_inbox(self) -> bool:
        took = False
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return took
            message()
            took = True

    def _wait(self) -> None:
        try:
            message = self._inbox.get(timeout=BEAT_SECONDS)
        except queue.Empty:
            return
        message()

    def _add(self, live: Live) -> None:
        with self._lock:
            self._pending -= 1
            self._pending_tokens -= len(live.request.tokens)
        live.open_texts(self.tokenizer)
        self._live[live.request.id] = live
        try:
            self.scheduler.add(
                live.request,
                depth=live.depth,
                seed=live.seed,
                prefill_steps=live.prefill_steps,
                root=self.profile.request_root(live.seed),
            )
        except RefusedError as error:
            self._report(live.request.id, RequestFailed(code=error.code, message=str(error)))
        self._look()

    def _look(self) -> None:
        line = self.scheduler.admission.line
        self._waiting, self._waiting_tokens = len(line), line.tokens

    def _end(self, id: str) -> None:
        self.scheduler.cancel(id)

    def _end_all(self) -> None:
        for id in list(self._live):
            self.scheduler.cancel(id, code="not_ready", message="server is shutting down")

    def _judge(self, id: str, choice: int, token: int) -> str | None:
        return self._live[id].judge(choice, token, self.tokenizer.eos)

    def _report(self, id: str, report: Report) -> None:
        live = self._live[id]
        event = live.event(report, self._usage)
        if isinstance(event, TokenSaid):
            self._said.append((self.clock(), 1))
        if isinstance(event, RequestEnded | RequestFailed):
            del self._live[id]
            self._ids.discard(id)
        live.on_event(event)

    def _usage(self, live: Live, took: Finished) -> Usage:
        depth, work = live.depth, self.profile.work
        most = self.profile.most_steps(depth)
        drafts = depth.draft_steps is not None
        step = self.profile.step_work
        whole = took.decode_tokens * (work.outside + most * step)
        return Usage(
            prompt_tokens=took.prompt_tokens,
            cached_tokens=took.cached_tokens,
            output_tokens=took.output_tokens,
            seed=live.seed,
            preemptions=took.preemptions,
            depth=DepthUsage(
                exit_rule=depth.exit_rule or ("replay" if depth.replay is not None else "full"),
                threshold=depth.exit_threshold,
                max_steps=most,
                prefill_steps=live.prefill_steps,
                decode_tokens=took.decode_tokens,
                histogram=took.histogram,
                applications=took.applications,
                full_depth_applications=took.decode_tokens * most,
                saved_flops_fraction=(took.decode_tokens * most - took.applications) * step / whole if whole else 0.0,
                kv_rule=self.profile.kv_rule,
                reuse=self.profile.verdict(depth),
                warnings=self.profile.warnings(depth),
                drafted_tokens=took.drafted_tokens if drafts else None,
                accepted_tokens=took.accepted_tokens if drafts else None,
                draft_rounds=took.draft_rounds if drafts else None,
            ),
        )

    def _stats(self) -> EngineStats:
        return replace(
            self.scheduler.stats(),
            kv_bytes=self.profile.bytes_per_token * self.profile.facts.pages * self.config.page_tokens,
            padding=self.runner.padding,
        )

    # Between the threads.

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the engine's thread."""
        if self._thread is None or not self._thread.is_alive() or threading.current_thread() is self._thread:
            return question()
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(reply)
        return answer.result(timeout=SILENT_SECONDS)

    def _admit(self, name: str, tokens: int) -> None:
        if not self.alive:
            raise BusyError("not_ready", f"the engine has stopped: {self.error}", retry_after=1)
        if self._draining:
            raise BusyError("not_ready", "server is shutting down", retry_after=1)
        if name in self._ids:
            raise RefusedError("duplicate_request", "request id is in use", "id")
        waiting, queued = self._waiting + self._pending, self._waiting_tokens + self._pending_tokens
        if waiting >= self.config.max_waiting or (waiting and queued + tokens > self.config.max_waiting_tokens):
            retry = self._retry_after(queued)
            raise BusyError("queue_full", f"{waiting} requests waiting; retry in {retry} s", retry_after=retry)

    def _retry_after(self, queued: int) -> int:
        """Seconds until so many tokens are through, at the recent rate."""
        now = self.clock()
        while self._said and self._said[0][0] < now - RATE_SECONDS:
            self._said.popleft()
        rate = len(self._said) / RATE_SECONDS
        return max(1, min(60, math.ceil(queued / rate) if rate else 60))


def gate_hashes(rules: Mapping[str, ExitRule | None]) -> tuple[tuple[str, str], ...]:
    """Name and hash of the weights of every trained gate among some rules."""
    trained = {name: rule for name, rule in rules.items() if isinstance(rule, GateExit | PreLoopExit)}
    return tuple((name, weight_hash(rule.gate.module)) for name, rule in sorted(trained.items()))


def depth_params(depth: int | ExitRule | DepthParams | None) -> DepthParams:
    """The depth of a request, from a number of steps or a rule."""
    if depth is None:
        return DepthParams()
    if isinstance(depth, DepthParams):
        return depth
    if isinstance(depth, int):
        return DepthParams(num_steps=depth)
    threshold = getattr(depth, depth.number) if depth.number else None
    return DepthParams(exit_rule=depth.name, exit_threshold=threshold, min_steps=depth.min_steps)


class _Answer:
    """Collects the events of one request of `generate`."""

    def __init__(self) -> None:
        self.request = ""
        self.over = False
        self.failed: RequestFailed | None = None
        self.usage: Usage | None = None
        self.prompt: tuple[TokenLogprob | None, ...] | None = None
        self.tokens: dict[int, list[TokenSaid]] = {}
        self.ends: dict[int, ChoiceEnded] = {}

    def put(self, event: Event) -> None:
        """Takes one event."""
        match event:
            case TokenSaid():
                self.tokens.setdefault(event.choice, []).append(event)
            case ChoiceEnded():
                self.ends[event.choice] = event
            case PromptRead():
                self.prompt = event.logprobs
            case RequestEnded():
                self.usage, self.over = event.usage, True
            case RequestFailed():
                self.failed, self.over = event, True

    def completions(self) -> list[Completion]:
        """All choices, in order."""
        if self.failed is not None:
            raise RuntimeError(f"{self.failed.code}: {self.failed.message}")
        assert self.usage is not None
        return [self._completion(choice, self.usage) for choice in sorted(self.ends)]

    def _completion(self, choice: int, usage: Usage) -> Completion:
        said, end = self.tokens.get(choice, []), self.ends[choice]
        logprobs = tuple(event.logprob for event in said if event.logprob is not None)
        return Completion(
            request=self.request,
            choice=choice,
            tokens=tuple(event.token for event in said),
            text="".join(event.text for event in said) + end.text,
            reason=end.reason,
            depths=tuple(event.steps for event in said),
            logprobs=logprobs or None,
            prompt_logprobs=self.prompt,
            usage=usage,
        )
