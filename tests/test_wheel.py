"""What is in a wheel and a source distribution, and when one is refused."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]

BUILD = """\
import sys
from scikit_build_core import build
hook, folder, *settings = sys.argv[1:]
getattr(build, hook)(folder, dict(word.split("=") for word in settings))
"""


def run_hook(
    hook: str, folder: Path, *settings: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Call a hook of the build backend, as pip does."""
    return subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(folder), *settings],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel without its native core, which takes a minute to compile."""
    folder = tmp_path_factory.mktemp("wheel")
    done = run_hook("build_wheel", folder, "wheel.cmake=false", "wheel.py-api=")
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


class TestWheel:
    """What is installed."""

    def test_it_has_all_modules_and_their_types_and_no_sources_of_the_core(
        self, wheel: zipfile.ZipFile
    ) -> None:
        names = {name for name in wheel.namelist() if name.startswith("remat/")}
        devices = (ROOT / "src/remat/files/devices").glob("*.json")
        instances = (ROOT / "src/remat/testing/instances/data").glob("*.json.gz")
        modules = [*(ROOT / "src").rglob("*.py"), *devices, *instances]
        expected = {path.relative_to(ROOT / "src").as_posix() for path in modules}
        assert names == {*expected, "remat/py.typed"}

    def test_its_metadata(self, wheel: zipfile.ZipFile) -> None:
        (info,) = {n.split("/")[0] for n in wheel.namelist() if ".dist-info/" in n}
        text = wheel.read(f"{info}/METADATA")
        metadata = Metadata.from_email(text)
        assert metadata.name == "remat"
        assert metadata.license_expression == "BSD-3-Clause"
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert metadata.requires_python == SpecifierSet(">=3.11")
        needed = {r.name: r for r in metadata.requires_dist or [] if r.marker is None}
        assert needed["torch"].specifier == SpecifierSet(">=2.11,<2.16")
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for name, module in (
            *declared["scripts"].items(),
            *declared["entry-points"]["torch_dynamo_backends"].items(),
        ):
            assert f"{name}={module}" in entry_points.replace(" ", "")


def test_the_source_distribution_has_what_building_and_testing_need(
    tmp_path: Path,
) -> None:
    done = run_hook("build_sdist", tmp_path)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ["src", "tests", "studies", "examples"]
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".hpp", ".json", ".gz", ".jsonl", ".typed"}
    }
    top = {"CMakeLists.txt", "LICENSE", "Makefile", "README.md", "constraints.txt"}
    assert not {*files, *top, "pyproject.toml", "tests/slow.txt"} - names
    assert not [name for name in names if "__pycache__" in name or ".venv" in name]


class TestWithoutCompiler:
    """A failed build is a wheel without native core, unless one is asked for."""

    def build(self, folder: Path, require: str) -> subprocess.CompletedProcess[str]:
        return run_hook(
            "build_wheel",
            folder,
            f"build-dir={folder / 'build'}",
            REMAT_REQUIRE_NATIVE=require,
            CXX="false",
        )

    def test_the_twins_are_installed(self, tmp_path: Path) -> None:
        done = self.build(tmp_path, "0")
        assert done.returncode == 0, done.stderr
        assert [p.name[-17:] for p in tmp_path.glob("*.whl")] == ["-py3-none-any.whl"]

    def test_a_wheel_for_others_is_refused(self, tmp_path: Path) -> None:
        done = self.build(tmp_path, "1")
        assert done.returncode != 0
        assert not list(tmp_path.glob("*.whl"))
