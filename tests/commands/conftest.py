"""Commands without a checkpoint take the newest run under output/: in tests there is none, whatever lies there."""

import pytest


@pytest.fixture(autouse=True)
def runs(monkeypatch, tmp_path):
    """The folder in which the newest run is looked for."""
    monkeypatch.setattr("softfree.commands.common.RUNS", tmp_path / "runs")
    return tmp_path / "runs"
