"""C code that is compiled on first use for the local processor and kept in the user's cache.

Triton does the same with its launchers. Compilation is optional: without a compiler, or with
``SOFTFREE_NATIVE=0``, :func:`load` returns None and PyTorch's own operations are used instead.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

# PyTorch also uses OpenMP threads, and both share one libgomp.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
SECONDS = 120
LOADING = threading.Lock()


def _unlock() -> None:
    """Replace the lock, which a process forked while a thread compiles would otherwise wait for forever."""
    global LOADING
    LOADING = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def load(source: Path) -> ctypes.CDLL | None:
    """The library compiled from a C file, once for all threads.

    None if there is no compiler, or with a warning if compilation failed.
    """
    with LOADING:
        return _load(source)


@functools.cache
def _load(source: Path) -> ctypes.CDLL | None:
    command = compiler()
    if command is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, command)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or ""
        if isinstance(said, bytes):  # of a compiler that was stopped, even if it writes text
            said = said.decode(errors="replace")
        said = said.strip() or str(error)
        warnings.warn(
            f"{source.name} could not be compiled by {command} and loaded: {said.splitlines()[-1]}. "
            "Plain PyTorch is used instead, which is slower; SOFTFREE_NATIVE=0 skips the attempt.",
            stacklevel=2,
        )
        return None


def is_off() -> bool:
    """Whether the user wants no compiled code."""
    return os.environ.get("SOFTFREE_NATIVE") == "0"


def compiler() -> str | None:
    """The path of a C compiler: ``CC``, cc, gcc or clang.

    None if there is none or ``SOFTFREE_NATIVE=0`` is set.
    """
    if is_off() or os.name != "posix":
        return None
    names = [os.environ.get("CC"), "cc", "gcc", "clang"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """The folder for files that can be recreated: ``SOFTFREE_CACHE``, or one in the user's cache folder."""
    chosen = os.environ.get("SOFTFREE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "softfree"


def _compiled(source: Path, command: str) -> Path:
    """The library for this source, compiler and processor; compiled unless it is in the cache, undamaged.

    Its name ends with the digest of its content: loading a file that was cut off would end the process.
    """
    version = _run(command, "-v").stderr
    parts = (source.read_text(), *FLAGS, version, _processor())
    stem = f"{source.stem}-{_digest(repr(parts).encode())}"
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in folder.glob(f"{stem}-*.so"):
            if path.name == f"{stem}-{_digest(path.read_bytes())}.so":
                return path
        handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    except (OSError, RuntimeError):  # no home folder, or no permission to write there
        folder = Path(_for_this_process().name)
        handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _run(command, *FLAGS, str(source), "-o", made, "-lm")
        path = folder / f"{stem}-{_digest(Path(made).read_bytes())}.so"
        os.replace(made, path)  # atomic, so that no other process reads half of it
    finally:
        Path(made).unlink(missing_ok=True)
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=True, timeout=SECONDS
    )


@functools.cache
def _for_this_process() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="softfree-")


def _processor() -> str:
    """The processor features that ``-march=native`` depends on, for home folders that machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
