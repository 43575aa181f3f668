"""LooplabLM: a looped model under lm-eval, at several depths at once.

    LooplabLM(looplab.load(NAME), num_steps=[1, 2, 4, 8])     one model for lm_eval.evaluator.evaluate
    lm.at(4)                                                  the same, answering as 4 steps do

The first question about a list of requests is answered for every depth in one pass (`scoring.py`); the other depths
find their answers ready. Generation runs one depth at a time (`decoding.py`). A depth is a number of steps,
`spec.plan(depth)`; of a model that was trained on the prefixes of its plan (`PrefixDepth`) it is a number of
applications, the plan's first ones: for one block that is the same.

What lm-eval defines is as in its own `hf` backend: a context's trailing blanks belong to the continuation, context and
continuation are encoded together, what is too long loses tokens on the left, long texts are scored in rolling windows
whose first token is predicted from bos (or eos), and a tokenizer that begins texts with bos does so there too.

Reference: Gao et al., "The Language Model Evaluation Harness", EleutherAI/lm-evaluation-harness.
Deviations: noise, where a model starts from it, is a function of seed, task and document; nothing is drawn from a
global generator. Windows of one text have noise of their own.
"""

import copy
import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from looplab.audit.runner import Runner
from looplab.data.tokenizers import Tokenizer
from looplab.interop.checkpoint import LoadedModel
from looplab.interop.decoding import Continuation, Prompt, Sampling, decode
from looplab.interop.scoring import Batching, Request, Score, score
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.exit import ExitRule
from looplab.recurrence.kv import CopyLast, DepthIndexed, KVRule
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import depth_plan, new_cache
from looplab.recurrence.plan import Plan
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.state import item_of

try:
    from lm_eval.api.model import LM
except ImportError:  # the package has to import without its extras; `require_lm_eval` says what is missing
    LM = object

SEED = 1234
"""lm-eval's own, so that few-shot examples are those of published numbers."""
LONGEST = 2048
"""Tokens of context for a model that declares no limit; lm-eval's own."""
MAX_TOKENS = 256
"""Generated tokens where a task names no number; lm-eval's own."""
TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
FIXED = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
"""Options of generation with the one value that is supported."""
STEPS, APPLICATIONS = "steps", "applications"
"""What a depth counts."""
Say = Callable[[str, int, int], None]
"""(what is done, finished, of how many): progress."""


class RequestError(ValueError):
    """A request of a task that this model cannot answer."""


def require_lm_eval() -> None:
    """Raises an ImportError that names the extra, where lm-eval is not installed."""
    if LM is object:
        raise ImportError("eval: lm-eval must be installed. It is not. Install it: pip install 'looplab[eval]'")


