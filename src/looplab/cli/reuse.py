"""`looplab reuse CHECKPOINT`: whether later tokens can use what tokens leave behind that stopped early."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from looplab.cli import exit_codes
from looplab.cli.checkpoint import ReadAs, open_checkpoint
from looplab.cli.config_file import FromFile, output_folder, parsed, resolved
from looplab.cli.exit_codes import UserError, user_error

if TYPE_CHECKING:
    from torch import Tensor

    from looplab.engine.verdict import ReuseResult
    from looplab.interop import LoadedModel
    from looplab.recurrence.exit import ExitRule
    from looplab.recurrence.kv import KVRule

KV_RULES = ("last_exited", "single", "first")
EPILOGUE = """
For every KV rule, tokens are read at their exit after a past at full depth and after a past that exited; the difference
is what exits cost later tokens. A rule passes if that is at most 0.01 nats and at most 2 % of top tokens change, by the
upper ends of their intervals. Where it does not, longer delays are tried. The verdict is kept beside the checkpoint,
where serving finds it, and written to --out with a report.
"""


@dataclass(frozen=True, kw_only=True)
class Options(FromFile, ReadAs):
    """Measure what early exits cost later tokens, for every KV rule, and say whether it is safe."""

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """Checkpoint folder, or name of a built-in one; looped, and able to stop early."""
    exit_rule: str
    """When tokens stop: hazard, latent, acceleration, kl, entropy, argmax, or the gate of --gate (lookahead, preloop,
    same_step)."""
    exit_threshold: float | None = None
    """The rule's number, such as 0.5."""
    min_steps: int = 1
    """No token stops before it."""
    gate: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Gate of `looplab gate`: a JSON file, or a folder with one; may be given several times."""
    kv_rule: str = ""
    """KV rules, with commas: last_exited, single, first, first_then_shared(s). Default: the first three, as far as the
    model supports them."""
    max_delay: int | None = None
    """Longest delay to try. Default: up to full depth."""
    text: Path | None = None
    """A .txt, .jsonl or .parquet file that the model was not trained on. Default: built-in, held-out side."""
    windows: int = 64
    """Texts to measure on, each at most once per length of a window."""
    prompt_tokens: int = 128
    """Tokens of a window that are read at full depth."""
    output_tokens: int = 128
    """Tokens that may exit, one by one."""
    free_tokens: int = 32
    """Tokens to generate from every prompt, with exits and without. 0: none."""
    replicates: int = 2000
    """Bootstrap replicates over windows."""
    rows: int = 16
    """Windows that run together."""
    tokenizer: str = ""
    """A folder with tokenizer.json, or "bytes". Default: the model's own."""
    seed: int = 0
    """Of noise and draws."""
    out: Path = Path("reuse-out")
    """Folder for reuse.json and report.html."""
    no_store: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not keep the verdict beside the checkpoint. Built-in checkpoints are never written to."""
    fail_on: Literal["none", "warning", "failure"] = "none"
    """Exit with code 6 where a KV rule is not reusable (failure) or not clearly so (warning), without a delay."""
    device: str = "cpu"
    """Device of PyTorch: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type the weights are cast to."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """No progress."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the result as JSON instead of a summary."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = parsed(Options, "reuse", argv, EPILOGUE)
    from looplab.cli.device import check_device
    from looplab.engine.verdict import store_result
    from looplab.interop import builtin_folder, builtin_names
    from looplab.records import dump_json, write_atomic
    from looplab.report.reuse import write_reuse

    check_device(options.device)
    _check(options)
    output_folder(options.out)
    loaded = open_checkpoint(options.checkpoint, options, dtype=options.dtype, device=options.device)
    rule, rules = _rule(options, loaded), _kv_rules(options, loaded)
    result = _audited(options, loaded, rule, rules, shlex.join(["looplab", "reuse", *argv]))
    with user_error(exit_codes.DATA, (ValueError,)):
        store_result(options.out, result)
        if not options.no_store and loaded.folder not in map(builtin_folder, builtin_names()):
            store_result(loaded.folder, result)
    write_atomic(options.out / "options.json", dump_json(resolved(options)))
    write_reuse(result, options.out)
    if options.json:
        print(dump_json(result), end="")
    else:
        print(result)
        print(f"Report: {options.out / 'report.html'}")
    at_once = [verdict.word for verdict in result.verdicts if verdict.delay == 0]
    bad = ("not reusable",) if options.fail_on == "failure" else ("not reusable", "undecided")
    failed = options.fail_on != "none" and any(word in bad for word in at_once)
    return exit_codes.FINDING if failed else exit_codes.DONE


def _check(options: Options) -> None:
    """What can be told before anything is opened."""
    least = {"windows": 8, "prompt_tokens": 1, "output_tokens": 2, "free_tokens": 0, "replicates": 1, "rows": 1}
    least |= {"max_delay": 0} if options.max_delay is not None else {}
    for name, number in least.items():
        if getattr(options, name) < number:
            flag = name.replace("_", "-")
            raise UserError(
                f"reuse: --{flag} must be at least {number}. Got {getattr(options, name)}. Raise it.", exit_codes.USAGE
            )


