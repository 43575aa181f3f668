"""Self-speculative decoding: shallow steps guess, full depth says what stands. No torch.

    guess     token by token at `draft_steps`, K times: rows like all others, which leave each block early
    confirm   the token that began the round and its K guesses as K + 1 rows of one text at full depth
    say       what full depth draws, up to the first draw that was not the guess, and that one: 1 .. K + 1 tokens

Rows of one text walk in order of position, and each writes its entries before a later one reads. Under a KV rule by
which iteration t reads entries of iterations <= t only that is what they do one after the other, so tokens and their
log-probabilities are those of full depth alone, and a token that was read out at few steps goes on from there: only
what follows a wrong guess is lost. Draws depend on seed, choice and place in the text, so a guess is drawn as the
token itself will be, and agrees with it often also above temperature 0. Entries after the last token that was said are
never read: the next round writes over them.

Source: Draft & Verify, arXiv:2309.08168, and LayerSkip, arXiv:2404.16710, which guess with the first layers of a stack.
Deviations: the first iterations of a loop guess; what confirms is no call of its own but rows among those of others.
"""

import dataclasses
import json
from collections.abc import Sequence

from looplab.engine.config import EngineConfig
from looplab.engine.queues import RowQueue
from looplab.engine.request import DepthParams, RefusedError
from looplab.engine.residents import Choice, Round, Token
from looplab.engine.seats import Seats
from looplab.engine.stages import Facts
from looplab.engine.stats import Book


class Rounds:
    """The rounds of all choices.

    Args:
        begun: Tokens that enter the loop in this tick.
    """

    def __init__(self, facts: Facts, seats: Seats, book: Book, begun: list[Token]):
        self.facts, self.seats, self.book, self.begun = facts, seats, book, begun
        self.held = RowQueue()
        """Tokens that have guessed and wait for the others of their round."""

    def begin(self, choice: Choice, index: int) -> bool:
        """Begins a round at output token `index`; False where nothing is to be guessed: the token goes alone.

        As many tokens are guessed as the text may still get before its last one, and as pages are free for. A round
        never reaches less far than the one before, so pages taken for wrong guesses serve the next ones.
        """
        group = choice.group
        if index + 1 < len(choice.output):  # run again after a preemption
            return False
        tokens = len(group.request.tokens) + index + 1
        room = (len(choice.table) + self.seats.pool.available) * self.facts.page_tokens - tokens
        size = min(group.draft_tokens, group.limit - len(choice.output) - 1, room)
        if size < 1:
            return False
        self.seats.cover(choice, tokens + size)
        choice.round = Round(choice, index, size)
        self.begun += choice.round.tokens
        return True

    def guess(self, token: Token, guess: int) -> None:
        """A token has guessed the next one; after the last guess of a round all of them go on to full depth."""
        choice, round = token.choice, token.choice.round
        assert round is not None
        self.book.total["drafted_tokens"] += 1
        choice.group.drafted += 1
        round.guesses.append(guess)
        self.held.put_tail([token])
        if len(round.guesses) < round.size:
            return
        for one in round.tokens:
            self.held.rows.remove(one)
            if self.facts.resumes:
                one.go_on()
            else:
                self.book.wasted["draft"] += one.executed
                one.restart()
        round.tokens.append(Token(choice, round.first + round.size, lane=round.size))
        self.book.total["draft_rounds"] += 1
        choice.group.rounds += 1
        self.begun += round.tokens

    def confirms(self, token: Token, drawn: int) -> bool:
        """Whether full depth drew what was guessed after the first token of a round that is still open; counts it."""
        choice, round = token.choice, token.choice.round
        assert round is not None
        round.tokens.remove(token)
        guesses = round.guesses[token.index - round.first :]
        if not guesses or guesses[0] != drawn:
            return False
        self.book.total["accepted_tokens"] += 1
        choice.group.confirmed += 1
        return True


