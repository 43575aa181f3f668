"""`looplab eval MODEL --tasks ...`: tasks of lm-eval at several depths, with a curve for each."""

import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from looplab.cli import exit_codes
from looplab.cli.checkpoint import ReadAs, open_checkpoint
from looplab.cli.exit_codes import UserError, user_error

if TYPE_CHECKING:
    from looplab.interop.lm_eval import LooplabLM
    from looplab.records import EvalResult

EPILOGUE = """
Runs tasks of lm-eval (EleutherAI's harness) on a model at one depth or several. All depths of a log-likelihood are
scored in one rollout: 1,2,4,8 costs 8 applications per input and not 15. Text is generated once per depth.

TASKS are names of lm-eval (hellaswag, mmlu_*), task files (.yaml, with data files beside them), folders of task files,
or "builtin": three small tasks that need no network. Tasks whose data lies on a hub need a network the first time.

A depth is a number of steps; of a model that was trained on prefixes of its plan it is a number of applications.

OUT holds report.html, results.json, tables.tex and figures/. The same command goes on where it was killed, and prints a
finished evaluation again; more tasks and more depths may follow on it.

Examples:
  looplab eval text-2x4-sampled --tasks builtin --num-steps 1,2,4,8 --out eval-out
  looplab eval FOLDER --tasks my_task.yaml --num-steps 4 --num-fewshot 5 --limit 100
  looplab eval FOLDER --tasks gsm8k --exit-rule hazard --exit-threshold 0.5 --gen-kwargs max_gen_toks=128
"""


