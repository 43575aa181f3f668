"""Every tiny preset of every registered model, and how to feed it. A new model brings its tests by registering one."""

import pytest
import torch

from looplab.models.base import MODELS, PRESETS, build, model_name
from looplab.recurrence.loop import forward
from looplab.recurrence.state import standard_noise

NAMES = [name for name in PRESETS if name.startswith("tiny-")]


def tiny(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0):
    """A freshly initialised tiny model."""
    return build(PRESETS[name](), seed=seed, dtype=dtype)


def tokens(model, rows: int, seq: int, seed: int = 0):
    """Random token ids; `seq` gives way to the length that a model is built for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.spec.vocab[0], (rows, model.spec.fixed_length or seq), generator=generator)


def encode(model, ids, **options):
    """`model.encode`, with what the model needs besides tokens, as a function of the row's tokens."""
    extras = {"puzzle_ids": ids.sum(dim=1) % 2} if model.spec.extras.get("puzzle_ids") else None
    return model.encode(ids, extras=extras, **options)


def excused(model, point: str) -> None:
    """Skips the test where the model's file says that the point does not hold, with its reason."""
    if point in model.contract_exceptions:
        pytest.skip(model.contract_exceptions[point])


def noise(model, positions, items=None, dtype=torch.float64):
    """The model's initial noise for these positions, or None."""
    if model.spec.noise_width == 0:
        return None
    items = list(range(positions.shape[0])) if items is None else items
    return standard_noise(1, items, positions, model.spec.noise_width).to(dtype)


def positions_of(valid):
    """Position of every token, where False is padding."""
    return (valid.long().cumsum(1) - 1).clamp(min=0)


def depths(model, wanted=(0, 1, 7)) -> list[int]:
    """Of the wanted numbers of steps, those that the model defines."""
    found = []
    for steps in wanted:
        try:
            model.spec.plan(steps)
        except ValueError:
            continue
        found.append(steps)
    return found


def run(model, ids, *, items=None, valid=None, **options):
    """`forward` with the noise of `items`."""
    valid_or_all = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
    dtype = next(model.parameters()).dtype
    if model.spec.extras.get("puzzle_ids"):
        options["extras"] = {"puzzle_ids": ids.sum(dim=1) % 2}
    return forward(model, ids, noise=noise(model, positions_of(valid_or_all), items, dtype), valid=valid, **options)


def models_without_preset() -> list[str]:
    """Registered models that no tiny preset builds."""
    return sorted(set(MODELS) - {model_name(PRESETS[name]()) for name in NAMES})
