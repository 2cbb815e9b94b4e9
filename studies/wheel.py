"""A built wheel where there is no compiler: does it install and work, and how quickly.

``python -m studies.wheel dist`` (``make wheel`` runs it) takes the wheel and the source
distribution in a folder. In a temporary folder, away from the checkout, it makes an
empty environment, with a ``PATH`` that holds nothing else, and installs torch. Then it
installs the wheel, and with what was installed runs the command line on a small model
and the tests of the source distribution that need no other packages. Anything that
fails ends it. Printed are seconds of the clock on the wall, and of processors: where
others use the cores as well, only the latter say something.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cl", "cmake", "ninja")
"""What must not be found on the path."""

TEST_TOOLS = ("hypothesis", "pytest", "pytest-timeout")

TESTS = (
    "tests/algorithms/chains",
    "tests/core",
    "tests/files",
    "tests/native",
    "tests/cli/test_command_line.py",
)
"""The tests that run: of the native core, what stands on it, and the command line."""

MOST_PROCESSOR_S = 60
"""Within which it is installed beside torch, and a small model verified."""

HAS_CORE_AND_BACKEND = """\
import sys
from pathlib import Path
import torch
from remat import native
assert "remat" in torch.compiler.list_backends(exclude_tags=())
core = native.core()
assert core is not None
assert Path(core.__file__).is_relative_to(sys.prefix), core.__file__
print(core.__file__)
"""
"""Fails unless the core is that of the environment, and torch finds the backend."""


class Took(NamedTuple):
    """How long something took, in seconds.

    Parameters
    ----------
    elapsed_s
        Of the clock on the wall.
    processor_s
        Of all processors together; 0 on Windows, which does not say.
    """

    elapsed_s: float
    processor_s: float

    @classmethod
    def now(cls) -> "Took":
        """Return what the clock says, and what ended processes have taken."""
        times = os.times()
        return cls(time.monotonic(), times.children_user + times.children_system)

    def since(self, start: "Took") -> "Took":
        """Return what it took from a start to here."""
        return Took(
            self.elapsed_s - start.elapsed_s, self.processor_s - start.processor_s
        )

    def __str__(self) -> str:
        return f"{self.elapsed_s:.1f} s, {self.processor_s:.1f} s of processors"


@dataclass(frozen=True, slots=True)
class Trial:
    """An empty environment in a folder of its own.

    Parameters
    ----------
    folder
        Where everything is written, and commands run.
    """

    folder: Path

    @property
    def programs(self) -> Path:
        """The folder of the environment's programs, the only one on the path."""
        return self.folder / "env" / ("Scripts" if os.name == "nt" else "bin")

    def variables(self) -> Mapping[str, str]:
        """Return the environment variables of all commands.

        Those of the user stay: they say where packages come from. What would lead to
        a compiler or to the checkout does not.
        """
        gone = {
            "CC",
            "CXX",
            "PIP_CONSTRAINT",
            "PYTHONHOME",
            "PYTHONPATH",
            "VIRTUAL_ENV",
        }
        kept = {name: text for name, text in os.environ.items() if name not in gone}
        cache = str(self.folder / "cache")
        return {**kept, "PATH": str(self.programs), "REMAT_CACHE_DIR": cache}

    def make(self) -> None:
        """Make the environment."""
        command = [sys.executable, "-m", "venv", str(self.folder / "env")]
        subprocess.run(command, check=True)
        self.check()

    def check(self) -> None:
        """Refuse an environment with a compiler.

        Raises
        ------
        RuntimeError
            If there is one on its path.
        """
        path = str(self.programs)
        found = [name for name in COMPILERS if shutil.which(name, path=path)]
        if found:
            msg = f"{path} holds {found}: this must be tried without a compiler"
            raise RuntimeError(msg)

    def run(self, name: str, program: str, *words: str, within: str = ".") -> Took:
        """Run a program of the environment; say and return how long it took.

        Raises
        ------
        CalledProcessError
            If it fails.
        """
        started = Took.now()
        subprocess.run(
            [self.programs / program, *words],
            cwd=self.folder / within,
            env=self.variables(),
            check=True,
        )
        took = Took.now().since(started)
        print(f"--- {name}: {took}", flush=True)
        return took

    def install(self, name: str, *words: str) -> Took:
        """Install packages, none of which may be built here; say how long it took."""
        how = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
        pins = ["--constraint", str(CONSTRAINTS)]
        return self.run(name, "python", "-m", "pip", "install", *how, *pins, *words)


def unpack_tests(sdist: Path, folder: Path) -> None:
    """Unpack all but the package's sources, so that tests find what is installed."""
    with tarfile.open(sdist) as archive:
        members = [
            member
            for member in archive.getmembers()
            if Path(member.name).parts[1:2] != ("src",)
        ]
        if hasattr(tarfile, "data_filter"):  # Not in Python 3.11.0 to 3.11.3.
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder, members=members)  # noqa: S202 - built by us


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern.

    Raises
    ------
    FileNotFoundError
        If there is none, or more than one.
    """
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = [path.name for path in found]
        msg = f"{folder} must hold one {pattern}, and holds {names}; run make wheel"
        raise FileNotFoundError(msg)
    return found[0].resolve()


def main(argv: Sequence[str] | None = None) -> None:
    """Try the wheel of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "dist", type=Path, help="where wheel and source distribution are"
    )
    dist = parser.parse_args(argv).dist
    wheel, sdist = only(dist, "*.whl"), only(dist, "*.tar.gz")
    with tempfile.TemporaryDirectory() as name:
        trial = Trial(Path(name).resolve())
        trial.make()
        trial.install("torch", "torch")
        install = trial.install("remat and the rest of what it needs", str(wheel))
        unpack_tests(sdist, trial.folder)
        root = sdist.name.removesuffix(".tar.gz")
        trial.run("core and backend", "python", "-c", HAS_CORE_AND_BACKEND)
        show_help = trial.run("remat --help", "remat", "--help")
        words = ["verify", "examples/small_step.py", "--budget", "60%"]
        check = trial.run("remat verify", "remat", *words, within=root)
        trial.install("what the tests need", *TEST_TOOLS)
        quick = ["-q", "-m", "not slow", *TESTS]
        trial.run("tests", "python", "-m", "pytest", *quick, within=root)
    total = Took(*map(sum, zip(install, show_help, check, strict=True)))
    print(f"{wheel.name}: installed, and a model verified: {total}")
    if total.processor_s > MOST_PROCESSOR_S:
        sys.exit(f"that is more than {MOST_PROCESSOR_S} s of processors")


if __name__ == "__main__":
    main()
