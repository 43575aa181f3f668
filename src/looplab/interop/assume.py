"""What the files of a published family leave open, and who answers it.

    assume="gate=fc1,rope=half"     whoever opens the folder; nothing then checks the answer
    logits.safetensors              recorded from the original: `tokens` Int[B T] and `logits` Float[B T V] (or those of
                                    the last position, Float[B V]); for a random start also `noise` Float[B T N],
                                    standard normal. Every combination of answers is run over them, and the only one
                                    that fits is taken

Neither: the folder is not opened. With both, the assumption has to fit the recording. Which answer a model was opened
with, and on what grounds, is the first of its `notes` and stands in `facts["reading"]`, from where results carry it.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from looplab._tolerances import RECORDED_LOGITS
from looplab.interop.published import Shards, family_settings, open_published
from looplab.models.folder import check_size
from looplab.models.published import Family, bare
from looplab.recurrence.loop import forward

RECORDED = "logits.safetensors"


def answer(family: Family, folder: Path, assume: str | None = None, *, device: str = "cpu") -> Family:
    """The family with its open questions answered.

    Args:
        family: One without open questions is given back.
        folder: Where a recording may lie beside the weights.
        assume: Answers, "question=answer,question=answer".
        device: Where the readings are run over a recording, one model at a time.
    Raises:
        ValueError: No answer, one that the family does not know, or a recording that not exactly one reading fits.
    """
    if family.open_questions:
        _check_supported(family, folder)
    possible = readings(family, folder, assume)
    if not possible:
        return family
    if not recorded(folder):
        (reading,) = possible
        return _noted(family, reading, f"Read as {written(reading)} by assumption, which nothing has checked.")
    errors = {written(reading): _error(_answered(family, reading), folder, device) for reading in possible}
    fitting = [reading for reading in possible if errors[written(reading)] <= RECORDED_LOGITS]
    told = ", ".join(f"{text} {error:.2g}" for text, error in errors.items())
    if len(fitting) != 1:
        raise ValueError(
            f"load: {RECORDED} of {folder} must fit one reading, with a relative error up to {RECORDED_LOGITS}. "
            f"Got {told}. Record the original's logits again, of more tokens or of these weights."
        )
    note = f"Read as {written(fitting[0])}, which fits {RECORDED} (relative errors: {told})."
    return _noted(family, fitting[0], note)


def readings(family: Family, folder: Path, assume: str | None = None) -> list[dict[str, str]]:
    """Answers that are left: those of `assume`, or all that a recording decides among; none where nothing is asked.

    Raises:
        ValueError: As for `answer`, which alone looks into the recording.
    """
    if not family.open_questions:
        if assume is None:
            return []
        raise ValueError(
            f"load: assume must be None: files of {family.name} leave nothing open. Got {assume!r}. Leave it out."
        )
    known = _combinations(family)
    if assume is None and recorded(folder):
        return known
    given = sorted(part.partition("=")[::2] for part in (assume or "").replace(" ", "").split(","))
    for reading in known:
        if sorted(reading.items()) == given:
            return [reading]
    asked = ", ".join(f"{question} ({' or '.join(answers)})" for question, answers in family.open_questions.items())
    raise ValueError(
        f"load: assume must answer what files of {family.name} leave open: {asked}. Got {assume!r}. Pass "
        f"assume={written(known[0])!r}, as the published code computes, or put recorded logits in {RECORDED}."
    )


def recorded(folder: Path) -> bool:
    """Whether a recording lies beside the weights."""
    return (folder / RECORDED).is_file()


def written(reading: Mapping[str, str]) -> str:
    """A reading as `assume` takes it."""
    return ",".join(f"{question}={given}" for question, given in reading.items())


def _combinations(family: Family) -> list[dict[str, str]]:
    questions = family.open_questions
    return [dict(zip(questions, answers, strict=True)) for answers in itertools.product(*questions.values())]


def _answered(family: Family, reading: Mapping[str, str]) -> Family:
    assert family.answered is not None
    return family.answered(reading)


def _check_supported(family: Family, folder: Path) -> None:
    """Refuses what no answer would open, before one is asked for."""
    _, _, facts = family_settings(folder, family)
    family.config(facts, {bare(name): shape for name, shape in Shards(folder).shapes.items()})


def _noted(family: Family, reading: Mapping[str, str], note: str) -> Family:
    found = _answered(family, reading)
    return replace(found, notes=(note, *found.notes))


def _error(family: Family, folder: Path, device: str) -> float:
    """Relative root mean square of our logits minus the recorded ones."""
    model, _, _ = open_published(folder, family, dtype=torch.float32, device=device)
    tensors = {name: tensor.to(device) for name, tensor in _recording(folder).items()}
    wanted, noise = tensors["logits"].float(), tensors.get("noise")
    if noise is None and model.spec.noise_width:
        raise ValueError(
            f"load: {RECORDED} must hold noise for a model with a random start. Got none. Add standard normal numbers "
            f"[rows, tokens, {model.spec.noise_width}] that the original's start was made of."
        )
    with torch.inference_mode():
        logits = forward(model, tensors["tokens"].long(), noise=None if noise is None else noise.float()).logits
    assert logits is not None
    if wanted.dim() == 2:
        logits = logits[:, -1]
    if logits.shape != wanted.shape:
        raise ValueError(
            f"load: logits of {RECORDED} must have shape {list(logits.shape)}. Got {list(wanted.shape)}. Record them "
            "for every row of tokens, over the whole vocabulary."
        )
    return float((logits - wanted).norm() / wanted.norm())


def _recording(folder: Path) -> dict[str, Tensor]:
    check_size(folder / RECORDED)
    tensors = load_file(folder / RECORDED)
    missing = sorted({"tokens", "logits"} - tensors.keys())
    if missing:
        raise ValueError(
            f"load: {RECORDED} must hold tokens and logits. Got {', '.join(sorted(tensors)) or 'nothing'}. "
            f"Add {' and '.join(missing)}."
        )
    return tensors
