"""Batch files: lines of requests in, lines of answers out, whatever happens in between.

    OUT          one line per request, in the order of the input; written at the end, whole or not at all
    OUT.meta     what the run is: hash of the input, and everything that tokens depend on
    OUT.parts/   answers so far (`looplab.journal`), a part every two seconds; gone when OUT is there

A killed run loses what came after its last part, and asks for that again: draws depend on the seed of the run and the
`custom_id` of a line alone. Lines are those of the batch files of the OpenAI API.
"""

import fcntl
import hashlib
import json
import queue
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from looplab.engine.profile import DECIDING
from looplab.engine.request import BusyError, Event, RefusedError, Request
from looplab.engine.tokenizer import ServedTokenizer
from looplab.journal import Journal, Part
from looplab.records import dump_json, write_atomic
from looplab.server.answer import Answer, Header
from looplab.server.ask import ServedEngine, Sizes, Taken, Work, check_model, prepare
from looplab.server.body import json_type, parse_object
from looplab.server.chat import ChatTemplate
from looplab.server.errors import ApiError, api_error
from looplab.server.schema import chat_ask, completion_ask

URLS = ("/v1/completions", "/v1/chat/completions")
FIELDS = ("custom_id", "method", "url", "body")
PART_SECONDS = 2.0
BUSY_SECONDS = 0.02
"""How long the engine is left alone after it refused for its load."""
MAX_PROMPTS = 128
SHOWN_ERRORS = 10
Say = Callable[[int, int], None]
"""(finished lines, all lines)."""


class InputError(ValueError):
    """An input file that cannot be used; the message names its lines."""


class BatchBusyError(ValueError):
    """The output belongs to another run, or another process writes it."""


