"""`softfree explore`: it serves a checkpoint on loopback until Ctrl-C, and says what it can't do."""

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from torch import nn

import softfree_cli
from softfree.analysis.subject import Subject
from softfree.commands.explore import listen, samples

from .checkpoints import classifier_checkpoint


def subject(**metadata) -> Subject:
    return Subject("model", nn.Identity(), metadata)


@pytest.mark.slow
def test_a_checkpoint_is_served_on_loopback_until_interrupted(tmp_path):
    folder = classifier_checkpoint(tmp_path / "run" / "best")
    process = subprocess.Popen(
        [sys.executable, "-m", "softfree", "explore", "--checkpoint", str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "Attention of softpp_tiny, run\n"
        found = re.match(r"(http://127\.0\.0\.1:\d+/) ", process.stdout.readline())
        assert found
        client = httpx.Client(base_url=found[1], trust_env=False, timeout=600)
        setup = client.get("api/setup").json()
        assert setup["models"][0] == setup["models"][0] | {
            "title": "softpp_tiny, run",
            "own_size": 64,
        }
        assert setup["photos"][0]["name"] == "digit 1"  # the checkpoint's classes are digits
        captured = client.get("api/capture?model=0&photo=sample-1&size=64").json()
        assert len(captured["layers"]) == 4
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0 and errors == ""


def test_a_port_in_use_is_refused_before_models_are_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert softfree_cli.main(["explore", "--port", str(port), "--model", "no_such"]) == 2
    assert f"--port {port}: can't listen there (Address already in use)" in capsys.readouterr().err


def test_answers_are_sent_without_delay():
    with listen("127.0.0.1", 0) as listening:
        assert (
            listening.proto == socket.IPPROTO_TCP
        )  # for asyncio, a sign to turn Nagle's algorithm off


def test_wrong_arguments_are_refused(tmp_path, capsys):
    for arguments, message in (
        (["--port", "70000"], "--port must be at most 65535"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 0: can't listen there"),
        (["--model", "no_such"], "timm knows no model 'no_such'"),
        (["--checkpoint", str(tmp_path / "none")], "no checkpoint at"),
        (["--device", "tpu"], "--device must be"),
    ):
        assert softfree_cli.main(["explore", "--port", "0", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert softfree_cli.main(["explore"]) == 2
    assert "needs uvicorn: pip install 'softfree[explorer]'" in capsys.readouterr().err


def test_digits_come_first_only_for_models_that_know_them():
    assert next(iter(samples([subject(class_names=["cat", "dog"])]))) == "lake"
    assert next(iter(samples([subject(class_names=[str(n) for n in range(10)])]))) == "digit 1"
