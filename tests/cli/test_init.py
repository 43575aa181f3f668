import subprocess
import sys
from types import SimpleNamespace

import pytest

import looplab
from looplab import cli
from looplab.cli import COMMANDS, GROUPS, exit_codes, main
from source import SRC

NOT_COMMANDS = {
    "__init__",
    "__main__",
    "checkpoint",
    "config_file",
    "device",
    "engine_options",
    "exit_codes",
    "kv_rule",
    "torchrun",
}


def test_the_table_and_the_folder_agree():
    files = {path.stem for path in (SRC / "cli").glob("*.py")} - NOT_COMMANDS
    files = {name for name in files if not name.startswith("scaling_")}  # actions of one command
    assert {name.replace("-", "_") for name in COMMANDS} == files
    for name, command in COMMANDS.items():
        assert command.module == f"looplab.cli.{name.replace('-', '_')}"
        assert command.group in GROUPS


def test_help_lists_every_command_and_imports_no_torch():
    code = "import sys; from looplab.cli import main; main(['--help']); assert 'torch' not in sys.modules, 'torch!'"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name, command in COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert command.help in result.stdout


def test_the_installed_entry_and_the_module_are_the_same():
    result = subprocess.run([sys.executable, "-m", "looplab.cli", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"looplab {looplab.__version__}\n")


def test_without_a_command_the_help_goes_to_stderr(capsys):
    assert main([]) == exit_codes.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: looplab COMMAND")


def test_a_misspelt_command_gets_a_suggestion(capsys):
    assert main(["audti", "x"]) == exit_codes.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("looplab: Unknown command 'audti'. Did you mean 'audit'? Known: audit, ")
    assert printed.err.count("\n") == 1


@pytest.fixture
def probe(monkeypatch):
    """A command `probe` whose behaviour the test sets."""
    module = SimpleNamespace(main=None)
    monkeypatch.setitem(COMMANDS, "probe", cli.Command("look", "a probe", "looplab.cli.probe"))
    monkeypatch.setitem(sys.modules, "looplab.cli.probe", module)
    return module


def test_a_command_gets_its_arguments_and_its_code_is_returned(probe):
    seen = []
    probe.main = lambda argv: seen.append(argv) or exit_codes.FINDING
    assert main(["probe", "x", "--y"]) == exit_codes.FINDING
    assert seen == [["x", "--y"]]


@pytest.mark.parametrize("message", ["the model is gone.", "probe: the model is gone."])
def test_a_user_error_is_one_line_and_its_code(probe, capsys, message):
    def fail(argv):
        raise exit_codes.UserError(message, exit_codes.MODEL)

    probe.main = fail
    assert main(["probe"]) == exit_codes.MODEL
    assert capsys.readouterr().err == "probe: the model is gone.\n"


def test_an_unexpected_error_keeps_its_traceback(probe):
    def fail(argv):
        raise RuntimeError("ours")

    probe.main = fail
    with pytest.raises(RuntimeError, match="ours"):
        main(["probe"])


def test_a_reader_that_leaves_is_no_error_of_ours():
    words = [sys.executable, "-u", "-m", "looplab.cli", "train", "text-core", "--help"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == exit_codes.UNEXPECTED


def test_an_interrupt_is_130(probe, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    probe.main = interrupt
    assert main(["probe"]) == exit_codes.INTERRUPTED
    assert capsys.readouterr().err == "probe: interrupted.\n"