def _rule(options: Options, loaded: "LoadedModel") -> "ExitRule":
    """The exit rule, by name or by gate."""
    from looplab.engine.gates import GateError, gates_of, load_gate
    from looplab.recurrence.exit import exit_rule

    with user_error(exit_codes.MODEL, (GateError,)):
        gates = gates_of(loaded.folder, loaded.model) | {
            gate.facts.gate: gate for gate in (load_gate(path, loaded.model) for path in options.gate)
        }
    name = options.exit_rule
    with user_error(exit_codes.USAGE, (ValueError, KeyError)):
        if name in ("lookahead", "preloop", "same_step") and name not in gates:
            raise ValueError(
                f"reuse: --exit-rule {name} needs its gate. Got {', '.join(gates) or 'none'}. Train it with "
                "looplab gate and give --gate"
            )
        if name not in gates:
            return exit_rule(name, options.exit_threshold, min_steps=options.min_steps)
        if options.exit_threshold is None:
            raise ValueError(f"reuse: --exit-rule {name} needs --exit-threshold. Got none. Give one, such as 0.5")
        return gates[name].rule(options.exit_threshold, min_steps=options.min_steps)


def _kv_rules(options: Options, loaded: "LoadedModel") -> dict[str, "KVRule"]:
    from looplab.engine.slots import rule_of

    asked = [word.strip() for word in options.kv_rule.split(",") if word.strip()]
    with user_error(exit_codes.USAGE, (ValueError,)):
        rules = {name: rule_of(name) for name in asked or KV_RULES}
    known = loaded.model.spec.kv_rules
    allowed = {name: rule for name, rule in rules.items() if any(one.allows(rule) for one in known)}
    refused = [name for name in rules if name not in allowed]
    if not allowed or (asked and refused):
        raise UserError(
            f"reuse: --kv-rule must be of those that the model supports. Got {', '.join(refused)}. Supported: "
            f"{', '.join(sorted({type(one).__name__ for one in known}))}.",
            exit_codes.MODEL,
        )
    return allowed


def _audited(
    options: Options, loaded: "LoadedModel", rule: "ExitRule", rules: dict[str, "KVRule"], command: str
) -> "ReuseResult":
    from looplab.engine.reuse import audit, check_auditable
    from looplab.recurrence.exit import exit_points

    with user_error(exit_codes.MODEL, (ValueError,)):
        for kv in rules.values():
            check_auditable(loaded.model, rule, kv)
    name, digest, windows = _windows(options, loaded)
    steps = max(exit_points(loaded.model.spec))
    with _progress(options.quiet) as (began, advanced):
        return audit(
            loaded.model,
            windows,
            rule,
            rules,
            prompt=options.prompt_tokens,
            name=Path(loaded.name).name,
            text=name,
            text_hash=digest,
            delays=range(steps if options.max_delay is None else min(steps, options.max_delay + 1)),
            seed=options.seed,
            replicates=options.replicates,
            free_tokens=options.free_tokens,
            rows=options.rows,
            command=command,
            began=began,
            advanced=advanced,
        )


def _windows(options: Options, loaded: "LoadedModel") -> tuple[str, str, "Tensor"]:
    """Name and hash of the text, and the windows."""
    from looplab.cli.gate import tokenizer_of
    from looplab.data.corpus import builtin_corpus
    from looplab.data.documents import DataError, Document, read_documents
    from looplab.engine.reuse import cut_windows

    with user_error(exit_codes.DATA, (DataError, ValueError)):
        tokenizer = tokenizer_of(loaded, options.tokenizer, "reuse")
        found = (
            builtin_corpus("heldout")
            if options.text is None
            else read_documents(options.text, option=f"--text {options.text}")
        )
        texts = [document.text for document in found.documents if isinstance(document, Document)]
        if len(texts) != len(found.documents):
            raise DataError(f"reuse: --text {options.text} must hold texts. Got grids. Give a text.")
        length = options.prompt_tokens + options.output_tokens + 1
        longest = loaded.model.spec.max_positions
        if longest is not None and length - 1 > longest:
            raise ValueError(
                f"reuse: --prompt-tokens and --output-tokens must be at most {longest} together, the model's context. "
                f"Got {length - 1}. Lower them."
            )
        ids = [list(text) for text in tokenizer.encode_all(texts)]
        return Path(found.name).name, found.hash, cut_windows(ids, length=length, windows=options.windows)


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Callable[[str, int], None], Callable[[int], None]]]:
    """A bar on stderr: what is measured now, and tokens done."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), disable=quiet, transient=True) as progress:
        task = progress.add_task("reference", total=None)

        def began(what: str, total: int) -> None:
            progress.reset(task, total=total, description=what)

        yield began, lambda tokens: progress.advance(task, tokens)
