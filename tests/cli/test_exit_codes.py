from pathlib import Path

import pytest

from looplab.cli import exit_codes
from looplab.cli.exit_codes import MEANINGS, UserError, user_error


def test_every_code_has_one_number_and_a_meaning():
    codes = {name: value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert codes == {
        "DONE": 0,
        "UNEXPECTED": 1,
        "USAGE": 2,
        "MODEL": 3,
        "DATA": 4,
        "SELF_TEST": 5,
        "FINDING": 6,
        "BUSY": 7,
        "INTERRUPTED": 130,
    }
    assert set(MEANINGS) == set(codes.values())


@pytest.mark.parametrize("error", [kind("bad 'x'") for kind in (ValueError, KeyError, TypeError, OSError)])
def test_a_refusal_becomes_a_user_error_with_the_message_as_written(error):
    with pytest.raises(UserError) as caught, user_error(exit_codes.DATA):
        raise error
    assert (caught.value.message, caught.value.code) == ("bad 'x'", exit_codes.DATA)
    assert caught.value.__cause__ is error


def test_other_errors_pass():
    with pytest.raises(RuntimeError), user_error(exit_codes.DATA):
        raise RuntimeError("ours")
    with pytest.raises(ValueError, match="ours"), user_error(exit_codes.DATA, (KeyError,)):
        raise ValueError("ours")


def test_a_missing_file_keeps_its_name():
    with pytest.raises(UserError, match="nowhere.jsonl"), user_error(exit_codes.DATA):
        Path("nowhere.jsonl").read_text()
