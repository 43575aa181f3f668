"""What must hold between any two ticks of a scheduler, and its state in words. No torch."""

from typing import TYPE_CHECKING

from looplab.engine.pages import IntegrityError, pages_of
from looplab.engine.residents import Choice, State, Token

if TYPE_CHECKING:
    from looplab.engine.scheduler import Scheduler


def check_integrity(scheduler: "Scheduler") -> None:
    """Raises IntegrityError with a dump where pages, seats, tables or queues contradict each other."""
    try:
        _check(scheduler)
    except IntegrityError as error:
        raise IntegrityError(f"{error}\n{dump(scheduler)}") from None


def _check(scheduler: "Scheduler") -> None:
    seats, pool = scheduler.seats, scheduler.pool
    sitting = list(seats.taken.values())
    pool.check([choice.table for choice in sitting], list(seats.leaving.values()))
    scheduler.cache.check()
    if len(seats.free) + len(seats.taken) != scheduler.max_resident or set(seats.free) & set(seats.taken):
        raise IntegrityError("seats: free and taken ones do not make up all of them")
    for seat, choice in seats.taken.items():
        if choice.seat != seat or (seat in seats.leaving) != (choice.state is State.ENDED):
            raise IntegrityError(f"seats: {_choice(choice)} sits in seat {seat}")
    _check_places(scheduler)
    for choice in sitting:
        if choice.state is not State.ENDED:
            _check_table(scheduler, choice)


def _check_places(scheduler: "Scheduler") -> None:
    """Every choice that is not over has one work item, in one place."""
    places: dict[int, list[str]] = {}
    for name, tokens in _queues(scheduler).items():
        for token in tokens:
            stands = token.choice.item is token or (name != "in flight" and token.choice.round is None)
            if stands and not token.dead:
                places.setdefault(id(token.choice), []).append(name)
            if token.steps >= scheduler.facts.max_steps[token.block] and name.startswith("ready"):
                raise IntegrityError(f"queues: {_choice(token.choice)} is ready for iteration {token.steps}")
    for name, choices in _lists(scheduler).items():
        for choice in choices:
            places.setdefault(id(choice), []).append(name)
    for group in scheduler.lives.groups.values():
        reader = next((choice for choice in group.choices if choice in scheduler.admission.started), None)
        for choice in group.choices:
            found = places.pop(id(choice), [])
            if choice.round is not None:
                _check_round(scheduler, choice)
                found.append("round")
            if choice.state is State.PREFILL and not choice.output and reader is not None and choice is not reader:
                found.append("started")  # a sibling reads its prompt
            if len(found) != (choice.state is not State.ENDED):
                raise IntegrityError(f"queues: {_choice(choice)} is in {found or 'no place'}")
    if places:
        raise IntegrityError(f"queues: choices of requests that are over are in {list(places.values())}")


def _check_round(scheduler: "Scheduler", choice: Choice) -> None:
    """The tokens of a round are each in one place, in order, in lanes of their own."""
    round = choice.round
    assert round is not None
    found = [token for tokens in _queues(scheduler).values() for token in tokens if token.choice is choice]
    alive = sorted(token.index for token in found if not token.dead)
    indices = [token.index for token in round.tokens]
    lanes = [token.index - round.first for token in round.tokens]
    if not indices or alive != indices or lanes != [token.lane for token in round.tokens]:
        raise IntegrityError(f"rounds: {_choice(choice)} waits for tokens {indices}, but {alive} are under way")


def _check_table(scheduler: "Scheduler", choice: Choice) -> None:
    """A table covers the tokens there are, and no page that a row may write to is shared."""
    size, prompt = scheduler.facts.page_tokens, len(choice.group.request.tokens)
    if choice.state is State.PREFILL:
        covered = prompt if choice.table else 0
        writes = covered
    else:
        item = choice.item
        writes = choice.cursor if choice.state is State.STALLED else item.index if item is not None else 0
        covered = prompt + writes + (choice.state is not State.STALLED)
        if choice.round is not None:
            writes = choice.round.first
            covered = prompt + writes + 1 + choice.round.size
        writes = prompt + writes
    if len(choice.table) != pages_of(covered, size):
        raise IntegrityError(f"tables: {_choice(choice)} has {len(choice.table)} pages for {covered} tokens")
    for page in choice.table[writes // size :]:
        if scheduler.pool.references[page] > 1 or scheduler.pool.is_cached[page]:
            raise IntegrityError(f"tables: {_choice(choice)} writes to page {page}, which others read")


def dump(scheduler: "Scheduler") -> str:
    """The state of a scheduler, a line per queue, choice and launch."""
    pool = scheduler.pool
    lines = [
        f"pages: {len(pool.free)} free, {pool.active} active, {pool.idle_cached} cached, "
        f"{pool.quarantined} quarantined",
        f"seats: {len(scheduler.seats.free)} free, leaving {sorted(scheduler.seats.leaving)}",
        f"waiting: {[group.request.id for group in scheduler.admission.line.groups]}",
        f"in flight: {len(scheduler.reads)} prompts, {len(scheduler.codas)} codas",
    ]
    for name, tokens in _queues(scheduler).items():
        lines.append(f"{name}: {[(_name(token.choice), token.index, token.steps) for token in tokens]}")
    for name, choices in _lists(scheduler).items():
        lines.append(f"{name}: {[_name(choice) for choice in choices]}")
    lines += [_choice(choice) for group in scheduler.lives.groups.values() for choice in group.choices]
    return "\n".join(lines)


def _queues(scheduler: "Scheduler") -> dict[str, list[Token]]:
    found = {f"ready {block}": list(queue.rows) for block, queue in enumerate(scheduler.ready)}
    in_flight = [token for flight in scheduler.codas for token in flight.tokens]
    return {
        **found,
        "staged": list(scheduler.staged.rows),
        "coda": list(scheduler.coda.rows),
        "held": list(scheduler.held.rows),
        "in flight": in_flight,
    }


def _lists(scheduler: "Scheduler") -> dict[str, list[Choice]]:
    admission = scheduler.admission
    return {
        "line": [choice for group in admission.line.groups for choice in group.choices],
        "started": admission.started,
        "returning": admission.returning,
        "stalled": scheduler.lives.stalled,
    }


def _name(choice: Choice) -> str:
    return f"{choice.group.request.id}/{choice.index}"


def _choice(choice: Choice) -> str:
    tokens = choice.round.tokens if choice.round is not None else [] if choice.item is None else [choice.item]
    items = [(token.index, token.block, token.steps) for token in tokens]
    return (
        f"{_name(choice)}: {choice.state.value}, seat {choice.seat}, {len(choice.group.request.tokens)} + "
        f"{len(choice.output)} tokens, items {items}, pages {list(choice.table)}, in flight {choice.in_flight}"
    )
