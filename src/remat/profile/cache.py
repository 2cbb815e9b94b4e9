"""Costs on disk, so that an operator is measured once per machine and version.

One JSON file per environment (torch version, threads, processor and the switches that
choose kernels). A file is replaced as a whole, so that readers never see half of one.
Two processes that save at the same moment may lose what one of them measured; it is
then measured again, which costs time and nothing else.
"""

import hashlib
import json
import logging
import os
import platform
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from remat.core.errors import RematError
from remat.files.cache_folder import cache_directory

Record = TypeVar("Record")

_SCHEMA = 5
_log = logging.getLogger(__name__)


class CostCacheWarning(UserWarning):
    """The cache of operator costs could not be read or written."""


def environment() -> dict[str, str]:
    """Return what the costs depend on besides the operators themselves."""
    return {
        "torch": torch.__version__,
        "processor": _processor_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn benchmark": str(torch.backends.cudnn.benchmark),
        "cudnn deterministic": str(torch.backends.cudnn.deterministic),
        "flush denormal": str(_flushes_denormals()),
    }


def _flushes_denormals() -> bool:
    smallest = torch.tensor(1e-310, dtype=torch.float64, device="cpu")
    return bool(smallest.mul(1.0).eq(0.0).item())


def _processor_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


class _File(msgspec.Struct):
    """What is read of a file; the rest is for people."""

    costs: dict[str, dict[str, Any]]


class CostCache:
    """Numbers measured on this machine, by the text that describes what was measured.

    A damaged file is renamed aside, with a warning, and its costs are measured again;
    a directory that cannot be written gives one warning, and the costs last as long
    as the process.

    Parameters
    ----------
    directory
        Where the files are; :func:`cache_directory` by default.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = cache_directory() if directory is None else directory
        self._environment = environment()
        text = json.dumps(self._environment, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.path = self._directory / f"costs-v{_SCHEMA}-{digest}.json"
        self._has_warned = False
        self._costs = self._read()
        self._fresh: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._costs)

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the record kept under ``key``, or ``None``."""
        return self._costs.get(key)

    def look_up(self, key: str, kind: type[Record]) -> Record | None:
        """Return the record kept under ``key`` as a ``kind``, a dataclass.

        ``None`` if there is none; one that does not fit is forgotten.
        """
        if (record := self.get(key)) is None:
            return None
        try:
            return msgspec.convert(record, kind)
        except (ValueError, RematError):
            self.discard(key)
            return None

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep ``record``, which must be plain JSON, until :meth:`save`."""
        self._costs[key] = self._fresh[key] = dict(record)

    def discard(self, key: str) -> None:
        """Forget the record kept under ``key``, if any."""
        self._costs.pop(key, None)
        self._fresh.pop(key, None)

    def save(self) -> None:
        """Write what is new, together with what other processes wrote meanwhile."""
        if not self._fresh:
            return
        costs = self._read() | self._fresh
        document = {
            "schema": _SCHEMA,
            "environment": self._environment,
            "costs": costs,
        }
        try:
            self._replace(json.dumps(document, indent=0, sort_keys=True))
        except OSError as error:
            self._warn(
                f"operator costs cannot be saved in {self._directory} ({error}); they "
                "will be measured again next time: make the directory writable or set "
                "REMAT_CACHE_DIR to one that is"
            )
            return
        self._costs = costs | self._costs
        self._fresh = {}

    def _replace(self, text: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=self._directory, prefix=self.path.stem, suffix=".part"
        )
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except UnicodeDecodeError as error:
            self._set_aside(str(error))
            return {}
        except OSError as error:
            self._warn(
                f"operator costs cannot be read from {self.path} ({error}); they are "
                "measured again"
            )
            return {}
        try:
            return msgspec.convert(json.loads(text), _File).costs
        except ValueError as error:
            self._set_aside(str(error))
            return {}

    def _set_aside(self, reason: str) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{os.getpid()}")
        try:
            self.path.replace(aside)
            place = f"it is now {aside.name}"
        except OSError as error:
            place = f"it could not be renamed ({error})"
        self._warn(
            f"the file of operator costs {self.path} is damaged ({reason}); {place}, "
            "and the costs are measured again"
        )

    def _warn(self, message: str) -> None:
        if self._has_warned:
            _log.info(message)
            return
        self._has_warned = True
        warnings.warn(message, CostCacheWarning, stacklevel=3)
