"""A scheduler over the hash model, driven by operations, checked after every one against the written-out texts."""

import random

from engine.hash_runner import HashRunner
from looplab.engine.config import EngineConfig
from looplab.engine.reports import Finished
from looplab.engine.request import (
    ChoiceEnded,
    DepthParams,
    RefusedError,
    Request,
    RequestFailed,
    SamplingParams,
    TokenSaid,
)
from looplab.engine.scheduler import Scheduler
from looplab.engine.stats import check_ledger
from reference.hash_model import RULES, say

LOOK_AHEAD = ("single", "anchor")
"""KV rules by which an iteration reads entries of later ones."""


def ends(token):
    """One token of 16 ends a text."""
    return token % 16 == 0


class World:
    """Submits, cancels, lets time pass, and knows what has to come out."""

    def __init__(self, rule, *, chunk=8, late=False, min_steps=1, stops=True, **sizes):
        names = ("max_steps", "pages", "delay", "whole", "resumes")
        runner_sizes = {k: sizes.pop(k) for k in names if k in sizes}
        self.rule, self.chunk, self.late, self.min_steps = rule, chunk, late, min_steps
        self.ends = ends if stops else lambda token: False
        self.runner = HashRunner(rule, late=late, **runner_sizes)
        settings = {"launch_rows": 3, "max_resident": 5, "min_coda_rows": 1, "token_budget": 2 * chunk} | sizes
        self.clock, self.requests, self.said, self.over, self.named = 0.0, {}, {}, {}, 0
        self.heard, self.launches = [], []
        self.truths = {}
        self.runner.oracle = self.foresee
        self.scheduler = Scheduler(
            EngineConfig(prefill_chunk=chunk, page_tokens=4, **settings),
            self.runner.facts,
            self.runner,
            on_event=self.hear,
            judge=lambda request, choice, token: "stop" if self.ends(token) else None,
            clock=lambda: self.clock,
            record=self.launches.append,
        )

    def submit(
        self, prompt, *, limit, n=1, steps=None, rate=40, priority=5, timeout=None, salt="", logprobs=None, drafts=None
    ):
        name, self.named = f"r{self.named}", self.named + 1
        most = max(self.runner.facts.max_steps)
        depth = (
            DepthParams(num_steps=steps, draft_steps=drafts and drafts[0], draft_tokens=drafts and drafts[1])
            if steps
            else DepthParams(min_steps=self.min_steps, exit_threshold=float(rate))
        )
        request = Request(
            id=name,
            tokens=tuple(prompt),
            n=n,
            sampling=SamplingParams(max_tokens=limit),
            depth=depth,
            priority=priority,
            timeout=timeout,
            cache_salt=salt,
            prompt_logprobs=logprobs,
        )
        self.scheduler.add(request, depth=depth, seed=self.named, prefill_steps=steps or most)
        self.requests[name] = (request, steps, rate, steps or most, self.named)
        self.said[name] = [[] for _ in range(n)]
        return name

    def try_submit(self, **request):
        """Submits; a request that never fits is refused."""
        try:
            return self.submit(**request)
        except RefusedError:
            return None

    def hear(self, name, report):
        assert name not in self.over, f"{name} was reported after its end"
        self.heard.append((name, report))
        if isinstance(report, TokenSaid):
            self.said[name][report.choice].append((report.token, report.steps))
        elif isinstance(report, ChoiceEnded):
            truth = self.truth(name, report.choice)
            assert self.said[name][report.choice] == truth, f"{name}/{report.choice} said something else"
            assert report.reason == ("stop" if truth and self.ends(truth[-1][0]) else "length")
        elif isinstance(report, RequestFailed):
            self.over[name] = report.code
            for choice, said in enumerate(self.said[name]):
                assert said == self.truth(name, choice)[: len(said)], f"{name}/{choice} said something else"
        elif isinstance(report, Finished):
            self.over[name] = "finished"
            assert report.output_tokens == sum(map(len, self.said[name]))
            assert report.applications == sum(steps for said in self.said[name] for _, steps in said[1:])
            assert report.accepted_tokens <= min(report.drafted_tokens, report.decode_tokens)

    def foresee(self, job, index):
        """Output token `index` of a choice, None past its end."""
        said = self.truth(job.request, job.choice)
        return said[index][0] if index < len(said) else None

    def truth(self, name, choice):
        """(token, steps) of all that a choice says."""
        if (name, choice) not in self.truths:
            self.truths[name, choice] = self.write(name, choice)
        return self.truths[name, choice]

    def write(self, name, choice):
        request, steps, rate, prefill_steps, seed = self.requests[name]
        tokens, depths = say(
            self.rule,
            self.runner.facts.max_steps,
            list(request.tokens),
            chunk=self.chunk,
            limit=request.sampling.max_tokens,
            ends=self.ends,
            prefill_steps=prefill_steps,
            steps=steps,
            min_steps=self.min_steps,
            rate=rate,
            late=self.late,
            seed=seed,
            choice=choice,
        )
        first = sum(min(prefill_steps, most) for most in self.runner.facts.max_steps)
        return list(zip(tokens, [first, *map(sum, depths)][: len(tokens)], strict=True))

    def tick(self):
        self.runner.now += 1
        self.scheduler.tick()

    def check(self):
        self.scheduler.check_integrity()
        check_ledger(self.scheduler.stats())

    def drain(self, most=20_000):
        for _ in range(most):
            if self.scheduler.idle:
                break
            self.tick()
            self.check()
        assert self.scheduler.idle, "work is left"
        assert set(self.over) == set(self.requests), "a request was lost"
        stats = self.scheduler.stats()
        assert stats.residents == 0 and stats.active_pages == 0 and stats.quarantined_pages == 0
        assert not self.runner.seats
        if set(self.over.values()) <= {"finished"}:
            taken = [report for _, report in self.heard if isinstance(report, Finished)]
            assert sum(report.output_tokens for report in taken) == stats.output_tokens
            assert sum(report.applications for report in taken) == stats.chosen + stats.wasted["delayed"]
            assert sum(report.preemptions for report in taken) == stats.preemptions
            for name in ("drafted_tokens", "accepted_tokens", "draft_rounds"):
                assert sum(getattr(report, name) for report in taken) == getattr(stats, name)


