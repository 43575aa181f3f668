"""Slow twin of key-value rules: keep every KV[p, t] of a row, read it by definition. Imports nothing of ours.

    DepthIndexed  KV[p, t]; where t >= e(p): the last entry (copy), nothing (skip), or an error (refuse)
    Single        KV[p, e(p) - 1]

A token that ran nothing has no entry. Tokens of the call itself are read at the query's own iteration under every rule.
"""


class Row:
    """All entries of one row of one layer."""

    def __init__(self, rule):
        self.rule = rule
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
        return self.entries[p, ran - 1 if self.rule == "single" else min(t, ran - 1)]
