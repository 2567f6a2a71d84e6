"""Writing files completely or not at all."""

import os
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and flush it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """Replace the file at ``path``, which is kept if that fails, by renaming a new file next to it."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        write_durably(beside, content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
