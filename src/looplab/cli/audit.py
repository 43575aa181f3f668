"""`looplab audit MODEL`: what the depth of a model is worth, with intervals, in one folder."""

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape

import looplab
from looplab._config import config_hash
from looplab._registry import did_you_mean
from looplab.audit.case import CONTROL, MODEL, Case, Name
from looplab.audit.compare import Summary, compare, summary
from looplab.audit.config import DEFAULT_PROBES, AuditConfig
from looplab.audit.documents import check_domain_name
from looplab.audit.folder import LEDGER, AuditFolder, FolderBusyError
from looplab.audit.footprint import GIB, SPOOL_BYTES, Footprint, footprint
from looplab.audit.positive_controls import ControlOutcome, run_self_check
from looplab.audit.problems import Problems
from looplab.audit.protocol import AuditPlan, CannotAudit, Measurement, plan_audit, trained_task
from looplab.audit.result import DENSE_MESSAGE, RESULTS, AuditResult, ModelCard, ScheduleEntry, SelfTest
from looplab.audit.schedules import full_plan
from looplab.audit.self_tests import NonFiniteError, SelfTestError
from looplab.audit.tables import write_tables
from looplab.audit.watch import PHASES, Watcher
from looplab.cli import exit_codes
from looplab.cli.checkpoint import ReadAs, open_checkpoint
from looplab.cli.device import check_device
from looplab.cli.exit_codes import UserError, user_error
from looplab.data.corpus import builtin_corpus
from looplab.data.documents import DataError, DocumentSet, read_documents
from looplab.data.tokenizers import Tokenizer, load_tokenizer
from looplab.executors import Executor, WorkerDied, executor
from looplab.interop import LoadedModel
from looplab.records import Level, dump_json, write_atomic
from looplab.report import write_comparison, write_report
from looplab.tasks.base import TASKS, Task

Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]
NONE = "none"
BUILTIN = "builtin"
"""The path of the built-in corpus."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class Options(ReadAs):
    """Say what the depth of a model is worth, with intervals.

    Runs the model cut short, from the end, and with repeated applications; refits the readout on separate documents;
    tells how the loss gap of depth splits, what cannot be told apart, and how many loops to pay for. Writes report.html
    and results.json. The same command in the same folder goes on with a killed audit, and prints a finished one again.
    A unit is what schedules move: one application, or one pass or cycle of several blocks.
    """

    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL [MODEL ...]")]
    """Checkpoint folders, or names of built-in checkpoints (see `looplab list`). Several are audited one after another,
    each in a folder of its own below --out, and compared on one page."""
    data: Repeated = ()
    """NAME=PATH of a .txt, .jsonl or .parquet file; may be given several times, each a domain of its own. The path
    "builtin" is the built-in corpus, which is also the default."""
    calibration: Repeated = ()
    """NAME=PATH of separate calibration documents for the domain NAME. Default: each domain is split by hash."""
    task: str = ""
    """Instead of texts, problems of this task (see `looplab task`): answers are scored. Default for a model that was
    trained on a task: that one, with its options."""
    difficulty: tuple[int, ...] = ()
    """Difficulties of the task, each a domain of its own. Default: those that it trains at."""
    text_field: str = "text"
    """Field or column that holds the text."""
    tokenizer: str = ""
    """A folder with tokenizer.json, or "bytes". Default: the model's own."""
    control: str = ""
    """A dense checkpoint as negative control, or "none". Default: the twin of a built-in model."""

    num_steps: tuple[int, ...] = ()
    """Iterations of the full plan: one number, or one per block. Default: what the model itself runs."""
    grid: str = ""
    """Numbers of units to cut at: "all", or a list such as 1,2,4. Default: all up to 16, else landmarks."""
    controls: str = "all"
    """Controls besides prefix and repeat, of suffix,factorial,permute,pinned,order,regrid,inner; "none", or "all" that
    can be identified."""
    schedule: Repeated = ()
    """A further schedule; may be given several times. Forms: prefix(k) suffix(k) repeat(k) same(a) cyclic(a)
    repeat_first(a) permute(seed) pinned(j) layer_major pass_major extend_last(a) extend_cycle(a) regrid(k)
    inner(prefix(1)), or applications as "[0.0 0.1 1.0]"."""
    extend: str = ""
    """Numbers of units past the trained plan, such as 12,16, made by repeating trained units. Default: none."""
    permutations: int = 4
    """Draws of the permuted order."""

    probes: str = ",".join(DEFAULT_PROBES)
    """Refitted readouts, of temperature,affine,full_rank; or "none"."""
    objective: Literal["nll", "kl"] = "nll"
    """What the full-rank probe minimises: the loss, or the divergence from the model's own full depth."""
    documents: int = 200
    """Evaluation documents per domain, at most."""
    calibration_documents: int = 200
    """Calibration documents per domain, at most."""
    max_tokens: int | None = None
    """Longest document in tokens. Default: 1024, or the trained context where that is shorter."""
    windows: int = 1
    """Most windows of a text that is longer than that; each goes on where the one before ended."""
    calibration_tokens: int = 50_000
    """Calibration tokens per domain, at most; whole documents."""
    affine_tokens: int = 12_000
    """Tokens of the affine fit, at most; whole documents."""

    init_seeds: int = 3
    """Noise seeds for a model that starts from noise."""
    init: Literal["model", "zero"] = "model"
    """Start as the model does, or from zero noise."""
    seed: int = 0
    """Decides the split, the draws and the noise."""

    replicates: int = 10_000
    """Bootstrap replicates."""
    level: float = 0.95
    """Level of the intervals."""
    margin_nats: float = 0.02
    """Effects inside this margin count as zero ..."""
    margin_share: float = 0.05
    """... if they are also inside this share of the gap."""
    weighting: Literal["token", "document"] = "token"
    """Every token counts alike, or every document."""

    device: str = "auto"
    """Device of PyTorch: auto, cpu, cuda, cuda:1."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Type the weights are cast to."""
    batch_tokens: int = 8192
    """Most positions of one launch."""

    out: Path = Path("audit-out")
    """Folder of the audit."""
    fresh: tyro.conf.FlagCreatePairsOff[bool] = False
    """Remove an audit with other settings from the folder."""
    beside: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Folder of a finished audit to show beside this one; may be given several times."""
    no_tokens: tyro.conf.FlagCreatePairsOff[bool] = False
    """Leave out tokens.parquet."""
    time: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write measured milliseconds into results and report, which then no longer repeat byte for byte. They are always
    in ledger.json."""
    keep_partial: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep the hidden states of calibration documents too; they are large and can be made again."""
    memory: str = "auto"
    """Most memory of the audit besides Python itself, such as 4G; "auto" is what the machine has free."""
    executor: Literal["local", "ray"] = "local"
    """Where the work runs: processes of this machine, or a Ray cluster. The numbers are the same."""
    workers: int = 1
    """Worker processes; 1 of "local" is this process."""
    address: str = ""
    """Address of a running Ray cluster; default: one is started here."""
    self_check: tyro.conf.FlagCreatePairsOff[bool] = False
    """Audit eight models whose answer is known beforehand, print what was found, and stop; takes no MODEL."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print schedules and counts, and stop."""
    fail_on: Literal["none", "warning", "failure"] = "none"
    """Exit with 6 if there is a finding of this level or above."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the result and nothing else."""
    brief: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the verdict of every domain, a line each, and nothing else."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = tyro.cli(Options, args=list(argv), prog="looplab audit")
    command = shlex.join(["looplab", "audit", *argv])
    watcher = ProgressLines(quiet=options.quiet or options.brief)
    if options.self_check:
        return _self_check(options)
    try:
        if len(options.models) == 1:
            return _one(options, watcher, command)
        return _several(options, watcher, command)
    except KeyboardInterrupt:
        print(f"Interrupted. To go on: {command}", file=sys.stderr)
        raise


