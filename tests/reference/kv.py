"""Slow twin of key-value rules: keep every KV[p, t] of a row, read it by definition. Imports nothing of ours.

    DepthIndexed  KV[p, t]; where t >= e(p): the last entry (copy), nothing (skip), or an error (refuse)
    Single        KV[p, e(p) - 1]
    First         KV[p, 0]
    Average       the mean over t' < e(p) of keys, and of values
    Modulo(m)     the newest KV[p, t'] with t' = t mod m; if there is none, the newest
    Anchor(n)     t < n: KV[p, t]; otherwise the newest with t' >= n; if there is none, the newest

A token that ran nothing has no entry. Tokens of the call itself are read at the query's own iteration under every rule.
"""


class Row:
    """All entries of one row of one layer; an entry is (key, value). `size`: m of modulo, n of anchor."""

    def __init__(self, rule, size=0):
        self.rule = rule
        self.size = size
        self.entries = {}
        self.executed = []

    def write(self, p, t, entry):
        """The entry of token p at iteration t."""
        self.entries[p, t] = entry

    def read(self, p, t):
        """What a query at iteration t reads of token p, or None where it sees nothing; KeyError: refused."""
        if p >= len(self.executed):
            return self.entries[p, t]
        ran = self.executed[p]
        if self.rule == "refuse":
            if t >= ran:
                raise KeyError((p, t))
            return self.entries[p, t]
        if ran == 0 or (self.rule == "skip" and t >= ran):
            return None
        if self.rule == "average":
            every = [self.entries[p, s] for s in range(ran)]
            return tuple(sum(part) / ran for part in zip(*every, strict=True))
        if self.rule in ("copy", "skip"):
            wanted = [t]
        elif self.rule == "single":
            wanted = [ran - 1]
        elif self.rule == "first":
            wanted = [0]
        elif self.rule == "modulo":
            wanted = [s for s in range(ran) if s % self.size == t % self.size]
        elif self.rule == "anchor":
            wanted = [t] if t < self.size else [s for s in range(ran) if s >= self.size]
        else:
            raise AssertionError(self.rule)
        there = [s for s in wanted if s < ran]
        return self.entries[p, max(there) if there else ran - 1]
