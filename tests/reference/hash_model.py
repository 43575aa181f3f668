"""A looped model of integers, and the texts it says when they are written one by one, without pages or batches.

    context = H(token, position, prelude entries so far)
    state   = H(context), then per iteration H(state, context, block, iteration, entries of the block so far)
    entry   = H(state before the iteration, slot)
    hidden  = H(state, coda entries so far);  token = H(hidden, seed, choice, index) mod V

A token that was computed from a wrong row, slot, page or step, or from a stale or foreign entry, is another one.

KV rules by name, t the iteration of the reader, d the iterations that the past token ran:

    depth_indexed  last_exited    written at slot t, read at slot min(t, d - 1)
    first                         written at iteration 0 only; tokens of one call read each other at iteration t
    single                        one slot, overwritten
    anchor                        two slots, the second overwritten: min(t, 1)

Prompts are read in pieces that end at multiples of `chunk`: the tokens of a piece walk the iterations together.
"""

from operator import mul

WORD = (1 << 64) - 1
ODD = tuple(2 * j + 1 for j in range(4096))
VOCABULARY = 65536
DEPTH_CAUSAL = ("depth_indexed", "last_exited")
RULES = (*DEPTH_CAUSAL, "first", "single", "anchor")


def mix(*words):
    """H."""
    h = 0x9E3779B97F4A7C15
    for word in words:
        h = ((h ^ word) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & WORD
        h ^= h >> 31
    return h


def fold(entries):
    """One number of a list of entries that depends on their order."""
    return sum(map(mul, entries, ODD)) & WORD


def write_slot(rule, t):
    """Where iteration t leaves its entry; None: nowhere."""
    if rule == "first":
        return 0 if t == 0 else None
    return {"single": 0, "anchor": min(t, 1)}.get(rule, t)


def read_slot(rule, t, d):
    """Which entry of a past token that ran d iterations is read at iteration t."""
    if rule in ("first", "single"):
        return 0
    return min(t, 1) if rule == "anchor" else min(t, d - 1)


def draw(hidden, seed, choice, index):
    """Output token `index` of a choice."""
    return mix(hidden, seed, choice, index) % VOCABULARY


def fires(state, block, t, rate):
    """Whether the exit rule asks for an end after t iterations; it does so in `rate` of 100 cases."""
    return mix(state, block, t, 5) % 100 < rate


class Reader:
    """One text that is being read and said.

    Args:
        rule: KV rule.
        max_steps: Per block, the most iterations.
        late: The end comes one iteration after the rule asked for it.
    """

    def __init__(self, rule, max_steps, *, late=False):
        self.rule, self.max_steps, self.late = rule, max_steps, late
        self.prelude, self.coda = [], []
        self.entries = [[{} for _ in range(most)] for most in max_steps]  # block, slot -> position -> entry
        self.ran = [{} for _ in max_steps]

    def piece(self, tokens, start, steps, depth_of=None):
        """Reads tokens that walk together; returns the last hidden and the iterations per block of the last token.

        Args:
            steps: Iterations per block; None: as the exit rule says.
            depth_of: (state, block, iterations done) -> whether to leave, where `steps` is None.
        """
        places = range(start, start + len(tokens))
        contexts = []
        for position, token in zip(places, tokens, strict=True):
            self.prelude.append(mix(token, position, 7))
            contexts.append(mix(token, position, fold(self.prelude[: position + 1])))
        states = [mix(context) for context in contexts]
        for block, most in enumerate(self.max_steps):
            last = most if steps is None else min(steps[block], most)
            for position in places:
                self.ran[block][position] = last
            asked = False
            for t in range(last):
                slot = write_slot(self.rule, t)
                if slot is not None:
                    for position, state in zip(places, states, strict=True):
                        self.entries[block][slot][position] = mix(state, slot)
                own = dict(zip(places, (mix(state, 0) for state in states), strict=True))
                states = [
                    mix(state, context, block, t, fold(self.seen(block, t, position, own)))
                    for position, state, context in zip(places, states, contexts, strict=True)
                ]
                if steps is None:
                    leave = depth_of(states[-1], block, t + 1)
                    if t + 1 == last or (asked if self.late else leave):
                        self.ran[block][start] = t + 1
                        break
                    asked = asked or leave
        hidden = 0
        for position, state in zip(places, states, strict=True):
            self.coda.append(mix(state, 9))
            hidden = mix(state, fold(self.coda[: position + 1]))
        return hidden, tuple(ran[places[-1]] for ran in self.ran)

    def seen(self, block, t, position, own):
        """Entries that a row at `position` reads, its own last.

        Args:
            own: Entries of iteration t of all tokens of the call; rule first keeps none but those of iteration 0.
        """
        ran, slots = self.ran[block], self.entries[block]
        if self.rule == "first":
            return [own.get(j, slots[0][j]) for j in range(position + 1)]
        past = [slots[read_slot(self.rule, t, ran[j])][j] for j in range(position)]
        return [*past, slots[read_slot(self.rule, t, t + 1)][position]]


def say(
    rule,
    max_steps,
    prompt,
    *,
    chunk,
    limit,
    ends,
    prefill_steps,
    steps=None,
    min_steps=1,
    rate=0,
    late=False,
    seed=0,
    choice=0,
):
    """What a choice says.

    Args:
        ends: (token) -> whether the text ends with it.
        steps: Of every token; None: an exit rule that fires at `rate`, from `min_steps` on.
    Returns:
        Tokens, and the iterations per block of every token after the first.
    """
    reader, blocks = Reader(rule, max_steps, late=late), len(max_steps)
    hidden = 0
    for start in range(0, len(prompt), chunk):
        hidden, _ = reader.piece(prompt[start : start + chunk], start, [prefill_steps] * blocks)
    output, depths = [], []
    while len(output) < limit:
        output.append(draw(hidden, seed, choice, len(output)))
        if ends(output[-1]) or len(output) == limit:
            break
        fixed = None if steps is None else [steps] * blocks
        hidden, ran = reader.piece(
            output[-1:],
            len(prompt) + len(output) - 1,
            fixed,
            lambda state, block, t: t >= min_steps and fires(state, block, t, rate),
        )
        depths.append(ran)
    return output, depths


def sweep(rule, max_steps, tokens, depths):
    """Last hiddens of tokens that walk one block together, each for as long as its own depth says."""
    reader, hidden = Reader(rule, max_steps), []
    contexts = []
    for position, token in enumerate(tokens):
        reader.prelude.append(mix(token, position, 7))
        contexts.append(mix(token, position, fold(reader.prelude)))
    states = [mix(context) for context in contexts]
    reader.ran[0] = dict(enumerate(depths))
    for t in range(max(depths)):
        walking = [position for position, depth in enumerate(depths) if t < depth]
        for position in walking:
            slot = write_slot(rule, t)
            if slot is not None:
                reader.entries[0][slot][position] = mix(states[position], slot)
        own = {position: mix(states[position], 0) for position in walking}
        seen = {position: fold(reader.seen(0, t, position, own)) for position in walking}
        for position in walking:
            states[position] = mix(states[position], contexts[position], 0, t, seen[position])
    for position, state in enumerate(states):
        reader.coda.append(mix(state, 9))
        hidden.append(mix(state, fold(reader.coda[: position + 1])))
    return hidden
