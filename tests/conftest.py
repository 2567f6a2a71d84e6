"""Settings every test shares: a fixed seed, and property tests that repeat the same examples."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "softfree", deadline=None, derandomize=True, max_examples=25, database=None
)
hypothesis.settings.load_profile("softfree")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
