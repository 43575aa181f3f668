"""What docs/results says of studies is the output of `looplab claims` over the results that are committed there."""

import hashlib
import json
from pathlib import Path

from looplab.report.claims import as_markdown, merge

DOCS = Path(__file__).resolve().parents[2] / "docs/results"
STUDIES, PAGE = DOCS / "studies", DOCS / "claims.md"


def test_the_page_of_claims_is_the_output_of_the_command():
    """Written by `looplab claims docs/results/studies --format md`."""
    assert PAGE.exists() == STUDIES.exists()
    if PAGE.exists():
        assert PAGE.read_text() == as_markdown(merge([STUDIES]))


def test_predictions_of_committed_studies_are_those_that_were_hashed_and_came_first():
    for results in STUDIES.glob("*/*/results.json"):
        found = json.loads(results.read_text())
        predictions = results.with_name("predictions.json").read_bytes()
        assert found["predictions"] == hashlib.sha256(predictions).hexdigest(), results
        ledger = json.loads(results.with_name("ledger.json").read_text())
        dates = [arm["finished"] for arm in ledger["arms"].values() if "finished" in arm]
        assert all(ledger["predictions_written"] <= date for date in dates), results
