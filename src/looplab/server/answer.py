"""Events of the engine as the body of an answer, whole or in chunks.

A choice of prompt p and choice c has index p * n + c. Both forms are made from the same parts, so that the chunks of a
stream add up to the whole answer. The last chunk carries the usage; with `stream_options.include_usage` it has no
choices, as in the OpenAI API, else it is that of the last choice to end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from looplab.engine.request import (
    ChoiceEnded,
    Event,
    PromptRead,
    RequestEnded,
    RequestFailed,
    TokenLogprob,
    TokenSaid,
    Usage,
)
from looplab.engine.text import Decoder
from looplab.engine.tokenizer import ServedTokenizer
from looplab.server.ask import Work
from looplab.server.errors import api_error
from looplab.server.logprobs import Placed, chat_logprobs, completion_logprobs


@dataclass(frozen=True, kw_only=True)
class Header:
    """What every body of one answer begins with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    fingerprint: str


@dataclass
class Piece:
    """What has come of one choice since it was last looked at."""

    text: str = ""
    tokens: list[Placed] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    reason: str | None = None


class Answer:
    """Collects the events of one HTTP request.

    Args:
        seeds: Of the requests, in order.
    """

    def __init__(self, work: Work, header: Header, tokenizer: ServedTokenizer, seeds: Sequence[int]):
        self.work, self._header, self._tokenizer, self._seeds = work, header, tokenizer, seeds
        ask = work.ask
        self._kind = "chat.completion" if ask.is_chat else "text_completion"
        self._pieces = [Piece() for _ in range(ask.n * len(work.requests))]
        self._lengths = [0] * len(self._pieces)
        self._open = len(self._pieces)
        self._usages: dict[int, Usage] = {}
        self._begun: set[int] = set()
        for index, piece in enumerate(self._pieces):
            if ask.echo:
                self._add_text(index, piece, work.prompt_texts[index // ask.n])

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return len(self._usages) == len(self.work.requests)

    def take(self, prompt: int, event: Event) -> None:
        """Takes one event of one request.

        Raises:
            ApiError: The request failed.
        """
        match event:
            case PromptRead():
                self._read_prompt(prompt, event)
            case TokenSaid():
                self._say(self._index(prompt, event.choice), event)
            case ChoiceEnded():
                index = self._index(prompt, event.choice)
                piece = self._pieces[index]
                piece.reason = "length" if self.work.hides_output else event.reason
                self._open -= 1
                if not self.work.hides_output:
                    self._add_text(index, piece, event.text)
            case RequestEnded():
                self._usages[prompt] = event.usage
            case RequestFailed():
                raise api_error(event)

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._whole(index, piece) for index, piece in enumerate(self._pieces)]
        return {**self._head(self._kind), "choices": choices, "usage": self.usage()}

    def chunks(self) -> list[dict[str, Any]]:
        """What has come since the last call: per choice one chunk, and the usage with the last."""
        found, shows = [], self.work.ask.sampling.logprobs is not None or self.work.ask.return_depths
        for index, piece in enumerate(self._pieces):
            left = Piece()
            if self._waits_for_usage and piece.reason is not None:
                piece, left = replace(piece, reason=None), Piece(reason=piece.reason)
            if piece.reason is not None or piece.text or (shows and piece.tokens):
                found.append(self._chunk(index, piece))
                self._pieces[index] = left
        if not self.done:
            return found
        if self.work.ask.include_usage:
            return [*found, {**self._head(self._chunk_kind), "choices": [], "usage": self.usage()}]
        found[-1]["usage"] = self.usage()
        return found

    def usage(self) -> dict[str, Any]:
        """Tokens, and what depth they ran at, over all prompts."""
        usages = [self._usages[i] for i in sorted(self._usages)]
        prompt = sum(usage.prompt_tokens for usage in usages)
        output = 0 if self.work.hides_output else sum(usage.output_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
            "depth": depth_block(usages),
        }

    @property
    def _waits_for_usage(self) -> bool:
        """Whether all choices have ended and the usage is still to come: the ends go with it."""
        return self._open == 0 and not self.done and not self.work.ask.include_usage

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.work.ask.is_chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        header = self._header
        prefix = "chatcmpl" if self.work.ask.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{header.id}",
            "object": kind,
            "created": header.created,
            "model": header.model,
            "system_fingerprint": header.fingerprint,
        }

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self.work.ask.n + choice

    def _add_text(self, index: int, piece: Piece, text: str) -> None:
        piece.text += text
        self._lengths[index] += len(text)

    def _say(self, index: int, event: TokenSaid) -> None:
        piece = self._pieces[index]
        if self.work.hides_output:
            return
        piece.tokens.append(Placed(event.token, event.logprob, self._lengths[index]))
        piece.depths.append(event.steps)
        self._add_text(index, piece, event.text)

    def _read_prompt(self, prompt: int, event: PromptRead) -> None:
        """Log-probabilities of the prompt stand before those of the output."""
        decoder, placed, offset = Decoder(self._tokenizer), [], 0
        for token, logprob in zip(self.work.requests[prompt].tokens, event.logprobs, strict=True):
            placed.append(Placed(token, logprob, offset))
            offset += len(decoder.push(token))
        for choice in range(self.work.ask.n):
            piece = self._pieces[self._index(prompt, choice)]
            piece.tokens[:0] = placed

    def _whole(self, index: int, piece: Piece) -> dict[str, Any]:
        content = {"role": "assistant", "content": piece.text, "refusal": None}
        text = {"message": content} if self.work.ask.is_chat else {"text": piece.text}
        return {"index": index, **text, **self._rest(index, piece)}

    def _chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        text: dict[str, Any] = {"text": piece.text}
        if self.work.ask.is_chat:
            first = {} if index in self._begun else {"role": "assistant"}
            text = {"delta": {**first, "content": piece.text}}
        self._begun.add(index)
        usage = {"usage": None} if self.work.ask.include_usage else {}
        choice = {"index": index, **text, **self._rest(index, piece)}
        return {**self._head(self._chunk_kind), "choices": [choice], **usage}

    def _rest(self, index: int, piece: Piece) -> dict[str, Any]:
        ask = self.work.ask
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": piece.reason}
        if ask.sampling.logprobs is not None:
            rest["logprobs"] = self._logprobs(piece.tokens)
        if ask.return_depths:
            rest["depths"] = piece.depths
        if piece.reason is not None:
            rest["seed"] = self._seeds[index // ask.n]
        return rest

    def _logprobs(self, tokens: Iterable[Placed]) -> dict[str, Any]:
        if self.work.ask.is_chat:
            said = [placed.logprob for placed in tokens]
            return chat_logprobs([one for one in said if isinstance(one, TokenLogprob)], self._tokenizer)
        return completion_logprobs(tokens, self._tokenizer)


def depth_block(usages: Sequence[Usage]) -> dict[str, Any]:
    """The `depth` block of an answer: counts are sums over its prompts, which all run by one rule."""
    blocks = [usage.depth for usage in usages]
    first = blocks[0]
    histogram: dict[int, int] = {}
    for block in blocks:
        for steps, tokens in block.histogram:
            histogram[steps] = histogram.get(steps, 0) + tokens
    decoded = sum(block.decode_tokens for block in blocks)
    applications = sum(block.applications for block in blocks)
    full = sum(block.full_depth_applications for block in blocks)
    drafts = {
        name: sum(getattr(block, name) for block in blocks)
        for name in ("drafted_tokens", "accepted_tokens", "draft_rounds")
        if first.drafted_tokens is not None
    }
    saved = sum(block.saved_flops_fraction * block.full_depth_applications for block in blocks)
    return {
        "exit_rule": first.exit_rule,
        "threshold": first.threshold,
        "max_steps": first.max_steps,
        "prefill_steps": first.prefill_steps,
        "decode_tokens": decoded,
        "mean": round(applications / decoded, 3) if decoded else None,
        "histogram": {str(steps): histogram[steps] for steps in sorted(histogram)},
        "applications": applications,
        "full_depth_applications": full,
        "saved_flops_fraction": round(saved / full, 4) if full else 0.0,
        **drafts,
        "kv_rule": first.kv_rule,
        "reuse": first.reuse,
        "cached_exited_tokens": sum(block.cached_exited_tokens for block in blocks),
        "warnings": list(dict.fromkeys(warning for block in blocks for warning in block.warnings)),
    }
