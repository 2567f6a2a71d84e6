"""Checkpoints: whole or not there, readable without running code, and clear about what is wrong."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from softfree.training import checkpoint
from softfree.training.checkpoint import (
    SETTINGS,
    CheckpointWriteError,
    check_fits,
    check_same_run,
    locate,
    read_checkpoint,
    read_run,
    read_state,
    recover,
    write_checkpoint,
)
from softfree.training.tasks import load_for_inference


def write(folder, value, **more):
    weights = {"w": torch.full((100,), float(value))}
    write_checkpoint(folder, weights, {"task": "toy"}, "{}", state={"step": value}, **more)


def value(folder):
    return read_checkpoint(folder).weights["w"][0].item()


def test_what_was_written_is_read_back(tmp_path):
    write(tmp_path / "last", 1, ema={"w": torch.full((100,), 7.0)})
    assert value(tmp_path / "last") == 7  # the moving average is what is used
    assert read_state(tmp_path / "last") == {"step": 1}
    write(tmp_path / "last", 2)
    assert value(tmp_path / "last") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last"]


def test_no_file_of_a_checkpoint_needs_pickle(tmp_path):
    write(tmp_path / "last", 1)
    for file in (tmp_path / "last").iterdir():
        if file.suffix == ".pt":
            torch.load(file, weights_only=True)
        else:
            assert file.suffix in (".json", ".safetensors")


def test_weights_that_share_memory_can_be_written(tmp_path):
    tied = torch.randn(4)
    write_checkpoint(tmp_path / "last", {"a": tied, "b": tied}, {}, "{}")
    assert torch.equal(read_checkpoint(tmp_path / "last").weights["b"], tied)


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, fails_at):
    write(tmp_path / "last", 1)
    calls = 0
    fsync = os.fsync

    def full(descriptor):
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointWriteError, match="No space left on device .*`resume` auto"):
        write(tmp_path / "last", 2)
    monkeypatch.undo()
    # The last sync comes after the renames: by then the new one is whole.
    assert value(tmp_path / "last") == (1 if fails_at < 6 else 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last"]
    write(tmp_path / "last", 3)
    assert value(tmp_path / "last") == 3


def test_a_disk_that_is_really_full_leaves_the_checkpoint_before(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True
    ).returncode == 0  # fmt: skip
    if not mounted:
        pytest.skip("needs the right to mount a small file system")
    try:
        write(disk / "last", 1)
        with pytest.raises(CheckpointWriteError, match="No space left on device"):
            write_checkpoint(disk / "last", {"w": torch.zeros(100_000)}, {}, "{}")
        assert value(disk / "last") == 1
        assert sorted(path.name for path in disk.iterdir()) == ["last"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_first_checkpoint_that_fails_says_there_is_none(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointWriteError, match="none yet"):
        write(tmp_path / "last", 1)
    assert not list(tmp_path.iterdir())


def test_half_written_folders_are_ignored_and_cleared(tmp_path):
    write(tmp_path / "last", 1)
    (tmp_path / ".last.new").mkdir()
    (tmp_path / ".last.new" / "model.safetensors").write_bytes(b"half")
    assert value(tmp_path / "last") == 1
    recover(tmp_path / "last")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last"]


def test_between_the_two_renames_the_old_checkpoint_is_found(tmp_path):
    write(tmp_path / "last", 1)
    (tmp_path / "last").rename(tmp_path / ".last.old")
    assert value(tmp_path / "last") == 1
    recover(tmp_path / "last")
    assert value(tmp_path / "last") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last"]


def test_after_the_second_rename_the_new_checkpoint_counts(tmp_path):
    write(tmp_path / ".last.old", 1)
    write(tmp_path / "last", 2)
    recover(tmp_path / "last")
    assert value(tmp_path / "last") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last"]


@pytest.mark.parametrize("length", [0, 3, 100, -1])
@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.STATE])
def test_a_truncated_file_is_named(tmp_path, name, length):
    write(tmp_path / "last", 1)
    file = tmp_path / "last" / name
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{name} is unreadable, perhaps truncated"):
        read_checkpoint(tmp_path / "last")
        read_state(tmp_path / "last")


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.EMA, checkpoint.STATE])
def test_one_flipped_bit_is_found(tmp_path, name):
    write(tmp_path / "last", 1, ema={"w": torch.full((100,), 7.0)})
    file = tmp_path / "last" / name
    content = bytearray(file.read_bytes())
    content[-30] ^= 8
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is (damaged or was changed|unreadable)"):
        read_run(tmp_path / "last")


def test_checkpoints_of_before_there_were_checksums_are_read(tmp_path):
    write(tmp_path / "last", 1)
    file = tmp_path / "last" / checkpoint.METADATA
    metadata = json.loads(file.read_text())
    assert len(metadata.pop("crc32")) == 2
    file.write_text(json.dumps(metadata))
    assert value(tmp_path / "last") == 1


def test_weights_that_are_not_finite_are_said(tmp_path, caplog):
    write(tmp_path / "last", float("nan"))
    read_checkpoint(tmp_path / "last")
    assert "last: w is not finite" in caplog.text


def test_a_reader_gets_the_files_of_one_checkpoint_whenever_a_run_replaces_it(
    tmp_path, monkeypatch
):
    def put(step):
        weights = {"w": torch.full((100,), float(step))}
        write_checkpoint(tmp_path / "best", weights, {"task": "toy", "step": step}, "{}")

    # A run writes between any two accesses of the reader: before the first, the second, and so on.
    read_once, accesses, times, between = checkpoint.read_metadata, 0, 0, 0

    def interrupt(path):
        nonlocal accesses, times
        accesses += 1
        if accesses == between:
            times += 1
            put(times)
        return read_once(path)

    monkeypatch.setattr(checkpoint, "read_metadata", interrupt)
    for between in range(8):  # noqa: B007
        put(0)
        accesses = 0
        found = read_checkpoint(tmp_path / "best")
        assert found.weights["w"][0] == found.metadata["step"]
    assert times >= 2


@pytest.mark.slow
def test_readers_beside_a_writer_never_see_two_checkpoints_at_once(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "best")])
    try:
        while not (tmp_path / "best").exists():
            assert writer.poll() is None
        seen: set[int] = set()
        until = time.monotonic() + 60
        while len(seen) <= 10 and time.monotonic() < until:
            found = read_checkpoint(tmp_path / "best")
            assert found.weights["w"][0] == found.metadata["step"]
            seen.add(found.metadata["step"])
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) > 10


WRITER = """
import itertools, sys
from pathlib import Path
import torch
from softfree.training.checkpoint import write_checkpoint
for step in itertools.count():
    w = {"w": torch.full((100,), float(step))}
    write_checkpoint(Path(sys.argv[1]), w, {"task": "toy", "step": step}, "{}")