class EngineDiedError(RuntimeError):
    """The engine stopped; what had been answered is kept."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One request of an input file."""

    custom_id: str
    url: str
    body: Mapping[str, Any]

    @property
    def name(self) -> str:
        """An id of the request that is the same in every run."""
        return f"batch_req_{hashlib.blake2b(self.custom_id.encode(), digest_size=12).hexdigest()}"

    def seed(self, run_seed: int) -> int:
        """Of draws, where the body names none."""
        digest = hashlib.blake2b(f"{run_seed} {self.custom_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def read_lines(data: bytes) -> list[Line]:
    """The requests of an input file; blank lines are left out.

    Raises:
        InputError: Lines that are no requests, by number; nothing of the file is to be run then.
    """
    lines: list[Line] = []
    wrong: list[str] = []
    first: dict[str, int] = {}
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            line = _line(raw)
        except (ApiError, ValueError) as error:
            wrong.append(f"line {number}: {error}")
            continue
        if line.custom_id in first:
            wrong.append(f"line {number}: custom_id {line.custom_id[:60]!r} is that of line {first[line.custom_id]}")
        first.setdefault(line.custom_id, number)
        lines.append(line)
    if wrong:
        more = f" and {len(wrong) - SHOWN_ERRORS} more" if len(wrong) > SHOWN_ERRORS else ""
        raise InputError(f"{'; '.join(wrong[:SHOWN_ERRORS])}{more}. Nothing was run. Mend the file.")
    if not lines:
        raise InputError("the file holds no request. Nothing was run. Write one per line.")
    return lines


class BatchFolder:
    """What a run keeps beside its output; as a context it is locked."""

    def __init__(self, out: Path, errors: Path | None = None):
        self.out, self.errors = out, errors
        self.meta = out.with_name(f"{out.name}.meta")
        self.parts = out.with_name(f"{out.name}.parts")
        self._journal = Journal(self.parts)

    @contextmanager
    def claimed(self, settings: Mapping[str, Any]) -> Iterator[bool]:
        """Makes the output that of one run; gives whether it is finished already.

        Raises:
            BatchBusyError: It belongs to another run, or another process writes it.
        """
        manifest = {"kind": "batch", "settings": json.loads(dump_json(dict(settings)))}
        self._check(manifest)
        if self.out.exists():
            yield True
            return
        self.parts.mkdir(parents=True, exist_ok=True)
        with open(self.parts / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchBusyError(f"{self.out} is being written by another process. Wait for it.") from None
            write_atomic(self.meta, dump_json(manifest))
            yield False

    def answers(self) -> list[dict[str, Any]]:
        """What has been answered so far."""
        found: list[dict[str, Any]] = []
        for key in self._keys():
            found += self._journal.get(key).facts["lines"]
        return found

    def add(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Keeps more answers, all of them or none."""
        number = sum(1 for _ in self._keys())
        self._journal.put(_key(number), Part(facts={"lines": [dict(answer) for answer in answers]}))

    def finish(self, lines: Sequence[Line]) -> tuple[int, int]:
        """Writes the output, in the order of the input; returns how many were answered, and how many with an error."""
        known = {answer["custom_id"]: answer for answer in self.answers()}
        ordered = [known[line.custom_id] for line in lines]
        if self.errors is not None:
            write_atomic(self.errors, _jsonl([answer for answer in ordered if _failed(answer)]))
        write_atomic(self.out, _jsonl([answer for answer in ordered if self.errors is None or not _failed(answer)]))
        shutil.rmtree(self.parts)
        return self.counted()

    def counted(self) -> tuple[int, int]:
        """The same of an output that is there."""
        files = [self.out] if self.errors is None or not self.errors.exists() else [self.out, self.errors]
        answers = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
        return len(answers), sum(map(_failed, answers))

    def _keys(self) -> Iterator[tuple[str]]:
        number = 0
        while _key(number) in self._journal:
            yield _key(number)
            number += 1

    def _check(self, manifest: Mapping[str, Any]) -> None:
        try:
            known = json.loads(self.meta.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if self.out.exists():
                raise BatchBusyError(f"{self.out} is there already, of no batch run. Choose another output.") from None
            return
        except ValueError:
            raise BatchBusyError(f"{self.meta} must be JSON. It is not. Remove it, or choose another output.") from None
        before, after = known.get("settings", {}), manifest["settings"]
        changed = [name for name in dict.fromkeys([*after, *before]) if before.get(name) != after.get(name)]
        if changed or known.get("kind") != "batch":
            listed = ", ".join(f"{name} {before.get(name)} -> {after.get(name)}" for name in changed)
            raise BatchBusyError(f"{self.out} belongs to another run ({listed}). Choose another output.")


class Batch:
    """Runs the lines of a file.

    Args:
        names: Of the model; a body may name one of them.
        most: Lines under way at once.
        seed: Of draws of lines that name none.
    """

    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: ServedTokenizer,
        *,
        names: tuple[str, ...],
        most: int,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine, self._tokenizer, self._names = engine, tokenizer, names
        self._most, self._seed, self._clock = most, seed, clock
        self._card = engine.describe()
        source = tokenizer.chat_template
        self._template = None if source is None else ChatTemplate(source, tokenizer)
        self._events: queue.SimpleQueue[tuple[Line, int, Event]] = queue.SimpleQueue()
        self._open: dict[str, Answer] = {}
        self._fresh: list[dict[str, Any]] = []

    def run(self, lines: Sequence[Line], folder: BatchFolder, say: Say = lambda done, total: None) -> None:
        """Answers every line that the folder has no answer for.

        Raises:
            EngineDiedError: The engine stopped.
            OSError: An answer could not be written; those before it are kept.
        """
        known = {answer["custom_id"] for answer in folder.answers()}
        todo = deque(line for line in lines if line.custom_id not in known)
        kept = self._clock()
        try:
            while todo or self._open:
                while todo and len(self._open) < self._most:
                    self._begin(todo.popleft())
                self._take()
                if self._clock() - kept >= PART_SECONDS:
                    self._keep(folder)
                    kept = self._clock()
                say(len(lines) - len(todo) - len(self._open), len(lines))
        finally:
            self._keep(folder)

    def _keep(self, folder: BatchFolder) -> None:
        if self._fresh:
            folder.add(self._fresh)
            self._fresh = []

    def _begin(self, line: Line) -> None:
        try:
            work = self._work(line)
            for request in work.requests:
                self._engine.check(request)
        except (ApiError, RefusedError) as error:
            self._end(line, error if isinstance(error, ApiError) else api_error(error))
            return
        seeds: list[int] = []
        header = Header(
            id=line.name,
            created=int(time.time()),
            model=work.ask.model or self._names[0],
            fingerprint=self._card["fingerprint"],
        )
        self._open[line.custom_id] = Answer(work, header, self._tokenizer, seeds)
        for prompt, request in enumerate(work.requests):
            seeds.append(self._submit(request, partial(self._post, line, prompt)).seed)

    def _submit(self, request: Request, post: Callable[[Event], None]) -> Taken:
        while True:
            try:
                return self._engine.submit(request, post)
            except BusyError as error:
                if not self._engine.alive:
                    raise EngineDiedError(str(error)) from None
                time.sleep(BUSY_SECONDS)

    def _work(self, line: Line) -> Work:
        chat = line.url == URLS[1]
        ask = chat_ask(line.body) if chat else completion_ask(line.body, max_prompts=MAX_PROMPTS)
        if ask.stream:
            raise ApiError("unsupported_parameter", "a batch file takes no stream; remove stream", "stream")
        check_model(ask.model, self._names)
        if ask.sampling.seed is None:
            ask = replace(ask, sampling=replace(ask.sampling, seed=line.seed(self._seed)))
        return prepare(ask, self._tokenizer, self._template, Sizes.of(self._card), name=line.name)

    def _post(self, line: Line, prompt: int, event: Event) -> None:
        self._events.put((line, prompt, event))

    def _take(self) -> None:
        """Waits for an event, and takes all there are."""
        if not self._open:
            return
        try:
            found = [self._events.get(timeout=PART_SECONDS / 2)]
        except queue.Empty:
            if not self._engine.alive:
                raise EngineDiedError("the engine stopped") from None
            return
        while not self._events.empty():
            found.append(self._events.get())
        for line, prompt, event in found:
            answer = self._open.get(line.custom_id)
            if answer is None:
                continue
            try:
                answer.take(prompt, event)
            except ApiError as error:
                if error.code in ("internal", "not_ready"):
                    raise EngineDiedError(error.message) from None
                self._end(line, error)
                continue
            if answer.done:
                self._end(line, answer.body())

    def _end(self, line: Line, outcome: ApiError | dict[str, Any]) -> None:
        self._open.pop(line.custom_id, None)
        status, body = (outcome.status, outcome.body()) if isinstance(outcome, ApiError) else (200, outcome)
        response = {"status_code": status, "request_id": line.name, "body": body}
        self._fresh.append({"id": line.name, "custom_id": line.custom_id, "response": response, "error": None})


def batch_settings(described: Mapping[str, Any], *, data: bytes, seed: int, names: Sequence[str]) -> dict[str, Any]:
    """What the answers of a run depend on."""
    keys = ("weights", "kv_rule", "numerics", "noise")
    return {
        "input": hashlib.sha256(data).hexdigest(),
        "seed": seed,
        "names": list(names),
        **{key: described[key] for key in keys},
        **{f"engine.{name}": described["config"][name] for name in DECIDING},
    }


def _line(raw: bytes) -> Line:
    value = parse_object(raw)
    if set(value) != set(FIELDS):
        raise ValueError(f"fields must be {', '.join(FIELDS)}; got {', '.join(map(str, value)) or 'none'}")
    custom_id, method, url, body = (value[field] for field in FIELDS)
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id must be a text; got {json_type(custom_id)}")
    custom_id.encode()
    if method != "POST":
        raise ValueError(f"method must be POST; got {method}")
    if url not in URLS:
        raise ValueError(f"url must be {' or '.join(URLS)}; got {url}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be an object; got {json_type(body)}")
    return Line(custom_id=custom_id, url=url, body=body)


def _failed(answer: Mapping[str, Any]) -> bool:
    return bool(answer["response"]["status_code"] >= 400)


def _key(number: int) -> tuple[str]:
    return (f"{number:06d}",)


def _jsonl(answers: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n" for answer in answers)
