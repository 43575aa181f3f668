"""How much memory and disk an audit needs, before it runs.

    launch      context + (live states + 1) * state + the scored tokens that updates are measured against
    spool       hidden states of one evaluation shard under every schedule, in memory up to `spool_bytes`
    fit         hidden states of one schedule on all documents of the splits that probes are fitted on
    logits      3 * LOGIT_BYTES at most: chunks of logits and what is made of them
    refits      PIECE_BYTES at most: derivatives of the loss of every token in every replicate refitted exactly
    statistics  the loss of every schedule and readout in every replicate
    geometry    hidden states and states of the sampled tokens under every schedule, and COPIES of one in float64

    memory = weights + max(logits + refits + max(launch + spool, fit, statistics), geometry)

Context and state are measured on one document and taken in proportion; what an application needs inside itself is not
in it. Disk: hidden states of calibration documents until their fit, and what the spool has no memory for.
"""

from dataclasses import dataclass

from looplab.audit.bootstrap import EXACT_ONLY, SENTINELS
from looplab.audit.case import CALIBRATION, EVALUATION, FULL_RANK, TEMPERATURE, Case
from looplab.audit.documents import extras_of
from looplab.audit.probes import LOGIT_BYTES
from looplab.audit.probes.stream import PIECE_BYTES
from looplab.audit.probes.temperature import NUMBERS
from looplab.recurrence import state as states

GIB = 2**30
SPOOL_BYTES = GIB
FLOAT64 = 8
MOST_REFITS = EXACT_ONLY + SENTINELS + 1
"""Replicates whose temperature is fitted at once, and beta = 0."""
COPIES = 12
"""Of two reference sites two each, and what one comparison makes of its vectors."""
MEASURED_PATHS = 3
"""Schedules whose updates are measured."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one case."""

    weights: int
    context: int
    """Of the largest launch."""
    state: int
    live_states: int
    updates: int
    spool: int
    spool_limit: int
    fit: int
    logits: int
    refits: int
    statistics: int
    geometry: int
    hidden_disk: int
    smallest_launch: int
    """Context and states of the longest document alone."""

    @property
    def launch(self) -> int:
        """Context and states of the largest launch."""
        return self.context + (self.live_states + 1) * self.state + self.updates

    @property
    def memory(self) -> int:
        """Most bytes held at once."""
        return self._with(self.launch)

    @property
    def least(self) -> int:
        """The same for launches of one document."""
        return self._with(self.smallest_launch)

    @property
    def disk(self) -> int:
        """Bytes of temporary files."""
        return self.hidden_disk + (self.spool if self.spool > self.spool_limit else 0)

    def _with(self, launch: int) -> int:
        spool = min(self.spool, self.spool_limit)
        before = self.logits + self.refits + max(launch + spool, self.fit, self.statistics)
        return self.weights + max(before, self.geometry)


def footprint(case: Case, *, spool_bytes: int = SPOOL_BYTES) -> Footprint:
    """Measures one short launch and counts the rest."""
    subject, runner = case.subject, case.subject.runner
    shards = [shard for split in (*case.fitted_splits, EVALUATION) for shard in case.shards(split).values()]
    probe = min(shards, key=lambda shard: shard.batch.tokens.shape[1])
    context, state = runner.start(
        probe.batch.tokens[:1], None, probe.items[:1], extras=extras_of(probe.batch.documents[:1])
    )
    per_position = probe.batch.tokens.shape[1]
    each_context, each_state = states.nbytes(context) / per_position, states.nbytes(state) / per_position
    width = runner.hidden(state, context)[0, :1]
    token = width.numel() * width.element_size()
    numbers = max(width.numel(), each_state / width.element_size())
    positions = max(shard.batch.tokens.numel() for shard in shards)
    longest = max(shard.batch.tokens.shape[1] for shard in shards)
    scored = max(len(shard.batch.place) for shard in case.shards(EVALUATION).values())
    schedules, live = len(subject.words), subject.live_states
    tables = sum(subject.seeds * case.split(split).tokens for split in case.fitted_splits) * token
    readouts = 1 + len(case.config.probes)
    refits = FLOAT64 * NUMBERS * MOST_REFITS * case.domain.calibration.tokens * subject.seeds * runner.spec.cells
    return Footprint(
        weights=sum(p.numel() * p.element_size() for p in runner.model.parameters()),
        context=round(each_context * positions),
        state=round(each_state * positions),
        live_states=live,
        updates=round(MEASURED_PATHS * each_state * scored),
        spool=schedules * scored * token,
        spool_limit=spool_bytes,
        fit=tables * (2 if FULL_RANK in case.config.probes else 1),
        logits=3 * min(LOGIT_BYTES, 4 * runner.spec.vocab[0] * max(1, _most_tokens(case))),
        refits=min(PIECE_BYTES, refits) if TEMPERATURE in case.config.probes else 0,
        statistics=schedules * readouts * case.config.replicates * FLOAT64,
        geometry=round(int(case.sample.sum()) * (schedules * (token + each_state) + COPIES * FLOAT64 * numbers)),
        hidden_disk=schedules * tables,
        smallest_launch=round((each_context + (live + 1) * each_state) * longest),
    )


def _most_tokens(case: Case) -> int:
    splits = [split for split in (CALIBRATION, EVALUATION) if split in (*case.fitted_splits, EVALUATION)]
    return max(case.subject.seeds * case.split(split).tokens for split in splits)
