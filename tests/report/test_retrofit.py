"""The page of a retrofit, from a planted record."""

import dataclasses
import json
import re

import pytest

from looplab.interop.layer_distance import LayerDistance
from looplab.interop.retrofit import Cut, Record
from looplab.records import dump_json
from looplab.report.figures.layer_distance import finding, layer_distance
from looplab.report.retrofit import distance_plate, distance_tables, looped, sentence, spans, write_retrofit
from report.test_figures import texts

LAYERS = 5


def table(layers=LAYERS):
    """The run of two layers from 2 on is the best."""
    angular = [[0.1 * n + 0.01 * (s - 2) ** 2 for s in range(layers - n + 1)] for n in range(1, layers + 1)]
    rows = tuple(map(tuple, angular))
    return LayerDistance(layers=layers, tokens=10, text="mine.txt", text_hash="h", angular=rows, influence=rows)


def record(**changes):
    fields = {
        "source": "a<b",
        "family": "llama",
        "sha256": {"model.safetensors": "ab" * 32},
        "cut": Cut(layers=LAYERS, prelude=(0,), core=((2,), (3,)), coda=(4,)),
        "source_parameters": 1234,
        "parameters": 987,
        "groups": {"embedding": 87, "core": 900},
        "injection": "concat-identity",
        "seed": 0,
        "dtype": "float32",
        "model_bytes": 1,
        "peak_bytes": 2,
        "config": {"dim": 4},
        "distance": table(),
    }
    return Record(**{**fields, **changes})


def test_the_page_says_what_was_made_and_embeds_the_record(tmp_path):
    page = write_retrofit(record(), tmp_path).read_text()
    assert "5 layers of llama as 1-2-1; layers dropped: 1." in page
    assert "Retrofit of <em>a&lt;b</em>" in page and "a<b" not in page.partition("<body>")[2].partition("<script")[0]
    embedded = re.search(r'class="results">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(embedded) == json.loads(dump_json(record()))
    assert 'data-key="distance.angular[1][2]"' in page and 'data-key="parameters"' in page
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "layer-distance.pdf",
        "layer-distance.svg",
    ]
    assert "Runs of 2 layers" in (tmp_path / "tables.tex").read_text()
    assert not re.findall(r'(?:src|href)="http', page)


def test_without_a_table_the_page_says_so(tmp_path):
    page = write_retrofit(record(distance=None), tmp_path).read_text()
    assert "distances between layers were not measured" in page
    assert not (tmp_path / "figures").exists() and distance_plate(record(distance=None)) is None


def test_every_run_of_the_looped_length_stands_in_the_table():
    runs, single = distance_tables(record())
    assert [row[0].text for row in runs.rows] == ["0-1", "1-2", "2-3", "3-4"]
    assert [row[1].text for row in single.rows] == ["0.1400", "0.1100", "0.1000", "0.1100", "0.1400"]


def test_words_for_layers():
    assert spans((0, 1, 2, 3, 8)) == "0-3, 8" and spans(()) == "none"
    averaged = record(cut=Cut(layers=5, prelude=(0,), core=((1, 3), (2, 4)), coda=()))
    assert looped(averaged) == (1, 4)
    assert sentence(averaged) == "5 layers of llama as 1-2-0, each core layer the mean of 2; no layer dropped."


def test_the_title_tells_whether_another_run_would_turn_less():
    assert finding(table(), 2, 2) == "Layers 2-3 turn the stream by 0.200, least of all runs of its length"
    assert finding(table(), 0, 1) == "Layer 0 turns the stream by 0.140; of this length, layer 2 least: 0.100"


@pytest.mark.parametrize("layers", [2, 5, 40])
def test_the_map_is_legible_at_any_size(layers):
    figure = layer_distance(table(layers), 0, 1)
    words = [(text.get_text(), box) for text, box in texts(figure) if not re.fullmatch("[−0-9.]+", text.get_text())]
    for text, box in words:
        assert figure.bbox.padded(1).contains(box.x0, box.y0) and figure.bbox.padded(1).contains(box.x1, box.y1), text
    mesh = figure.axes[0].collections[0].get_array()
    assert mesh.count() == layers * (layers + 1) // 2  # a cell for every run, none beyond


def test_equal_records_give_equal_bytes(tmp_path):
    pages = [write_retrofit(dataclasses.replace(record()), tmp_path / name).read_bytes() for name in ("a", "b")]
    assert pages[0] == pages[1]