def refusal(kv_rule: str, *, looks_ahead: bool, homogeneous_steps: bool) -> str:
    """Why an engine guesses nothing; empty: it may.

    Args:
        looks_ahead: Whether under this KV rule an iteration reads entries of later ones.
    """
    if homogeneous_steps:  # a launch would take a later token of a text before an earlier one
        return "tokens of one text are confirmed at different steps, which homogeneous_steps keeps apart; leave it out"
    if not looks_ahead:
        return ""
    return (
        "guesses are confirmed side by side, which is exact only where step t reads entries of steps up to t, and "
        f"under {kv_rule} it reads later ones; use last_exited or depth_indexed"
    )


def lanes(config: EngineConfig) -> int:
    """Places of a seat for the states of tokens under way: those of a round.

    Raises:
        ValueError: EngineConfig.draft_tokens is below 1.
    """
    if config.draft_tokens < 1:
        raise ValueError(
            f"EngineConfig.draft_tokens must be at least 1. Got {config.draft_tokens}. For none, name no draft_steps"
        )
    return 1 + config.draft_tokens


def guess_depths(depth: DepthParams, max_steps: Sequence[int]) -> tuple[int, ...]:
    """Iterations of every block of a token that guesses; none where nothing is guessed."""
    return tuple(min(depth.draft_steps, most) for most in max_steps) if depth.draft_steps else ()


def check_drafts(
    depth: DepthParams, *, rule: str | None, full_steps: int, most_tokens: int, default_steps: int | None, refused: str
) -> None:
    """Refuses guesses that cannot be made or confirmed.

    Args:
        depth: As asked for.
        rule: What may stop its tokens early; None: nothing.
        full_steps: Steps of its tokens.
        most_tokens: Guesses of a round that the engine has places for.
        default_steps: Of guesses, where a request does not say.
        refused: Why the engine makes none; empty: it does.

    Raises:
        RefusedError: invalid_depth or exit_refused.
    """
    steps, tokens = depth.draft_steps, depth.draft_tokens
    if tokens is not None and not (_is_int(tokens) and 1 <= tokens <= most_tokens):
        words = f"draft_tokens must be in 1..{most_tokens}, the places for guesses; got {json.dumps(tokens)}; ask for "
        raise RefusedError("invalid_depth", words + "fewer, or start with more --draft-tokens", "draft_tokens")
    if tokens is not None and not (default_steps if steps is None else steps):
        raise RefusedError("invalid_depth", "draft_tokens needs draft_steps; got none; name them", "draft_tokens")
    if steps is None or (steps == 0 and _is_int(steps)):
        return
    if refused:
        raise RefusedError("exit_refused", f"draft_steps: {refused}", "draft_steps")
    if rule is not None:
        words = f"draft_steps needs tokens that run all their steps, and {rule} may stop them; leave one out"
        raise RefusedError("invalid_depth", words + ", or ask for exit_rule full", "draft_steps")
    if not (_is_int(steps) and 1 <= steps < full_steps):
        must = f"in 1..{full_steps - 1}, below the {full_steps} steps of a token, or 0"
        if full_steps == 1:
            must = "0, as a token runs 1 step"
        raise RefusedError("invalid_depth", f"draft_steps must be {must}; got {json.dumps(steps)}", "draft_steps")


def with_drafts(resolved: DepthParams, asked: DepthParams, config: EngineConfig, *, refused: str) -> DepthParams:
    """A resolved depth with what is guessed: as asked for, else the engine's default where nothing stands against it.

    Raises:
        RefusedError: As for `check_drafts`.
    """
    rule = "replay" if resolved.replay is not None else resolved.exit_rule
    rule = None if rule == "full" else rule
    full_steps = resolved.num_steps or resolved.max_steps
    assert full_steps is not None
    steps, default = asked.draft_steps, config.draft_steps or 0
    check_drafts(
        asked, rule=rule, full_steps=full_steps, most_tokens=config.draft_tokens, default_steps=default, refused=refused
    )
    if steps is None:
        steps = default if rule is None and default < full_steps else 0
    if not steps:
        return resolved
    return dataclasses.replace(resolved, draft_steps=steps, draft_tokens=asked.draft_tokens or config.draft_tokens)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
