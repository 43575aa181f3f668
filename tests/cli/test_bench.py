"""`looplab bench`: it finds the cases of a checkout, compares commits, and says so where there is no checkout."""

import subprocess

import pytest

from looplab.cli import bench, main
from looplab.cli.exit_codes import UserError

CASE = '''"""A case."""
import argparse, json
from pathlib import Path
CASES = {"first": None, "second": None}
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--by", type=float, default=1)
    options = parser.parse_args()
    speed = float(Path("speed").read_text()) * options.by
    print("a line before")
    print(json.dumps({"case": options.case, "rows": [{"arm": "a", "speed": speed}], "commit": "x"}))
if __name__ == "__main__":
    main()
'''


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits of a checkout whose only case got three times as fast."""
    for folder in ("benchmarks/cases", "src/looplab"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "benchmarks" / "cases" / "made.py").write_text(CASE)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    for speed in ("2", "6"):
        (tmp_path / "speed").write_text(speed)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", speed], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_cases_are_listed_run_and_given_their_options(repository, capfd):
    assert main(["bench"]) == 0
    assert capfd.readouterr().out.split() == ["made.first", "made.second"]
    assert main(["bench", "made.first", "--by", "2"]) == 0
    assert '"speed": 12.0' in capfd.readouterr().out


def test_a_case_is_compared_with_another_commit_and_nothing_is_left(repository, capfd):
    assert main(["bench", "made.first", "--against", "HEAD~1"]) == 0
    out = capfd.readouterr().out
    assert "rows a speed" in out and "ratio 3.000" in out
    left = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, cwd=repository)
    assert len(left.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["made.frist"], "Did you mean 'made.first'?"),
        (["made.first", "--against"], "must be followed by a commit"),
        (["made.first", "--against", "nowhere"], "--against must be a commit of this checkout. Got 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(repository, capfd, words, message):
    assert main(["bench", *words]) == 2
    assert message in capfd.readouterr().err


def test_outside_a_checkout_it_says_that_it_needs_one(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site" / "looplab" / "cli" / "bench.py"))
    with pytest.raises(UserError, match="part of a checkout of looplab, not of the installed package"):
        bench.checkout(tmp_path)


def test_help_needs_no_checkout(capsys):
    assert main(["bench", "--help"]) == 0 and "--against REF" in capsys.readouterr().out
