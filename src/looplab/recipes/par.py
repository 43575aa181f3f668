"""Progress-aligned recurrence on word problems: one local rule, learned at length 8, applied to words of any length.

The core sees a position and its left neighbour only, so one iteration can apply one operation; the state starts as
"identity so far" everywhere. Numbers: see docs/results/par.md.

`ARMS` are the same run with one thing changed, for the study `par`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from looplab.models.dense import DenseConfig
from looplab.models.looped import LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import ALiBi, FallingBias, Learned, NoPE, Position, RelativeBias, Rope
from looplab.objectives.base import Objective
from looplab.objectives.every_iteration import EveryIteration
from looplab.objectives.halting import Halting
from looplab.objectives.next_token import NextToken
from looplab.objectives.prefix_distillation import PrefixDistillation
from looplab.objectives.progress_aligned import ProgressAligned
from looplab.recipes.base import RECIPES
from looplab.recurrence.boundary import EndNorm, NoBoundary
from looplab.recurrence.depth import FixedDepth, PrefixDepth, UniformDepth
from looplab.recurrence.halting import QHead
from looplab.recurrence.injection import Add, Concat
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.signal import StepEmbedding
from looplab.recurrence.state_init import Zeros
from looplab.tasks.rows import TaskRows
from looplab.tasks.state_tracking import ShorterWords, StateTracking
from looplab.tasks.written_states import WrittenStates
from looplab.training.config import RunConfig, TaskEvaluation
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Cosine

WIDTH, LENGTH, ITERATIONS, BURN_IN = 64, 8, 4, 4
SWAPS = StateTracking(group="swap_s5")
SHORTER = ShorterWords(group="swap_s5")
PROGRESS = ProgressAligned(iterations=ITERATIONS, state_noise=0.15, replay=0.7)
NO_REPLAY = dataclasses.replace(PROGRESS, replay=0.0)
SOFT_ANCHOR = dataclasses.replace(PROGRESS, anchor=0.1)
EQUAL_FLOPS_STEPS = 2400
"""Steps of the written arm that cost as many training FLOPs as the recipe."""
ADD = Add(source="embeds")


@RECIPES.register("par-swap-s5")
def par_swap_s5() -> RunConfig:
    """Progress-aligned recurrence on swaps of five items, trained at length 8 only."""
    return par("par-swap-s5")


@RECIPES.register("par-swap-s5-causal")
def par_swap_s5_causal() -> RunConfig:
    """The same without a window: every position sees all before it, and has to find out that one position back counts.

    The trained distances have a bias each; beyond them it falls, so that far positions weigh little in rows of any
    length.
    """
    return par("par-swap-s5-causal", attention=attention(FallingBias(max=LENGTH)))


def par(name: str, task: StateTracking = SWAPS, *, objective: Objective = PROGRESS, **changes: Any) -> RunConfig:
    """The recipe for any group; `changes` are fields of the model's configuration."""
    settings: dict[str, Any] = {
        "dim": WIDTH,
        "vocab": len(task.tokens),
        "attention": attention(RelativeBias(max=2), window=2),
        "ffn": SwiGLU(hidden=4 * WIDTH),
        "blocks": (1,),
        "envelope": NoEnvelope(),
        "order": ModelLoop(num_steps=LENGTH),
        "trained_depth": UniformDepth(low=ITERATIONS, high=ITERATIONS + BURN_IN),
        "injection": Concat(order="state_first", init="normal", source="embeds"),
        "state_init": Zeros(),
        "boundary": EndNorm(),
        "head": Head(tied=False, outputs=task.cells * len(task.symbols), cells=task.cells, bias=True),
        "init": Init(std=WIDTH**-0.5, out_std=0.5 * WIDTH**-0.5, embed_std=1.0),
    }
    return RunConfig(
        recipe=name,
        model=LoopedConfig(**(settings | changes)),
        data=TaskRows(task=task, rows=128),
        objective=objective,
        optimizer=AdamW(lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
        schedule=Cosine(warmup_steps=50, hold=0.4),
        steps=1800,
        evaluation=TaskEvaluation(every=600, items=128, difficulties=(8, 32, 128), depths=(1.0, 1.25)),
        save_every=300,
    )


def attention(position: Position, window: int | None = None) -> Attention:
    """Four heads; without a window a position sees all before it."""
    return Attention(heads=4, kv_heads=4, head_dim=WIDTH // 4, position=position, window=window)


def every_iteration(name: str) -> RunConfig:
    """The final value of every prefix as target of every iteration."""
    return par(name, objective=EveryIteration(), trained_depth=FixedDepth(num_steps=LENGTH))


def final_only(
    name: str, task: StateTracking = SWAPS, *, objective: Objective | None = None, **changes: Any
) -> RunConfig:
    """One label per word: its answer, after as many iterations as the longest word has operations."""
    objective = objective or NextToken()
    run = par(name, task, objective=objective, trained_depth=FixedDepth(num_steps=LENGTH), **changes)
    return dataclasses.replace(run, data=_rows(run, answer_only=True))


def distillation(name: str) -> RunConfig:
    """Labels of answers, and the model's own answers to parts of the word as targets on the way."""
    return final_only(name, SHORTER, objective=PrefixDistillation(layout="window", state_noise=0.15))


def halting(name: str) -> RunConfig:
    """The recipe with a trained stopping score."""
    objective = Halting(iterations=ITERATIONS, state_noise=PROGRESS.state_noise, replay=PROGRESS.replay)
    return par(name, objective=objective, halt=QHead())


def indexed(name: str) -> RunConfig:
    """One block eight times that knows its iteration: iteration k has to find operation k and apply it.

    The answer's position alone is scored, sees all others, and holds the product of the first k operations.
    """
    return par(
        name,
        objective=ProgressAligned(iterations=LENGTH, layout="answer", state_noise=PROGRESS.state_noise),
        attention=attention(Learned(max=LENGTH + 1)),
        signal=StepEmbedding(max=LENGTH),
        trained_depth=PrefixDepth(law=UniformDepth(low=1, high=LENGTH)),
    )


def written(name: str, steps: int | None = None) -> RunConfig:
    """Explicit chain of thought: a dense model of two layers that writes the states down, one token each."""
    task, base = WrittenStates(group=SWAPS.group), par(name)
    model = DenseConfig(
        dim=WIDTH,
        vocab=len(task.tokens),
        layers=2,
        attention=attention(Rope(base=10000.0)),
        ffn=SwiGLU(hidden=4 * WIDTH),
        head=Head(tied=False, outputs=len(task.symbols), bias=True),
        init=base.model.init,
    )
    return dataclasses.replace(
        base, model=model, data=_rows(base, task=task), objective=NextToken(), steps=steps or base.steps
    )


def _rows(run: RunConfig, **changes: Any) -> TaskRows:
    assert isinstance(run.data, TaskRows)
    return dataclasses.replace(run.data, **changes)


def _everywhere(position: Position) -> Callable[[str], RunConfig]:
    """The recipe without the window: a position sees all before it, and itself."""
    return lambda name: par(name, attention=attention(position))


def _group(group: str) -> Callable[[str], RunConfig]:
    return lambda name: par(name, StateTracking(group=group))


ARMS: dict[str, tuple[str, Callable[[str], RunConfig]]] = {
    "main": ("the recipe: window targets, hard anchor, concat injection, noise, replay", par),
    "no_anchor": ("no anchor", lambda name: par(name, boundary=NoBoundary())),
    "add": ("additive injection", lambda name: par(name, injection=ADD)),
    "add_no_anchor": (
        "additive injection, no anchor",
        lambda name: par(name, injection=ADD, boundary=NoBoundary()),
    ),
    "final_only": ("no progress: one label per word, its answer, after the last iteration", final_only),
    "add_final_only": ("no progress, additive injection", lambda name: final_only(name, injection=ADD)),
    "every_iteration": ("no progress: every iteration predicts the final value of every prefix", every_iteration),
    "final_lengths": (
        "one label per word, words of 1 to 8 operations",
        lambda name: final_only(name, SHORTER),
    ),
    "distillation": ("the same words and labels, and its own answers to parts of them", distillation),
    "halting": ("the recipe with a trained stopping score", halting),
    "indexed": ("one block x 8 with a learned iteration index, prefixes of 1 to 8 iterations", indexed),
    "written": ("explicit chain of thought: a dense model of two layers writes the states down", written),
    "soft_anchor": (
        "soft anchor: a part of the loss instead of a rule of the loop",
        lambda name: par(name, objective=SOFT_ANCHOR, boundary=NoBoundary()),
    ),
    "add_soft_anchor": (
        "additive injection, soft anchor",
        lambda name: par(name, objective=SOFT_ANCHOR, injection=ADD, boundary=NoBoundary()),
    ),
    "no_replay": ("no replay", lambda name: par(name, objective=NO_REPLAY)),
    "no_noise": (
        "no noise on states",
        lambda name: par(name, objective=dataclasses.replace(PROGRESS, state_noise=0.0)),
    ),
    "layout_prefix": (
        "no replay, targets of prefixes: position j is scored from iteration j on",
        lambda name: par(name, objective=dataclasses.replace(NO_REPLAY, layout="prefix")),
    ),
    "layout_answer": (
        "no replay, targets at the answer's position alone, which sees all others",
        lambda name: par(
            name,
            objective=dataclasses.replace(NO_REPLAY, layout="answer"),
            attention=attention(RelativeBias(max=LENGTH)),
        ),
    ),
    "falling": (
        f"no window: a learned bias for the {LENGTH} trained distances, falling by 1 per position beyond",
        _everywhere(FallingBias(max=LENGTH)),
    ),
    "falling_near": (
        "no window: a learned bias for 3 distances, falling by 1 per position beyond",
        _everywhere(FallingBias(max=3)),
    ),
    "relative": ("no window: a learned bias per distance", _everywhere(RelativeBias(max=LENGTH))),
    "rope": ("no window: rotary positions", _everywhere(Rope(base=10000.0))),
    "alibi": ("no window: ALiBi", _everywhere(ALiBi())),
    "nope": ("no window: no positions", _everywhere(NoPE())),
    "written_longer": (
        "explicit chain of thought at equal training FLOPs: more steps",
        lambda name: written(name, steps=EQUAL_FLOPS_STEPS),
    ),
    "a5": ("the group A5, all 60 elements as operations", _group("a5")),
    "swap_s6": ("swaps of six items", _group("swap_s6")),
    "z60": ("residues mod 60", _group("z60")),
}
"""Arm -> what it is, and the run of a recipe's name."""


def par_arm(name: str, seed: int = 0) -> RunConfig:
    """The run of an arm, graded in the study and not on the way."""
    _, make = ARMS[name]
    run = make("par-swap-s5" if name == "main" else f"par-{name.replace('_', '-')}")
    return dataclasses.replace(
        run, seed=seed, evaluation=TaskEvaluation(every=run.steps, items=64, difficulties=(LENGTH,), depths=(1.0,))
    )


def smoke(run: RunConfig) -> RunConfig:
    """The same run cut to seconds."""
    evaluation = TaskEvaluation(every=20, items=8, difficulties=(LENGTH,), depths=(1.0,))
    return dataclasses.replace(run, data=_rows(run, rows=16), steps=20, save_every=10, evaluation=evaluation)
