"""Executes the launches of `engine.stages` for any causal looped model, in PyTorch.

    prefill   encode -> init_state -> the plan of `prefill_steps` -> coda -> head -> draws
    encode    encode -> init_state                                                        state, context -> seats
    core      seats -> step(state, context, block, iteration per row, cache) -> seats, exit rules
    coda      seats -> coda -> head -> draws -> encode of what was drawn

What belongs to a choice (state, context, memory of its rule, text) lies in banks on the device, with one place per seat
and, for states and contexts, per lane; a launch gathers its rows and puts them back. What belongs to a text lies in
pages (`engine.slots`). Tokens that were drawn go on to their encoding on the device; the host reads them, and late exit
flags, from pinned copies.

A *section* is a loop that tokens leave one by one: a block, or the cycles of a two-level model. Where sections cannot
be launched separately (layer-loop, dense, two levels, or `segments="plan"`) a core launch takes its rows through all of
them in lockstep: rows that have left a section wait for the next one and cost nothing.

numerics="exact": row counts are rounded up to multiples of 8 with rows that write to page 0, attention is computed by
plain matrix products over whole pages, prompts run alone. A probe of the model's own stages at the start compares bits;
if they differ, launches are split into tiles of 8 rows and probed again; if they still do, the engine refuses and names
the stage.

Source: continuous depth batching, arXiv:2608.09444. Deviations: rows of one launch may be at different iterations under
every cache rule (`engine.slots`). On CUDA launches are eager, without graphs.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from looplab._types import Float, Int
from looplab.engine import sampling
from looplab.engine.config import EngineConfig
from looplab.engine.drafts import lanes, refusal, with_drafts
from looplab.engine.exits import Exits, build_rule, check_bounds, loadable
from looplab.engine.launches import Found, Launch, PromptReads, SpanResult
from looplab.engine.request import DepthParams, RefusedError
from looplab.engine.sections import check_kv_rule, check_model, sections_of
from looplab.engine.slots import (
    PagedCache,
    bytes_per_token,
    depth_causal,
    name_of,
    refuses_exits,
    rule_of,
    shapes_of,
)
from looplab.engine.stages import Decision, Drawn, Facts, Job, Prefilled, Row, Span
from looplab.recurrence import state as states
from looplab.recurrence.exit import ExitRule
from looplab.recurrence.kv.depth_indexed import DepthIndexed
from looplab.recurrence.kv.first import First
from looplab.recurrence.plan import Blocks, ModelLoop, Plan
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.state import standard_noise

TILE = 8
"""Rows that matrix products take together without a change of bits."""
VECTOR = 16
"""Numbers that a loop over a row takes at a time."""
SMALL = 400
"""Multiply-adds of one row of a batched product below which PyTorch takes another kernel."""
LONGEST = 4096
"""Context of models that declare none."""
READ_TOKENS = 256
"""Tokens of a prompt whose logits are held at a time."""
WORD = 2**64 - 1


class TorchRunner:
    """A `stages.Runner`.

    Attributes:
        config: The configuration with sizes resolved to numbers.
        facts: What a scheduler has to know.
        kv_rule: Command-line name of the KV rule in use.
        numerics: exact or fast.
        noise: How first states are drawn: none, zeros, position or request.
        bytes_per_token: Of all cache layers and slots together.
        refused_rules: Exit rules that are not loaded -> why.
        drafts_refused: Why no tokens are guessed ahead; empty: they may be.
        padding: Rows and tokens so far that launches computed and nobody asked for.

    Args:
        model: In eval mode.
        eos: The end-of-text token, which `min_tokens` forbids.
        gates: Exit rules of gates that were trained beside the model, by name.
    Raises:
        ValueError: The model cannot be served, or the configuration contradicts it or itself.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        *,
        eos: int | None = None,
        gates: Mapping[str, ExitRule] | None = None,
    ):
        spec: LoopSpec = model.spec
        check_model(spec, ragged_cache=model.ragged_cache)
        self.model, self.spec, self.eos = model, spec, eos
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._rule = spec.kv_rule if config.kv_rule is None else rule_of(config.kv_rule)
        check_kv_rule(spec, self._rule)
        self.kv_rule, self.numerics = name_of(self._rule), config.numerics
        self.noise = (config.noise or "position") if spec.noise_width else "none"
        self._turns = isinstance(spec.order, ModelLoop | Blocks)
        whole = config.segments == "plan" or not self._turns
        self._sections = sections_of(spec, config.max_steps)
        most = tuple(len(section) for section in self._sections)
        self._plans: dict[int, Plan] = {}
        iterations = self._plan(max(most)).iterations()
        shapes = shapes_of(model)
        self.bytes_per_token = bytes_per_token(shapes, self._rule, iterations, self.dtype)
        self.config = self._resolved(config)
        assert self.config.max_resident and self.config.num_pages and self.config.max_model_len
        self.facts = Facts(
            blocks=len(most),
            max_steps=most,
            whole=whole,
            pages=self.config.num_pages,
            page_tokens=config.page_tokens,
            max_tokens=self.config.max_model_len,
            depth_causal=depth_causal(self._rule),
            resumes=not whole and len(most) == 1 and spec.grid is None,
        )
        self.rules, self.refused_rules = loadable(
            spec,
            most,
            gates=gates or {},
            refuses_exits=refuses_exits(self._rule),
            allow_costly=config.allow_costly_exit,
        )
        self.drafts_refused = refusal(
            self.kv_rule,
            looks_ahead=not isinstance(self._rule, DepthIndexed | First),
            homogeneous_steps=config.homogeneous_steps,
        )
        self.resolve(DepthParams(draft_steps=config.draft_steps))
        self.padding = 0
        self.cache = PagedCache(
            shapes,
            self._rule,
            iterations=iterations,
            pages=self.config.num_pages,
            page_tokens=config.page_tokens,
            dtype=self.dtype,
            device=self.device,
            contiguous=self.numerics == "exact",
        )
        seats = self.config.max_resident
        self.exits = Exits(spec, seats, most, offset_one=config.offset_one, device=self.device)
        self._seats = seats
        self._sink = seats * lanes(config)
        self._unit = self._least = 1
        if self.numerics == "exact":  # sums over whole vectors have the same bits however many zeros follow
            self._unit = VECTOR // math.gcd(VECTOR, config.page_tokens)
            self._least = -(-SMALL // (min(width for _, width in shapes.values()) * config.page_tokens))
        widest = self._width(-(-self.facts.max_tokens // config.page_tokens))
        self._tables = torch.zeros(seats + 1, widest, dtype=torch.long)  # the last one of padding
        self._pages: list[tuple[int, ...]] = [()] * (seats + 1)
        self._jobs: dict[int, Job] = {}
        self._texts: dict[int, list[int]] = {}
        self._state: Any = None
        self._context: Any = None
        self._noise_table = torch.zeros(0, spec.noise_width)
        self._waiting: dict[int, Launch] = {}
        self._tickets = 0
        self._tile: int | None = None
        if self.numerics == "exact":
            self._probe()

    # What the engine asks.

    def resolve(self, depth: DepthParams) -> tuple[DepthParams, int]:
        """The depth of a request with nothing left open, and the steps of its prompt.

        Raises:
            RefusedError: It cannot be served.
        """
        resolved, prefill_steps = self._resolve(depth)
        return with_drafts(resolved, depth, self.config, refused=self.drafts_refused), prefill_steps

    def _resolve(self, depth: DepthParams) -> tuple[DepthParams, int]:
        c, most = self.config, max(len(section) for section in self._sections)
        for name in ("num_steps", "max_steps", "min_steps"):
            asked = getattr(depth, name)
            if asked is not None and not 1 <= asked <= most:
                raise RefusedError("invalid_depth", f"{name} must be in 1..{most}; got {asked}", name)
        if depth.num_steps is not None:
            return DepthParams(num_steps=depth.num_steps), depth.num_steps
        deepest = most if depth.max_steps is None else depth.max_steps
        if depth.replay is not None:
            if refuses_exits(self._rule):
                raise RefusedError("exit_refused", "depth_indexed forbids exits; use last_exited", "replay")
            return DepthParams(replay=depth.replay, max_steps=deepest), deepest
        name = depth.exit_rule or c.exit_rule or "full"
        threshold = depth.exit_threshold
        if threshold is None and name == c.exit_rule:
            threshold = c.exit_threshold
        least = c.min_steps if depth.min_steps is None else depth.min_steps
        if least > deepest and depth.min_steps is None:
            least = deepest
        if least > deepest:
            raise RefusedError(
                "invalid_depth", f"min_steps must be at most max_steps, {deepest}; got {least}", "min_steps"
            )
        resolved = DepthParams(
            exit_rule=name,
            exit_threshold=threshold,
            min_steps=least,
            max_steps=deepest,
            exit_delay=c.exit_delay if depth.exit_delay is None else depth.exit_delay,
        )
        check_bounds(build_rule(resolved, self.rules, self.refused_rules), resolved, self._rule)
        return resolved, deepest

    # The protocol.

    def open(self, seat: int, job: Job) -> None:
        """Puts a choice into a free seat."""
        known = job.depth.num_steps is not None or job.depth.replay is not None
        self.exits.open(seat, job, None if known else build_rule(job.depth, self.rules, self.refused_rules))
        self._jobs[seat] = job
        self._texts[seat] = list(job.tokens)
        self._pages[seat] = ()

    def close(self, seat: int) -> None:
        """Frees a seat."""
        self.exits.close(seat)
        self._jobs.pop(seat, None)
        self._texts.pop(seat, None)
        self._pages[seat] = ()

    def copy_page(self, source: int, target: int) -> None:
        """Copies all entries of a page."""
        with torch.inference_mode():
            self.cache.copy_page(source, target)

    def prefill(self, spans: Sequence[Span]) -> int:
        """Starts the launch of some spans; returns its ticket."""
        with self._numerics():
            parts: dict[int, SpanResult] = {}
            for places in self._packed(spans):
                launch = self._prefill([spans[place] for place in places])
                parts |= {place: SpanResult(launch, number) for number, place in enumerate(places)}
        return self._started(Launch(self.device, lambda: tuple(parts[i].finish() for i in range(len(spans)))))

    def encode(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        """Embedding and prelude of known tokens."""
        for row, token in zip(rows, tokens, strict=True):
            self._say(row.seat, row.position, token)
        with self._numerics():
            for part in self._tiles(range(len(rows))):
                chosen = [rows[i] for i in part]
                self._encode(chosen, [row.position for row in chosen], torch.tensor([tokens[i] for i in part]))

    def core(self, block: int, rows: Sequence[Row]) -> Sequence[Decision]:
        """Runs iteration `steps` of a block, or the whole plan, for every row."""
        run = self._whole if self.facts.whole else functools.partial(self._core, block)
        with self._numerics():
            return [decision for part in self._tiles(rows) for decision in run(part)]

    def coda(self, rows: Sequence[Row]) -> int:
        """Starts a readout; returns its ticket."""
        if any(sampling.penalised(self._jobs[row.seat].sampling) for row in rows):
            self._settle()
        with self._numerics():
            parts = [self._coda(part) for part in self._tiles(rows)]
        return self._started(Launch(self.device, lambda: tuple(drawn for part in parts for drawn in part())))

    def poll(self, ticket: int, *, wait: bool) -> tuple[Prefilled, ...] | tuple[Drawn, ...] | None:
        """Results of a launch; None while it is under way and `wait` is False."""
        launch = self._waiting[ticket]
        if not wait and not launch.done():
            return None
        del self._waiting[ticket]
        return launch.result()

    # Stages.

    def _encode(self, rows: Sequence[Row], positions: Sequence[int], tokens: Int[Tensor, " batch"]) -> None:
        """Puts state and context of these tokens into their places."""
        new = [row.pages[p // self.facts.page_tokens] for row, p in zip(rows, positions, strict=True)
               if p % self.facts.page_tokens == 0]  # fmt: skip
        if new:
            self.cache.fresh(new)
        seats, at = self._announce(rows, positions)
        padded = torch.zeros(len(seats), 1, dtype=torch.long, device=self.device)
        padded[: len(rows), 0] = tokens
        context = self.model.encode(padded, self.cache, positions=at)
        state = self.model.init_state(context, self._first_noise(at, max(positions) + 1, [row.seat for row in rows]))
        if self._state is None:
            self._state, self._context = self._bank(state), self._bank(context)
        self._put(self._state, state, seats, len(rows))
        self._put(self._context, context, seats, len(rows))

    def _core(self, section: int, rows: Sequence[Row]) -> list[Decision]:
        seats, _ = self._announce(rows, [row.position for row in rows])
        steps = [row.steps for row in rows]
        done = torch.tensor([*steps, *[0] * (len(seats) - len(rows))], device=self.device)
        state, context = self._take(self._state, seats), self._take(self._context, seats)
        self.cache.launch(section, done)
        ids = self._iteration_ids(section, rows, done)
        new = self.model.step(state, context, section, ids, self.cache)
        decisions = self._leave(section, rows, [step + 1 for step in steps], seats, state, new, context, late=True)
        self._put(self._state, new, seats, len(rows))
        return decisions

    def _whole(self, rows: Sequence[Row]) -> list[Decision]:
        """All sections in lockstep."""
        seats, _ = self._announce(rows, [row.position for row in rows])
        state, context = self._take(self._state, seats), self._take(self._context, seats)
        everyone = self.cache.rows_of_launch
        chosen: list[int] = [0] * len(rows)
        ran: list[list[int]] = [[] for _ in rows]
        for number, section in enumerate(self._sections):
            alive, part, inside, place = list(rows), state, context, list(range(len(rows)))
            where, at = None, seats
            for step, applications in enumerate(section):
                before = part
                for block, ordinal in applications:
                    done = torch.full((len(at),), ordinal, device=self.device)
                    self.cache.launch(block, done)
                    ids = self._iteration_ids(number, alive, done, block)
                    part = self.model.step(part, inside, block, ids, self.cache)
                ages = [step + 1] * len(alive)
                left = self._leave(number, alive, ages, at, before, part, inside, late=False)
                going = [i for i, decision in enumerate(left) if not decision.chosen]
                for i, decision in enumerate(left):
                    if decision.chosen:
                        chosen[place[i]] += decision.chosen
                        ran[place[i]].append(step + 1)
                if len(going) == len(alive):
                    continue
                state = part if where is None else self._merge(state, part, where)
                if not going:
                    break
                alive, place = [alive[i] for i in going], [place[i] for i in going]
                # A row of padding repeats one that goes on, and so writes what that one writes.
                more = self._padded(len(going)) - len(going)
                kept = torch.tensor([*going, *going[:1] * more], device=self.device)
                where = kept if where is None else where[kept]
                part, inside, at = self._take(part, kept), self._take(inside, kept), at[kept]
                self.cache.narrow(kept)
            self.cache.resume(everyone)
        self._put(self._state, state, seats, len(rows))
        return [Decision(total, tuple(depths)) for total, depths in zip(chosen, ran, strict=True)]

    def _coda(self, rows: Sequence[Row]) -> Callable[[], list[Drawn]]:
        logits = self._logits(rows)
        wants = [self._want(row.seat, row.position + 1) for row in rows]
        tokens = sampling.draw(logits, wants)
        if any(row.forced is not None for row in rows):
            forced = torch.tensor([-1 if row.forced is None else row.forced for row in rows], device=self.device)
            tokens = torch.where(forced < 0, tokens, forced)
        going = [i for i, row in enumerate(rows) if row.successor]
        if going:
            followers = tokens if len(going) == len(rows) else tokens[torch.tensor(going, device=self.device)]
            entering = [rows[i]._replace(lane=rows[i].next_lane) for i in going]
            self._encode(entering, [row.position + 1 for row in entering], followers)
        found = self._found(logits, tokens, [want.sampling.logprobs for want in wants])

        def finish() -> list[Drawn]:
            drawn = found.drawn([(row.position, row.steps) for row in rows])
            for row, one in zip(rows, drawn, strict=True):
                if not one.error and row.seat in self._texts:
                    self._say(row.seat, row.position + 1, one.token)
            return drawn

        return finish

    def _logits(self, rows: Sequence[Row]) -> Float[Tensor, "rows vocab"]:
        """What the head says of the states in these seats."""
        seats, _ = self._announce(rows, [row.position for row in rows])
        hidden = self.model.coda(self._take(self._state, seats), self._take(self._context, seats), self.cache)
        return self.model.head(hidden)[: len(rows), 0]

    # Prompts.

    def _packed(self, spans: Sequence[Span]) -> list[list[int]]:
        """Which spans run together: equally deep ones, where padding is allowed and stays below the tokens."""
        alone = self.numerics == "exact" or "right" not in self.spec.padding
        if alone:
            return [[place] for place in range(len(spans))]
        groups: list[list[int]] = []
        used = 0
        order = sorted(range(len(spans)), key=lambda i: (self._depth_of(spans[i]), spans[i].start - spans[i].stop))
        for place in order:
            size = spans[place].stop - spans[place].start
            first = spans[groups[-1][0]] if groups else None
            fits = first is not None and self._depth_of(first) == self._depth_of(spans[place])
            if first is not None and fits and (len(groups[-1]) + 1) * (first.stop - first.start) <= 2 * (used + size):
                groups[-1].append(place)
                used += size
            else:
                groups.append([place])
                used = size
        return groups

    def _depth_of(self, span: Span) -> int:
        return self._jobs[span.seat].prefill_steps

    def _prefill(self, spans: Sequence[Span]) -> PromptReads:
        size, lengths = self.facts.page_tokens, [span.stop - span.start for span in spans]
        longest = max(lengths)
        self.padding += len(spans) * longest - sum(lengths)
        self.cache.fresh(
            [page for span in spans for page in span.pages[-(-span.start // size) : -(-span.stop // size)]]
        )
        texts = [self._jobs[span.seat].tokens[span.start : span.stop] for span in spans]
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=self.device)
        offset = torch.arange(longest, device=self.device)
        start, length = torch.tensor([[span.start for span in spans], lengths], device=self.device)[..., None]
        at = start + torch.minimum(offset, length - 1)
        own = None if min(lengths) == longest else offset < length
        seats, deepest = [span.seat for span in spans], max(span.stop for span in spans)
        table = self._table(seats, [span.pages for span in spans], len(spans), -(-deepest // size))
        self.cache.begin(table, at, own, visible=None if self.numerics == "exact" else deepest)
        context = self.model.encode(tokens, self.cache, positions=at, valid=own)
        state = self.model.init_state(context, self._first_noise(at, deepest, seats))
        for block, iteration, ordinal in self._run(self._depth_of(spans[0])):
            self.cache.launch(block, torch.full((len(spans),), ordinal, device=self.device))
            index = torch.full((len(spans),), iteration, device=self.device)
            state = self.model.step(state, context, block, index, self.cache)
        wanted = any(span.seats or span.prompt_logprobs is not None for span in spans)
        if not wanted and not self.spec.cost.coda.layers:
            return PromptReads({}, {})
        hidden = self.model.coda(state, context, self.cache)
        return PromptReads(
            {i: self._first_tokens(span, hidden[i, lengths[i] - 1]) for i, span in enumerate(spans) if span.seats},
            {i: self._read_prompt(span, hidden[i]) for i, span in enumerate(spans) if span.prompt_logprobs is not None},
        )

    def _first_tokens(self, span: Span, hidden: Float[Tensor, " dim"]) -> Callable[[], list[Drawn]]:
        logits = self.model.head(hidden[None, None])[:, 0].expand(len(span.seats), -1)
        wants = [self._want(seat, span.stop) for seat in span.seats]
        tokens = sampling.draw(logits, wants)
        found = self._found(logits, tokens, [want.sampling.logprobs for want in wants])

        def finish() -> list[Drawn]:
            drawn = found.drawn([(span.stop - 1, self._depth_of(span))] * len(wants))
            for seat, one in zip(span.seats, drawn, strict=True):
                if not one.error and seat in self._texts:
                    self._say(seat, span.stop, one.token)
            return drawn

        return finish

    def _read_prompt(self, span: Span, hidden: Float[Tensor, "seq dim"]) -> Callable[[], list[Drawn]]:
        """What the model thought of the tokens start + 1 .. stop, as far as there is one."""
        targets = self._jobs[span.seat].tokens[span.start + 1 : span.stop + 1]
        steps, parts = self._depth_of(span), []
        for first in range(0, len(targets), READ_TOKENS):
            chosen = targets[first : first + READ_TOKENS]
            logits = self.model.head(hidden[None, first : first + len(chosen)])[0]
            tokens = torch.tensor(chosen, device=self.device)
            found = self._found(logits, tokens, [span.prompt_logprobs] * len(chosen))
            parts.append((found, [(span.start + first + i, steps) for i in range(len(chosen))]))
        return lambda: [one for found, places in parts for one in found.drawn(places)]

    def _run(self, num_steps: int) -> Iterator[tuple[int, int, int]]:
        """(block, iteration, which of the block's own it is) along the plan of so many steps."""
        counts: dict[int, int] = {}
        for block, iteration in self._plan(num_steps):
            ordinal = counts.get(block, 0)
            counts[block] = ordinal + 1
            yield block, iteration, ordinal

    def _plan(self, num_steps: int) -> Plan:
        """The plan of so many steps; a section that has fewer runs all of its own."""
        if num_steps not in self._plans:
            counts = tuple(min(num_steps, len(section)) for section in self._sections)
            self._plans[num_steps] = self.spec.plan(counts if isinstance(self.spec.order, Blocks) else num_steps)
        return self._plans[num_steps]

    # Rows.

    def _announce(
        self, rows: Sequence[Row], positions: Sequence[int]
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, "batch 1"]]:
        """Tells the cache which rows come; returns their places in the banks and positions, padding included."""
        more = self._padded(len(rows)) - len(rows)
        self.padding += more
        seats = [row.seat for row in rows]
        places = [row.lane * self._seats + row.seat for row in rows]
        numbers = torch.tensor([places + [self._sink] * more, [*positions, *[0] * more]], device=self.device)
        width = max(positions) // self.facts.page_tokens + 1
        table = self._table(seats, [row.pages for row in rows], len(rows) + more, width)
        if self.numerics == "exact":
            self.cache.begin(table, numbers[1, :, None])
        else:
            visible = max(positions) + 1
            self.cache.begin(table, numbers[1, :, None], visible=visible, equal=min(positions) + 1 == visible)
        return numbers[0], numbers[1, :, None]

    def _table(
        self, seats: Sequence[int], pages: Sequence[tuple[int, ...]], rows: int, width: int
    ) -> Int[Tensor, "batch pages"]:
        """The first `width` pages of these seats, or a few more; rows beyond them are padding."""
        for seat, own in zip(seats, pages, strict=True):
            if self._pages[seat] is not own:
                if self._pages[seat] != own:
                    line = self._tables[seat]
                    line.fill_(own[0])
                    line[: len(own)] = torch.tensor(own)
                self._pages[seat] = own
        index = torch.tensor([*seats, *[self._seats] * (rows - len(seats))])
        return self._tables.narrow(1, 0, self._width(width)).index_select(0, index).to(self.device, non_blocking=True)

    def _width(self, pages: int) -> int:
        """Pages of a launch whose longest row has so many."""
        return -(-max(pages, self._least) // self._unit) * self._unit

    def _padded(self, rows: int) -> int:
        """Rows of a launch of so many, padding included."""
        return -(-rows // TILE) * TILE if self.numerics == "exact" else rows

    def _tiles(self, rows: Sequence[Any]) -> list[Sequence[Any]]:
        """The launches that some rows come to."""
        if self._tile is None:
            return [rows] if rows else []
        return [rows[i : i + self._tile] for i in range(0, len(rows), self._tile)]

    def _bank(self, rows: Any) -> Any:
        """A place per lane and seat for such values, and one for padding."""
        return states.map(lambda leaf: leaf.new_zeros(self._sink + 1, *leaf.shape[1:]), rows)

    def _take(self, bank: Any, index: Int[Tensor, " batch"]) -> Any:
        return states.map(lambda leaf: leaf.index_select(0, index), bank)

    def _put(self, bank: Any, new: Any, seats: Int[Tensor, " batch"], rows: int) -> None:
        """Keeps the first `rows` rows."""
        whole = rows == len(seats)
        index = seats if whole else seats[:rows]
        states.map(lambda held, leaf: held.index_copy_(0, index, leaf if whole else leaf[:rows]), bank, new)

    def _merge(self, everyone: Any, part: Any, where: Int[Tensor, " part"]) -> Any:
        return states.map(lambda held, leaf: held.index_copy(0, where, leaf), everyone, part)

    def _iteration_ids(
        self, section: int, rows: Sequence[Row], done: Int[Tensor, " batch"], block: int | None = None
    ) -> Int[Tensor, " batch"]:
        """What the model calls the iterations that come next: on a grid, ids of the row's own number of steps."""
        if self.spec.grid is None:
            return done
        block = section if block is None else block
        steps = done.tolist()
        ids = [
            self._plan(self.exits.goal(section, row)).indices()[block][step]
            for row, step in zip(rows, steps, strict=False)
        ]
        return torch.tensor([*ids, *[0] * (len(steps) - len(ids))], device=self.device)

    def _leave(
        self,
        section: int,
        rows: Sequence[Row],
        ages: Sequence[int],
        seats: Int[Tensor, " batch"],
        before: Any,
        state: Any,
        context: Any,
        *,
        late: bool,
    ) -> list[Decision]:
        @functools.cache
        def logits() -> Tensor:
            hidden = self.model.coda(state, context, self.cache)
            return self.model.head(hidden).unflatten(-1, (self.spec.cells, -1))

        score = functools.cache(lambda: self.model.halt(state))
        return self.exits.after(
            section, rows, ages, seats, before, state, context,
            score=score, logits=logits, late=late and self.config.offset_one,
        )  # fmt: skip

    # Draws.

    def _want(self, seat: int, position: int) -> sampling.Draw:
        """What the draw of the token at `position` needs."""
        job = self._jobs[seat]
        s = job.sampling
        prompt = len(job.tokens)
        ends: tuple[int, ...] = ()
        if position - prompt < s.min_tokens:
            ends = s.stop_token_ids if s.ignore_eos or self.eos is None else (*s.stop_token_ids, self.eos)
        text: Sequence[int] = self._texts[seat]
        if sampling.penalised(s):  # guesses may follow
            text = text[:position]
        return sampling.Draw(s, job.seed, job.choice, position - prompt, text, prompt, ends)

    def _found(
        self, logits: Float[Tensor, "rows vocab"], tokens: Int[Tensor, " rows"], alternatives: Sequence[int | None]
    ) -> Found:
        asked = [count for count in alternatives if count is not None]
        told = sampling.read(sampling.log_probs(logits), tokens, max(asked)) if asked else None
        return Found(tokens, logits.isfinite().all(dim=-1), told, alternatives)

    def _say(self, seat: int, position: int, token: int) -> None:
        text = self._texts[seat]
        if text[position : position + 1] != [token]:  # else guesses that follow stand
            del text[position:]
            text.append(token)

    def _settle(self) -> None:
        """Waits for all launches: what comes next depends on the tokens they drew."""
        for launch in self._waiting.values():
            launch.result()

    def _started(self, launch: Launch) -> int:
        self._tickets += 1
        self._waiting[self._tickets] = launch
        return self._tickets

    # First states.

    def _first_noise(
        self, positions: Int[Tensor, "batch seq"], deepest: int, seats: Sequence[int]
    ) -> Float[Tensor, "batch seq noise"] | None:
        """Noise of the first states at positions below `deepest`; rows beyond `seats` are padding."""
        width = self.spec.noise_width
        if not width:
            return None
        if self.noise == "zeros":
            return torch.zeros(*positions.shape, width, dtype=self.dtype, device=self.device)
        if self.noise == "position":
            self._grow_noise(deepest)
            return self._noise_table[positions]
        at = positions.cpu()
        rows = [standard_noise(self._jobs[seat].seed & WORD, [0], at[i : i + 1], width) for i, seat in enumerate(seats)]
        rows += [torch.zeros_like(rows[0])] * (len(at) - len(seats))
        return torch.cat(rows).to(self.device, self.dtype)

    def _grow_noise(self, tokens: int) -> None:
        """Noise by position is the same for everyone, so it is drawn once."""
        have = len(self._noise_table)
        if tokens > have:
            at = torch.arange(have, max(tokens, 2 * have, 64))[None]
            more = standard_noise(self.config.seed & WORD, [0], at, self.spec.noise_width)[0]
            self._noise_table = torch.cat(
                [self._noise_table.to(self.device, self.dtype), more.to(self.device, self.dtype)]
            )

    # Numerics.

    @contextmanager
    def _numerics(self) -> Iterator[None]:
        with torch.inference_mode():
            if self.numerics == "exact":
                with sdpa_kernel([SDPBackend.MATH]):
                    yield
            else:
                yield

    def _probe(self) -> None:
        """Finds out whether neighbours leave a row's bits alone."""
        for tile in (None, TILE):
            self._tile = tile
            stage = self._unstable()
            if stage is None:
                return
        raise ValueError(
            f"numerics must be fast for {self.spec.name} on this machine: in {stage} the bits of a row change with its "
            f"neighbours, even in tiles of {TILE} rows. Got exact. Use numerics='fast'"
        )

    def _unstable(self) -> str | None:
        """The first stage in which the bits of a row differ between launches; None: there is none."""
        c = self.config
        assert c.launch_rows and c.max_resident and c.num_pages
        crowd = min(c.launch_rows, c.max_resident, (c.num_pages - 3) // 2)
        if crowd < 1:
            return None
        expected: list[tuple[str, Any]] | None = None
        for rows, place in sorted({(1, 0), (min(3, crowd), min(3, crowd) - 1), (min(9, crowd), 0), (crowd, crowd - 1)}):
            seen = self._trial(rows, place)
            expected = seen if expected is None else expected
            for (stage, one), (_, other) in zip(expected, seen, strict=True):
                pairs = zip(states.leaves(one), states.leaves(other), strict=True)
                if not all(torch.equal(a, b) for a, b in pairs):
                    return stage
        return None

    def _trial(self, crowd: int, place: int) -> list[tuple[str, Any]]:
        """All that a row goes through in two tokens, at this place among so many rows."""
        size, tokens = self.facts.page_tokens, self.spec.token_ids or self.spec.vocab[0]
        # Neighbours have longer tables, so that the row's own entries are followed by zeros.
        width = self._tables.shape[1]
        pages = [((1, 2) if seat == place else (3 + 2 * seat, 4 + 2 * seat) * 4)[:width] for seat in range(crowd)]
        longest, own = min(8 * size, self.facts.max_tokens) - 2, min(2 * size, self.facts.max_tokens) - 2
        for seat in range(crowd):
            self.open(seat, Job(
                request="probe", choice=0, tokens=(0,), sampling=sampling.SamplingParams(), seed=0,
                depth=DepthParams(num_steps=1), prefill_steps=1,
            ))  # fmt: skip
        seen: list[tuple[str, Any]] = []
        with self._numerics():
            self.cache.invent(3 + 2 * crowd)
            for token in range(2):
                at = [own + token if seat == place else max(token, longest + token - seat % 3) for seat in range(crowd)]
                ids = [(5 if seat == place else 7 * seat + 3) % tokens for seat in range(crowd)]
                rows = [Row(seat, p, 0, table) for seat, p, table in zip(range(crowd), at, pages, strict=True)]
                for part in self._tiles(range(crowd)):
                    self._encode([rows[i] for i in part], [at[i] for i in part], torch.tensor([ids[i] for i in part]))
                seen.append(("encode", self._seat_of(place)))
                if self.facts.whole:
                    for part in self._tiles(rows):
                        self._whole(part)
                    seen.append(("core", states.select(self._state, [place])))
                for block in range(0 if self.facts.whole else len(self._sections)):
                    for step in range(min(2, len(self._sections[block]))):
                        moved = [row._replace(steps=step) for row in rows]
                        for part in self._tiles(moved):
                            self._core(block, part)
                        seen.append((f"core of block {block}", states.select(self._state, [place])))
                logits = torch.cat([self._logits(part) for part in self._tiles(rows)])
                seen.append(("coda", logits[place : place + 1].clone()))
        for seat in range(crowd):
            self.close(seat)
        return seen

    def _seat_of(self, seat: int) -> tuple[Any, Any]:
        return states.select(self._state, [seat]), states.select(self._context, [seat])

    def _resolved(self, config: EngineConfig) -> EngineConfig:
        """The configuration with sizes in place of None."""
        rows = config.launch_rows or (64 if self.device.type == "cuda" else 16)
        if config.launch_rows is None and config.max_resident is not None:
            rows = min(rows, config.max_resident)
        resident = config.max_resident or rows + max(1, rows // 2)
        longest = config.max_model_len or self.spec.max_positions or LONGEST
        if self.spec.max_positions is not None and longest > self.spec.max_positions:
            raise ValueError(
                f"max_model_len must be at most {self.spec.max_positions}, the positions of {self.spec.name}. "
                f"Got {longest}. Lower it"
            )
        pages = config.num_pages or self._pages_found(config, resident * -(-longest // config.page_tokens))
        return dataclasses.replace(
            config,
            launch_rows=rows,
            max_resident=resident,
            # As many rows may wait for a readout as leave the core's launches full.
            min_coda_rows=config.min_coda_rows or max(1, resident - rows),
            num_pages=pages,
            max_model_len=longest,
        )

    def _pages_found(self, config: EngineConfig, needed: int) -> int:
        """Pages that fit the memory, and no more than twice what residents can fill."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        fitting = int(free * config.kv_fraction) // (self.bytes_per_token * config.page_tokens)
        return 1 + max(1, min(fitting, 2 * needed))
