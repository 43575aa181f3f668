"""A model on tasks of lm-eval at several depths, in one folder that can be gone on with.

    manifest.json    what the folder is an evaluation of; written first
    partial/         every finished (task, depth): a killed evaluation goes on from them, a larger one starts from them
    results.json     the numbers; written last

More tasks or more depths may follow on what is there; nothing else may differ. lm-eval builds the requests and turns
answers into metrics; every depth of a task sees the same few-shot examples, as their generator starts anew each time.
"""

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import looplab
from looplab.audit.folder import FolderBusyError
from looplab.audit.runner import weight_hash
from looplab.interop.eval_tasks import TaskError, Tasks, listening
from looplab.interop.lm_eval import STEPS, LooplabLM, generation
from looplab.interop.scoring import shared_applications
from looplab.journal import Journal, Part
from looplab.records import SCHEMA_VERSION, EvalResult, EvalScore, EvalTask, dump_json, write_atomic
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.spec import LoopSpec

MANIFEST, RESULTS, PARTIAL = "manifest.json", "results.json", "partial"
OWN = (RESULTS, "report.html", "tables.tex", "figures", PARTIAL, MANIFEST)
"""Everything an evaluation writes; `fresh` removes these and nothing else."""
REPLICATES = 1000
"""Bootstrap replicates of metrics whose standard error has no formula."""
GENERATIVE = "generate_until"
PACKAGES = ("lm-eval", "transformers", "datasets", "tokenizers")
COUNTS = (
    "launches", "row_applications", "encoded_tokens", "readouts", "head_tokens", "flops_forward", "kv_bytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How tasks are asked."""

    num_fewshot: int | None = None
    """Examples before every question; None: what the task says. A task that says 0 keeps it, as under lm-eval."""
    limit: int | None = None
    """Documents per task, the first ones; None: all."""
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    """Under a chat template: examples are turns of their own."""
    system_prompt: str = ""
    gen_kwargs: str = ""
    """NAME=VALUE,... that replace what generative tasks say."""

    def __post_init__(self) -> None:
        for name, least in (("num_fewshot", 0), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}. Got {value}. Leave it out for the task's own.")


def evaluate_tasks(
    lm: LooplabLM,
    tasks: Tasks,
    config: EvalConfig,
    folder: Path,
    *,
    command: str = "",
    fresh: bool = False,
    warned: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> EvalResult:
    """The result of all tasks at all depths; what the folder has is not run again.

    Args:
        folder: Locked by the caller, and there.
        fresh: Remove what another evaluation left.
        warned: What was said of the model when it was opened, for the record.
        say: Told the name of a task before it is run.
    Raises:
        FolderBusyError: The folder holds another run, or an evaluation with other settings.
        TaskError: A task that this model or lm-eval cannot run.
        RequestError: A request that the model cannot answer.
    """
    for task in tasks.tasks.values():
        _configure(task, config)
    settings, scope = _settings(lm, config), {"tasks": list(tasks.tasks), "depths": list(lm.depths)}
    known = _claim(folder, settings, scope, fresh)
    if known is not None:
        return known
    journal = Journal(folder / PARTIAL)
    for name, task in tasks.tasks.items():
        key = (name, _task_hash(task, config))
        missing = [depth for depth in lm.depths if (*key, str(depth)) not in journal]
        if missing and say is not None:
            say(name)
        if missing:
            _run(lm, name, task, missing, config, journal, key)
    result = _assembled(lm, tasks, config, journal, warned, command)
    write_atomic(folder / RESULTS, dump_json(result))
    return result


def chat_hash(lm: LooplabLM, config: EvalConfig) -> str:
    """SHA-256 of the chat template; empty where none is applied."""
    if not config.apply_chat_template:
        return ""
    return hashlib.sha256(lm.chat_template(True).encode()).hexdigest()


def trained_units(spec: LoopSpec, unit: str) -> tuple[int, int] | None:
    """Smallest and largest depth, counted in `unit`, at which the readout was trained; None if that is unknown."""
    law = spec.trained_depth
    if not isinstance(law, DepthSampler):
        return None
    depths = law.support()
    return (min(depths), max(depths)) if law.of_prefix == (unit != STEPS) else None


def _configure(task: Any, config: EvalConfig) -> None:
    """Few-shot count and generation options, as lm-eval's own command sets them."""
    from lm_eval.utils import simple_parse_args_string

    own = task.get_config("num_fewshot")
    if own is None or (config.num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=config.num_fewshot or 0)
    if task.OUTPUT_TYPE == GENERATIVE and config.gen_kwargs:
        task.set_config(key="generation_kwargs", value=simple_parse_args_string(config.gen_kwargs), update=True)
    if task.OUTPUT_TYPE == GENERATIVE:
        generation(task.get_config("generation_kwargs") or {})  # refuses before anything runs


def _settings(lm: LooplabLM, config: EvalConfig) -> dict[str, Any]:
    """Flat names and values that the numbers depend on, besides tasks and depths."""
    return {
        "weights": weight_hash(lm.loaded.model),
        "tokenizer": lm.tokenizer.hash,
        "dtype": str(lm.runner.weights.dtype).removeprefix("torch."),
        "device": lm.runner.weights.device.type,
        "exit rule": str(lm.exit_rule or ""),
        "kv rule": str(lm.kv_rule or lm.spec.kv_rule),
        "init": lm.init,
        "seed": lm.seed,
        "max length": lm.max_length,
        "num fewshot": config.num_fewshot,
        "limit": config.limit,
        "chat template": chat_hash(lm, config),
        "fewshot as multiturn": config.fewshot_as_multiturn,
        "system prompt": config.system_prompt,
        "gen kwargs": config.gen_kwargs,
        "looplab": looplab.__version__,
        "lm-eval": version("lm-eval"),
        "torch": torch.__version__,
    }


def _claim(folder: Path, settings: Mapping[str, Any], scope: Mapping[str, Any], fresh: bool) -> EvalResult | None:
    """Makes the folder that of this evaluation; returns its result if it is there already."""
    if fresh:
        for name in OWN:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    manifest = {"kind": "eval", "settings": dict(settings), "scope": dict(scope), "schema": SCHEMA_VERSION}
    if (folder / MANIFEST).exists():
        known = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if known.get("kind") != "eval":
            raise FolderBusyError(f"{folder} holds another run ({known.get('kind')}). Use another --out.")
        before = known["settings"]
        changed = [
            f"{name} {before.get(name)} -> {settings.get(name)}"
            for name in dict.fromkeys([*before, *settings])
            if before.get(name) != settings.get(name)
        ]
        if changed:
            raise FolderBusyError(
                f"{folder} holds an evaluation with other settings ({', '.join(changed)}). "
                "Use another --out or --fresh."
            )
        if known["scope"] == manifest["scope"] and (folder / RESULTS).exists():
            return EvalResult.from_json((folder / RESULTS).read_text(encoding="utf-8"))
    (folder / RESULTS).unlink(missing_ok=True)  # what follows is not finished
    for path in folder.rglob(".*.partial"):
        path.unlink(missing_ok=True)  # of a killed process
    write_atomic(folder / MANIFEST, dump_json(manifest))
    return None


def _task_hash(task: Any, config: EvalConfig) -> str:
    """Of a task's settings and of the documents that are asked. Where its files lie does not count."""
    plain = {k: v for k, v in task.dump_config().items() if k not in ("dataset_kwargs", "metadata")}
    made = hashlib.sha256(json.dumps(plain, sort_keys=True, default=_named).encode())
    for _, document in task.doc_iterator(limit=config.limit):
        made.update(json.dumps(document, sort_keys=True, default=_named).encode())
    return made.hexdigest()[:32]


def _named(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__name__


def _run(
    lm: LooplabLM,
    name: str,
    task: Any,
    depths: Sequence[int],
    config: EvalConfig,
    journal: Journal,
    key: tuple[str, str],
) -> None:
    """Runs one task at the depths that are missing, and keeps each as soon as it is there."""
    view = lm.of(depths)
    with listening() as heard:
        for depth in depths:
            view.ledger = Ledger()
            found = _scored(view.at(depth), name, task, config)
            requests, tokens = view.truncated.get((name, _kind(task)), (0, 0))
            facts = {
                "scores": {k: v for k, v in found["results"][name].items() if isinstance(v, (int, float))},
                "version": str(found["versions"].get(name, "")),
                "higher_is_better": found["higher_is_better"].get(name, {}),
                "num_fewshot": int(found["n-shot"].get(name) or 0),
                "documents": found["n-samples"][name]["effective"],
                "of": found["n-samples"][name]["original"],
                "truncated": requests,
                "lost_tokens": tokens,
                "steps": view.steps.get((name, depth)),
                "counts": {count: getattr(view.ledger, count) for count in COUNTS},
                "heard": list(heard),
            }
            lm.ledger.add(view.ledger)
            journal.put((*key, str(depth)), Part(facts=facts))


def _scored(lm: LooplabLM, name: str, task: Any, config: EvalConfig) -> Any:
    """lm-eval's own result for one task."""
    from lm_eval.evaluator import evaluate

    task.set_fewshot_seed(seed=lm.seed)
    unsafe = getattr(task, "UNSAFE_CODE", False)
    if unsafe or getattr(task, "MULTIMODAL", False):
        what = "code that the model wrote" if unsafe else "images or sound"
        raise TaskError(f"task {name} must be text alone and run nothing. Got a task with {what}. Leave it out.")
    return evaluate(
        lm=lm,
        task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
        limit=config.limit,
        bootstrap_iters=REPLICATES,
        log_samples=False,
        system_instruction=config.system_prompt or None,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=config.fewshot_as_multiturn and config.apply_chat_template,
    )


def _kind(task: Any) -> str:
    return "loglikelihood" if task.OUTPUT_TYPE == "multiple_choice" else task.OUTPUT_TYPE


def _assembled(
    lm: LooplabLM, tasks: Tasks, config: EvalConfig, journal: Journal, warned: Sequence[str], command: str
) -> EvalResult:
    ran: list[EvalTask] = []
    heard: list[str] = list(warned)
    scores: list[EvalScore] = []
    metrics: dict[int, dict[str, Any]] = {depth: {} for depth in lm.depths}
    for name, task in tasks.tasks.items():
        settings = _task_hash(task, config)
        parts = {depth: journal.get((name, settings, str(depth))).facts for depth in lm.depths}
        ran.append(_task(name, task, tasks.origins[name], settings, parts))
        for depth, facts in parts.items():
            scores += _rows(name, depth, facts["scores"], facts["higher_is_better"])
            heard += [f"{name}, lm-eval: {text}" for text in facts["heard"]]
            metrics[depth][name] = {k: _number(v) for k, v in facts["scores"].items()}
    for name, group in tasks.groups.items():
        better = {k: v for task in group.get_all_tasks() for k, v in task.higher_is_better().items()}
        for depth in lm.depths:
            with listening():
                summed = group.aggregate(metrics[depth])
            scores += _rows(name, depth, {k: v for k, v in summed.items() if isinstance(v, (int, float))}, better)
    spec = lm.spec
    return EvalResult(
        model=lm.loaded.name,
        architecture=f"{spec.name} {spec.version}",
        weights=weight_hash(lm.loaded.model),
        tokenizer=lm.tokenizer.hash,
        dtype=str(lm.runner.weights.dtype).removeprefix("torch."),
        device=lm.runner.weights.device.type,
        parameters=spec.params.total,
        trained_depth=str(spec.trained_depth),
        default_depth=str(spec.default_steps),
        depths=lm.depths,
        unit=lm.unit,
        trained_units=trained_units(spec, lm.unit),
        shared=shared_applications(lm.plans),
        exit_rule=str(lm.exit_rule or ""),
        kv_rule=str(lm.kv_rule or spec.kv_rule) if spec.kv_rules else "no cache",
        init=lm.init if spec.noise_width else "model",
        seeds=dict.fromkeys(("fewshot", "noise", "draws"), lm.seed),
        system_prompt=config.system_prompt,
        chat_template=chat_hash(lm, config),
        fewshot_as_multiturn=config.fewshot_as_multiturn and config.apply_chat_template,
        gen_kwargs=config.gen_kwargs,
        limit=config.limit,
        max_length=lm.max_length,
        batching=str(lm.batching),
        tasks=tuple(ran),
        scores=tuple(scores),
        notes=(*_own_notes(lm, config, ran), *dict.fromkeys(heard)),
        versions={
            "looplab": looplab.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: version(name) for name in PACKAGES},
        },
        command=command,
    )


def _own_notes(lm: LooplabLM, config: EvalConfig, ran: Sequence[EvalTask]) -> list[str]:
    """What a reader of the numbers has to know."""
    notes = [
        f"{task.name}: {task.truncated:,} inputs are longer than {lm.max_length} tokens and lost {task.lost_tokens:,} "
        "tokens on the left."
        for task in ran
        if task.truncated
    ]
    notes += [
        f"{task.name}: its own file says {task.num_fewshot} examples, which {config.num_fewshot} do not replace."
        for task in ran
        if config.num_fewshot not in (None, task.num_fewshot)
    ]
    shared, alone = shared_applications(lm.plans)
    deepest = max(len(plan) for plan in lm.plans.values())
    if shared > deepest:
        notes.append(
            f"The plans of these depths are no prefixes of the deepest: a rollout of all takes {shared} applications "
            f"({deepest} the deepest, {alone} one by one)."
        )
    if lm.init == "zero" and not lm.spec.noise_width:
        notes.append(f"{lm.spec.name} does not start from noise: init=zero changes nothing.")
    return notes


def _task(name: str, task: Any, origin: str, settings: str, parts: Mapping[int, Mapping[str, Any]]) -> EvalTask:
    first = next(iter(parts.values()))
    counts = {
        count: (max if count == "kv_bytes" else sum)(part["counts"][count] for part in parts.values())
        for count in COUNTS
    }
    return EvalTask(
        name=name,
        origin=origin,
        version=first["version"],
        output=str(task.OUTPUT_TYPE),
        documents=first["documents"],
        of=first["of"],
        num_fewshot=first["num_fewshot"],
        settings=settings,
        truncated=first["truncated"],
        lost_tokens=first["lost_tokens"],
        steps={str(depth): part["steps"] for depth, part in parts.items() if part["steps"] is not None},
        counts=counts,
    )


def _rows(name: str, depth: int, found: Mapping[str, Any], better: Mapping[str, Any]) -> list[EvalScore]:
    """lm-eval's `metric,filter` and `metric_stderr,filter` as rows."""
    rows = []
    for key, value in found.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            error = found.get(f"{metric}_stderr,{kind}")
            rows.append(
                EvalScore(
                    task=name,
                    depth=depth,
                    metric=metric,
                    filter=kind,
                    value=_number(value),
                    stderr=None if error is None else _number(error),
                    higher_is_better=better.get(metric),
                )
            )
    return rows


def _number(value: Any) -> float:
    """Journals write what is not finite as a word."""
    return float(value)
