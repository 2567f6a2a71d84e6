"""The environment of a measurement: the date, the device, the versions."""

import csv
import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch


def cpu_name() -> str:
    """The processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_environment(device: torch.device | str = "cpu") -> dict[str, object]:
    """Date, device, CPU threads and versions; ``""`` for a package that is not installed.

    Example:
        >>> list(describe_environment("cpu"))
        ['date', 'device', 'threads', 'python', 'torch', 'triton', 'timm', 'softfree']
    """
    on_gpu = torch.device(device).type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "timm", "softfree")},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def write_csv(
    path: Path, rows: Sequence[Mapping[str, object]], measured_in: Mapping[str, object]
) -> None:
    """Write rows, each followed by the environment; missing fields are empty, and folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        columns = dict.fromkeys(name for row in (*rows, measured_in) for name in row)
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows({**row, **measured_in} for row in rows)
