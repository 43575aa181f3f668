"""What the runs can tell about a law at all: first by the design, before any optimiser, then by predicted errors."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from looplab.records import Finding, Level
from looplab.scaling.laws.base import Law
from looplab.scaling.laws.effective import EffectiveParameters
from looplab.scaling.laws.points import Array, Points

PLACES = 10
WORST_CONDITION = 1e12
EXPONENT_SD, SHARE_SD = 0.1, 0.25
"""A predicted error beyond these is "not identified in practice": of an exponent, and of an amplitude as its share."""


def structure(law: Law, points: Points, cells: Sequence[tuple[str, ...]]) -> list[Finding]:
    """What the design forbids or weakens; a FAILURE refuses the law."""
    found: list[Finding] = []

    def add(name: str, level: Level, message: str) -> None:
        found.append(Finding(kind=f"scaling.{name}", level=level, message=message))

    if isinstance(law, EffectiveParameters) and law.how.names:
        gain, pairs = law.how, points.present()
        steps, windows = pairs.T
        if gain.truncated and not (windows < steps).any():
            add(
                "no_truncation",
                Level.FAILURE,
                f"The value of forward-only passes ({', '.join(gain.truncated)}) is not identified: no run truncates. "
                "Fit IsoDepth, or add runs such as (8,1).",
            )
        cut = pairs[(windows < steps)]
        if gain.fixed_ratio and len(cut) and np.ptp(cut[:, 1] / cut[:, 0]) < 1e-9:
            add("one_ratio", Level.WARNING, gain.fixed_ratio)
        if len(set(steps.tolist())) == 1:
            add("one_depth", Level.FAILURE, f"phi is not identified: every run has num_steps = {steps[0]:g}.")
        if (1.0, 1.0) not in {(float(f), float(b)) for f, b in pairs}:
            add(
                "no_baseline",
                Level.WARNING,
                "No unlooped baseline: phi rests on the power form alone, and Table gains are known up to a common "
                "factor.",
            )
    if len({cell[0] for cell in cells}) == 1:
        add("one_budget", Level.WARNING, "beta and E are not separated from alpha: there is one budget.")
    sizes: dict[tuple[str, ...], set[float]] = {}
    for cell, size in zip(cells, points.n_rec.tolist(), strict=True):
        sizes.setdefault(cell, set()).add(size)
    if all(len(own) == 1 for own in sizes.values()):
        add("one_width", Level.WARNING, "Widths vary only with the budget, so alpha, E and the gain trade off.")
    if not any(f.level is Level.FAILURE for f in found) and _rank(law, points) < len(law.names):
        add(
            "rank",
            Level.FAILURE,
            f"The {len(law.names)} parameters of {law.title} are not identified: at {PLACES} places of the box the "
            "runs leave a direction free. Add cells, or fit a simpler law.",
        )
    return found


def _rank(law: Law, points: Points) -> int:
    """Largest rank of the Jacobian over places inside the box; columns have unit length."""
    low, high = law.box(points).T
    draws = np.random.Generator(np.random.PCG64(0))
    # Towards the middle: at the ends of the box one term swamps the others.
    places = low + (high - low) * (0.25 + 0.5 * draws.random((PLACES, len(low))))
    _, jacobian, _ = law.derivatives(_balanced(law, places, points), points)
    length = np.linalg.norm(jacobian, axis=2, keepdims=True)
    return int(np.linalg.matrix_rank(jacobian / np.maximum(length, 1e-300), tol=1e-10).max())


def _balanced(law: Law, places: Array, points: Points) -> Array:
    """The places with amplitudes that give every term a like share."""
    places = places.copy()
    for term, amplitude in zip(law.terms(places, points), law.linear, strict=True):
        places[:, amplitude] -= np.median(term.value, axis=1)
    return places


def predicted_sd(
    law: Law, theta: Array, points: Points, sigma: float, held: Collection[str] = ()
) -> tuple[Array, float, Array]:
    """Standard errors that `sigma` nats of independent noise would give, the condition number, and the weakest
    direction in units of one predicted error; zero for parameters that are held."""
    total, jacobian, _ = law.derivatives(theta, points)
    free = np.array([name not in held for name in law.names])
    scaled = jacobian[0, free] * np.exp(total[0]) / sigma
    length = np.maximum(np.linalg.norm(scaled, axis=1), 1e-100)
    _, singular, vectors = np.linalg.svd((scaled / length[:, None]).T, full_matrices=False)
    singular = np.maximum(singular, 1e-100)
    own = np.sqrt(((vectors / singular[:, None]) ** 2).sum(axis=0)) / length
    errors, weak = np.zeros(len(free)), np.zeros(len(free))
    errors[free], weak[free] = own, vectors[-1] / length / own
    return errors, float(singular[0] / singular[-1]), weak


def in_practice(law: Law, theta: Array, points: Points, sigma: float, held: Collection[str] = ()) -> list[Finding]:
    """Parameters whose predicted error is too large to say anything, with the direction that is weakest, in words."""
    errors, condition, weak = predicted_sd(law, theta, points, sigma, held)
    if condition > WORST_CONDITION:
        return [
            Finding(
                kind="scaling.singular",
                level=Level.FAILURE,
                message=f"{law.title} is not identified by these runs: condition {condition:.1e}.",
                value=condition,
                threshold=WORST_CONDITION,
            )
        ]
    found = []
    for place, (name, error) in enumerate(zip(law.names, errors, strict=True)):
        limit = SHARE_SD if place in law.linear else EXPONENT_SD
        if error > limit:
            found.append(
                Finding(
                    kind="scaling.weak",
                    level=Level.UNIDENTIFIED,
                    message=f"{name} is not identified in practice: predicted standard error {error:.2g} at "
                    f"{sigma:.3g} nats. {direction(law.names, weak)}",
                    value=float(error),
                    threshold=float(limit),
                )
            )
    return found


def direction(names: Sequence[str], weak: Array) -> str:
    """`phi_f rises while alpha falls.`: the two or three largest parts of a direction."""
    order = np.argsort(-np.abs(weak))
    kept = [int(i) for i in order[:3] if abs(weak[i]) >= 0.5 * abs(weak[order[0]])]
    if len(kept) < 2:
        kept = [int(i) for i in order[:2]]
    lead = np.sign(weak[kept[0]])
    up = [names[i] for i in kept if np.sign(weak[i]) == lead]
    down = [names[i] for i in kept if np.sign(weak[i]) != lead]
    text = f"{' and '.join(up)} {'rises' if len(up) == 1 else 'rise'}"
    if down:
        text += f" while {' and '.join(down)} {'falls' if len(down) == 1 else 'fall'}"
    return f"{text}."


def can_redraw(law: Law, points: Points, present: NDArray[np.bool_]) -> bool:
    """Whether the runs `present` identify the gain: some truncate, depths differ, every pair of a table occurs."""
    if not isinstance(law, EffectiveParameters) or not law.how.names:
        return True
    drawn = points.take(np.flatnonzero(present)).present()
    steps, windows = drawn.T
    if len(set(steps.tolist())) == 1 or (law.how.truncated and not (windows < steps).any()):
        return False
    # A parameter that no drawn run depends on shows as a column of zeros.
    theta = np.zeros((1, len(law.how.names)))
    return bool(np.abs(law.how.log_gain(theta + 0.5, drawn)[1][0]).max(axis=1, initial=0.0).min() > 0)
