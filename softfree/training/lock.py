"""One run at a time per folder: the run holds a lock, which the system releases when the process ends."""

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
# On Windows others can't read a locked byte, so a byte after the text is locked.
BEHIND = 2**20
HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which is created if necessary, and removed again if it stays empty.

    Raises ``ValueError`` if another process holds it; the message names that process.
    """
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    file = None
    try:
        try:
            file = _open_locked(folder)
        except OSError as error:
            raise ValueError(
                f"can't write to `output` {folder}: {error.strerror}; use a folder that you can write to"
            ) from error
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                # Removed while the lock is held: later the file may belong to another run. Windows can't
                # remove open files, so there it stays.
                (folder / LOCK).unlink()
            file.close()
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()  # fails if it is not empty


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
                    f"`output` {folder} is in use by {holder}; wait until it ends, or use another "
                    "`output`"
                ) from error
            logger.warning(
                "%s: this disk does not support locks (%s); don't start a second run there",
                folder,
                error.strerror,
            )
        # The previous holder may have removed the file after it was opened here.
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
    """Lock a file.

    Child processes don't inherit the lock, since loading processes may outlive a killed run.
    """
    if sys.platform == "win32":
        file.seek(BEHIND)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        file.seek(0)
    else:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read(200).strip() or "another process"
