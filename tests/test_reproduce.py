"""results/: every command of reproduce.sh is one that softfree understands, started once; draw.py draws."""

import csv
import functools
import inspect
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

import softfree_cli
from softfree.commands import compare
from softfree.data.classification import load_images
from softfree.training.classification import Classification, ClassificationSettings

SCRIPT = Path(__file__).parent.parent / "results" / "reproduce.sh"
TABLES = (
    "table2",
    "table6",
    "controls",
    "ablations",
    "precision",
    "lra",
    "dense",
    "own",
    "shapes",
    "twins",
    "speed",
)
# In softfree's place: notes its arguments, one command a line, and leaves the files that were asked for.
RECORDER = """#!/usr/bin/env bash
printf '%s\\0' "$@" >> "$RECORD"; echo >> "$RECORD"
[[ "$*" != *"${STOP_AT:-nowhere}"* ]] || exit 75
while [ $# -gt 0 ]; do
  case $1 in
    --csv) mkdir -p "$(dirname "$2")"; printf 'top1\\n50\\n' > "$2" ;;
    --output) mkdir -p "$2"; printf 'step\\n1\\n' | tee "$2/train.csv" > "$2/eval.csv" ;;
  esac
  shift
done
"""


class Script:
    """The script with the recorder in softfree's place."""

    def __init__(self, folder: Path):
        self.out, self.record = folder / "out put", folder / "record"
        recorder = folder / "softfree"
        recorder.write_text(RECORDER)
        recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
        data = dict.fromkeys(("TI", "CIFAR", "IMDB", "VOC"), str(folder))
        self.environment = {"PATH": os.environ["PATH"], **data}
        self.environment |= dict.fromkeys(("SOFTFREE", "WITHOUT_ATTENTION"), str(recorder))
        self.environment |= {"RECORD": str(self.record), "OUT": str(self.out), "DEVICE": "cpu"}

    def run(self, *tables: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [SCRIPT, *tables], env=self.environment | variables, capture_output=True, text=True
        )

    def commands(self) -> list[list[str]]:
        """The arguments of each start of softfree so far."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [line.split("\0")[:-1] for line in lines]


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path)


class ParsedError(Exception):
    """Carries what a command line was read as, before anything is done."""


@pytest.fixture
def parse(monkeypatch):
    """Reads a command line with the command's own parser."""
    cli = tyro.cli

    def read_only(target, **options):
        if not inspect.isclass(target):
            target = functools.wraps(target)(lambda *args, **kwargs: None)
        raise ParsedError(cli(target, **options))

    def parse(arguments):
        with pytest.raises(ParsedError) as parsed:
            softfree_cli.main(arguments)
        return parsed.value.args[0]

    monkeypatch.setattr(tyro, "cli", read_only)
    return parse


@pytest.mark.parametrize("table", TABLES)
def test_softfree_understands_every_command(table, script, parse):
    ended = script.run(table, EXTRA="--steps 2 --warmup-epochs 0 --batch-size 8")
    assert ended.returncode == 0, ended.stderr
    assert script.commands()
    data = load_images(None)
    for arguments in script.commands():
        settings = parse(arguments)
        if isinstance(settings, ClassificationSettings):
            assert settings.optim.steps == 2
            Classification(settings, data)  # refuses arguments that the model does not take
        if isinstance(settings, compare.CompareSettings):
            compare.check(settings)


@pytest.mark.parametrize("table", TABLES)
def test_existing_files_are_not_made_again(table, script):
    assert script.run(table).returncode == 0
    made = script.commands()
    assert script.run(table).returncode == 0
    assert script.commands() == made


def test_a_stopped_run_is_started_again_and_the_others_are_not(script):
    assert script.run("precision", STOP_AT="precision_soft_float16").returncode == 75
    begun = script.commands()
    assert len(begun) == 3
    assert script.run("precision").returncode == 0
    assert script.commands()[3] == begun[2]
    assert len(script.commands()) == 3 + 4


def test_a_run_with_other_arguments_is_trained_and_scored_again(script):
    script.run("table2", EXTRA="--steps 2")
    made = len(script.commands())
    script.run("table2")
    speed = 1
    assert len(script.commands()) == 2 * made - speed


def test_a_table_has_a_row_for_every_run_and_seed(script):
    assert script.run("table2", SEEDS="42 43").returncode == 0
    rows = list(csv.DictReader((script.out / "table2.csv").open()))
    assert len(rows) == 13 * 2
    assert rows[-1] == {"run": "softpp_average", "seed": "43", "top1": "50"}


def test_dense_starts_from_the_weights_of_table2(script):
    assert "random weights" in script.run("dense").stderr
    assert not any("--backbone-checkpoint" in arguments for arguments in script.commands())
    script.record.unlink()
    script.run("table2")
    assert "random weights" not in script.run("dense").stderr
    # As in the published runs.
    for task, run in (("segmentation", "softmax"), ("detection", "softmax_average")):
        weights = str(script.out / "tiny_imagenet" / run / "42" / "last")
        assert any(weights in arguments for arguments in script.commands() if task in arguments)


@pytest.mark.parametrize(
    ("tables", "words"),
    [(["speed", "dense"], "set VOC=the folder"), (["lra"], "got ''"), (["speed", "no-such"], "")],
)
def test_nothing_begins_before_all_that_is_needed_is_there(script, tables, words):
    ended = script.run(*tables, VOC="", IMDB="")
    assert ended.returncode == 2
    assert words in ended.stderr
    assert not script.commands()


def test_help_is_the_head_of_the_script(script):
    ended = script.run()
    assert ended.returncode == 2
    assert all(f"results/reproduce.sh {table} " in ended.stdout for table in TABLES)
    assert "set -e" not in ended.stdout


@pytest.mark.full
def test_the_pictures_can_be_drawn_again(tmp_path):
    for path in SCRIPT.parent.glob("*.csv"):
        shutil.copy(path, tmp_path)
    heat_maps = "2026-11-20_nvidia-h200_heatmap_own.jpg"  # which one of the drawings shows
    for name in ("draw.py", heat_maps):
        shutil.copy(SCRIPT.with_name(name), tmp_path)
    subprocess.run([sys.executable, tmp_path / "draw.py"], check=True)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    by_benchmarks = {"2026-11-16_nvidia-h200_twins.png"}
    assert drawn == {path.name for path in SCRIPT.parent.glob("*.png")} - by_benchmarks
