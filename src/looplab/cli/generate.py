"""`looplab generate MODEL --prompt ...`: what a model says, at a depth or under an exit rule."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.text import Text

from looplab.cli import exit_codes
from looplab.cli.config_file import parsed
from looplab.cli.engine_options import EngineOptions, open_engine
from looplab.cli.exit_codes import UserError, user_error

if TYPE_CHECKING:
    from looplab.engine.engine import Engine
    from looplab.engine.request import DepthUsage, Event, Request, Usage

EPILOGUE = """
Text is written as it comes. --show-depths colours every token by the steps it ran; --json prints whole answers as JSON
lines, with tokens, steps and log-probabilities.

Examples:
  looplab generate demo --prompt "First Citizen:"
  looplab generate demo --prompt "First Citizen:" --num-steps 2 --max-tokens 64
  looplab generate demo --prompt "To be" --exit-rule hazard --exit-threshold 0.5 --show-depths
  looplab generate demo --prompt "To be" --draft-steps 1 --draft-tokens 4
  looplab generate FOLDER --prompt-file story.txt --temperature 0.8 --seed 1 --n 4
"""
COLOURS = ("grey62", "steel_blue1", "cyan2", "green3", "yellow3", "orange1", "red1", "magenta")
"""Of tokens, from the fewest steps to the most."""


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """Let a model go on with a text."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder, or the name of a built-in checkpoint (see `looplab list`)."""
    prompt: str = ""
    """The text to go on with."""
    prompt_file: Path | None = None
    """A file that holds it instead."""
    max_tokens: int = 128
    """Most tokens to say."""
    n: int = 1
    """Answers, drawn independently."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the fewest likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Only tokens that have at least this share of the likeliest one's probability."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text that ends the answer; may be given several times."""
    seed: int | None = None
    """Of the draws. Default: a new one, which is said at the end."""
    num_steps: int | None = None
    """Steps of every token, prompt included, instead of an exit rule. Default: what the model itself runs."""
    show_depths: tyro.conf.FlagCreatePairsOff[bool] = False
    """Colour every token by its steps."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print answers as JSON lines and no text."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the text alone."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = parsed(Options, "generate", argv, EPILOGUE)
    if options.num_steps is not None and options.exit_rule is not None:
        raise UserError("--num-steps and --exit-rule exclude each other. Got both. Leave one out.", exit_codes.USAGE)
    prompt = _prompt(options)
    with open_engine(options.model, options) as engine:
        return generate(engine, prompt, options)


def generate(engine: "Engine", prompt: str, options: Options) -> int:
    """Lets the engine go on with a prompt, and prints what it says."""
    from looplab.engine.request import BusyError, RefusedError

    with user_error(exit_codes.USAGE, (RefusedError, BusyError)):
        request = _request(engine, prompt, options)
        engine.check(request)
        engine.start()
        handle = engine.submit(request)
    answers = Answers(options.n, Console(highlight=False, soft_wrap=True), options)
    try:
        for event in handle:
            answers.take(event)
    except KeyboardInterrupt:
        handle.cancel()
        raise
    if answers.failed:
        raise UserError(answers.failed, exit_codes.MODEL)
    assert answers.usage is not None
    answers.show()
    if not (options.json or options.quiet):
        print(summary(answers.usage), file=sys.stderr)
    return exit_codes.DONE


class Answers:
    """Answers as they come: one answer is written at once, several one after the other at the end."""

    def __init__(self, choices: int, console: Console, options: Options):
        self.options, self.console = options, console
        self.parts: list[list[dict[str, object]]] = [[] for _ in range(choices)]
        self.tails, self.reasons = [""] * choices, [""] * choices
        self.usage: Usage | None = None
        self.failed = ""
        self._streams = choices == 1 and not options.json

    def take(self, event: "Event") -> None:
        """One event of the request."""
        from looplab.engine.request import ChoiceEnded, RequestEnded, RequestFailed, TokenSaid

        match event:
            case TokenSaid():
                self.parts[event.choice].append({"token": event.token, "text": event.text, "steps": event.steps})
                self._write(event.text, event.steps)
            case ChoiceEnded():
                self.tails[event.choice], self.reasons[event.choice] = event.text, event.reason
                self._write(event.text, 0)
            case RequestEnded():
                self.usage = event.usage
            case RequestFailed():
                self.failed = f"{event.code}: {event.message}"

    def show(self) -> None:
        """What was not written yet."""
        if self._streams:
            self.console.print()
            return
        for choice, parts in enumerate(self.parts):
            text = "".join(str(part["text"]) for part in parts) + self.tails[choice]
            if self.options.json:
                assert self.usage is not None
                found = {
                    "choice": choice,
                    "text": text,
                    "finish_reason": self.reasons[choice],
                    "tokens": [part["token"] for part in parts],
                    "steps": [part["steps"] for part in parts],
                    "usage": dataclasses.asdict(self.usage),
                }
                print(json.dumps(found, ensure_ascii=False))
                continue
            if not self.options.quiet:
                self.console.print(f"[{choice}]", markup=False)
            for part in parts:
                self._print(str(part["text"]), int(str(part["steps"])))
            self.console.print(self.tails[choice], markup=False)

    def _write(self, text: str, steps: int) -> None:
        if self._streams and text:
            self._print(text, steps)

    def _print(self, text: str, steps: int) -> None:
        style = COLOURS[min(steps, len(COLOURS)) - 1] if self.options.show_depths and steps else ""
        self.console.print(Text(text, style=style), end="")
        self.console.file.flush()


def summary(usage: "Usage") -> str:
    """One line: tokens, depth, seed."""
    depth = usage.depth
    steps = ", ".join(f"{steps}: {tokens}" for steps, tokens in depth.histogram)
    mean = "" if depth.mean is None else f"; mean {depth.mean:.2f} of {depth.max_steps} steps ({steps})"
    saved = "" if not depth.draft_rounds else f", {accepted(depth)}"
    saved += f", {100 * depth.saved_flops_fraction:.0f} % of FLOPs saved" if depth.applications else ""
    warned = "".join(f"\nwarning: {text}" for text in depth.warnings)
    said = f"{usage.prompt_tokens} prompt + {usage.output_tokens} output tokens{mean}{saved}"
    return f"{said}; exit rule {depth.exit_rule}, KV rule {depth.kv_rule}, seed {usage.seed}{warned}"


def accepted(depth: "DepthUsage") -> str:
    """What guesses came to."""
    assert depth.drafted_tokens and depth.accepted_tokens is not None and depth.draft_rounds
    share, length = (depth.accepted_tokens / whole for whole in (depth.drafted_tokens, depth.draft_rounds))
    return f"{share:.0%} of {depth.drafted_tokens} guesses accepted, {length:.2f} per round"


def _prompt(options: Options) -> str:
    if (options.prompt_file is None) == (not options.prompt):
        got = "both" if options.prompt else "neither"
        raise UserError(f"generate: give one of --prompt and --prompt-file. Got {got}.", exit_codes.USAGE)
    if options.prompt_file is None:
        return options.prompt
    try:
        return options.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = f"--prompt-file must be a text in UTF-8. Got {options.prompt_file}: {error}. Give another."
        raise UserError(said, exit_codes.DATA) from None


def _request(engine: "Engine", prompt: str, options: Options) -> "Request":
    from looplab.engine.request import DepthParams, Request, SamplingParams

    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=options.stop,
    )
    tokens = tuple(engine.tokenizer.encode(prompt))
    depth = DepthParams(num_steps=options.num_steps, draft_steps=engine.config.draft_steps)
    return Request(tokens=tokens, sampling=sampling, depth=depth, n=options.n)
