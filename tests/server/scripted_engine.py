"""An engine without a model: what it says is a function of the request, and tests say when it fails, waits or dies.

It keeps the interface of `looplab.engine.engine.Engine` as far as a server uses it. Every tick gives each open request
one token of each choice, from a thread of its own.
"""

import itertools
import threading
import time
from dataclasses import replace

from looplab.engine.check import CheckFacts, check
from looplab.engine.request import (
    BusyError,
    ChoiceEnded,
    DepthUsage,
    PromptRead,
    RequestEnded,
    RequestFailed,
    TokenLogprob,
    TokenSaid,
    Usage,
)
from looplab.engine.stats import EngineStats
from looplab.engine.text import TextStream

FACTS = CheckFacts(
    vocab=259,
    context=1024,
    pages=64,
    page_tokens=16,
    seats=16,
    max_steps=8,
    trained_steps="4",
    exit_rules=("full", "hazard", "latent"),
    refused_rules=(("kl", "kl needs coda and head every step: bound 0.99x; start with --allow-costly-exit"),),
)


class Handle:
    def __init__(self, engine, name, seed):
        self.engine, self.id, self.seed = engine, name, seed

    def cancel(self):
        self.engine.cancelled.append(self.id)
        self.engine.end(self.id, RequestFailed(code="cancelled", message="cancelled by the client"))


class Open:
    def __init__(self, request, seed, post, tokenizer):
        self.request, self.seed, self.post, self.said = request, seed, post, 0
        stop = request.sampling.stop
        self.texts = [TextStream(tokenizer, context=request.tokens, stop=stop) for _ in range(request.n)]
        self.open = set(range(request.n))
        self.counts = [0] * request.n
        self.began = time.monotonic()


class ScriptedEngine:
    """Says `script(request, choice, index)`, the next token of a choice."""

    def __init__(self, tokenizer, script, *, facts=FACTS, tick_seconds=0.0, max_waiting=256):
        self.tokenizer, self.script, self.facts = tokenizer, script, facts
        self.tick_seconds, self.max_waiting = tick_seconds, max_waiting
        self.live, self.cancelled, self.seen = {}, [], []
        self.fail_at = {}  # token index -> RequestFailed
        self.go = threading.Event()
        self.go.set()
        self.alive, self.draining, self.stopping = True, False, False
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.thread = threading.Thread(target=self.run, daemon=True)

    @property
    def ready(self):
        return self.alive and not self.draining and len(self.live) < self.max_waiting

    def start(self):
        self.thread.start()

    def close(self):
        self.stopping = True
        self.go.set()
        self.thread.join()

    def check(self, request):
        check(request, self.facts)

    def submit(self, request, on_event=None):
        self.check(request)
        with self.lock:
            if self.draining or not self.alive:
                raise BusyError("not_ready", "server is shutting down", retry_after=1)
            if len(self.live) >= self.max_waiting:
                raise BusyError("queue_full", f"{len(self.live)} requests waiting; retry in 7 s", retry_after=7)
            seed = request.sampling.seed if request.sampling.seed is not None else next(self.numbers)
            assert request.id not in self.live
            self.seen.append(request)
            self.live[request.id] = Open(request, seed, on_event, self.tokenizer)
        return Handle(self, request.id, seed)

    def end(self, name, event):
        with self.lock:
            found = self.live.pop(name, None)
        if found is not None:
            found.post(event)

    def drain(self, seconds):
        self.draining = True
        end = time.monotonic() + seconds
        while self.live and time.monotonic() < end:
            time.sleep(0.005)
        left = list(self.live)
        for name in left:
            self.end(name, RequestFailed(code="not_ready", message="server is shutting down"))
        return not left

    def die(self):
        self.alive = False

    def stats(self):
        return EngineStats(residents=len(self.live), exit_steps=((2, 3), (4, 1)), free_pages=self.facts.pages)

    def describe(self):
        facts = self.facts
        return {
            "name": "scripted",
            "trained_steps": facts.trained_steps,
            "max_steps": facts.max_steps,
            "exit_rules": list(facts.exit_rules),
            "kv_rule": "last_exited",
            "reuse": "unknown",
            "context": facts.context,
            "numerics": "exact",
            "pages": facts.pages,
            "page_tokens": facts.page_tokens,
            "fingerprint": "fp_scripted",
        }

    def run(self):
        while not self.stopping:
            self.go.wait()
            with self.lock:
                if self.alive:
                    for name, one in list(self.live.items()):
                        self.step(name, one)
            time.sleep(self.tick_seconds or 0.0002)

    def step(self, name, one):
        sampling = one.request.sampling
        if one.said == 0 and one.request.prompt_logprobs is not None:
            read = [None, *(TokenLogprob(t, -0.5, ((t, -0.5), (65, -3.0))) for t in one.request.tokens[1:])]
            one.post(PromptRead(logprobs=tuple(read)))
        if one.said in self.fail_at:
            self.end(name, self.fail_at[one.said])
            return
        waited = time.monotonic() - one.began
        if one.request.timeout is not None and waited > one.request.timeout:
            said = f"{one.said} of {sampling.max_tokens} tokens after {one.request.timeout:g} s"
            self.end(name, RequestFailed(code="deadline_exceeded", message=said))
            return
        for choice in sorted(one.open):
            self.say(one, choice, self.script(one.request, choice, one.said))
        one.said += 1
        if not one.open:
            self.end(name, RequestEnded(usage=self.usage(one)))

    def say(self, one, choice, token):
        sampling, text = one.request.sampling, one.texts[choice]
        over = token == self.tokenizer.eos and not sampling.ignore_eos
        piece = "" if over else text.push(token)
        logprob = None if sampling.logprobs is None else TokenLogprob(token, -0.25, ((token, -0.25), (66, -2.0)))
        steps = 4 if one.counts[choice] == 0 else 2
        one.counts[choice] += 1
        one.post(TokenSaid(choice=choice, token=token, text=piece, steps=steps, logprob=logprob))
        reason = "stop" if over or text.stopped else "length" if one.counts[choice] == sampling.max_tokens else None
        if reason is not None:
            one.open.discard(choice)
            one.post(ChoiceEnded(choice=choice, reason=reason, text=text.close()))

    def usage(self, one):
        output = sum(one.counts)
        decoded = output - one.request.n
        depth = DepthUsage(
            exit_rule=one.request.depth.exit_rule or "full",
            threshold=one.request.depth.exit_threshold,
            max_steps=4,
            prefill_steps=4,
            decode_tokens=decoded,
            histogram=((2, decoded),) if decoded else (),
            applications=2 * decoded,
            full_depth_applications=4 * decoded,
            saved_flops_fraction=0.4,
            kv_rule="last_exited",
            reuse="unknown",
        )
        return Usage(
            prompt_tokens=len(one.request.tokens), cached_tokens=0, output_tokens=output, depth=depth, seed=one.seed
        )


def spelling(text, eos=257):
    """A script that spells a text in bytes, then ends."""
    data = text.encode()
    return lambda request, choice, index: data[index] if index < len(data) else eos


def with_facts(**changes):
    """The usual facts, but for some."""
    return replace(FACTS, **changes)
