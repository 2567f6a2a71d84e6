"""One run at a time in a folder: who writes there holds a lock that the system lets go of when the process ends."""

import contextlib
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
# Windows keeps others from reading what is locked: a byte behind the text.
BEHIND = 2**20
HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made if need be and removed again if nothing was written there.

    Raises ``ValueError`` if another process holds it; the message names that process.
    """
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    file = None
    try:
        try:
            file = _open_locked(folder)
        except OSError as error:
            raise ValueError(
                f"`output` {folder} can't be written: {error.strerror}; give a folder of yours"
            ) from error
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                # While it is held: later it may be another's. Windows removes no open file, there it stays.
                (folder / LOCK).unlink()
            file.close()
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()  # refused if there is something in it


def _open_locked(folder: Path) -> IO[str]:
    path = folder / LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
        try:
            _lock(file)
        except OSError as error:
            holder = _holder(file)
            if error.errno in HELD:
                file.close()
                raise ValueError(
                    f"`output` {folder} is being written by {holder}; wait until it ends, or give "
                    "another `output`"
                ) from error
            logger.warning(
                "%s: this disk knows no locks (%s); let no second run write there",
                folder,
                error.strerror,
            )
        # Who held it before may have removed the file after it was opened here.
        if sys.platform == "win32" or (
            path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        ):
            file.truncate(0)
            file.write(
                f"process {os.getpid()} on {socket.gethostname()} since "
                f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n"
            )
            file.flush()
            return file
        file.close()


def _lock(file: IO[str]) -> None:
    """Not inherited by processes that are started later: loading processes may outlive a killed run."""
    if sys.platform == "win32":
        file.seek(BEHIND)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        file.seek(0)
    else:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read(200).strip() or "another process"
