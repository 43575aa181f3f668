"""The table of layer distances: against the definition, and where a run that does nothing is planted."""

import pytest
import torch

from interop.dense_sources import LAYERS, saved, stream, write
from looplab.data.documents import Document, DocumentSet, Grid
from looplab.data.tokenizers import ByteTokenizer
from looplab.interop.dense_source import open_dense
from looplab.interop.layer_distance import calibration_tokens, measure_layers
from reference.layer_distance import distance
from tiny import LetterTokenizer
from tolerances import FLOAT32_SCORES


def rows(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 90, (1, n), generator=generator) for n in lengths]


def test_the_table_is_that_of_the_definition(tmp_path):
    model = saved(tmp_path, "llama3", max_position_embeddings=160)
    texts, told = rows(150, 40), []
    table = measure_layers(
        open_dense(str(tmp_path)).model(), texts, text="t", text_hash="h", advanced=lambda *n: told.append(n)
    )
    assert (table.layers, table.tokens, told) == (LAYERS, 190, [(150, 190), (190, 190)])
    streams = [stream(model, text) for text in texts]
    states = [[vector for one in streams for vector in one[k]] for k in range(LAYERS + 1)]
    for length in range(1, LAYERS + 1):
        assert len(table.angular[length - 1]) == len(table.influence[length - 1]) == LAYERS - length + 1
        for start in range(LAYERS - length + 1):
            expected = distance(states[start], states[start + length])
            torch.testing.assert_close(torch.tensor(table.of(start, length)), torch.tensor(expected), **FLOAT32_SCORES)


@pytest.mark.parametrize("family", ["llama3", "smollm3"])
def test_a_planted_run_that_does_nothing_is_found(family, tmp_path):
    model = saved(tmp_path, family)
    with torch.no_grad():
        for layer in (2, 3):
            model.model.layers[layer].self_attn.o_proj.weight.mul_(1e-3)
            model.model.layers[layer].mlp.down_proj.weight.mul_(1e-3)
    write(tmp_path, model)
    table = measure_layers(open_dense(str(tmp_path)).model(), rows(30), text="t", text_hash="h")
    assert table.least(2, first=0, stop=LAYERS) == 2
    assert table.of(2, 2)[0] < 0.2 * min(table.of(s, 2)[0] for s in (0, 1, 3, 4))
    assert table.least(2, first=3, stop=LAYERS) == 3 and table.least(1, first=0, stop=2) in (0, 1)


def test_texts_are_cut_and_counted():
    texts = (Document("abcdefgh"), Grid((1,), (1,)), Document("a"), Document("bcd"), Document("efgh"), Document("h"))
    found = calibration_tokens(DocumentSet("d", texts, "h"), LetterTokenizer(), tokens=9, longest=5)
    assert [row.tolist() for row in found] == [[[0, 1, 2, 3, 4]], [[1, 2, 3]]]


def test_texts_begin_with_bos_where_they_are_meant_to():
    tokenizer = ByteTokenizer()
    tokenizer.starts_with_bos = True
    (row,) = calibration_tokens(DocumentSet("d", (Document("ab"),), "h"), tokenizer, tokens=9, longest=5)
    assert row.tolist() == [[256, 97, 98]]


def test_no_text_is_refused():
    with pytest.raises(ValueError, match="--text must hold at least two tokens"):
        measure_layers(open_dense("text-dense").model(), [], text="empty.txt", text_hash="h")
