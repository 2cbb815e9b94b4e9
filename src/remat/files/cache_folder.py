"""Where caches are on disk, and documents that are kept there within a size.

What is kept saves time and nothing else: a folder that cannot be written, or a file
that is gone or damaged, is said in the log, once, and is no error.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from remat.core.errors import FileFormatError, RematError
from remat.files.documents import load_document, write_document

Parsed = TypeVar("Parsed")

COST_FILES = re.compile(r"costs-v\d+-.*")
"""Names of the files of measured costs, and of what is left of damaged ones."""

# Of documents, and of what a process that was killed left of one.
_NAME = re.compile(r"\.?[0-9a-f]{64}\.json(\.[0-9a-f]+\.tmp)?")

_log = logging.getLogger(__name__)
_said: set[str] = set()


def cache_directory() -> Path:
    """Return where measured costs and plans are kept.

    ``REMAT_CACHE_DIR`` if set, else ``remat`` under ``XDG_CACHE_HOME``, else
    ``~/.cache/remat``.
    """
    if explicit := os.environ.get("REMAT_CACHE_DIR"):
        return Path(explicit)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "remat"
    return Path.home() / ".cache" / "remat"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFolder:
    """Documents by key, of which the ones that were used least lately are removed.

    Several processes may read and write at once: a document is replaced as a whole.

    Parameters
    ----------
    path
        The folder, made when the first document is written. Files that are not named as
        keys are digests are left alone.
    kind
        What the documents are.
    most_bytes
        Size of all files that is not exceeded for longer than a document is written.
    """

    path: Path
    kind: str
    most_bytes: int

    def read(self, key: str, parse: Callable[[object], Parsed]) -> Parsed | None:
        """Return what ``parse`` makes of a document, or ``None`` if there is none.

        One that ``parse`` refuses, with an error of this package, is removed.
        """
        file = self._file(key)
        if not os.path.isfile(file):  # noqa: PTH113 - Path's raises where it may not look
            return None
        try:
            found = load_document(file, self.kind, parse)
        except RematError as error:
            _say_once(f"{file} is not used, and made anew: {error}")
            remove(file)
            return None
        try:
            os.utime(file)
        except OSError as error:
            # Another user's folder, or gone meanwhile: it is removed earlier.
            _log.info("%s: %s", file, error)
        return found

    def write(self, key: str, payload: Mapping[str, object]) -> None:
        """Write a document, and remove others if all are too large together."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_document(self._file(key), self.kind, payload)
        except (OSError, FileFormatError) as error:
            _say_once(
                f"nothing can be kept in {self.path} ({error}): make the folder writable, "
                "or set REMAT_CACHE_DIR to one that is"
            )
            return
        self._shrink()

    def files(self) -> list[tuple[Path, int]]:
        """Return the files and their sizes in bytes, the ones used last at the end."""
        return files_in(self.path, _NAME)

    def _shrink(self) -> None:
        files = self.files()
        total_bytes = sum(size for _, size in files)
        for file, size in files:
            if total_bytes <= self.most_bytes:
                break
            total_bytes -= size
            remove(file)

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.json"


def files_in(folder: Path, names: re.Pattern[str]) -> list[tuple[Path, int]]:
    """Return files and their sizes in bytes, the ones used last at the end.

    None where there is no folder, or it cannot be read, which is said in the log.
    """
    found: list[tuple[int, Path, int]] = []
    try:
        for file in folder.iterdir():
            if names.fullmatch(file.name) is not None:
                found += _status(file)
    except FileNotFoundError:
        return []
    except OSError as error:
        _say_once(f"{folder} cannot be read: {error}")
    return [(file, size) for _, file, size in sorted(found)]


def _status(file: Path) -> list[tuple[int, Path, int]]:
    try:
        status = file.stat()
    except FileNotFoundError:
        # Another process has removed it.
        return []
    return [(status.st_mtime_ns, file, status.st_size)]


def remove(file: Path) -> bool:
    """Remove a file, and return whether it is gone; why it is not is in the log."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        _say_once(f"{file} cannot be removed: {error}")
        return False
    return True


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning(message)
