"""Recorded requests of a real allocator, replayed on the model of it.

``torch.cuda.memory._snapshot()`` returns what the allocator was asked for, and what it
asked of the device, if ``torch.cuda.memory._record_memory_history()`` was called
before. Replaying the requests must give the same segments, at the same addresses.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, cast

from remat.core.allocator import AllocatorSettings
from remat.core.errors import FileFormatError
from remat.memory.caching_allocator import (
    BlockRow,
    BlockState,
    DeviceAction,
    DeviceCall,
    Replayed,
    Request,
    RequestKind,
    SegmentRow,
    replay_requests,
    rules_of,
)

_CALLS = {
    "segment_alloc": DeviceAction.SEGMENT_ALLOC,
    "segment_free": DeviceAction.SEGMENT_FREE,
    "segment_map": DeviceAction.SEGMENT_MAP,
    "segment_unmap": DeviceAction.SEGMENT_UNMAP,
}
_GIVES_BACK = {"segment_free", "segment_unmap"}
_STATES = {
    "active_allocated": BlockState.ALLOCATED,
    "active_pending_free": BlockState.PENDING,
    "active_awaiting_free": BlockState.PENDING,
    "inactive": BlockState.INACTIVE,
}

_FIRST_WAITING = 128
"""Streams from here on stand for whatever a freed block waits for."""

_SPACE_BITS = 52
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReplay:
    """How a recorded history and its replay compare.

    Parameters
    ----------
    request_count
        How many requests were replayed.
    call_count
        How often the recorded allocator asked the device for something.
    reserved_bytes
        Most bytes that the replay reserved.
    differences
        What differs, one line each, the first few; empty where nothing does.
    """

    request_count: int
    call_count: int
    reserved_bytes: int
    differences: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether calls, addresses, segments and blocks are the recorded ones."""
        return not self.differences