class LooplabLM(LM):  # type: ignore[misc, valid-type]
    """A model and its tokenizer as lm-eval asks them.

    Attributes:
        depths: What was asked for, ascending; `unit` says what they count.
        depth: The one whose answers are returned: the last, or that of `at`.
        ledger: Counts of everything that ran.
        truncated: (task, kind of request) -> how many inputs lost tokens on the left, and how many tokens.
        steps: (task, depth) -> mean exit step, under an exit rule.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        tokenizer: Tokenizer | None = None,
        num_steps: int | Sequence[int] | None = None,
        exit_rule: ExitRule | None = None,
        batch_size: int | None = None,
        batch_tokens: int = 8192,
        max_length: int | None = None,
        kv_rule: KVRule | None = None,
        init: str = "model",
        seed: int = SEED,
        say: Say | None = None,
    ):
        """Raises ValueError where the model cannot answer what lm-eval asks; warns beyond the trained depth.

        Args:
            tokenizer: Default: the model's own.
            num_steps: One depth or several; None: what the model itself runs.
            exit_rule: Of `looplab.recurrence.exit`; `num_steps` is then the deepest.
            batch_size: Rows per launch; None: as many as fit `batch_tokens`.
            max_length: Longest input; None: the trained context, or 2048 tokens.
            kv_rule: What the cache keeps while generating; None: what the model was trained with, under an exit rule
                with the last entry in place of one that an exited token never wrote.
            init: "model", or "zero": a random start is replaced by its mean.
            seed: Of noise and of draws.
        """
        require_lm_eval()
        super().__init__()
        self.loaded, self.spec = loaded, loaded.model.spec
        tokenizer = tokenizer or loaded.tokenizer
        _check_model(self.spec, tokenizer)
        assert tokenizer is not None
        if init not in ("model", "zero"):
            raise ValueError(f"init must be 'model' or 'zero'. Got {init!r}. Use 'model'.")
        self.tokenizer = tokenizer
        self.runner = Runner(loaded.model, seed=seed, zero_noise=init == "zero")
        self.init, self.seed = init, seed
        self.unit = depth_unit(self.spec)
        self.plans = _plans(self.spec, num_steps)
        self.depths = tuple(self.plans)
        self.depth = self.depths[-1]
        self.exit_rule = exit_rule
        if exit_rule is not None:
            if len(self.depths) > 1:
                raise ValueError(
                    f"num_steps must be one number under an exit rule, the deepest. Got {list(self.depths)}. "
                    f"Use {self.depth}."
                )
            if self.unit == APPLICATIONS and self.plans[self.depth] != self.spec.plan():
                raise ValueError(
                    f"num_steps must be left out under an exit rule for {self.spec.name}, whose depth counts "
                    f"applications. Got {self.depth}."
                )
            exit_rule.check(self.spec)
        self.kv_rule = kv_rule or _exit_kv_rule(self.spec, exit_rule)
        if kv_rule is not None:
            new_cache(self.spec, rows=1, capacity=1, num_steps=self._steps(), rule=kv_rule)  # refuses, or warns once
        self.batching = Batching(size=batch_size, tokens=batch_tokens)
        self.max_length = _longest(self.spec, max_length)
        self.ledger = Ledger()
        self.truncated: dict[tuple[str, str], tuple[int, int]] = {}
        self.steps: dict[tuple[str, int], float] = {}
        self.say = say
        self._answers: dict[str, dict[int, list[Any]]] = {}
        self._chat: Any = None

    def at(self, depth: int) -> "LooplabLM":
        """The same model, answering as `depth` steps do; answers and counts are shared."""
        if depth not in self.depths:
            raise ValueError(f"at: depth must be one of {list(self.depths)}. Got {depth}. Name it in num_steps.")
        view = copy.copy(self)
        view.depth = depth
        return view

    def of(self, depths: Sequence[int]) -> "LooplabLM":
        """The same model with some of its depths, and nothing remembered."""
        view = self.at(max(depths))
        view.plans = {depth: self.plans[depth] for depth in sorted(depths)}
        view.depths = tuple(view.plans)
        view._answers = {}
        return view

    def _steps(self) -> int | None:
        """The number of steps whose plan is run, or begun; None: the model's own."""
        return self.depth if self.unit == STEPS else None

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Log-probability of every continuation at `depth`, and whether greedy decoding would give it."""
        return [(found.logprob, found.greedy) for found in self._answered("loglikelihood", requests)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-probability of every text at `depth`."""
        return [found.logprob for found in self._answered("loglikelihood_rolling", requests)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """What the model says at `depth` after every context, up to a stop."""
        return self._answered("generate_until", requests)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat as one text, by the template in the model's folder."""
        return self._chat_tokenizer().apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template that `apply_chat_template` uses; empty where none is asked for."""
        return str(self._chat_tokenizer().chat_template) if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """The hash of the tokenizer."""
        return self.tokenizer.hash

    @property
    def prefix_token(self) -> int:
        """What an empty context is read as: bos, else eos."""
        token = self.tokenizer.eos if self.tokenizer.bos is None else self.tokenizer.bos
        if token is None:
            raise RequestError(
                "prefix: an empty context is read as bos or eos. Got a tokenizer that has neither. Name one of them in "
                "tokenizer_config.json."
            )
        return token

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; with bos in front where the tokenizer begins texts with it and this one does not yet."""
        ids = self.tokenizer.encode(text)
        if special and self.tokenizer.starts_with_bos and ids[:1] != [self.tokenizer.bos]:
            assert self.tokenizer.bos is not None
            return [self.tokenizer.bos, *ids]
        return ids

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of what goes on after it."""
        if context == "":
            whole = self.encode(continuation, special=False)
            prefix = self.prefix_token
            return ([prefix], whole) if whole[:1] != [prefix] else (whole[:1], whole[1:])
        blanks = len(context) - len(context.rstrip())
        text, rest = context[: len(context) - blanks], context[len(context) - blanks :] + continuation
        before, whole = self.encode(text), self.encode(text + rest)
        return (before, whole[len(before) :]) if before else ([self.prefix_token], whole)

    def _answered(self, kind: str, requests: list[Any]) -> list[Any]:
        key = _digest(kind, requests)
        if self.depth not in self._answers.get(key, {}):
            ready = {"loglikelihood": self._pairs, "loglikelihood_rolling": self._rolling}
            for task in {_task(request) for request in requests}:
                self.truncated[task, kind] = (0, 0)
            found = ready[kind](requests) if kind in ready else self._generated(requests)
            self._answers.setdefault(key, {}).update(found)
            self._warn_truncated(kind, requests)
        return self._answers[key][self.depth]

    def _pairs(self, requests: list[Any]) -> dict[int, list[Score]]:
        items = [item_of("eval", _task(r), *_document(r)) for r in requests]
        pairs = [self.encode_pair(*request.args) for request in requests]
        return self._scored("log-likelihoods", requests, [[pair] for pair in pairs], [[item] for item in items])

    def _rolling(self, requests: list[Any]) -> dict[int, list[Score]]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.encode(request.args[0]),
                    prefix_token=self.prefix_token,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        items = [
            [item_of("eval", _task(request), *_document(request), j) for j in range(len(own))]
            for request, own in zip(requests, windows, strict=True)
        ]
        return self._scored("texts", requests, windows, items)

    def _scored(
        self, what: str, requests: list[Any], pairs: list[list[tuple[list[int], list[int]]]], items: list[list[int]]
    ) -> dict[int, list[Score]]:
        """Depth -> one score per request, summed over its parts. An empty continuation is certain."""
        parts: list[Request] = []
        owners: list[int] = []
        for index, (own, names) in enumerate(zip(pairs, items, strict=True)):
            for (context, continuation), item in zip(own, names, strict=True):
                if continuation:
                    parts.append(self._fitted(requests[index], context, continuation, item))
                    owners.append(index)
        found = score(
            self.runner,
            parts,
            self.plans,
            batching=self.batching,
            exit_rule=self.exit_rule,
            num_steps=self._steps(),
            ledger=self.ledger,
            progress=self._progress(what, len(parts)),
        )
        summed: dict[int, list[Score]] = {}
        for depth, scores in found.items():
            by_request: list[list[Score]] = [[] for _ in requests]
            for owner, one in zip(owners, scores, strict=True):
                by_request[owner].append(one)
            summed[depth] = [_summed(own) for own in by_request]
            lengths = [len(part.continuation) for part in parts]
            self._keep_steps(requests, depth, [one.steps for one in scores], lengths)
        return summed

    def _fitted(self, request: Any, context: list[int], continuation: list[int], item: int) -> Request:
        """The request, without what is too long on the left."""
        if len(continuation) > self.max_length:
            raise RequestError(
                f"a continuation must be at most {self.max_length} tokens long. Got {len(continuation)} in "
                f"{_task(request)}, document {request.doc_id}. Use a model with a longer context."
            )
        lost = max(0, len(context) + len(continuation) - self.max_length - 1)
        if lost:
            self._lose(request, "loglikelihood", lost)
        return Request(tuple(context[lost:]), tuple(continuation), item)

    def _generated(self, requests: list[Any]) -> dict[int, list[str]]:
        seen: Counter[str] = Counter()
        groups: dict[tuple[Sampling, tuple[str, ...]], list[tuple[int, Prompt]]] = {}
        for index, request in enumerate(requests):
            context, options = request.args
            sampling, stops = generation(options)
            place = _digest("", [request])
            draws = item_of("draws", self.seed, _task(request), *_document(request), request.idx, seen[place])
            seen[place] += 1
            item = item_of("eval", _task(request), *_document(request))
            prompt = Prompt(self._prompt(request, context, sampling), item, draws)
            groups.setdefault((sampling, stops), []).append((index, prompt))
        said: list[str] = [""] * len(requests)
        progress = self._progress(f"texts at {self.depth} {self.unit}", len(requests))
        ran: list[Continuation] = []
        for (sampling, stops), members in groups.items():

            def ended(tokens: list[int], stops: tuple[str, ...] = stops) -> bool:
                text = self._decoded(tokens)
                return any(stop in text for stop in stops)

            found = decode(
                self.runner,
                [prompt for _, prompt in members],
                self.plans[self.depth],
                num_steps=self._steps(),
                sampling=sampling,
                ended=ended,
                batching=self.batching,
                eos=self.tokenizer.eos,
                kv_rule=self.kv_rule,
                exit_rule=self.exit_rule,
                ledger=self.ledger,
                progress=progress,
            )
            ran += found
            for (index, _), continuation in zip(members, found, strict=True):
                said[index] = _cut(self._decoded(continuation.tokens), stops)
        self._keep_steps(requests, self.depth, [one.steps for one in ran], [len(one.tokens) for one in ran])
        return {self.depth: said}

    def _prompt(self, request: Any, context: str, sampling: Sampling) -> tuple[int, ...]:
        room = self.max_length - sampling.max_tokens
        if room < 1:
            raise RequestError(
                f"max_gen_toks must be below the model's context of {self.max_length} tokens. Got "
                f"{sampling.max_tokens} in {_task(request)}. Lower it, for all tasks with --gen-kwargs "
                f"max_gen_toks={max(1, self.max_length // 4)}."
            )
        ids = self.encode(context) or [self.prefix_token]
        if len(ids) > room:
            self._lose(request, "generate_until", len(ids) - room)
        return tuple(ids[-room:])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token < self.tokenizer.vocab_size])

    def _lose(self, request: Any, kind: str, tokens: int) -> None:
        requests, lost = self.truncated.get((_task(request), kind), (0, 0))
        self.truncated[_task(request), kind] = (requests + 1, lost + tokens)

    def _warn_truncated(self, kind: str, requests: list[Any]) -> None:
        for task in dict.fromkeys(_task(request) for request in requests):
            count, tokens = self.truncated[task, kind]
            if count:
                warnings.warn(
                    f"{task}: {count} of {len(requests)} inputs are longer than {self.max_length} tokens and lost "
                    f"{tokens:,} tokens on the left.",
                    stacklevel=4,
                )

    def _keep_steps(
        self, requests: list[Any], depth: int, steps: Sequence[float | None], lengths: Sequence[int]
    ) -> None:
        """Mean exit step over tokens, of the task that asked."""
        pairs = [(step, length) for step, length in zip(steps, lengths, strict=True) if step is not None]
        tasks = {_task(request) for request in requests}
        if pairs and len(tasks) == 1:
            total = sum(length for _, length in pairs)
            self.steps[tasks.pop(), depth] = sum(step * length for step, length in pairs) / max(1, total)

    def _progress(self, what: str, total: int) -> Callable[[int], None] | None:
        if self.say is None:
            return None
        done, say = 0, self.say

        def progress(finished: int) -> None:
            nonlocal done
            done += finished
            say(what, done, total)

        return progress

    def _chat_tokenizer(self) -> Any:
        """The library's tokenizer of the folder, which renders chats; opened from the local disk alone."""
        if self._chat is None:
            self._chat = _chat_tokenizer(self.loaded)
        return self._chat


def generation(options: dict[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
    """What a task's generation options ask for: how tokens are chosen, and the texts that end a row.

    Raises:
        RequestError: An option that is not supported, or a number out of range.
    """
    left = dict(options)
    until = left.pop("until", None) or []
    stops = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    limits = [left.pop(name) for name in TOKEN_LIMITS if name in left]
    sample, temperature = left.pop("do_sample", None), left.pop("temperature", None)
    if sample is False or (sample is None and not temperature):
        temperature = 0.0
    known = {name: left.pop(name) for name in ("top_k", "top_p") if left.get(name) is not None}
    wrong = sorted(name for name, value in left.items() if name not in FIXED or value != FIXED[name])
    if wrong:
        raise RequestError(
            f"generation options must be until, do_sample, temperature, top_k, top_p or {TOKEN_LIMITS[0]}. Got "
            f"{', '.join(wrong)}. Leave it out of the task's generation_kwargs."
        )
    try:
        sampling = Sampling(
            max_tokens=int(next((limit for limit in limits if limit is not None), MAX_TOKENS)),
            temperature=1.0 if temperature is None else float(temperature),
            **known,
        )
    except (ValueError, TypeError) as error:
        raise RequestError(f"generation options: {error}") from None
    return sampling, stops


def _check_model(spec: LoopSpec, tokenizer: Tokenizer | None) -> None:
    if not spec.causal:
        raise ValueError(
            f"eval: MODEL must be causal: lm-eval asks for the next token. Got {spec.name}, which sees both "
            "directions. looplab audit takes it."
        )
    needed = sorted(name for name, must in spec.extras.items() if must)
    if needed:
        raise ValueError(f"eval: MODEL must need nothing but tokens. Got {spec.name}, which needs {', '.join(needed)}.")
    if tokenizer is None:
        raise ValueError("eval: MODEL must have a tokenizer. Got a folder without tokenizer.json. Put it there.")
    if tokenizer.vocab_size > spec.vocab[0]:
        raise ValueError(
            f"eval: the tokenizer must have at most the model's {spec.vocab[0]} ids. Got {tokenizer.vocab_size}. Use "
            "the tokenizer that the model was trained with."
        )


def depth_unit(spec: LoopSpec) -> str:
    """What a depth counts: steps, or applications of a model that was trained on the prefixes of its plan."""
    law = spec.trained_depth
    return APPLICATIONS if isinstance(law, DepthSampler) and law.of_prefix else STEPS


def _plans(spec: LoopSpec, num_steps: int | Sequence[int] | None) -> dict[int, Plan]:
    """Depth -> plan, ascending. A depth that the model lacks is a ValueError; beyond the trained one is a warning."""
    if num_steps is None:
        num_steps = _own_depth(spec)
    asked = [num_steps] if isinstance(num_steps, int) else sorted(num_steps)
    if not asked or len(set(asked)) < len(asked):
        raise ValueError(f"num_steps must be one depth or several different ones. Got {asked}. Name each once.")
    if depth_unit(spec) == STEPS:
        return {depth: depth_plan(spec, depth, 1)[0] for depth in asked}
    full = spec.plan()
    if asked[0] < 0 or asked[-1] > len(full):
        raise ValueError(
            f"num_steps must be from 0 to {len(full)}: {spec.name} was trained on the first applications of its plan "
            f"{full}, and a depth counts them. Got {asked}. Leave the others out."
        )
    return {depth: full[:depth] for depth in asked}


def _own_depth(spec: LoopSpec) -> int:
    if depth_unit(spec) == APPLICATIONS:
        return len(spec.plan())
    default = spec.default_steps
    for steps in dict.fromkeys((default,) if isinstance(default, int) else default):
        if spec.plan(steps) == spec.plan():
            return steps
    raise ValueError(
        f"num_steps must be given for {spec.name}: no single number stands for the {default} that it runs by itself. "
        "Name one, such as 1."
    )


def _exit_kv_rule(spec: LoopSpec, rule: ExitRule | None) -> KVRule | None:
    """The rule of a cache in which tokens of different depths will stand; None: the model's own."""
    if rule is None or not rule.early or spec.kv_rule != DepthIndexed():
        return None
    return DepthIndexed(missing=CopyLast())


def _longest(spec: LoopSpec, asked: int | None) -> int:
    limit = spec.max_positions or LONGEST
    if asked is None:
        return limit
    if not 1 <= asked <= (spec.max_positions or asked):
        raise ValueError(f"max_length must be from 1 to {spec.max_positions}. Got {asked}. Leave it out.")
    return asked


def _chat_tokenizer(loaded: LoadedModel) -> Any:
    from transformers import PreTrainedTokenizerFast

    found = None
    if (loaded.folder / "tokenizer.json").is_file():
        found = PreTrainedTokenizerFast.from_pretrained(str(loaded.folder), local_files_only=True)
    if found is None or not found.chat_template:
        raise ValueError(
            f"apply_chat_template: MODEL must have a chat template. Got {loaded.name}, whose folder has no "
            "chat_template.jinja and no chat_template in tokenizer_config.json. Leave the option out."
        )
    return found


def _task(request: Any) -> str:
    return request.task_name or ""


def _document(request: Any) -> tuple[Any, ...]:
    """What names the document: its number, or the request's text where it has none."""
    return (request.doc_id,) if request.doc_id is not None else (str(request.args[0]),)


def _digest(kind: str, requests: Sequence[Any]) -> str:
    made = hashlib.sha256(kind.encode())
    for request in requests:
        made.update(repr((request.task_name, request.doc_id, request.idx, request.args)).encode())
    return made.hexdigest()


def _summed(parts: Sequence[Score]) -> Score:
    return Score(sum((part.logprob for part in parts), 0.0), all(part.greedy for part in parts))


def _cut(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text
