"""The error stream: what is known is dropped, all else comes through, in order."""

import os
import subprocess
import sys
import threading

import pytest

from remat.backends.error_stream import HeldErrorStream


def test_what_is_not_known_is_passed_on(capfd: pytest.CaptureFixture[str]):
    with HeldErrorStream("known", "too") as held:
        os.write(2, b"first\nthis is known\nsecond\n")
        os.write(2, b"and this too\nthird, without an end")
        assert capfd.readouterr().err == ""
        held.release()
        assert capfd.readouterr().err == "first\nsecond\nthird, without an end"
        os.write(2, b"known, but later\n")
        held.release()
    assert capfd.readouterr().err == "known, but later\n"


def test_nothing_known_holds_nothing(capfd: pytest.CaptureFixture[str]):
    with HeldErrorStream():
        os.write(2, b"at once\n")
        assert capfd.readouterr().err == "at once\n"


def test_an_error_gives_the_stream_back(capfd: pytest.CaptureFixture[str]):
    def fail() -> None:
        with HeldErrorStream("known"):
            os.write(2, b"before\nknown\n")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"


def test_one_block_at_a_time(capfd: pytest.CaptureFixture[str]):
    def hold(name: bytes) -> None:
        for _ in range(20):
            with HeldErrorStream("known"):
                os.write(2, name + b"\nknown\n")

    threads = [threading.Thread(target=hold, args=(name,)) for name in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == ["a"] * 20 + ["b"] * 20


def test_a_closed_stream_is_no_problem():
    program = (
        "import os, sys\n"
        "from remat.backends.error_stream import HeldErrorStream\n"
        "os.close(2)\n"
        "with HeldErrorStream('known'):\n"
        "    print('works')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "works\n"
