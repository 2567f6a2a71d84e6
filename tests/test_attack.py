"""benchmarks/attack.py: it tells faults from refusals, and finds none."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "attack.py"


@pytest.mark.full
@pytest.mark.parametrize(
    "what, count",
    [("checkpoints", 8), ("pictures", 4), ("coco", 4), ("layouts", 4), ("requests", 20)],
)
def test_damaged_files_are_refused_in_a_line_or_taken(what, count):
    words = [sys.executable, str(SCRIPT), what, "--count", str(count), "--seed", "1"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{what}: {count} attacks, seed 1: " in done.stdout


def test_an_attack_that_ends_in_a_traceback_a_signal_or_silence_is_a_fault(tmp_path):
    spec = importlib.util.spec_from_file_location("attack", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules["attack"] = script  # dataclasses look their module up
    spec.loader.exec_module(script)

    def say(words):
        print(words, file=sys.stderr)
        return 2

    attempts = {
        "accepted": lambda: 0,
        "refused": lambda: say("softfree: error: no"),
        "no word": lambda: 1,
        "traceback": lambda: 1 // 0,
        "signal 6": os.abort,
        "too many words": lambda: say("x\n" * (script.LINES + 1)),
    }
    for kind, run in attempts.items():
        verdict = script.attempt(script.Attack(kind, run), tmp_path)
        assert verdict.kind == kind
        assert verdict.fault == (kind not in ("accepted", "refused"))
