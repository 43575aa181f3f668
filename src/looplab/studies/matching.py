"""What arms must share: declared before they run, and measured after it."""

import json
from collections.abc import Sequence
from typing import Any

from looplab._config import declared
from looplab.records import Matched, StudyArm
from looplab.studies.base import EQUAL, FACTS, TOLERANCES, Arm, Study
from looplab.studies.claims import DIVERGED, factor_apart
from looplab.training.config import RunConfig


class StudyError(ValueError):
    """A study that contradicts its own declaration."""


def check_declared(study: Study, arms: Sequence[Arm]) -> None:
    """Compares every trained arm with the first of its seed, where the study says what may differ.

    Raises:
        StudyError: Something else differs.
    """
    if study.varies is None:
        return
    first: dict[int | None, Arm] = {}
    for arm in arms:
        if not isinstance(arm.source, RunConfig):
            continue
        other = first.setdefault(arm.seed, arm)
        one, two = declared(other.source), declared(arm.source)
        for name in sorted({*one, *two} - {*study.varies, "recipe"}):
            if one.get(name) != two.get(name):
                raise StudyError(
                    f"{study.name}: arms {other.name} and {arm.name} differ in {name} ({_short(one.get(name))}, "
                    f"{_short(two.get(name))}), not declared. Declare it in `varies` or make it equal."
                )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def matches(arms: Sequence[StudyArm], equal: Sequence[str] = EQUAL) -> tuple[Matched, ...]:
    """Whether the trained arms of each seed share what they must; nothing where no arm was trained.

    Args:
        equal: Keys of `FACTS`.
    """
    trained = [arm for arm in arms if arm.seed is not None and DIVERGED not in arm.facts]
    found = []
    for name in equal if trained else ():
        by_seed: dict[int | None, set[str]] = {}
        for arm in trained:
            by_seed.setdefault(arm.seed, set()).add(arm.facts[FACTS[name]])
        near = TOLERANCES.get(name, 0.0)
        shared = all(factor_apart(values) <= 1 + near for values in by_seed.values())
        held = {arm.label: arm.facts[FACTS[name]] for arm in trained}
        found.append(Matched(name=name, equal=shared, values=held, tolerance=near))
    return tuple(found)
