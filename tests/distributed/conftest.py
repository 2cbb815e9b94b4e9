"""Ends the processes that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.distributed.processes import end_processes


@pytest.fixture(scope="package", autouse=True)
def processes_end() -> Iterator[None]:
    yield
    end_processes()
