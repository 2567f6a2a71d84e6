"""Settings every test shares: a fixed seed, and property tests that repeat the same examples."""

import signal

import hypothesis
import pytest
import torch

# A shell that starts tests in the background has them ignore these, and so would the runs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.register_profile(
    "softfree", deadline=None, derandomize=True, max_examples=25, database=None
)
hypothesis.settings.load_profile("softfree")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
