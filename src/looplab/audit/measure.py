"""What is measured of one case: hidden states of a shard, the probes of a schedule, the scores of a shard.

    hidden states   one walk over a shard of documents; the states of scored tokens, schedule by schedule
    probes          temperature (with its refits in every replicate), affine and full-rank, from all shards of a split
    scores          one walk over a shard of evaluation documents; every schedule under every readout

A walk makes every distinct prefix of its words once. Each function returns parts (`looplab.journal`): arrays and facts,
the same bits whether a shard is walked for all schedules at once or for those that are missing. What a part counts is
what its schedule is the first to need; a ledger beside the parts says what ran.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.audit.bootstrap import DocumentSums, TemperatureReplicates, refit_replicates
from looplab.audit.case import (
    AFFINE,
    CALIBRATION,
    EVALUATION,
    FULL,
    FULL_RANK,
    MODEL,
    TEMPERATURE,
    TRAINING,
    Case,
    Shard,
    Subject,
    Table,
    owned,
)
from looplab.audit.geometry import read_state
from looplab.audit.probes import (
    Affine,
    FullRank,
    LogitChunks,
    Temperature,
    TokenScores,
    cells_right,
    divergence,
    exact_refit,
    fit_affine,
    fit_full_rank,
    fit_temperature,
    leading_tokens,
    token_nll,
    token_scores,
)
from looplab.audit.result import RAW
from looplab.audit.runner import Runner
from looplab.audit.self_tests import check_finite
from looplab.audit.spool import Spool
from looplab.audit.strata import BUCKETS, position_buckets
from looplab.audit.updates import UpdateMeter, token_components
from looplab.intervals import document_draws
from looplab.journal import Part
from looplab.records import Finding
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import walk
from looplab.recurrence.plan import PlanNode

MEANS = (
    *(f"{readout} {name}" for readout in (RAW, TEMPERATURE) for name in ("entropy", "brier")),
    "logit norm",
    "centred norm",
    "kl",
    "agree",
)
"""Token statistics of which sums over tokens are kept, in the order of the array `totals`."""

Progress = Callable[[str, int], None]


def counting_head(runner: Runner, ledger: Ledger) -> Callable[[Tensor], Tensor]:
    """The head, counted; of a token that answers with several cells, one row of logits per cell."""
    cells = runner.spec.cells

    def head(hidden: Tensor) -> Tensor:
        ledger.count_head(runner.spec, tokens=len(hidden), gradient=hidden.requires_grad)
        logits = runner.head(hidden)
        return logits if cells == 1 else logits.unflatten(1, (cells, -1)).flatten(0, 1)

    return head


def walk_shard(
    subject: Subject,
    shard: Shard,
    root: PlanNode,
    visit: Callable[[str, Float[Tensor, "tokens dim"], Any], None],
    *,
    on_step: Callable[[PlanNode, Any, Any], None] | None = None,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Runs a trie of schedules over one shard; `visit` gets (schedule, hidden states of scored tokens, state).

    Args:
        root: `Subject.tree` of the schedules.
        on_step: See `recurrence.loop.walk`.

    Returns:
        Schedule -> application at which its hidden states stopped being finite; those are not visited.

    Raises:
        NonFiniteError: That schedule is the full plan.
    """
    runner, batch = subject.runner, shard.batch
    ledger = Ledger() if ledger is None else ledger
    before = ledger.row_applications
    context, start = runner.start(batch.tokens, batch.valid, shard.items, ledger, batch.extras)
    diverged: dict[str, int] = {}

    def on_node(node: PlanNode, state: Any) -> None:
        hidden = runner.hidden(state, context)[batch.read]
        ledger.count_coda(runner.spec, rows=batch.tokens.shape[0], tokens=batch.tokens.shape[1])
        for name in node.wanted:
            if bool(torch.isfinite(hidden).all()):
                visit(name, hidden, state)
            else:
                if name == FULL:
                    for row, document in enumerate(batch.documents):
                        check_finite(hidden[batch.read[0] == row], document)
                diverged[name] = _first_bad(subject, name, shard, context, start)
            if progress is not None:
                progress(name, ledger.row_applications - before)

    walk(runner.model, context, start, root, on_node, on_step=on_step, ledger=ledger)
    return diverged


