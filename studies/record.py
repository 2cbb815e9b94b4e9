"""JSON lines that stand alone: what was measured, with what, on what."""

import datetime as dt
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

import remat

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
_VERSIONED = ("torch", "transformers", "numpy", "ortools")


def environment() -> dict[str, Any]:
    """Return commit, date, versions and machine of this process."""
    return {
        **_AT_START,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "remat": remat.__version__,
            **{name: _version(name) for name in _VERSIONED},
        },
        "machine": {
            "processor": _proc_field("/proc/cpuinfo", "model name"),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def source_digest() -> str:
    """Return a digest of the package and the study models as they are on disk.

    Unlike the commit it also changes with what is not committed.
    """
    digest = hashlib.sha256()
    files = [*sorted((ROOT / "src" / "remat").rglob("*.py"))]
    files += [ROOT / "studies" / "models.py", ROOT / "studies" / "networks.py"]
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def append(path: Path, line: dict[str, Any]) -> None:
    """Add one line to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none if there is no such file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def latest(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the last line of each model and case."""
    return {(line["model"], line["case"]): line for line in lines}


def measured_on(lines: Sequence[dict[str, Any]]) -> str:
    """Return when and on what some lines were measured, at least one, for people."""
    newest = max(lines, key=lambda line: line["date"])
    oldest = min(line["date"] for line in lines)
    machine, versions = newest["machine"], newest["versions"]
    named = ", ".join(f"{k} {v}" for k, v in sorted(versions.items()) if v)
    return (
        f"Measured between {oldest[:16]} and {newest['date'][:16]} UTC on "
        f"{machine['processor']} ({machine['capability']}); {named}"
    )


class ForeignLoad:
    """How busy other processes kept the cores during a block.

    Attributes
    ----------
    share
        Processor time of other processes over that of all cores, 0 to 1; ``None``
        where the system does not tell.
    """

    def __init__(self) -> None:
        self.share: float | None = None

    def __enter__(self) -> Self:
        """Begin to count."""
        self._before = _processor_seconds()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Set the share."""
        before, after = self._before, _processor_seconds()
        if before is None or after is None:
            return
        all_s, busy_s, own_s = (b - a for a, b in zip(before, after, strict=True))
        self.share = round(max(busy_s - own_s, 0) / all_s, 3) if all_s else None


def _processor_seconds() -> tuple[float, float, float] | None:
    """Return the cores' total, their busy and this process's own seconds."""
    path = Path("/proc/stat")
    if not path.is_file():
        return None
    fields = path.read_text(encoding="ascii").splitlines()[0].split()[1:9]
    ticks = [int(field) for field in fields]
    per_second = os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (
        sum(ticks) / per_second,
        (sum(ticks) - idle) / per_second,
        usage.ru_utime + usage.ru_stime,
    )


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _proc_field(path: str, name: str) -> str:
    if Path(path).is_file():
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return platform.processor()


# What is on disk may change while a study runs; what runs was read at the start.
_AT_START = {"commit": _commit(), "source": source_digest()}
