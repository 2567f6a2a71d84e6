"""Files that are there as a whole or not at all."""

import os
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and force it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """Write a file in place of the one at ``path``, which stays if that fails: beside it first, then renamed."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        write_durably(beside, content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