def draw_world(rng, rule=None):
    """A world with sizes and policies drawn by chance, tight enough that pages run out."""
    rule = rule or rng.choice(RULES)
    residents = rng.randint(2, 6)
    rows = rng.randint(1, residents)
    return World(
        rule,
        max_steps=rng.choice([(4,), (4,), (3, 2), (2, 2, 3)]),
        min_steps=2 if rule == "anchor" else 1,
        late=rule != "depth_indexed" and rng.random() < 0.3,
        pages=rng.choice([10, 10, 12, 14, 24]),
        delay=rng.randint(0, 3),
        whole=rng.random() < 0.15,
        resumes=rng.random() < 0.7,
        chunk=rng.choice([4, 8]),
        launch_rows=rows,
        max_resident=residents,
        min_coda_rows=rng.randint(1, residents),
        refill=rng.random() < 0.7,
        successors=rng.choice(["tail", "tail", "head"]) if rows == residents else "tail",
        homogeneous_steps=rng.random() < 0.15,
        prefix_cache=rng.random() < 0.8,
        numerics=rng.choice(["fast", "exact"]),
        admit=rng.choice(["optimistic", "optimistic", "optimistic", "reserve"]),
        preempt=rng.choice(["replay", "replay", "replay", "never"]),
        free_page_margin=rng.choice([0.0, 0.0, 0.2]),
        min_free_seats=rng.randint(1, 2),
        max_bypass=rng.choice([0, 2]),
    )


def draw_request(rng, world):
    """Arguments of `World.submit` by chance: prompts share beginnings, and some rules forbid some depths."""
    most = max(world.runner.facts.max_steps)
    fixed = world.rule == "depth_indexed" or rng.random() < 0.2
    length = rng.choice([1, 3, 4, 7, 8, 9, 15, 16, 17])
    steps = rng.randint(world.min_steps, most) if fixed else None
    drafts = None
    may_draft = world.rule not in LOOK_AHEAD and not world.scheduler.config.homogeneous_steps
    if may_draft and most > 1 and rng.random() < 0.5:
        steps = steps if steps is not None and steps > 1 else most
        drafts = (rng.randint(1, steps - 1), rng.randint(1, 5))
    return {
        "prompt": [*([rng.randrange(2)] * 12), *range(9)][:length],
        "limit": rng.choice([1, 2, 6, 12, 20]),
        "n": rng.choice([1, 1, 1, 2]),
        "steps": steps,
        "drafts": drafts,
        "rate": rng.choice([0, 30, 70, 100]),
        "priority": rng.choice([0, 5, 5, 9]),
        "timeout": rng.choice([None, None, None, 3.0, 20.0]),
        "salt": rng.choice(["", "", "other"]),
    }


def random_schedule(seed, operations=60, *, rule=None):
    """One world, one schedule, checked after every operation and to its end."""
    rng = random.Random(seed)
    world = draw_world(rng, rule)
    for _ in range(operations):
        choice = rng.random()
        if choice < 0.2:
            world.try_submit(**draw_request(rng, world))
        elif choice < 0.23 and world.requests:
            world.scheduler.cancel(rng.choice(list(world.requests)))
        elif choice < 0.27:
            world.clock += rng.choice([0.5, 3.0])
        else:
            world.tick()
        world.check()
    world.drain()
    return world