class _PlainUnpickler(pickle.Unpickler):  # noqa: S301 - it refuses what could run
    """Reads numbers, texts, lists and dictionaries, and nothing that could run."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        msg = f"it holds a {module_name}.{global_name}, which no snapshot does"
        raise pickle.UnpicklingError(msg)


def load_snapshot(path: str | Path) -> dict[str, Any]:
    """Read a file that ``torch.cuda.memory._dump_snapshot`` wrote; runs nothing in it.

    Raises
    ------
    FileFormatError
        If the file cannot be read, or is no snapshot.
    """
    try:
        content = Path(path).read_bytes()
        snapshot = _PlainUnpickler(io.BytesIO(content)).load()
    except (OSError, EOFError, ValueError, IndexError, pickle.UnpicklingError) as error:
        msg = f"{path}: no snapshot of an allocator could be read: {error}"
        raise FileFormatError(msg) from error
    if not isinstance(snapshot, dict) or "device_traces" not in snapshot:
        msg = f"{path}: this is no snapshot of an allocator: it has no device_traces"
        raise FileFormatError(msg)
    return cast("dict[str, Any]", snapshot)


def replay_snapshot(
    snapshot: Mapping[str, Any],
    *,
    device: int = 0,
    settings: AllocatorSettings | None = None,
) -> SnapshotReplay:
    """Replay a recorded history, and compare.

    Parameters
    ----------
    snapshot
        From ``torch.cuda.memory._snapshot()`` or :func:`load_snapshot`, recorded from
        before the first allocation on, without pools of its own for CUDA graphs.
    device
        Whose history.
    settings
        How the allocator was set; by default as the snapshot says.

    Raises
    ------
    FileFormatError
        If the history is not complete, or no such one.
    InvalidPlatformError
        If the allocator had settings that are not modelled.

    Notes
    -----
    Segments are given back all at once in the replay, as ``empty_cache`` and a request
    without room do; garbage collection gives back some of them, and then differs.
    """
    try:
        if settings is None:
            settings = _settings_of(snapshot)
        history = _History(snapshot["device_traces"][device])
        segments = [s for s in snapshot["segments"] if s["device"] == device]
        addresses = [
            c.address for c in history.calls if c.action == DeviceAction.SEGMENT_ALLOC
        ]
        rules = rules_of(settings, segment_addresses=addresses)
        replayed = replay_requests(history.requests, rules, 0)
        return history.compared(replayed, segments)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, FileFormatError):
            raise
        msg = f"the history of device {device} cannot be replayed: {error!r}"
        raise FileFormatError(msg) from error


def _settings_of(snapshot: Mapping[str, Any]) -> AllocatorSettings:
    said: Mapping[str, Any] = snapshot.get("allocator_settings", {})
    text = said.get("last_allocator_settings") or said.get("PYTORCH_CUDA_ALLOC_CONF")
    return AllocatorSettings.parse(text or "")


class _History:
    """The requests in a trace, and what came of them."""

    def __init__(self, trace: Sequence[Mapping[str, Any]]) -> None:
        self.requests: list[Request] = []
        self.calls: list[DeviceCall] = []
        self.found: dict[int, int] = {}
        self._trace = trace
        self._streams: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        for position in range(len(trace)):
            self._take(position)

    def _take(self, position: int) -> None:
        entry = self._trace[position]
        action = entry["action"]
        match action:
            case "alloc":
                number = len(self.requests)
                stream = self._stream(entry["stream"])
                self._live[entry["addr"]] = number
                self.found[number] = entry["addr"]
                self._ask(RequestKind.ALLOCATE, number, entry["size"], stream)
            case "free_requested":
                self._free(position)
            case "free_completed":
                if entry["addr"] in self._waiting:
                    stream = self._waiting.pop(entry["addr"])
                    self._ask(RequestKind.COMPLETE, stream=stream)
            case "snapshot" | "oom":
                pass
            case _ if action in _CALLS:
                self._call(position)
            case _:
                msg = f"entry {position} of the trace is {action!r}, which is unknown"
                raise FileFormatError(msg)

    def _ask(
        self, kind: RequestKind, block: int = 0, size_bytes: int = 0, stream: int = 0
    ) -> None:
        self.requests.append(Request(kind, block, size_bytes, stream))

    def _stream(self, handle: int) -> int:
        number = self._streams.setdefault(handle, len(self._streams))
        if number >= _FIRST_WAITING:
            msg = f"the history has more than {_FIRST_WAITING} streams"
            raise FileFormatError(msg)
        return number

    def _free(self, position: int) -> None:
        address = self._trace[position]["addr"]
        if address not in self._live:
            msg = (
                f"entry {position} of the trace frees {address:#x}, which it does not "
                "allocate: record from before the first allocation on, with max_entries "
                "large enough"
            )
            raise FileFormatError(msg)
        number = self._live.pop(address)
        following = self._trace[position + 1 : position + 2]
        is_done = bool(following) and (
            following[0]["action"] == "free_completed"
            and following[0]["addr"] == address
        )
        if not is_done:
            taken = set(self._waiting.values())
            stream = next(
                (s for s in range(_FIRST_WAITING, 256) if s not in taken), None
            )
            if stream is None:
                msg = "more than 128 freed blocks wait for streams at once"
                raise FileFormatError(msg)
            self._waiting[address] = stream
            self._ask(RequestKind.RECORD_STREAM, number, stream=stream)
        self._ask(RequestKind.FREE, number)

    def _call(self, position: int) -> None:
        entry = self._trace[position]
        before = self._trace[position - 1]["action"] if position else ""
        if entry["action"] in _GIVES_BACK and before not in _GIVES_BACK:
            self._ask(RequestKind.EMPTY_CACHE)
        self.calls.append(
            DeviceCall(
                len(self.requests),
                _CALLS[entry["action"]],
                entry["addr"],
                entry["size"],
                self._stream(entry["stream"]),
            )
        )

    def compared(
        self, replayed: Replayed, segments: Sequence[Mapping[str, Any]]
    ) -> SnapshotReplay:
        addresses, reserved, _, _, calls, rows, blocks = replayed
        differences: list[str] = []
        spaces = _Spaces(self.calls, calls)
        for mine, real in zip_longest(calls, self.calls):
            found = None if mine is None else spaces.call(DeviceCall(*mine))
            recorded = None if real is None else _call_text(real)
            if found != recorded:
                differences.append(f"recorded {recorded}, replayed {found}")
        for number, real in self.found.items():
            mine = spaces.address(addresses[number])
            if mine != real:
                size = self.requests[number].size_bytes
                differences.append(
                    f"block of {size} bytes: recorded at {real:#x}, replayed at {mine:#x}"
                )
        found_rows = _found_segments(rows, blocks, spaces)
        real_rows = self._recorded_segments(segments)
        differences += [
            f"segment at {address:#x}: recorded {real_rows.get(address)}, "
            f"replayed {found_rows.get(address)}"
            for address in sorted(found_rows.keys() | real_rows.keys())
            if found_rows.get(address) != real_rows.get(address)
        ]
        return SnapshotReplay(
            request_count=len(self.requests),
            call_count=len(self.calls),
            reserved_bytes=max(reserved, default=0),
            differences=tuple(differences[:_MOST_SHOWN]),
        )

    def _recorded_segments(
        self, segments: Sequence[Mapping[str, Any]]
    ) -> dict[int, object]:
        rows: dict[int, object] = {}
        for segment in segments:
            blocks = [
                (block["size"], _STATES[block["state"]].name)
                for block in segment["blocks"]
            ]
            rows[segment["address"]] = (
                segment["total_size"],
                self._streams.get(segment["stream"]),
                segment["segment_type"] == "large",
                blocks,
            )
        return rows


class _Spaces:
    """From the replay's addresses in expandable segments to the recorded ones."""

    def __init__(
        self, recorded: Sequence[DeviceCall], replayed: Sequence[DeviceCall]
    ) -> None:
        self._shifts: dict[int, int] = {}
        for real, mine in zip(recorded, replayed, strict=False):
            _, action, address, _, _ = mine
            if action == real.action == DeviceAction.SEGMENT_MAP:
                self._shifts.setdefault(address >> _SPACE_BITS, real.address - address)

    def address(self, address: int) -> int:
        return address + self._shifts.get(address >> _SPACE_BITS, 0)

    def call(self, call: DeviceCall) -> str:
        return _call_text(call._replace(address=self.address(call.address)))


def _call_text(call: DeviceCall) -> str:
    action = DeviceAction(call.action).name.lower()
    return f"{action} of {call.size_bytes} bytes at {call.address:#x}"


def _found_segments(
    rows: Sequence[SegmentRow], blocks: Sequence[BlockRow], spaces: _Spaces
) -> dict[int, object]:
    parts: list[list[tuple[int, str]]] = [[] for _ in rows]
    for index, _, size_bytes, _, state in blocks:
        parts[index].append((size_bytes, BlockState(state).name))
    return {
        spaces.address(address): (size_bytes, stream, is_large, parts[index])
        for index, (address, size_bytes, stream, is_large, _) in enumerate(rows)
    }
