"""The settings of an audit refuse what is out of range, by the option's name."""

import re

import pytest

from looplab._config import from_dict, to_dict
from looplab.audit.config import AuditConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("replicates", 50, "--replicates must be at least 1000. Got 50."),
        ("init_seeds", 0, "--init-seeds must be at least 1. Got 0."),
        ("permutations", -1, "--permutations must be at least 0. Got -1."),
        ("max_tokens", 1, "--max-tokens must be at least 2. Got 1."),
        ("documents", 0, "--documents must be at least 1. Got 0."),
        ("calibration_documents", 0, "--calibration-documents must be at least 1. Got 0."),
        ("calibration_tokens", 0, "--calibration-tokens must be at least 1. Got 0."),
        ("affine_tokens", 0, "--affine-tokens must be at least 1. Got 0."),
        ("level", 1.0, "--level must be between 0 and 1. Got 1.0."),
        ("margin_nats", 0.0, "--margin-nats must be a number above 0. Got 0.0."),
        ("margin_nats", float("inf"), "--margin-nats must be a number above 0. Got inf."),
        ("margin_share", -0.1, "--margin-share must be a number above 0. Got -0.1."),
        ("init", "nought", "--init must be model or zero. Got 'nought'."),
        ("weighting", "loop", "--weighting must be token or document. Got 'loop'."),
        ("probes", ("lens",), "--probes must be names out of temperature, affine, full_rank. Got 'lens'."),
    ],
)
def test_a_bad_setting_names_its_option(field, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        AuditConfig(**{field: value})


def test_settings_survive_json():
    config = AuditConfig(num_steps=(4, 4), grid=(1, 2), controls=(), schedules=("same(3)",), level=0.9)
    assert from_dict(AuditConfig, to_dict(config)) == config
    assert from_dict(AuditConfig, to_dict(AuditConfig())) == AuditConfig()