def _self_check(options: Options) -> int:
    """Audits the positive controls."""
    if options.models:
        raise UserError(
            f"--self-check takes no MODEL. Got {options.models[0]!r}. Leave one of them out.", exit_codes.USAGE
        )

    def told(outcome: ControlOutcome) -> None:
        if not options.quiet:
            verdict = "passed" if outcome.passed else "FAILED"
            print(f"{outcome.name} {outcome.title}: {verdict}, {outcome.seconds:.1f} s", file=sys.stderr)

    check = run_self_check(write_report=write_report, watcher=told, seed=options.seed)
    print(check)
    return exit_codes.DONE if check.passed else exit_codes.SELF_TEST


def _one(options: Options, watcher: "ProgressLines", command: str) -> int:
    plan = _plan(options, options.models[0])
    watcher.chosen(plan, options)
    sizes = _fitting(plan, options)
    if options.dry_run:
        print("\n".join(dry_run_lines(plan, sizes)))
        return exit_codes.DONE
    beside = [_finished(folder) for folder in options.beside]
    _executor(options)  # refuses what it cannot take, whatever the folder holds
    with user_error(exit_codes.BUSY, (FolderBusyError,)), AuditFolder(options.out) as folder:
        facts = manifest_facts(plan, command)
        result = folder.claim(settings(plan, options), scope(plan), facts, fresh=options.fresh)
        if result is None:
            measurement = _measure(plan, options.models[0], folder, options, watcher)
            result = _write(measurement, folder, options, watcher, command, beside)
        elif beside:
            write_report(result, options.out, beside)
    if options.brief:
        print("\n".join(f"{result.model.name}: {domain.verdict.sentence}" for domain in result.domains))
    else:
        print(result)
        print(f"Report: {options.out / 'report.html'}")
    return exit_code([result], options.fail_on)


