"""What the garbage collector walks through while planning."""

import gc
from collections.abc import Iterator

import pytest

from remat.core import garbage
from remat.core.garbage import old_objects_left_alone


@pytest.fixture
def nothing_left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the collector see all, as in a process that has set nothing."""
    monkeypatch.setattr(garbage, "_others_do", [False])
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_left_alone")
def test_what_is_there_is_left_alone_until_the_outermost_ends() -> None:
    old = [object()]
    with old_objects_left_alone():
        assert not any(item is old for item in gc.get_objects())
        new = [object()]
        assert any(item is new for item in gc.get_objects())
        with old_objects_left_alone():
            assert not any(item is old for item in gc.get_objects())
            assert any(item is new for item in gc.get_objects())
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
    assert any(item is old for item in gc.get_objects())


@pytest.mark.usefixtures("nothing_left_alone")
def test_what_others_leave_alone_stays_so() -> None:
    gc.freeze()
    for _ in range(2):
        old_here = [object()]
        with old_objects_left_alone():
            assert any(item is old_here for item in gc.get_objects())
        assert gc.get_freeze_count()
