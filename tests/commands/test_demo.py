"""`softfree demo`: it runs, and says clearly what it can't do."""

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from softfree.analysis.measure import Measured
from softfree.analysis.pictures import landscape
from softfree.commands import demo


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_demo_shows_four_maps_and_the_race(capsys):
    assert demo.main(["--device", "cpu", "--max-tokens", "784"]) == 0
    out = capsys.readouterr().out
    for shape in ("56 x 56", "28 x 28", "14 x 14", "7 x 7"):
        assert shape in out
    assert "112 x 112" in out and "softfree models" in out


def test_the_users_own_picture_is_used(tmp_path, capsys):
    Image.new("L", (90, 70)).save(tmp_path / "grey.png")
    arguments = [str(tmp_path / "grey.png"), "--device", "cpu", "--max-tokens", "784"]
    assert demo.main(arguments) == 0
    assert "yours: 90 x 70" in capsys.readouterr().out


def test_missing_picture_is_named():
    with pytest.raises(FileNotFoundError, match=r"no photo at nowhere\.png"):
        demo.main(["nowhere.png"])


def test_file_that_is_no_picture_is_named(tmp_path):
    (tmp_path / "notes.png").write_text("not a picture")
    with pytest.raises(ValueError, match=r"notes\.png can't be read as a photo"):
        demo.main([str(tmp_path / "notes.png")])


def test_unknown_model_and_device_are_refused():
    with pytest.raises(ValueError, match="timm knows no model 'softest'"):
        demo.main(["--model", "softest", "--device", "cpu"])
    with pytest.raises(ValueError, match=r"'auto', 'cuda' or 'cpu', got 'tpu'"):
        demo.main(["--device", "tpu"])


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match=r"--max-tokens must be at least 784"):
        demo.main(["--max-tokens", "10"])


def test_softmax_is_extrapolated_and_marked_where_it_would_take_too_long(capsys, monkeypatch):
    monkeypatch.setattr(demo, "SLOWEST", 0.0)
    monkeypatch.setattr(demo, "run", lambda *_, **__: Measured(0.5, extra_bytes=2**20))
    demo.race(Console(), torch.device("cpu"), [28, 56])
    first, second = (
        line for line in capsys.readouterr().out.splitlines() if " 784 " in line or "3,136" in line
    )
    assert "~" not in first
    assert "~8,000" in second and "~16.0" in second and " - " in second


def test_a_long_call_is_made_once():
    calls = []
    cost = demo.run(lambda: calls.append(torch.zeros(1000)), torch.device("cpu"), once=True)
    assert len(calls) == 1
    assert cost.extra_bytes == 4000 and cost.seconds > 0


def test_the_drawn_picture_is_the_same_each_time_and_not_flat():
    one, two = np.asarray(landscape(64, 48)), np.asarray(landscape(64, 48))
    assert one.shape == (48, 64, 3)
    assert (one == two).all()
    assert one.std() > 30