def _several(options: Options, watcher: "ProgressLines", command: str) -> int:
    """Audits every model in a folder of its own, then compares them."""
    if not options.models:
        raise UserError("MODEL must be a checkpoint folder or a built-in name. Got none. Name one.", exit_codes.USAGE)
    if options.beside:
        raise UserError(
            "--beside takes one MODEL. Got several, which are shown side by side already.", exit_codes.USAGE
        )
    if options.brief:
        raise UserError("--brief takes one MODEL. Got several, which are compared. Use --quiet.", exit_codes.USAGE)
    summaries: dict[str, Summary] = {}
    for model, name in zip(options.models, _folder_names(options.models), strict=True):
        plan = _plan(options, model)
        watcher.chosen(plan, options)
        own = shlex.join(["looplab", "audit", model])
        sizes = _fitting(plan, options)
        if options.dry_run:
            print("\n".join(dry_run_lines(plan, sizes)))
            continue
        with user_error(exit_codes.BUSY, (FolderBusyError,)), AuditFolder(options.out / name) as folder:
            done = folder.claim(settings(plan, options), scope(plan), manifest_facts(plan, own), fresh=options.fresh)
            measurement = _measure(plan, model, folder, options, watcher)
            result = done or _write(measurement, folder, options, watcher, own, ())
            summaries[name] = summary(measurement, result)
    if options.dry_run:
        return exit_codes.DONE
    with user_error(exit_codes.DATA, (DataError,)):
        comparison = compare(summaries, command)
    results = [each.result for each in summaries.values()]
    page = write_comparison(comparison, results, options.out)
    print(comparison)
    print(f"Report: {page}")
    return exit_code(results, options.fail_on)