def _first_bad(subject: Subject, name: str, shard: Shard, context: Any, state: Any) -> int:
    """Index of the first application of a schedule after which a scored token's hidden state is not finite."""
    plan = subject.words[name][0]
    for j in range(len(plan)):
        state = subject.runner.rollout(plan[j : j + 1], context, state)
        if not bool(torch.isfinite(subject.runner.hidden(state, context)[shard.batch.read]).all()):
            break
    return j


def hidden_states(
    case: Case, split: str, shard: Shard, names: Sequence[str], done: Sequence[str], ledger: Ledger, progress: Progress
) -> dict[str, Part]:
    """The hidden states of one shard's scored tokens; a part of a diverged schedule has only the fact.

    Args:
        done: Schedules whose parts of this shard are there already.
    """
    counts = owned(case.subject, shard, names, done)
    found: dict[str, Part] = {}

    def visit(name: str, hidden: Tensor, state: Any) -> None:
        array, dtype = as_array(hidden)
        found[name] = Part({"hidden": array}, {"dtype": dtype, "counts": counts[name].to_dict(times=False)})

    with ledger.phase("walk"):
        root = case.subject.tree(names)
        diverged = walk_shard(case.subject, shard, root, visit, ledger=ledger, progress=progress)
    for name, j in diverged.items():
        found[name] = Part(facts={"diverged": j, "counts": counts[name].to_dict(times=False)})
    return {name: found[name] for name in counts}  # in the order of the map


def as_array(tensor: Tensor) -> tuple[np.ndarray, str]:
    """A tensor as an array of the same bits, with the name of its dtype; NumPy has no bfloat16."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return (tensor.contiguous().view(torch.int16) if dtype == "bfloat16" else tensor).numpy(), dtype


def as_tensor(array: np.ndarray, dtype: str) -> Tensor:
    """The tensor that `as_array` took apart."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


@dataclass(frozen=True, eq=False)
class Fits:
    """The probes of one schedule."""

    temperature: Temperature | None = None
    replicates: TemperatureReplicates | None = None
    affine: Affine | None = None
    full_rank: FullRank | None = None


def fit(case: Case, tables: Mapping[str, Tensor], full: Mapping[str, Tensor], ledger: Ledger) -> Fits:
    """Fits every probe of one schedule.

    Args:
        tables: Split -> hidden states of the schedule in the order of the split's token table.
        full: The same of the full plan, where the full-rank probe is fitted to its output.
    """
    config, subject = case.config, case.subject
    if not config.probes:
        return Fits()
    table, hidden = Table(case.domain.calibration, subject.seeds), tables[CALIBRATION]
    head = counting_head(subject.runner, ledger)
    temperature = replicates = affine = None
    with ledger.phase("fit"):
        if TEMPERATURE in config.probes:
            chunks = LogitChunks(hidden, head)
            ids, owners = table.targets.flatten(), table.owners.repeat_interleave(subject.runner.spec.cells)
            temperature = fit_temperature(chunks, ids, owners)
            draws = document_draws(
                len(table.split.documents),
                config.replicates,
                seed=config.seed,
                domain=case.domain.name,
                split="calibration",
            )
            replicates = refit_replicates(temperature, draws, exact_refit(chunks, ids, owners))
        if AFFINE in config.probes:
            used = leading_tokens(table.owners, config.affine_tokens)
            keys = [document.key for document in table.split.documents[: int(table.owners[used - 1]) + 1]]
            affine = fit_affine(hidden[:used], head, table.targets[:used], table.owners[:used], keys)
        full_rank = _full_rank(case, tables[TRAINING], full.get(TRAINING), head) if FULL_RANK in config.probes else None
    return Fits(temperature, replicates, affine, full_rank)


def _full_rank(case: Case, hidden: Tensor, full: Tensor | None, head: Callable[[Tensor], Tensor]) -> FullRank:
    table = Table(case.domain.training, case.subject.seeds)
    keys = [document.key for document in table.split.documents]
    return fit_full_rank(
        hidden, head, table.targets, table.owners, keys, objective=case.config.objective, full_hidden=full
    )


