"""Slow twins of the loop: plain Python, one application after another, with cuts written out by hand."""

import torch

from reference.kv import Row


def cuts(length, *, window=None, every=None):
    """Numbers of applications after which the state is detached, and after which a loss is read."""
    if window is not None:
        return ({length - window} if length > window else set()), {length}
    if every is not None:
        ends = set(range(every, length, every)) | {length}
        return ends - {length}, ends
    return set(), {length}


def detached(state):
    """Every tensor of a state without its graph."""
    if isinstance(state, torch.Tensor):
        return state.detach()
    return type(state)(*(part.detach() for part in state))


def loss(model, plan, context, state, detach, score, loss_of):
    """Sum of the losses after the applications in `score`; the graph is cut after those in `detach`."""
    total = 0.0
    rows = context.embeds.shape[0]
    for done, (block, iteration) in enumerate(plan, start=1):
        state = model.step(state, context, block, torch.full((rows,), iteration))
        if done in score:
            total = total + loss_of(state, context)
        if done in detach:
            state = detached(state)
    return total


class KeepAll:
    """A cache that stores every KV[p, layer, t] of one row and reads past tokens by the definition of the rule."""

    def __init__(self, rule, size=0):
        self.rule, self.size = rule, size
        self.layers = {}
        self.ran = []
        self.padded = False

    @property
    def length(self):
        return len(self.ran)

    def fits(self, rows, tokens):
        pass

    def stage(self, positions, valid):
        pass

    def launch(self, iteration, active=None):
        self.iteration = iteration

    def view(self, block, layer, iteration):
        row = self.layers.setdefault((block, layer), Row(self.rule, self.size))
        row.executed = self.ran if block >= 0 else []  # prelude and coda have one entry per token
        return _KeepAllView(self, row, 0 if block < 0 else int(iteration[0]))


class _KeepAllView:
    positions = None

    def __init__(self, cache, row, iteration):
        self.cache, self.row, self.iteration = cache, row, iteration

    def append(self, keys, values):
        start, end = self.cache.length, self.cache.length + keys.shape[2]
        for p in range(start, end):
            self.row.write(p, self.iteration, (keys[:, :, p - start], values[:, :, p - start]))
        read = [self.row.read(p, self.iteration) for p in range(end)]
        nothing = (torch.zeros_like(keys[:, :, 0]), torch.zeros_like(values[:, :, 0]))
        allowed = torch.zeros(1, 1, end - start, end, dtype=torch.bool)
        for query in range(end - start):
            for p in range(start + query + 1):
                allowed[0, 0, query, p] = read[p] is not None
        seen = [entry or nothing for entry in read]
        return torch.stack([k for k, _ in seen], 2), torch.stack([v for _, v in seen], 2), allowed


def decode_under(rule, model, ids, pieces, end, *, noise, size=0):
    """Logits of the last piece of one row, where piece ((start, stop), steps) ran `steps` iterations.

    Args:
        rule: What a query reads of a past token, by its name in `reference.kv`.
        size: The rule's own number.
    """
    cache = KeepAll(rule, size)
    for (start, stop), steps in pieces:
        at = torch.arange(start, stop)[None]
        context = model.encode(ids[None, start:stop], cache, positions=at)
        state = model.init_state(context, noise(at))
        for t in range(steps):
            state = model.step(state, context, 0, torch.tensor([t]), cache)
        logits = model.head(model.coda(state, context, cache))[0]
        cache.ran += [steps] * (stop - start)
        if stop == end:
            return logits
    raise ValueError("end is not the end of a piece")
