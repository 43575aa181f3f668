"""Runs the hash model of tests/reference in seats and pages, as a scheduler tells it."""

from looplab.engine.drafts import guess_depths
from looplab.engine.stages import Decision, Drawn, Facts, Prefilled
from reference.hash_model import DEPTH_CAUSAL, draw, fires, fold, mix, read_slot, write_slot


class Seat:
    """What is kept of a token of a choice: no more than a device would keep."""

    def __init__(self, job):
        self.job, self.state, self.context, self.asked, self.guesses = job, 0, 0, 0, False


class HashRunner:
    """A runner whose results are seen `delay` ticks late.

    Args:
        rule: KV rule of the hash model.
        late: Decisions take effect one iteration late.
    """

    def __init__(
        self, rule, *, max_steps=(4,), pages=64, page_tokens=4, max_tokens=200, delay=0, late=False, whole=False,
        resumes=True, lanes=8
    ):  # fmt: skip
        self.facts = Facts(
            blocks=len(max_steps),
            max_steps=tuple(max_steps),
            whole=whole,
            pages=pages,
            page_tokens=page_tokens,
            max_tokens=max_tokens,
            depth_causal=rule in DEPTH_CAUSAL,
            resumes=resumes and not whole and len(max_steps) == 1,
        )
        self.rule, self.delay, self.late, self.lanes = rule, delay, late, lanes
        self.now = 0
        self.seats = {}
        """Seat -> one per lane."""
        self.results = {}
        self.calls = []
        self.broken = set()
        """Requests whose numbers are not finite from now on."""
        self.oracle = None
        """(job, output token) -> what full depth says, None where it says nothing."""
        self.right = 75
        """Percent of guesses that are what full depth says."""
        groups = ["prelude", "coda", *((b, s) for b, most in enumerate(max_steps) for s in range(most))]
        self.entries = {group: [[-1] * page_tokens for _ in range(pages)] for group in groups}
        self.ran = [[[1] * page_tokens for _ in range(pages)] for _ in max_steps]

    # Entries.

    def put(self, store, pages, position, entry):
        page, offset = divmod(position, self.facts.page_tokens)
        assert pages[page] > 0, "a row wrote to the sink"
        store[pages[page]][offset] = entry

    def read(self, store, pages, count):
        found = []
        for page in pages[: -(-count // self.facts.page_tokens)]:
            found += store[page]
        return found[:count]

    def seen(self, block, t, pages, position, own):
        """Entries of the past and, last, its own; `own` has those of iteration t of all tokens of the call."""
        if self.rule == "first":
            kept = self.read(self.entries[block, 0], pages, position + 1)
            return [own.get(j, entry) for j, entry in enumerate(kept)]
        if self.rule in ("depth_indexed", "last_exited"):
            ran = self.read(self.ran[block], pages, position)
            slots = {s: self.read(self.entries[block, s], pages, position + 1) for s in range(t + 1)}
            return [*(slots[min(t, d - 1)][j] for j, d in enumerate(ran)), slots[t][position]]
        return self.read(self.entries[block, read_slot(self.rule, t, t + 1)], pages, position + 1)

    # Stages.

    def open(self, seat, job):
        assert seat not in self.seats, "a seat was given away twice"
        self.seats[seat] = [Seat(job) for _ in range(self.lanes)]

    def close(self, seat):
        del self.seats[seat]

    def copy_page(self, source, target):
        for store in (*self.entries.values(), *self.ran):
            store[target] = list(store[source])

    def iterate(self, block, seat, pages, position, t, own=None):
        """One iteration of one row; its state before gave its entry, which is written already."""
        seen = fold(self.seen(block, t, pages, position, own or {position: mix(seat.state, 0)}))
        return mix(seat.state, seat.context, block, t, seen)

    def leave_entry(self, block, seat, pages, position, t):
        slot = write_slot(self.rule, t)
        if slot is not None:
            self.put(self.entries[block, slot], pages, position, mix(seat.state, slot))
        self.put(self.ran[block], pages, position, t + 1)

    def embed(self, seat, pages, position, token):
        self.put(self.entries["prelude"], pages, position, mix(token, position, 7))
        seat.context = mix(token, position, fold(self.read(self.entries["prelude"], pages, position + 1)))
        seat.state, seat.asked = mix(seat.context), 0

    def read_out(self, seat, pages, position):
        self.put(self.entries["coda"], pages, position, mix(seat.state, 9))
        return mix(seat.state, fold(self.read(self.entries["coda"], pages, position + 1)))

    def prefill(self, spans):
        self.calls.append(("prefill", spans))
        results = []
        for span in spans:
            job, pages = self.seats[span.seat][0].job, span.pages
            walkers = {}
            for position in range(span.start, span.stop):
                walkers[position] = Seat(job)
                self.embed(walkers[position], pages, position, job.tokens[position])
            for block, most in enumerate(self.facts.max_steps):
                for t in range(min(job.prefill_steps, most)):
                    for position, walker in walkers.items():
                        self.leave_entry(block, walker, pages, position, t)
                    own = {position: mix(walker.state, 0) for position, walker in walkers.items()}
                    states = [self.iterate(block, w, pages, p, t, own) for p, w in walkers.items()]
                    for walker, state in zip(walkers.values(), states, strict=True):
                        walker.state = state
            hidden = [self.read_out(walker, pages, position) for position, walker in walkers.items()][-1]
            drawn = []
            for number in span.seats:
                other = self.seats[number][0].job
                drawn.append(Drawn(draw(hidden, other.seed, other.choice, 0)))
            results.append(Prefilled(tuple(drawn), error="bad" if job.request in self.broken else ""))
        return self.launch(tuple(results))

    def encode(self, rows, tokens):
        self.calls.append(("encode", rows))
        for row, token in zip(rows, tokens, strict=True):
            self.embed(self.seats[row.seat][row.lane], row.pages, row.position, token)

    def core(self, block, rows):
        self.calls.append(("core", block, rows))
        if self.facts.whole:
            return [self.walk(row) for row in rows]
        for row in rows:
            seat = self.seats[row.seat][row.lane]
            self.leave_entry(block, seat, row.pages, row.position, row.steps)
            seat.state = self.iterate(block, seat, row.pages, row.position, row.steps)
            seat.guesses = bool(row.depths) and row.depths == guess_depths(seat.job.depth, self.facts.max_steps)
        return [self.decide(block, row) for row in rows]

    def walk(self, row):
        """The whole plan of one row."""
        decisions, seat = [], self.seats[row.seat][row.lane]
        seat.guesses = bool(row.depths) and row.depths == guess_depths(seat.job.depth, self.facts.max_steps)
        for block in range(self.facts.blocks):
            for t in range(self.facts.max_steps[block]):
                self.leave_entry(block, seat, row.pages, row.position, t)
                seat.state = self.iterate(block, seat, row.pages, row.position, t)
                decision = self.decide(block, row._replace(steps=t))
                if decision.chosen:
                    decisions.append((decision.chosen, t + 1))
                    break
        chosen, depths = zip(*decisions, strict=True)
        return Decision(sum(chosen), depths)

    def decide(self, block, row):
        seat, done = self.seats[row.seat][row.lane], row.steps + 1
        depth, most = seat.job.depth, self.facts.max_steps[block]
        chosen = 0
        if row.depths:
            chosen = done if done == row.depths[block] else 0
        elif depth.num_steps is not None:
            chosen = done if done == min(depth.num_steps, most) else 0
        elif depth.replay is not None:
            wanted = depth.replay[seat.job.choice][row.position - len(seat.job.tokens)]
            if done == min(wanted + self.late, most):
                chosen = min(wanted, done)
        else:
            fired = done >= depth.min_steps and fires(seat.state, block, done, depth.exit_threshold)
            if done == most or (seat.asked if self.late else fired):
                chosen = seat.asked if self.late and seat.asked else done
            elif fired:
                seat.asked = done
        if chosen:
            seat.asked = 0
        return Decision(chosen)

    def coda(self, rows):
        self.calls.append(("coda", rows))
        results = []
        for row in rows:
            seat = self.seats[row.seat][row.lane]
            index = row.position - len(seat.job.tokens) + 1
            hidden = self.read_out(seat, row.pages, row.position)
            token = draw(hidden, seat.job.seed, seat.job.choice, index) if row.forced is None else row.forced
            if seat.guesses and row.forced is None and mix(hidden, 3) % 100 < self.right:
                token = token if (said := self.oracle(seat.job, index)) is None else said
            results.append(Drawn(token, error="bad" if seat.job.request in self.broken else ""))
            if row.successor:
                self.embed(self.seats[row.seat][row.next_lane], row.pages, row.position + 1, token)
        return self.launch(tuple(results))

    def launch(self, results):
        ticket = len(self.results)
        self.results[ticket] = (self.now + self.delay, results)
        return ticket

    def poll(self, ticket, *, wait):
        due, results = self.results[ticket]
        return results if wait or due <= self.now else None