def pack_fits(fits: Fits) -> Part:
    """Fits as a part; `unpack_fits` gives them back, bit by bit."""
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    if fits.temperature is not None and fits.replicates is not None:
        t, r = fits.temperature, fits.replicates
        arrays |= {f"temperature.{name}": getattr(t.sums, name) for name in _SUMS}
        arrays |= {"temperature.numbers": np.array([t.beta, t.loss, r.difference])}
        arrays |= {"replicates.betas": r.betas, "replicates.exact": r.exact}
        facts["temperature"] = {"status": t.status, "passes": t.passes}
    if fits.affine is not None:
        a = fits.affine
        arrays |= {"affine.gain": a.gain, "affine.shift": a.shift, "affine.heldout": np.array(a.heldout)}
        arrays["affine.numbers"] = np.array([a.scale, a.strength])
        facts["affine"] = {name: getattr(a, name) for name in _SEARCH}
        facts["affine"]["findings"] = [finding.to_dict() for finding in a.findings]
    if fits.full_rank is not None:
        f = fits.full_rank
        arrays |= {"full_rank.matrix": f.matrix, "full_rank.shift": f.shift}
        arrays |= {"full_rank.heldout": np.array(f.heldout).reshape(-1, 2)}
        arrays["full_rank.numbers"] = np.array([f.scale, f.strength])
        facts["full_rank"] = {name: getattr(f, name) for name in ("objective", *_SEARCH)}
        facts["full_rank"]["findings"] = [finding.to_dict() for finding in f.findings]
    return Part(arrays, facts)


_SUMS = ("loss", "first", "second", "third", "tokens")
_SEARCH = ("converged", "iterations", "passes", "tokens", "convex")


def unpack_fits(part: Part) -> Fits:
    """The fits of a part."""
    arrays, facts = part.arrays, part.facts
    temperature = replicates = affine = full_rank = None
    if "temperature" in facts:
        beta, loss, difference = map(float, arrays["temperature.numbers"])
        sums = DocumentSums(**{name: arrays[f"temperature.{name}"] for name in _SUMS})
        temperature = Temperature(beta=beta, loss=loss, sums=sums, **facts["temperature"])
        replicates = TemperatureReplicates(
            beta=beta,
            status=temperature.status,
            betas=arrays["replicates.betas"],
            exact=arrays["replicates.exact"],
            difference=difference,
        )
    if "affine" in facts:
        affine = Affine(gain=arrays["affine.gain"], shift=arrays["affine.shift"], **_found(part, "affine"))
    if "full_rank" in facts:
        matrix, shift = arrays["full_rank.matrix"], arrays["full_rank.shift"]
        full_rank = FullRank(matrix=matrix, shift=shift, **_found(part, "full_rank"))
    return Fits(temperature, replicates, affine, full_rank)


