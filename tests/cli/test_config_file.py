"""Options from a file: who wins, and what is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from looplab.cli.bench import _from_file
from looplab.cli.config_file import FromFile, output_folder, parsed, resolved
from looplab.cli.exit_codes import USAGE, UserError


@dataclass(frozen=True, kw_only=True)
class Options(FromFile):
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    port: int = 8000
    rate: float | None = None
    reuse: Literal["off", "check"] = "check"
    gate: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False


def read(folder, text, *words, name="options.yaml"):
    (folder / name).write_text(text)
    return parsed(Options, "try", ["--config", str(folder / name), *words], "")


def test_a_file_says_what_the_command_line_leaves_open(tmp_path, capsys):
    text = "model: demo\nport: 1\nrate: 1e-3\nreuse: off\ngate: [a, b]\n"
    found = read(tmp_path, text)
    assert (found.model, found.port, found.rate, found.reuse) == ("demo", 1, 0.001, "off")
    assert found.gate == (Path("a"), Path("b"))
    assert json.loads(capsys.readouterr().err.removeprefix("config: ")) == resolved(found)
    found = read(tmp_path, text + "quiet: true\n", "other", "--port=2", "--gate", "c", "--quiet")
    assert (found.model, found.port, found.gate, found.rate) == ("other", 2, (Path("c"),), 0.001)
    assert capsys.readouterr().err == ""


def test_what_was_printed_is_a_file_again(tmp_path):
    found = read(tmp_path, '{"model": "m", "gate": "g", "rate": 2}', name="options.json")
    again = read(tmp_path, json.dumps(resolved(found)), name="again.json")
    assert resolved(again) == resolved(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "must name options of this command. Got 'prot'. Did you mean 'port'?"),
        ("config: x", "Got 'config'"),
        ("port: 1.5", "port in .* must be an integer. Got 1.5"),
        ("port: true", "must be an integer. Got True"),
        ("rate: fast", "must be a number. Got 'fast'"),
        ("reuse: never", "must be one of off, check. Got 'never'"),
        ("quiet: 1", "must be true or false. Got 1"),
        ("- a", "which holds none. Write lines such as"),
        ("a: [", "must be a YAML or JSON file"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, text, said):
    with pytest.raises(UserError, match=said) as found:
        read(tmp_path, text)
    assert found.value.code == USAGE


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="none.yaml: .*No such file"):
        parsed(Options, "try", ["--config=none.yaml"], "")


def test_a_benchmark_gets_the_words_of_its_file(tmp_path, capsys):
    path = tmp_path / "case.yaml"
    path.write_text("case: engine.width\nmodel: loop-512\nrows: [8, 16]\nagainst: HEAD\n")
    words = _from_file(["--config", str(path), "--rows", "4"])
    assert words == ["engine.width", "--rows", "4", "--model", "loop-512", "--against", "HEAD"]
    assert capsys.readouterr().err == "bench: engine.width --rows 4 --model loop-512 --against HEAD\n"
    assert _from_file(["engine.depth_mix", f"--config={path}"])[:3] == ["engine.depth_mix", "--model", "loop-512"]
    path.write_text("rows: 8\n")
    with pytest.raises(UserError, match="must name the case"):
        _from_file([f"--config={path}"])


def test_an_output_folder_that_is_a_file_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out must be a folder, .*file: File exists. Name another"):
        output_folder(tmp_path / "file")
    output_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
