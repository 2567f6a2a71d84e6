"""The lock of a run's folder: one holder, named to the others, gone with its process."""

import contextlib
import errno
import os
import signal

import pytest

from softfree.training import lock
from softfree.training.lock import locked


@contextlib.contextmanager
def held_elsewhere(folder):
    """Another process that holds the lock; yields its number."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(folder):
            os.write(writer, b"!")
            signal.pause()
        os._exit(0)
    os.read(reader, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_another_process_is_refused_and_told_who_holds_it(tmp_path):
    with (
        held_elsewhere(tmp_path / "run") as holder,
        pytest.raises(ValueError, match=f"is in use by process {holder} on .* since 2"),
        locked(tmp_path / "run"),
    ):
        pass


def test_a_killed_holder_leaves_no_lock_and_a_longer_name_no_trace(tmp_path):
    with held_elsewhere(tmp_path):
        (tmp_path / ".lock").write_text("process 1 " + 100 * "x")
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
        assert "x" not in (tmp_path / ".lock").read_text().rpartition("since")[2]
    assert not list(tmp_path.iterdir())


def test_folders_that_were_made_go_if_nothing_was_written(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "a" / "b"):
        raise KeyError
    assert not list(tmp_path.iterdir())
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


def test_a_lock_that_was_removed_after_it_was_opened_is_none(tmp_path, monkeypatch):
    take, opened = lock._lock, []

    def late(file):
        opened.append(file)
        if len(opened) == 1:
            (tmp_path / ".lock").unlink()  # by its holder, who has ended by now
        take(file)

    monkeypatch.setattr(lock, "_lock", late)
    with locked(tmp_path):
        assert len(opened) == 2 and (tmp_path / ".lock").exists()


def test_a_disk_without_locks_is_said_and_used(tmp_path, monkeypatch, caplog):
    def refuse(file):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock, "_lock", refuse)
    with locked(tmp_path):
        assert "this disk does not support locks" in caplog.text
