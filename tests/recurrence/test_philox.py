import numpy as np
import pytest
from scipy import stats

from looplab.recurrence.philox import philox, stream_key, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        # The third vector of the Random123 distribution: digits of pi.
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, words):
    found = philox(np.array(counter, np.uint64), key)
    assert " ".join(f"{int(word):08x}" for word in found) == words


def test_counters_of_any_shape_are_independent_of_each_other():
    counter = np.arange(2 * 3 * 4, dtype=np.uint64).reshape(2, 3, 4)
    words = philox(counter, 5)
    assert words.shape == (2, 3, 4)
    assert (words[1, 2] == philox(counter[1, 2], 5)).all()


def test_streams_have_their_own_keys():
    names = ("init", "data", "depth", "noise", "augment", "task", "eval")
    keys = {stream_key(seed, name) for seed in range(4) for name in names}
    assert len(keys) == 4 * len(names)
    assert all(0 <= key < 2**64 for key in keys)
    assert stream_key(3, "depth") == stream_key(3, "depth")


def test_a_uniform_depends_on_key_step_micro_batch_and_row_alone():
    rows = np.arange(50)
    straight = uniforms(7, 3, rows)
    assert (uniforms(7, 3, rows[::-1])[::-1] == straight).all()
    assert (uniforms(7, 3, rows[20:30]) == straight[20:30]).all()
    for other in (uniforms(8, 3, rows), uniforms(7, 4, rows), uniforms(7, 3, rows, micro_batch=1)):
        assert not (other == straight).any()


def test_uniforms_are_uniform_and_never_0_or_1():
    drawn = uniforms(stream_key(0, "depth"), 11, np.arange(100_000))
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert stats.kstest(drawn, "uniform").pvalue > 1e-4
