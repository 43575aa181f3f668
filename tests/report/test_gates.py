"""The page of gates, from a planted record."""

import dataclasses
import json
import re

from engine.test_verdict import interval
from looplab.records import dump_json
from looplab.report.escape import NBSP
from looplab.report.gates import losses_table, sentences, write_gates
from looplab.report.keyed import Keyed
from looplab.training.gates import GateResult, GateRow
from report.test_sheet import embedded


def gates():
    rows = [
        GateRow(
            gate=gate,
            threshold=q,
            teacher_threshold=q,
            agreement=interval(share, 0.01),
            mean_depth=interval(2.5),
            teacher_depth=interval(2.25),
            distance=interval(0.5 - q / 2),
        )
        for gate, share in (("lookahead", 0.8), ("same_step", 0.95))
        for q in (0.3, 0.5)
    ]
    return GateResult(
        model="a<b",
        weights="w",
        teacher="hazard",
        threshold=None,
        steps=4,
        text="t",
        text_hash="h",
        held_out="held",
        documents=3,
        tokens=1234,
        updates=20,
        losses={"lookahead": (0.9, 0.5), "same_step": (0.4, 0.4)},
        rows=tuple(rows),
    )


def test_the_page_of_gates(tmp_path):
    page = write_gates(gates(), tmp_path).read_text()
    assert embedded(page) == json.loads(dump_json(gates()))
    assert "Gates of <em>a&lt;b</em>" in page and "a<b" not in page.partition("<body>")[2].partition("<script")[0]
    assert 'data-key="rows[2].agreement.estimate"' in page
    assert f"95.0{NBSP}%" in page and f"94.0{NBSP}% .. 96.0{NBSP}%" in page
    assert not re.findall(r'(?:src|href)="http', page)
    assert "Chosen depths on held-out text" in (tmp_path / "tables.tex").read_text()
    first, *of_gates = sentences(gates())
    assert first.endswith("compared on 1,234 tokens of 3 documents of held.")
    assert of_gates[0].startswith(
        "lookahead: the teacher's depth for 80.0% to 80.0% of tokens; furthest from it at 0.3"
    )
    assert sentences(dataclasses.replace(gates(), teacher="latent"))[0].startswith("Teacher: the rule latent")
    assert losses_table(Keyed(gates())).columns == ("gate", "1/2", "2/2")
