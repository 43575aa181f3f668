"""Small synthetic designs of scaling: 12 pairs, 3 budgets, 4 widths, unless said otherwise."""

from looplab.scaling.examples import synthetic_runs

TRUTH = {"A": 22.2, "alpha": 0.199, "B": 1223.0, "beta": 0.369, "E": 1.57}
BUDGETS = (4.64e17, 2.15e18, 1e19)


def rows_of(law, *, noise=0.005, seed=0, **given):
    gains = given.pop("gains")
    design = {"budgets": BUDGETS, "widths": 4} | given
    return synthetic_runs(law, law.values(**TRUTH, **gains), noise=noise, seed=seed, **design)
