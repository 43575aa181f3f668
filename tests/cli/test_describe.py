import json

import pytest

from looplab.cli import exit_codes, main
from looplab.models.base import PRESETS, build


def described(capsys, *argv):
    assert main(["describe", *argv, "--json"]) == exit_codes.DONE
    return json.loads(capsys.readouterr().out)


def test_counts_are_those_of_the_built_model(capsys):
    facts = described(capsys, "tiny-blocks", "--tokens", "10")
    model = build(PRESETS["tiny-blocks"]())
    assert facts["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    groups = {name: n for name, n in facts["parameters"].items() if name != "total"}
    assert sum(groups.values()) == facts["parameters"]["total"]
    assert facts["plan"] == str(model.spec.plan()) == "[0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3]"
    assert facts["applications"] == facts["distinct_functions"] == 8
    assert facts["cost"]["forward_flops"] == model.spec.cost.forward({0: 4, 1: 4}, tokens=10)
    assert facts["cost"]["kv_bytes"] == 10 * facts["cost"]["kv_bytes_per_token"]


def test_an_index_free_core_is_one_function(capsys):
    facts = described(capsys, "tiny-core")
    assert (facts["applications"], facts["distinct_functions"]) == (4, 1)


def test_more_steps_cost_more_and_keep_more(capsys):
    two, four = (described(capsys, "tiny-core", "--num-steps", n)["cost"] for n in ("2", "4"))
    once = two["application_flops"]["0"]
    assert four["forward_flops"] - two["forward_flops"] == 2 * once
    assert four["kv_bytes"] > two["kv_bytes"]


def test_flops_are_counted_for_a_sequence_the_model_can_take(capsys):
    assert described(capsys, "text-core")["cost"]["tokens"] == 256
    assert described(capsys, "tiny-core")["cost"]["tokens"] == 1024


def test_one_count_per_block(capsys):
    facts = described(capsys, "tiny-blocks", "--num-steps", "1", "3")
    assert facts["plan"] == "[0.0 1.0 1.1 1.2]"


def test_float32_keys_take_twice_the_room(capsys):
    half, full = (described(capsys, "tiny-core", "--kv-dtype", d)["cost"]["kv_bytes"] for d in ("bfloat16", "float32"))
    assert full == 2 * half


def test_tables_show_what_json_says(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["describe", "tiny-blocks"]) == exit_codes.DONE
    text = capsys.readouterr().out
    facts = described(capsys, "tiny-blocks")
    for shown in (facts["plan"], facts["trained_depth"], f"{facts['cost']['forward_flops']:,}"):
        assert shown in text


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["tiny-core", "--tokens", "0"], exit_codes.USAGE, "describe: --tokens must be at least 1. Got 0."),
        (["tiny-blocks", "--num-steps", "9"], exit_codes.USAGE, "describe: embedding has 4 iterations"),
        (["tiny-blocks", "--num-steps", "-1"], exit_codes.USAGE, "describe: num_steps must be an int >= 0"),
        (
            ["tiny-blokcs"],
            exit_codes.MODEL,
            "Got 'tiny-blokcs'. Did you mean 'tiny-blocks'? Built in: demo, par-indexed, par-swaps, ",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_its_code(argv, code, message, capsys):
    assert main(["describe", *argv]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