def _folder_names(models: Sequence[str]) -> list[str]:
    """A folder name for every model: the last part of its path, numbered where several share one."""
    names = [Path(model).resolve().name if Path(model).exists() else model.replace("/", "-") for model in models]
    return [f"{name}-{names[:i].count(name) + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _finished(folder: Path) -> AuditResult:
    try:
        return AuditResult.load(folder)
    except FileNotFoundError:
        message = f"--beside {folder}: no {RESULTS} there. Give the folder of a finished audit."
    except ValueError as error:
        message = f"--beside {folder}: {error}"
    raise UserError(message, exit_codes.DATA)


def exit_code(results: Sequence[AuditResult], fail_on: str) -> int:
    """6 if a finding of any audit reaches the level of `--fail-on`, else 0."""
    failing = {"none": (), "warning": (Level.WARNING, Level.FAILURE), "failure": (Level.FAILURE,)}[fail_on]
    return exit_codes.FINDING if any(result.worst() in failing for result in results) else exit_codes.DONE


def _plan(options: Options, model: str) -> AuditPlan:
    if options.batch_tokens < 1:
        raise UserError(f"--batch-tokens must be at least 1. Got {options.batch_tokens}.", exit_codes.USAGE)
    with user_error(exit_codes.USAGE, (ValueError,)):
        config = _config(options)
        sources = named_paths("--data", options.data)
        calibrations = named_paths("--calibration", options.calibration)
    device = _device(options.device)
    loaded = _load(model, options, device, read_as=options)
    with user_error(exit_codes.USAGE, (ValueError,)):
        config = _with_grid(config, options.grid, loaded.model.spec)
        problems = _problems(options, loaded)
    wanted = options.control or (NONE if problems else loaded.control) or NONE
    control = None if wanted == NONE else _load(wanted, options, device, option="--control")
    with user_error(exit_codes.DATA, (DataError,)):
        tokenizer: Tokenizer | None = load_tokenizer(options.tokenizer) if options.tokenizer else None
        sets = problems or _read("--data", sources, options.text_field) or {"text": builtin_corpus("heldout")}
        calibration = _read("--calibration", calibrations, options.text_field)
    with (
        user_error(exit_codes.USAGE, (ValueError,)),
        user_error(exit_codes.DATA, (DataError,)),
        user_error(exit_codes.MODEL, (CannotAudit,)),
    ):
        return plan_audit(
            loaded,
            sets,
            config,
            tokenizer=tokenizer,
            calibration=calibration,
            control=control,
            batch_tokens=options.batch_tokens,
        )


def _problems(options: Options, loaded: LoadedModel) -> dict[str, Problems]:
    """The problems that are asked for, or that the model was trained on, by domain; none for texts."""
    texts = {"--data": options.data, "--calibration": options.calibration, "--tokenizer": options.tokenizer}
    given = [option for option, value in texts.items() if value]
    if options.task and given:
        raise ValueError(f"--task takes no {given[0]}: its problems are the documents. Got both. Leave one out.")
    if options.task and options.task not in TASKS:
        near, known = did_you_mean(options.task, TASKS), ", ".join(TASKS)
        raise ValueError(f"--task must name a task. Got {options.task!r}.{near} Known: {known}.")
    trained = trained_task(loaded.facts)
    task: Task | None = None if given else trained
    if options.task and (trained is None or trained.name != options.task):
        task = TASKS[options.task]()
    if task is None and options.difficulty:
        raise ValueError(f"--difficulty is of a task. Got {options.difficulty[0]} and texts. Add --task NAME.")
    if task is None:
        return {}
    made = (Problems(task=task, difficulty=d) for d in options.difficulty or task.train_difficulties)
    return {problems.domain: problems for problems in made}


def _load(
    name: str, options: Options, device: str, *, option: str = "MODEL", read_as: ReadAs | None = None
) -> LoadedModel:
    found = [path.name for path in sorted(Path(name).glob("*")) if path.suffix in (*PICKLES, ".safetensors")]
    if found and not any(entry.endswith(".safetensors") for entry in found):
        raise UserError(
            f"weights must be safetensors. Found only {found[0]} in {name}. "
            f"Convert it once: looplab convert {name}/{found[0]} OUT.",
            exit_codes.MODEL,
        )
    try:
        return open_checkpoint(name, read_as, dtype=options.dtype, device=device)
    except UserError as error:
        raise UserError(error.message.replace("MODEL must", f"{option} must", 1), error.code) from error


def _config(options: Options) -> AuditConfig:
    names = {field for field in AuditConfig.__dataclass_fields__} & set(Options.__dataclass_fields__)
    plain = {name: getattr(options, name) for name in names - {"num_steps", "grid", "controls", "probes", "extend"}}
    controls = None if options.controls == "all" else _listed(options.controls)
    return AuditConfig(
        **plain,
        num_steps=options.num_steps or None,
        controls=controls,
        schedules=options.schedule,
        probes=_listed(options.probes),
        extend=_numbers("--extend", options.extend),
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    entries = _listed(text)
    if not all(entry.isdecimal() and int(entry) > 0 for entry in entries):
        raise ValueError(f"{option} must be whole numbers above 0, such as 12,16. Got {text!r}.")
    return tuple(map(int, entries))


def _listed(text: str) -> tuple[str, ...]:
    """The entries of a comma-separated list; "none" has none."""
    return () if text in ("", NONE) else tuple(entry.strip() for entry in text.split(","))


def _with_grid(config: AuditConfig, text: str, spec: Any) -> AuditConfig:
    """The configuration with the grid that `--grid` asks for."""
    if not text:
        return config
    steps = config.num_steps
    units = full_plan(spec, steps[0] if steps and len(steps) == 1 else steps).M
    if text == "all":
        grid = tuple(range(1, units + 1))
    else:
        entries = [entry.strip() for entry in text.split(",")]
        if not all(entry.isdecimal() and 1 <= int(entry) <= units for entry in entries):
            raise ValueError(f"--grid must be whole numbers from 1 to {units}. Got {text!r}.")
        grid = tuple(int(entry) for entry in entries)
    return AuditConfig(**{**vars(config), "grid": grid})


def named_paths(option: str, entries: Sequence[str]) -> dict[str, str]:
    """NAME=PATH entries as a mapping; ValueError for another form, a name given twice or one that is no file name."""
    found: dict[str, str] = {}
    for entry in entries:
        name, separator, path = entry.partition("=")
        if not separator or not name or not path:
            raise ValueError(f"{option} must be NAME=PATH. Got {entry!r}. Write text={entry}.")
        check_domain_name(name, f"{option} NAME")
        if name in found:
            raise ValueError(f"{option} must name every domain once. Got {name!r} twice. Choose another name.")
        found[name] = path
    return found


def _read(option: str, sources: dict[str, str], text_field: str) -> dict[str, DocumentSet]:
    return {
        name: builtin_corpus("heldout")
        if path == BUILTIN
        else read_documents(path, text_field=text_field, option=f"{option} {name}={path}")
        for name, path in sources.items()
    }


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name)
    return name


def settings(plan: AuditPlan, options: Options) -> dict[str, Any]:
    """Flat names and values that the numbers depend on, for the manifest; the seed first."""
    config = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(plan.config).items()}
    machine = {"looplab": looplab.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return {
        "seed": config.pop("seed"),
        **config,
        **plan.identity,
        "tokens": not options.no_tokens,
        "time": options.time,
        **machine,
    }


def scope(plan: AuditPlan) -> dict[str, tuple[str, ...]]:
    """What is measured; an audit in the same folder may have measured less."""
    return {"schedules": tuple(plan.subject.words), "domains": tuple(plan.domains)}


def manifest_facts(plan: AuditPlan, command: str) -> dict[str, Any]:
    """What else the manifest says."""
    return {
        "config_hash": config_hash(plan.config),
        "documents": {
            name: {
                "source": domain.source,
                "evaluation": [document.content_key for document in domain.evaluation.documents],
                "calibration": [document.content_key for document in domain.calibration.documents],
            }
            for name, domain in plan.domains.items()
        },
        "command": command,
    }


def _cases(options: Options, model: str) -> dict[Name, Case]:
    """The cases of an audit, made in a worker process."""
    return _plan(options, model).cases


def _measure(
    plan: AuditPlan, model: str, folder: AuditFolder, options: Options, watcher: "ProgressLines"
) -> Measurement:
    """Does what the folder lacks."""
    with (
        watcher.shown(),
        user_error(exit_codes.DATA, (DataError, NonFiniteError)),
        user_error(exit_codes.SELF_TEST, (SelfTestError,)),
        user_error(exit_codes.UNEXPECTED, (WorkerDied,)),
    ):
        return plan.measure(
            folder.journal,
            executor=_executor(options),
            make=partial(_cases, options, model),
            watcher=watcher,
            keep_tokens=not options.no_tokens,
            keep_hidden=options.keep_partial,
            spool_bytes=_spool_bytes(memory_bytes(options.memory)),
        )


def _write(
    measurement: Measurement,
    folder: AuditFolder,
    options: Options,
    watcher: "ProgressLines",
    command: str,
    beside: Sequence[AuditResult],
) -> AuditResult:
    """Writes the files of an audit, the numbers last."""
    with watcher.shown():
        result = measurement.result(command, times=options.time)
        watcher.advanced("report", "", 0, 1, "")
        collected = {domain: part for (role, domain), part in measurement.collected.items() if role == MODEL}
        write_tables(folder.path, folder.journal, collected, keep_tokens=not options.no_tokens)
        ledger: dict[str, Any] = {
            "counts": result.counts,
            "ran": {phase: made.to_dict() for phase, made in measurement.ran.items()},
        }
        ledger["milliseconds_per_token"] = measurement.milliseconds
        write_atomic(folder.path / LEDGER, dump_json(ledger))
        write_report(result, folder.path, beside)
        result.save(folder.path)
    return result


def _executor(options: Options) -> Executor:
    with user_error(exit_codes.USAGE, (ValueError, ImportError)):
        return executor(
            options.executor,
            workers=options.workers,
            threads=torch.get_num_threads(),
            address=options.address or None,
        )


def memory_bytes(text: str) -> int:
    """Bytes of a size such as "4G", "512M" or a plain number; "auto" is the memory that is free.

    Raises:
        ValueError: Something else.
    """
    if text == "auto":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**62
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:iB|B)?", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"--memory must be a size such as 4G or 512M, or auto. Got {text!r}.")
    return round(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))


