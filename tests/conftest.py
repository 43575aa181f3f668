"""Every test process: one thread, deterministic algorithms, fresh memory full of NaN.

Annotations of looplab are checked at run time (`--jaxtyping-packages` in pyproject.toml).
"""

import os

# Before the first import of NumPy or PyTorch: workers share the cores, and sums in one thread repeat bit for bit.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import hypothesis
import jaxtyping
import pytest
import torch

# The same examples every time, and no verdict about speed: other workers share the cores.
hypothesis.settings.register_profile(
    "looplab", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("looplab")


@pytest.fixture(scope="session", autouse=True)
def _fresh_memory_is_nan():
    """`torch.empty` fills with NaN, so reading what was never written fails a test."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def unchecked():
    """Annotations are not checked: wrong arguments reach the code, whose own message is under test."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