def _found(part: Part, probe: str) -> dict[str, Any]:
    """What both penalised probes have in common."""
    scale, strength = map(float, part.arrays[f"{probe}.numbers"])
    facts = dict(part.facts[probe])
    return {
        **facts,
        "findings": tuple(Finding.from_dict(finding) for finding in facts["findings"]),
        "scale": scale,
        "strength": strength,
        "heldout": tuple((float(s), float(loss)) for s, loss in part.arrays[f"{probe}.heldout"]),
    }


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is to be scored on a shard, and what is there already."""

    scores: tuple[str, ...]
    done: tuple[str, ...]
    cross: Mapping[str, Mapping[str, float]]
    """Schedule -> other domain -> beta fitted there, of schedules whose cross losses are missing."""


def scores(
    case: Case,
    shard: Shard,
    wanted: Wanted,
    fits: Mapping[str, Fits],
    ledger: Ledger,
    progress: Progress,
    *,
    keep_tokens: bool,
    spool_bytes: int,
) -> tuple[dict[str, Part], dict[str, Part]]:
    """Walks one evaluation shard and scores it.

    Args:
        fits: Of every schedule in `wanted.scores`.
        keep_tokens: Add the columns of `tokens.parquet`.

    Returns:
        Schedule -> scores, and schedule -> losses under other domains' temperatures.
    """
    counts = owned(case.subject, shard, wanted.scores, wanted.done)
    names = {*wanted.scores, *wanted.cross, *([FULL] if wanted.scores else [])}
    root = case.subject.tree(tuple(names))
    meter = _update_meter(case, shard, root, counts)
    sample = case.sample[shard.batch.place] if case.role == MODEL and shard.noise_seed == 0 else None
    found: dict[str, Part] = {}
    crossed: dict[str, Part] = {}
    sampled: dict[str, tuple[np.ndarray, str]] = {}
    everything = torch.arange(len(shard.batch.place))
    with Spool(len(everything), len(names), budget=spool_bytes) as spool:

        def visit(name: str, hidden: Tensor, state: Any) -> None:
            spool.put(name, everything, hidden)
            if sample is not None and name in counts:
                seen = read_state(state, case.subject.runner.spec.state)[shard.batch.read][sample]
                sampled[name] = as_array(seen.cpu())

        with ledger.phase("walk"):
            diverged = walk_shard(case.subject, shard, root, visit, on_step=meter, ledger=ledger, progress=progress)
        with ledger.phase("score"):
            for name in (name for name in case.subject.words if name in names):
                if name in diverged:
                    if name in counts:
                        found[name] = Part(facts={"diverged": diverged[name]})
                    continue
                heads = Ledger()
                arrays, under_others = _score(
                    case,
                    shard,
                    name,
                    spool,
                    fits[name] if name in counts else None,
                    wanted.cross.get(name, {}),
                    heads,
                    keep_tokens,
                )
                ledger.add(heads)
                if name in wanted.cross:
                    crossed[name] = under_others
                if name not in counts:
                    continue
                counts[name] += heads
                found[name] = Part(arrays)
                if sample is not None:
                    arrays["sample.hidden"], dtype = as_array(spool.get(name)[sample])
                    arrays["sample.state"], state_dtype = sampled[name]
                    found[name].facts["dtypes"] = {"hidden": dtype, "state": state_dtype}
                if meter is not None and name in meter.tables:
                    arrays["updates"] = meter.tables[name]
    for name, part in found.items():
        part.facts["counts"] = counts[name].to_dict(times=False)
    return found, crossed


def _update_meter(case: Case, shard: Shard, root: PlanNode, names: Mapping[str, Ledger]) -> UpdateMeter | None:
    """Measures the updates of full, repeat(1) and repeat(kmid), as far as they are among `names`."""
    spec, kmid = case.subject.runner.spec, case.subject.full.kmid
    wanted = [name for name in dict.fromkeys((FULL, "repeat(1)", f"repeat({kmid})")) if name in names]
    components = token_components(spec.state)
    if case.role != MODEL or not wanted or not components:
        return None
    prefixes = [spec.state[name].prefix for name in components]
    return UpdateMeter(root, wanted, components, shard.batch.read, shard.rows, prefixes)


def _score(
    case: Case,
    shard: Shard,
    name: str,
    spool: Spool,
    fits: Fits | None,
    cross: Mapping[str, float],
    ledger: Ledger,
    keep_tokens: bool,
) -> tuple[dict[str, np.ndarray], Part]:
    """All scores of one schedule on one shard (none without fits), and its losses under other domains' betas."""
    head, hidden = counting_head(case.subject.runner, ledger), spool.get(name)
    targets, owners = case.domain.evaluation.targets[shard.batch.place], shard.batch.read[0]
    found = Fits() if fits is None else fits
    temperature, replicates = found.temperature, found.replicates
    exact = [] if replicates is None else [float(beta) for beta in replicates.exact_betas]
    beta = 1.0 if temperature is None else temperature.beta
    scored = token_scores(hidden, head, targets, owners, beta=beta, extra_betas=[*exact, *cross.values()])
    crossed = Part({other: scored.extra[:, len(exact) + i] for i, other in enumerate(cross)})
    if fits is None:
        return {}, crossed
    losses, right = {RAW: scored.raw.nll}, {RAW: scored.cells_right}
    if temperature is not None:
        losses[TEMPERATURE] = scored.temperature.nll
    for readout, probe in ((AFFINE, found.affine), (FULL_RANK, found.full_rank)):
        if probe is not None:
            losses[readout] = token_nll(probe.apply(hidden), head, targets)
            if case.domain.task is not None:
                right[readout] = cells_right(probe.apply(hidden), head, targets)
    kl, agree = divergence(hidden, spool.get(FULL), head)
    arrays = {
        **{f"loss.{readout}": _by_document(owners.numpy(), nll, shard.rows) for readout, nll in losses.items()},
        "derivatives": np.stack([scored.sums.first, scored.sums.second, scored.sums.third]),
        "extra": scored.extra[:, : len(exact)],
        "confidence.raw": scored.raw.confidence,
        "confidence.temperature": scored.temperature.confidence,
        "correct": scored.correct,
        **{f"bucket.{readout}": _by_bucket(case, shard, nll) for readout, nll in losses.items()},
        "totals": np.array([values.sum(dtype=np.float64) for _, values in _means(scored, kl, agree)]),
    }
    if case.domain.task is not None:
        rows = owners.numpy()
        arrays |= {f"right.{readout}": _by_document(rows, cells, shard.rows) for readout, cells in right.items()}
    if keep_tokens:
        columns = _columns(case, shard, losses, scored, kl, agree)
        arrays |= {f"token.{column}": values for column, values in columns.items()}
    return arrays, crossed


