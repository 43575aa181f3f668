"""From tokens to text as it may be said: whole characters only, and nothing that may still become a stop string.

    said = the text so far, up to a stop string, without
           - an incomplete character at its end (at most three bytes of UTF-8)
           - the longest suffix that begins a stop string

All pieces together are the text of the answer, so a stream and a whole answer cannot differ. A stop string is looked
for character by character (Knuth, Morris, Pratt), so where it is found does not depend on where tokens begin. No torch.
"""

from collections.abc import Sequence

from looplab.engine.tokenizer import ServedTokenizer

BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are no character."""
CONTEXT = 6
"""Tokens of the prompt that a decoder is shown, so that a leading blank is not taken for the begin of a text."""
LONGEST = 3
"""Most bytes, and so most tokens, of a character that may still be completed."""


class Decoder:
    """Text of tokens that come one by one.

    Args:
        context: Tokens before the first; their last ones are read, and not said.
    """

    def __init__(self, tokenizer: ServedTokenizer, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._shown = list(context[-CONTEXT:])
        self._held: list[int] = []
        self._told = 0
        """Characters of the held tokens that have been said already."""

    def push(self, token: int) -> str:
        """What the token adds, up to a character that is incomplete."""
        self._held.append(token)
        before, whole = self._texts()
        if not whole.endswith(BROKEN):
            return self._say(before, whole, self._held)
        if len(self._held) <= LONGEST:
            return self._say(before, whole.rstrip(BROKEN), [])
        return self._say(before, *self._complete(whole))

    def close(self) -> str:
        """What was left, an incomplete character as U+FFFD."""
        before, whole = self._texts()
        return self._say(before, whole, self._held)

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._shown), decode(self._shown + self._held)

    def _complete(self, whole: str) -> tuple[str, list[int]]:
        """More tokens are held than a character has bytes: those that cannot be part of one, and their text."""
        decode = self._tokenizer.decode
        for kept in range(LONGEST, 0, -1):
            sure, rest = self._held[:-kept], self._held[-kept:]
            text = decode(self._shown + sure)
            if text + decode(rest) == whole:
                return text, sure
        return whole, self._held

    def _say(self, before: str, text: str, tokens: list[int]) -> str:
        new = text[_common(before, text) :]
        said = new[self._told :]
        if not tokens:  # all are held, as the next one may complete a character
            self._told += len(said)
            return said
        self._held, self._told = self._held[len(tokens) :], max(0, self._told - len(new))
        if new:  # tokens without a text, such as special ones, are forgotten: the last text stays in view
            self._shown = list(tokens)
        return said


class StopFinder:
    """Looks for one string in a text that comes in pieces; `matched` characters of it end the text so far."""

    def __init__(self, wanted: str):
        self.wanted, self.matched = wanted, 0
        self._borders = [0] * len(wanted)
        for end in range(1, len(wanted)):
            self._borders[end] = self._step(self._borders[end - 1], wanted[end])

    def push(self, character: str) -> bool:
        """Whether the string ends with this character."""
        self.matched = self._step(self.matched, character)
        return self.matched == len(self.wanted)

    def _step(self, matched: int, character: str) -> int:
        while matched and self.wanted[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.wanted[matched] == character)


class TextStream:
    """The text of one choice.

    Args:
        context: Tokens of the prompt.
        stop: Strings that end the text; they are not part of it. Of two that end together the longer one counts.
    """

    def __init__(self, tokenizer: ServedTokenizer, *, context: Sequence[int] = (), stop: Sequence[str] = ()):
        self._decoder = Decoder(tokenizer, context)
        self._finders = [StopFinder(text) for text in stop]
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; nothing is said after it."""

    def push(self, token: int) -> str:
        """What may be said once this token is known."""
        return self._read(self._decoder.push(token))

    def close(self) -> str:
        """The text has ended: what had been held back."""
        said = self._read(self._decoder.close())
        if self.stopped:
            return said
        held, self._held = self._held, ""
        return said + held

    def _read(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        for end in range(len(self._held), len(text)):
            found = [len(finder.wanted) for finder in self._finders if finder.push(text[end])]
            if found:
                self.stopped, self._held = True, ""
                return text[: end + 1 - max(found)]
        kept = max((finder.matched for finder in self._finders), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _common(before: str, after: str) -> int:
    """Characters with which both begin."""
    if after.startswith(before):
        return len(before)
    return next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