def _spool_bytes(allowed: int) -> int:
    """What the spool may hold: an eighth, and no more than by default."""
    return min(SPOOL_BYTES, allowed // 8)


def _fitting(plan: AuditPlan, options: Options) -> dict[Name, Footprint]:
    """The footprint of every case; refuses what does not fit."""
    with user_error(exit_codes.USAGE, (ValueError,)):
        allowed = memory_bytes(options.memory)
    sizes = {name: footprint(case, spool_bytes=_spool_bytes(allowed)) for name, case in plan.cases.items()}
    least, memory = (max(getattr(size, name) for size in sizes.values()) for name in ("least", "memory"))
    given = _size(allowed) if options.memory == "auto" else options.memory
    if least > allowed:
        raise UserError(
            f"one document needs {_size(least)} and --memory is {given}. Lower --max-tokens or raise --memory.",
            exit_codes.DATA,
        )
    if memory > allowed:
        raise UserError(
            f"a launch of {options.batch_tokens} positions needs {_size(memory)} and --memory is {given}. "
            "Lower --batch-tokens or raise --memory.",
            exit_codes.DATA,
        )
    disk = sum(size.hidden_disk for size in sizes.values()) + max(
        size.disk - size.hidden_disk for size in sizes.values()
    )
    place = next(folder for folder in (options.out, *options.out.absolute().parents) if folder.is_dir())
    if not os.access(place, os.W_OK):
        raise UserError(
            f"--out must be in a folder that can be written. Got {options.out}. Choose another.", exit_codes.USAGE
        )
    free = shutil.disk_usage(place).free
    if disk > free:
        raise UserError(
            f"the spool needs {disk / 1e9:.1f} GB, {free / 1e9:.1f} free in {place}. "
            "Free some, choose another --out, or lower --calibration-tokens.",
            exit_codes.DATA,
        )
    return sizes


def dry_run_lines(plan: AuditPlan, sizes: Mapping[Name, Footprint]) -> Iterator[str]:
    """The schedule table, the exact counts of a run, and what it needs."""
    yield from schedule_lines(plan.card, plan.subject.rows)
    for name, domain in plan.domains.items():
        for side in ("evaluation", "calibration", "training"):
            split = getattr(domain, side)
            if split.documents:
                yield f"{name}: {len(split.documents)} {side} documents, {split.tokens:,} scored tokens"
    subject = plan.subject
    total = subject.minimal * plan.documents * subject.seeds
    yield f"{subject.minimal} applications per document ({subject.naive} one by one), {total:,} in all"
    yield f"{len(subject.words)} readouts per document, {subject.live_states} states held at once"
    control = plan.control_subject
    if control is not None and plan.control is not None:
        made = control.minimal * plan.walked(CONTROL)
        yield f"control {plan.control.name}: {control.minimal} applications per document, {made:,} in all"
    size = max(sizes.values(), key=lambda size: size.memory)
    parts = {
        "weights": size.weights,
        f"context and {size.live_states} + 1 states of a launch": size.launch,
        "spooled hidden states": min(size.spool, size.spool_limit),
        "or a fit": size.fit,
        "or statistics": size.statistics,
        "logits": size.logits,
    }
    listed = ", ".join(f"{name} {_size(number)}" for name, number in parts.items())
    yield f"memory besides Python and the inside of one application: at most {_size(size.memory)} ({listed})"
    yield f"disk while it runs: {_size(sum(size.disk for size in sizes.values()))}"


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"


def schedule_lines(card: ModelCard, rows: Sequence[ScheduleEntry]) -> Iterator[str]:
    """The schedule map; rows that are not run say why."""
    if card.dense:
        yield DENSE_MESSAGE
    yield f"{card.name}: {card.applications} applications, {card.units} units, kmid {card.kmid}"
    for row in rows:
        count = f"{row.applications} application{'s' if row.applications > 1 else ''}"
        said = f"not identifiable: {row.reason}" if row.reason else count
        yield f"  {row.name:<16} {said}"


def progress_line(phase: str, domain: str, done: int, total: int, schedule: str, seconds: float) -> str:
    """`[4/6] evaluate text  applications 18,432/25,600  72%  repeat(3)  1.9k/s  eta 0:04`."""
    unit = "fits" if phase == "fit" else "applications"
    head = f"[{PHASES.index(phase) + 1}/{len(PHASES)}] {phase}{f' {domain}' if domain else ''}"
    if done == 0:
        return head
    rate = done / max(seconds, 1e-9)
    speed = f"{rate / 1000:.1f}k/s" if rate >= 1000 else f"{rate:.1f}/s"
    left = round((total - done) / rate)
    share = f"{100 * done // total}%"
    return f"{head}  {unit} {done:,}/{total:,}  {share}  {schedule}  {speed}  eta {left // 60}:{left % 60:02d}"


class ProgressLines(Watcher):
    """Progress on stderr: a line that is rewritten on a terminal, one line every ten seconds elsewhere."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None):
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._live = self._console.is_terminal
        self._phase, self._done = "", -1
        self._started = self._last = 0.0
        self._status: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the audit runs."""
        with self._console.status("starting") as self._status:
            yield

    def chosen(self, plan: AuditPlan, options: Options) -> None:
        """Says which documents were chosen for a model that was trained on a task."""
        if plan.opened.task and not options.task:
            self._console.print(
                f"{plan.opened.name} was trained on {plan.opened.task}: its answers are scored, on "
                f"{', '.join(plan.domains)}. Choose others with --difficulty, --task or --data."
            )

    def planned(self, card: ModelCard, rows: Sequence[ScheduleEntry], minimal: int, naive: int) -> None:
        for line, row in zip(schedule_lines(card, rows), [None] * (1 + card.dense) + list(rows), strict=True):
            struck = row is not None and row.reason is not None
            self._console.print(f"[strike dim]{escape(line)}[/]" if struck else escape(line))
        self._console.print(f"{minimal} applications per document ({naive} one by one)")

    def tested(self, test: SelfTest) -> None:
        margin = "" if test.margin is None else f"  {test.margin:.1e} (limit {test.limit:g})"
        note = f"  {test.note}" if test.note else ""
        self._console.print(
            f"[1/{len(PHASES)}] self-test {test.name} {escape(test.title)}{margin}{escape(note)}", markup=False
        )

    def advanced(self, phase: str, domain: str, done: int, total: int, schedule: str) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._started, self._last, self._done = phase, now, 0.0, -1
        line = progress_line(phase, domain, done, total, schedule, now - self._started)
        finished = (done >= total or done == 0) and done != self._done
        self._done = done
        if self._live and self._status is not None:
            self._status.update(escape(line))
        if finished or (not self._live and now - self._last >= 10):
            self._last = now
            self._console.print(line, markup=False)