def _by_document(
    owners: Int[np.ndarray, " tokens"],
    values: Float[np.ndarray, " tokens"] | Int[np.ndarray, " tokens"],
    documents: int,
) -> Float[np.ndarray, " documents"]:
    return np.bincount(owners, weights=values, minlength=documents)


def _by_bucket(case: Case, shard: Shard, values: Float[np.ndarray, " tokens"]) -> Float[np.ndarray, "documents 4"]:
    """Sums by document and position bucket."""
    positions = case.split(EVALUATION).positions[shard.batch.place].numpy()
    place = shard.batch.read[0].numpy() * len(BUCKETS) + position_buckets(positions)
    sums = np.bincount(place, weights=values, minlength=shard.rows * len(BUCKETS))
    return sums.reshape(shard.rows, len(BUCKETS))


def _means(scored: TokenScores, kl: np.ndarray, agree: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    values = itertools.chain(
        *((part.entropy, part.brier) for part in (scored.raw, scored.temperature)),
        (scored.logit_norm, scored.centred_norm, kl, agree),
    )
    return zip(MEANS, values, strict=True)


def _targets(ids: Int[Tensor, "tokens *cells"]) -> dict[str, np.ndarray]:
    """One column, or one per cell."""
    columns = ids.to(torch.int32).flatten(1).mT if ids.dim() > 1 else ids.to(torch.int32)[None]
    names = ["token"] if len(columns) == 1 else [f"cell_{i}" for i in range(len(columns))]
    return {name: column.contiguous().numpy() for name, column in zip(names, columns, strict=True)}


def _columns(
    case: Case,
    shard: Shard,
    losses: Mapping[str, np.ndarray],
    scored: TokenScores,
    kl: np.ndarray,
    agree: np.ndarray,
) -> dict[str, np.ndarray]:
    """One row per scored token, for `tokens.parquet`."""
    split, place = case.split(EVALUATION), shard.batch.place
    columns: dict[str, np.ndarray] = {
        "document": split.owners[place].numpy().astype(np.int32),
        "window": split.windows[place].numpy().astype(np.int32),
        "position": split.positions[place].numpy().astype(np.int32),
        **_targets(split.targets[place]),
        "noise_seed": np.full(len(place), shard.noise_seed, dtype=np.int8),
        **{f"nll_{readout}": nll.astype(np.float32) for readout, nll in losses.items()},
    }
    for readout, part in ((RAW, scored.raw), (TEMPERATURE, scored.temperature)):
        if readout in losses:
            columns[f"confidence_{readout}"] = part.confidence.astype(np.float32)
            columns[f"entropy_{readout}"] = part.entropy.astype(np.float32)
            columns[f"brier_{readout}"] = part.brier.astype(np.float32)
    columns |= {
        "correct": scored.correct,
        "logit_norm": scored.logit_norm.astype(np.float32),
        "centred_norm": scored.centred_norm.astype(np.float32),
        "kl_to_full": kl.astype(np.float32),
        "agree_with_full": agree,
    }
    return columns