"""


def test_a_path_that_is_no_checkpoint_gets_advice(tmp_path):
    write(tmp_path / "best", 1)
    with pytest.raises(ValueError, match="is not a checkpoint folder .* did you mean .*best"):
        locate(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*bset; did you mean .*best"):
        locate(tmp_path / "bset")


def test_weights_of_another_architecture_are_told_by_their_keys(tmp_path):
    given, expected = {"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(3)}
    with pytest.raises(ValueError, match="than soft_tiny: b is not in the model; a is \\(2,\\)"):
        check_fits(tmp_path, given, expected, "soft_tiny")
    check_fits(tmp_path, given, {name: t.clone() for name, t in given.items()}, "soft_tiny")


def test_a_run_may_change_where_its_data_lie_but_not_what_it_trains(tmp_path):
    first = dict(
        data=dict(data_dir="a", task="text"), backbone=dict(model="x", bn=False), optim=dict(lr=1)
    )
    (tmp_path / SETTINGS).write_text(json.dumps(first))
    moved = {**first, "data": dict(data_dir="b", task="text", new=3), "optim": dict(lr=2)}
    check_same_run(tmp_path, json.dumps(moved))
    other = {
        **first,
        "data": dict(data_dir="a", task="image"),
        "backbone": dict(model="y", bn=True),
    }
    with pytest.raises(
        ValueError,
        match="was written by a run with `task` text, `model` x, `no_bn`; use the same settings",
    ):
        check_same_run(tmp_path, json.dumps(other))


def test_a_checkpoint_of_an_unknown_task_is_refused(tmp_path):
    write(tmp_path / "last", 1)
    with pytest.raises(
        ValueError, match="checkpoint of the task 'toy', which this version does not know"
    ):
        load_for_inference(tmp_path / "last")
