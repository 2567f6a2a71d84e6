"""C compiled when first needed, for the processor at hand, and kept in the user's cache; as Triton does with its launchers.

Nothing depends on it: where there is no compiler, or ``SOFTFREE_NATIVE=0`` is set, :func:`load` gives None and PyTorch's own
operations take the place of compiled ones.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

# PyTorch's threads are OpenMP's, too, and those of one libgomp.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
SECONDS = 120


@functools.cache
def load(source: Path) -> ctypes.CDLL | None:
    """The library made of a C file; None where it can't be had, with a warning if a compiler tried and failed."""
    command = compiler()
    if command is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, command)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"{source.name} could not be compiled by {command} and loaded: {said.strip().splitlines()[-1]}. "
            "Plain PyTorch takes its place, slower; SOFTFREE_NATIVE=0 avoids the attempt.",
            stacklevel=2,
        )
        return None


def compiler() -> str | None:
    """The path of a C compiler: ``CC``, cc, gcc or clang; None if there is none, or none is wanted."""
    if os.environ.get("SOFTFREE_NATIVE") == "0" or os.name != "posix":
        return None
    names = [os.environ.get("CC"), "cc", "gcc", "clang"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """Where softfree keeps what it can make again: ``SOFTFREE_CACHE``, or ``softfree`` in the user's folder for caches."""
    chosen = os.environ.get("SOFTFREE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "softfree"


def _compiled(source: Path, command: str) -> Path:
    """The library of this source, compiler and processor, made unless it is there."""
    version = _run(command, "-v").stderr
    parts = (source.read_text(), *FLAGS, version, _processor())
    name = f"{source.stem}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}.so"
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (folder / name).exists():
            return folder / name
        handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    except (OSError, RuntimeError):  # no home, or no right to write there
        folder = Path(_for_this_process().name)
        handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _run(command, *FLAGS, str(source), "-o", made, "-lm")
        os.replace(made, folder / name)  # at once, so that no other process reads half of it
    finally:
        Path(made).unlink(missing_ok=True)
    return folder / name


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)


@functools.cache
def _for_this_process() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="softfree-")


def _processor() -> str:
    """What ``-march=native`` looks at, for homes that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