@dataclass(frozen=True, kw_only=True)
class Options(ReadAs):
    """Evaluate a model on tasks of lm-eval at several depths."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder, or the name of a built-in checkpoint (see `looplab list`)."""
    tasks: str
    """Tasks, separated by commas: names, task files, folders, or "builtin"."""
    include_path: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Folder of task files that may be named in --tasks; may be given several times."""
    num_steps: str = ""
    """Depths, such as 1,2,4,8. Default: what the model itself runs."""
    exit_rule: str = ""
    """Stop every token by a rule (hazard, latent, acceleration, kl, entropy, argmax, fixed); --num-steps is then the
    deepest."""
    exit_threshold: float | None = None
    """The rule's number, such as 0.5."""
    kv_rule: str = ""
    """What the cache keeps while generating: depth_indexed, last_exited, single, first, average, first_then_shared(s),
    mod_m(m). Default: what the model was trained with."""
    init: Literal["model", "zero"] = "model"
    """Start as the model does, or from zero noise."""
    seed: int = 1234
    """Of few-shot examples, noise and draws."""

    num_fewshot: int | None = None
    """Examples before every question. Default: what the task says; a task that says 0 keeps it."""
    limit: int | None = None
    """Documents per task, the first ones. Default: all."""
    apply_chat_template: tyro.conf.FlagCreatePairsOff[bool] = False
    """Ask in the chat format of the model's folder."""
    fewshot_as_one_turn: tyro.conf.FlagCreatePairsOff[bool] = False
    """Under a chat template: examples and question in one turn. Default: turns of their own."""
    system_prompt: str = ""
    """Text before everything else."""
    gen_kwargs: str = ""
    """NAME=VALUE,... for generative tasks: max_gen_toks, temperature, top_k, top_p, until, do_sample."""

    tokenizer: str = ""
    """A folder with tokenizer.json, or "bytes". Default: the model's own."""
    max_length: int | None = None
    """Longest input in tokens. Default: the trained context, or 2048."""
    batch_tokens: int = 8192
    """Most positions of one launch, padding included."""
    batch_size: int | None = None
    """Rows of one launch, instead of --batch-tokens."""
    device: str = "auto"
    """Device of PyTorch: auto, cpu, cuda, cuda:1."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Type the weights are cast to."""

    out: Path = Path("eval-out")
    """Folder of the evaluation."""
    fresh: tyro.conf.FlagCreatePairsOff[bool] = False
    """Remove an evaluation with other settings from the folder."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the result and nothing else."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = tyro.cli(Options, args=list(argv) or ["--help"], prog="looplab eval", description=EPILOGUE.strip())
    command = shlex.join(["looplab", "eval", *argv])
    console = Console(stderr=True, quiet=options.quiet, highlight=False, soft_wrap=True)
    depths = _depths(options.num_steps)
    try:
        result = _evaluated(options, depths, console, command)
    except KeyboardInterrupt:
        print(f"Interrupted. To go on: {command}", file=sys.stderr)
        raise
    print(result)
    print(f"Report: {options.out / 'report.html'}")
    return exit_codes.DONE


def _evaluated(options: Options, depths: list[int] | None, console: Console, command: str) -> "EvalResult":
    # lm-eval takes a second to import and is an extra: nothing above needs it.
    from looplab.audit.folder import AuditFolder, FolderBusyError
    from looplab.data.documents import DataError
    from looplab.interop.eval_tasks import TaskError, load_tasks
    from looplab.interop.evaluate import EvalConfig, evaluate_tasks
    from looplab.interop.lm_eval import RequestError
    from looplab.report.evaluation import write_evaluation

    wanted = [entry.strip() for entry in options.tasks.split(",") if entry.strip()]
    if not wanted:
        raise UserError('--tasks must name tasks. Got none. Try "builtin".', exit_codes.USAGE)
    with user_error(exit_codes.USAGE, (ValueError,)):
        config = EvalConfig(
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=not options.fewshot_as_one_turn,
            system_prompt=options.system_prompt,
            gen_kwargs=options.gen_kwargs,
        )
    with _said(console) as warned:
        lm = _model(options, depths)
    progress = ProgressLine(console)
    lm.say = progress.advanced
    with user_error(exit_codes.USAGE, (ImportError, KeyError)), user_error(exit_codes.DATA, (TaskError,)):
        tasks = load_tasks(wanted, options.include_path)
    with (
        progress.shown(),
        user_error(exit_codes.BUSY, (FolderBusyError,)),
        AuditFolder(options.out),
        _said(console),
        user_error(exit_codes.DATA, (DataError, TaskError, RequestError)),
    ):
        result = evaluate_tasks(
            lm, tasks, config, options.out, command=command, fresh=options.fresh, warned=warned, say=progress.started
        )
        write_evaluation(result, options.out)
    return result


def _model(options: Options, depths: list[int] | None) -> "LooplabLM":
    from looplab.cli.device import check_device
    from looplab.cli.kv_rule import kv_rule
    from looplab.data.documents import DataError
    from looplab.data.tokenizers import load_tokenizer
    from looplab.interop.lm_eval import LooplabLM, require_lm_eval
    from looplab.interop.scoring import Batching
    from looplab.recurrence.exit import exit_rule

    with user_error(exit_codes.USAGE, (ImportError,)):
        require_lm_eval()
    device = _device(options.device)
    check_device(device)
    if options.exit_threshold is not None and not options.exit_rule:
        raise UserError("--exit-threshold needs --exit-rule. Got none. Name one, such as hazard.", exit_codes.USAGE)
    with user_error(exit_codes.USAGE, (ValueError, KeyError)):
        rule = exit_rule(options.exit_rule, options.exit_threshold) if options.exit_rule else None
        kept = kv_rule(options.kv_rule)
        Batching(size=options.batch_size, tokens=options.batch_tokens)
    loaded = open_checkpoint(options.model, options, dtype=options.dtype, device=device)
    with user_error(exit_codes.DATA, (DataError,)):
        tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    with user_error(exit_codes.MODEL, (ValueError,)):
        lm = LooplabLM(
            loaded,
            tokenizer=tokenizer,
            num_steps=depths,
            exit_rule=rule,
            batch_size=options.batch_size,
            batch_tokens=options.batch_tokens,
            max_length=options.max_length,
            kv_rule=kept,
            init=options.init,
            seed=options.seed,
        )
        if options.apply_chat_template:
            lm.chat_template(True)  # refuses before the tasks are loaded
    return lm


def _depths(text: str) -> list[int] | None:
    if not text:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isdecimal() for entry in entries):
        raise UserError(f"--num-steps must be whole numbers, such as 1,2,4,8. Got {text!r}.", exit_codes.USAGE)
    return [int(entry) for entry in entries]


def _device(name: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


@contextmanager
def _said(console: Console) -> Iterator[list[str]]:
    """Warnings as single lines, and as texts for the record."""
    texts: list[str] = []

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        text = " ".join(str(message).split())
        if issubclass(category, UserWarning) and text not in texts:
            texts.append(text)
            console.print(f"warning: {text}", markup=False)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        before = warnings.showwarning
        warnings.showwarning = show
        try:
            yield texts
        finally:
            warnings.showwarning = before


class ProgressLine:
    """Progress on stderr: a line that is rewritten on a terminal, one line every ten seconds elsewhere."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console, clock
        self._task, self._what = "", ""
        self._start = self._last = 0.0
        self._status: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the evaluation runs."""
        with self._console.status("starting") as self._status:
            yield

    def started(self, task: str) -> None:
        """A task begins."""
        self._task, self._what = task, ""

    def advanced(self, what: str, done: int, total: int) -> None:
        """`looplab_text  log-likelihoods 64/240  27%  eta 0:12`."""
        now = self._clock()
        if what != self._what:
            self._what, self._start, self._last = what, now, now
        left = round((now - self._start) * (total - done) / max(1, done))
        line = f"{self._task}  {what} {done:,}/{total:,}  {100 * done // total}%  eta {left // 60}:{left % 60:02d}"
        if self._console.is_terminal and self._status is not None:
            self._status.update(line)
        elif done >= total or now - self._last >= 10:
            self._last = now
            self._console.print(line, markup=False)
