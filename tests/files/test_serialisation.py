"""Files: round trips, version 1 for ever, and one clear error for all that is wrong."""

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import Case, cases

from remat.core.errors import FileFormatError, RematError
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.platform import Device, DeviceKind, Link, Platform
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule
from remat.files.conversion import convert
from remat.files.documents import (
    VERSION,
    document_kind,
    format_document,
    load_document,
    parse_document,
    write_bytes,
    write_document,
)
from remat.files.serialisation import (
    graph_from_json,
    graph_to_json,
    load_graph,
    load_platform,
    load_schedule,
    platform_from_json,
    platform_to_json,
    save_graph,
    save_platform,
    save_schedule,
    schedule_from_json,
    schedule_to_json,
)

DATA = Path(__file__).parents[1] / "data"

GRAPH = TrainingGraph(
    name='gölden "graph"',
    device_kinds=("cpu", "cuda"),
    storages=(
        Storage(name="weight", size_bytes=4096, role=Role.PARAMETER, is_resident=True),
        Storage(
            name="batch", size_bytes=1024, role=Role.INPUT, is_resident=True, home=1
        ),
        Storage(name="relu", size_bytes=2**40),
        Storage(name="mask", size_bytes=0),
        Storage(name="loss", size_bytes=4, role=Role.OUTPUT),
        Storage(name="d loss", size_bytes=4, role=Role.TANGENT),
        Storage(name="d weight", size_bytes=4096, role=Role.GRADIENT, home=1),
    ),
    ops=(
        Op(
            name="relu",
            reads=(0, 1),
            writes=(2, 3),
            cost_ns=(1200, None),
            workspace_bytes=(64, 0),
            phase=Phase.FORWARD,
            is_ordered=True,
            source="model.py:12",
        ),
        Op(
            name="loss",
            reads=(2,),
            writes=(4,),
            cost_ns=(0, 7),
            workspace_bytes=(0, 0),
            phase=Phase.FORWARD,
            is_external=True,
        ),
        Op(
            name="relu backward",
            reads=(5, 3, 2),
            writes=(6,),
            cost_ns=(None, 10**15),
            workspace_bytes=(0, 1),
            phase=Phase.BACKWARD,
            non_recomputable="it counts",
        ),
    ),
    forward_outputs=(4,),
    tangents=(5,),
    final_outputs=(6, 2),
)
PLATFORM = Platform(
    devices=(
        Device(name="host", kind="cpu"),
        Device(name="card", kind="cuda", budget_bytes=2**33),
    ),
    links=(
        Link(source=0, target=1, bytes_per_s=16 * 10**9, latency_ns=9000),
        Link(source=1, target=0, bytes_per_s=16 * 10**9),
    ),
)
SCHEDULE = Schedule(
    (
        Compute(0),
        Compute(1, 1),
        Discard(3),
        Discard(4, 1),
        Copy(2, 0, 1),
        Boundary(),
        Compute(2, 1),
    )
)


# --- version 1 ------------------------------------------------------------------------


def test_graphs_of_version_1_stay_readable():
    assert load_graph(DATA / "graph_v1.json") == GRAPH


def test_platforms_of_version_1_stay_readable():
    assert load_platform(DATA / "platform_v1.json") == PLATFORM


def test_schedules_of_version_1_stay_readable():
    assert load_schedule(DATA / "schedule_v1.json") == SCHEDULE


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("graph", graph_to_json(GRAPH)),
        ("platform", platform_to_json(PLATFORM)),
        ("schedule", schedule_to_json(SCHEDULE)),
    ],
)
def test_what_is_written_today_is_what_was_written_then(
    kind: str, payload: dict[str, object]
):
    golden = (DATA / f"{kind}_v1.json").read_text(encoding="utf-8")
    assert format_document(kind, payload) == golden


def test_tables_have_one_row_a_line():
    lines = (DATA / "schedule_v1.json").read_text(encoding="utf-8").splitlines()
    assert '      ["copy", 2, 0, 1],' in lines
    assert '      ["boundary"],' in lines
    assert len(format_document("graph", graph_to_json(GRAPH)).splitlines()) < 35


# --- round trips ----------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_is_read_is_what_was_written(case: Case):
    graph = format_document("graph", graph_to_json(case.graph))
    assert graph_from_json(parse_document(graph, "graph")) == case.graph
    platform = format_document("platform", platform_to_json(case.platform))
    assert platform_from_json(parse_document(platform, "platform")) == case.platform
    schedule = format_document("schedule", schedule_to_json(case.schedule))
    assert schedule_from_json(parse_document(schedule, "schedule")) == case.schedule


@settings(max_examples=50, deadline=None)
@given(st.text(), st.text())
def test_any_name_survives(name: str, source: str):
    graph = TrainingGraph(
        name=name,
        storages=(Storage(name=name, size_bytes=1),),
        ops=(
            Op(
                name=name,
                reads=(),
                writes=(0,),
                cost_ns=(1,),
                workspace_bytes=(0,),
                phase=Phase.FORWARD,
                source=source,
            ),
        ),
    )
    text = format_document("graph", graph_to_json(graph))
    assert text.isascii()
    assert graph_from_json(parse_document(text, "graph")) == graph


def test_a_name_that_utf8_cannot_express_survives(tmp_path: Path):
    name = os.fsdecode(b"model_\xff.py")
    path = tmp_path / "graph.json"
    graph = TrainingGraph(
        name=name,
        storages=GRAPH.storages,
        ops=GRAPH.ops,
        tangents=(5,),
        device_kinds=("cpu", "cuda"),
    )
    save_graph(path, graph)
    assert load_graph(path).name == name


def test_saved_values_come_back(tmp_path: Path):
    save_graph(tmp_path / "g.json", GRAPH)
    save_platform(str(tmp_path / "p.json"), PLATFORM)
    save_schedule(tmp_path / "s.json", SCHEDULE)
    assert load_graph(str(tmp_path / "g.json")) == GRAPH
    assert load_platform(tmp_path / "p.json") == PLATFORM
    assert load_schedule(tmp_path / "s.json") == SCHEDULE
    assert load_schedule(tmp_path / "s.json") != Schedule(())


def test_a_large_graph_is_small_and_fast_to_read(tmp_path: Path):
    count = 4000
    graph = TrainingGraph(
        name="long",
        storages=tuple(
            Storage(name=f"relu_{i}", size_bytes=123_456) for i in range(count)
        ),
        ops=tuple(
            Op(
                name=f"aten.relu.default {i}",
                reads=(i - 1,) if i else (),
                writes=(i,),
                cost_ns=(123_456,),
                workspace_bytes=(0,),
                phase=Phase.FORWARD,
                source="model.py:12",
            )
            for i in range(count)
        ),
    )
    path = tmp_path / "graph.json"
    save_graph(path, graph)
    assert path.stat().st_size < 200 * count
    assert load_graph(path) == graph


# --- writing --------------------------------------------------------------------------


def interrupt_a_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_schedule(path, SCHEDULE)


def test_an_interrupted_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "s.json"
    save_schedule(path, Schedule(()))
    old = path.read_bytes()
    interrupt_a_write(path, monkeypatch)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_nothing_where_nothing_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    interrupt_a_write(tmp_path / "s.json", monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fill(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(FileFormatError, match=r"cannot write .*No space left"):
        save_schedule(tmp_path / "s.json", SCHEDULE)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_a_clear_error(tmp_path: Path):
    with pytest.raises(FileFormatError, match="No such file or directory"):
        save_schedule(tmp_path / "none" / "s.json", SCHEDULE)


def test_a_folder_or_device_is_not_replaced(tmp_path: Path):
    with pytest.raises(FileFormatError, match="not a regular file"):
        save_schedule(tmp_path, SCHEDULE)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileFormatError, match="not a regular file"):
        save_schedule(pipe, SCHEDULE)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_is_followed(tmp_path: Path):
    target, link = tmp_path / "s.json", tmp_path / "link.json"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    save_schedule(link, SCHEDULE)
    assert link.is_symlink()
    assert load_schedule(target) == SCHEDULE


def test_a_file_may_be_read_by_those_whom_the_umask_allows(tmp_path: Path):
    path, ordinary = tmp_path / "s.json", tmp_path / "ordinary"
    save_schedule(path, SCHEDULE)
    ordinary.write_text("", encoding="utf-8")
    assert path.stat().st_mode == ordinary.stat().st_mode


def test_a_value_that_json_does_not_know_leaves_no_file(tmp_path: Path):
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_document(path, "x", {"gap": float("nan")})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_document(path, "x", {"gap": {1, 2}})
    assert list(tmp_path.iterdir()) == []


def test_tuples_and_nested_objects_are_written_and_read(tmp_path: Path):
    path = tmp_path / "x.json"
    write_document(path, "x", {"a": (1, 2), "b": {}, "c": {"d": [], "e": [(1,), {}]}})
    assert load_document(path, "x", lambda payload: payload) == {
        "a": [1, 2],
        "b": {},
        "c": {"d": [], "e": [[1], {}]},
    }


# --- reading what is wrong ------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(FileFormatError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def test_the_error_is_one_of_ours_and_a_value_error():
    assert issubclass(FileFormatError, RematError)
    assert issubclass(FileFormatError, ValueError)


def test_a_missing_file(tmp_path: Path):
    message = refusal(lambda: load_graph(tmp_path / "none.json"))
    assert "cannot read" in message
    assert "none.json" in message
    assert "No such file" in message


def test_a_folder(tmp_path: Path):
    assert "Is a directory" in refusal(lambda: load_graph(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path):
    path = tmp_path / "s.json"
    save_schedule(path, SCHEDULE)
    path.chmod(0)
    assert "Permission denied" in refusal(lambda: load_schedule(path))


def test_a_refused_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "Permission denied" in refusal(lambda: load_graph(tmp_path / "s.json"))


def test_a_path_that_cannot_be(tmp_path: Path):
    assert "null" in refusal(lambda: load_graph("a\0b"))
    assert "null" in refusal(lambda: save_graph("a\0b", GRAPH))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot read" in refusal(lambda: load_graph(loop))
    assert "cannot write" in refusal(lambda: save_graph(loop, GRAPH))


def document(**changes: Any) -> dict[str, Any]:
    plain = {
        "format": "remat",
        "kind": "schedule",
        "version": VERSION,
        "payload": {"steps": []},
    }
    return {**plain, **changes}


def dropped(key: str) -> dict[str, Any]:
    return {k: v for k, v in document().items() if k != key}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "line 1 column 1"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"\x00" * 10, "damaged or cut short"),
        (b"{", "damaged or cut short"),
        (b'{"format": "remat", "kind": "sche', "damaged or cut short"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[1, 2]", "not a remat file"),
        (b"null", "not a remat file"),
        (b"{}", "not a remat file: document lacks ['format', 'version']"),
        (b'{"format": NaN}', "NaN is not a number that JSON knows"),
        (b'{"format": -Infinity}', "-Infinity is not a number"),
        (b'{"format": 1e999}', "1e999 is not a number"),
        (b'{"format": ' + b"9" * 5000 + b"}", "damaged"),
        (b'{"format": "remat", "format": "remat"}', 'key "format" is given twice'),
        (dropped("version"), "document lacks ['version']"),
        (dropped("kind"), "lacks ['kind']"),
        (dropped("payload"), "lacks ['payload']"),
        (document(format="other"), 'format is "other"; it must be "remat"'),
        (document(format=["remat"]), 'format is ["remat"]; it must be'),
        (document(version=2), "version 2, but this release reads version 1"),
        (document(version=0), "version 0, but this release reads version 1"),
        (document(version=2, extra=1), "version 2, but"),
        (document(version=1.0), "version is 1.0; it must be an integer"),
        (document(version=True), "version is true; it must be an integer"),
        (document(version="1"), 'version is "1"; it must be an integer'),
        (document(kind="graph"), "holds a graph, but a schedule is needed"),
        (document(kind="g" * 1000), "..."),
        (document(kind=None), "kind is null; it must be text"),
        (document(extra=1), "unknown keys ['extra']"),
        (
            document(**{"a.b[3]` - at `$.c[0]": 1}),
            "unknown keys ['a.b[3]` - at `$.c[0]']",
        ),
        (document(version=10**3000), "..."),
        (document(payload=[]), "payload is []; it must be an object"),
        (document(payload={}), "schedule lacks ['steps']"),
        (document(payload={"steps": [], "more": 1}), "unknown keys ['more']"),
        (document(payload={"steps": {}}), "schedule.steps is an object of 0 items"),
        (document(payload={"steps": [3]}), "schedule.steps[0] is 3"),
        (
            document(payload={"steps": [[[3]]]}),
            "schedule.steps[0] is a list of 1 items",
        ),
        (
            document(payload={"steps": [["\udcff"]]}),
            r'holds "\udcff" where there is no',
        ),
        (
            document(**{"\udcff": 1}),
            r'document holds "\udcff" where there is no such key',
        ),
    ],
)
def test_a_file_that_is_wrong(
    tmp_path: Path, content: bytes | dict[str, Any], words: str
):
    path = tmp_path / "s.json"
    path.write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    message = refusal(lambda: load_schedule(path))
    assert words in message
    assert message.startswith(str(path)) or str(path) in message


@pytest.mark.parametrize(
    "row",
    [
        [],
        ["compute"],
        ["compute", 1, 2, 3],
        ["compute", "1"],
        ["compute", True],
        ["compute", 1.0],
        ["compute", None],
        ["compute", [1]],
        ["discard"],
        ["copy", 1, 2],
        ["boundary", 0],
        ["swap", 1],
        [["compute"], 1],
        [None],
        [{}],
    ],
)
def test_a_step_of_no_known_form(row: list[Any]):
    message = refusal(lambda: schedule_from_json({"steps": [["boundary"], row]}))
    assert message.startswith("schedule.steps[1]")


def test_device_0_may_be_written_out():
    rows = [["compute", 1, 0], ["discard", 2, 0]]
    assert schedule_from_json({"steps": rows}) == Schedule((Compute(1), Discard(2)))


def changed(payload: dict[str, Any], *place: Any, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(payload))
    inside = copy
    for key in place[:-1]:
        inside = inside[key]
    if value is ...:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("name",), 3, "graph.name is 3; it must be text"),
        (("name",), ..., "graph lacks ['name']; its keys are name, device_kinds"),
        (("tangents",), None, "graph.tangents is null; it must be a list"),
        (("tangents",), [True], "graph.tangents[0] is true; it must be an integer"),
        (("device_kinds",), "cpu", 'graph.device_kinds is "cpu"; it must be a list'),
        (("device_kinds", 0), 1, "graph.device_kinds[0] is 1"),
        (("device_kinds", 0), "cuda", "device_kinds must be distinct"),
        (("storages",), [], "graph.storages is []; it must be an object"),
        (
            ("storages", "columns", 0),
            "nom",
            'graph.storages.columns is ["nom", "size_bytes", ',
        ),
        (("storages", "rows", 2, 1), -1, "size_bytes of storage"),
        (
            ("storages", "rows", 2, 1),
            4.0,
            "rows[2].size_bytes is 4.0; it must be an int",
        ),
        (("storages", "rows", 2, 1), True, "rows[2].size_bytes is true"),
        (
            ("storages", "rows", 2, 2),
            "skin",
            'rows[2].role is "skin"; it must be one of',
        ),
        (("storages", "rows", 2, 2), ["input"], 'role is ["input"]; it must be one of'),
        (("storages", "rows", 2, 3), 0, "rows[2].is_resident is 0; it must be true or"),
        (("storages", "rows", 2, 4), None, "rows[2].home is null"),
        (
            ("storages", "rows", 2),
            [],
            "is []; it must be a list of 5 values (name, size",
        ),
        (("storages", "rows", 2), "row", 'rows[2] is "row"; it must be a list'),
        (("ops", "rows", 1, 1), "sideways", "it must be one of forward, backward"),
        (("ops", "rows", 1, 2), [99], "op 1 'loss' names storage 99 of 7"),
        (("ops", "rows", 1, 2), [1.5], "graph.ops.rows[1].reads[0] is 1.5"),
        (("ops", "rows", 1, 4), [None, None], "every cost is None"),
        (("ops", "rows", 1, 4), ["1", 2], "graph.ops.rows[1].cost_ns[0] is"),
        (("ops", "rows", 1, 5), [None, 0], "graph.ops.rows[1].workspace_bytes[0]"),
        (("ops", "rows", 1, 6), 5, "graph.ops.rows[1].non_recomputable is 5"),
        (("ops", "rows", 1, 7), None, "graph.ops.rows[1].is_ordered is null"),
        (("ops", "rows", 1, 9), {}, "source is an object of 0 items; it must be text"),
    ],
)
def test_a_graph_that_is_wrong(place: tuple[Any, ...], value: Any, words: str):
    payload = changed(graph_to_json(GRAPH), *place, value=value)
    assert words in refusal(lambda: graph_from_json(payload))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("links",), ..., "platform lacks ['links']"),
        (("devices", "rows"), [], "at least one device"),
        (("devices", "rows", 0, 2), 0, "budget_bytes of device"),
        (
            ("devices", "rows", 0, 2),
            1.5,
            "platform.devices.rows[0].budget_bytes is 1.5",
        ),
        (("links", "rows", 0, 1), 7, "names an unknown device"),
        (("links", "rows", 0, 3), "0", 'platform.links.rows[0].latency_ns is "0"'),
    ],
)
def test_a_platform_that_is_wrong(place: tuple[Any, ...], value: Any, words: str):
    payload = changed(platform_to_json(PLATFORM), *place, value=value)
    assert words in refusal(lambda: platform_from_json(payload))


KINDS = Platform(
    devices=(Device(), Device(name="far", kind="card"), Device(name="s", kind="slow")),
    kinds=(
        DeviceKind(name="card", flops_per_s=5, bytes_per_s=7, launch_ns=3),
        DeviceKind(name="slow", runs_on="cpu", time_percent=300),
        DeviceKind(name="store", computes=False),
    ),
    copies_wait=True,
)


def test_kinds_and_copies_that_wait_are_kept():
    text = format_document("platform", platform_to_json(KINDS))
    assert platform_from_json(parse_document(text, "platform")) == KINDS
    assert set(platform_to_json(PLATFORM)) == {"devices", "links"}


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("copies_wait",), 1, "platform.copies_wait is 1; it must be true or false"),
        (("kinds", "rows", 0, 0), None, "platform.kinds.rows[0].name is null"),
        (("kinds", "rows", 0, 1), 5, "platform.kinds.rows[0].runs_on is 5"),
        (("kinds", "rows", 0, 2), "no", "platform.kinds.rows[0].computes is"),
        (
            ("kinds", "rows", 1, 3),
            0,
            "inconsistent: time_percent of device kind 'slow'",
        ),
        (("kinds", "rows", 0, 4), 1.5, "platform.kinds.rows[0].flops_per_s is 1.5"),
        (("kinds", "rows", 0, 5), None, "has one rate of two"),
        (("kinds", "columns"), ["name"], "platform.kinds.columns is"),
    ],
)
def test_kinds_that_are_wrong(place: tuple[Any, ...], value: Any, words: str):
    payload = changed(platform_to_json(KINDS), *place, value=value)
    assert words in refusal(lambda: platform_from_json(payload))


def test_a_fault_inside_names_the_file_and_the_place(tmp_path: Path):
    path = tmp_path / "g.json"
    payload = changed(graph_to_json(GRAPH), "ops", "rows", 1, 2, value=[99])
    write_document(path, "graph", payload)
    message = refusal(lambda: load_graph(path))
    assert message.startswith(f"{path}: the graph is not a valid training graph")


def test_any_kind_of_document_can_be_read_with_its_own_parser(tmp_path: Path):
    path = tmp_path / "x.json"
    write_document(path, "numbers", {"numbers": [1, 2]})

    def parse(payload: object) -> int:
        assert isinstance(payload, dict)
        return sum(convert(payload["numbers"], list[int], "numbers"))

    assert load_document(path, "numbers", parse) == 3
    assert "holds a numbers" in refusal(lambda: load_document(path, "plan", parse))


def test_values_for_other_documents():
    assert convert(["a", "b"], tuple[str, ...], "names") == ("a", "b")
    assert convert(2**80, int, "count") == 2**80
    refused = refusal(lambda: convert(["a", 1], tuple[str, ...], "names"))
    assert refused == "names[1] is 1; it must be text"
    assert "names is true; it must be a list" in refusal(
        lambda: convert(True, list[str], "names")
    )
    assert "..." in refusal(lambda: convert("x" * 1000, int, "count"))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_damage_ends_in_another_error(data: st.DataObject):
    from_json, payload = data.draw(
        st.sampled_from(
            [
                (graph_from_json, graph_to_json(GRAPH)),
                (platform_from_json, platform_to_json(PLATFORM)),
                (schedule_from_json, schedule_to_json(SCHEDULE)),
            ]
        )
    )
    damaged: Any = json.loads(json.dumps(payload))
    inside, place = damaged, []
    while (
        isinstance(inside, dict | list)
        and inside
        and (not place or data.draw(st.booleans()))
    ):
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        place.append((inside, data.draw(st.sampled_from(keys))))
        inside = inside[place[-1][1]]
    holder, key = place[-1]
    holder[key] = data.draw(JSON_VALUES)
    with suppress(FileFormatError):
        from_json(damaged)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 1000))
def test_no_bytes_end_in_another_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
):
    path = tmp_path_factory.getbasetemp() / "noise.json"
    golden = (DATA / "schedule_v1.json").read_bytes()
    cut = at % len(golden)
    path.write_bytes(golden[:cut] + noise)
    with suppress(FileFormatError):
        load_schedule(path)


def test_kind_of_a_document_is_read_without_its_payload(tmp_path: Path):
    path = tmp_path / "some.json"
    path.write_text(format_document("plan", {"anything": 1}), encoding="utf-8")
    assert document_kind(path) == "plan"


@pytest.mark.parametrize("text", ["[1]", "{}", '{"format": "remat"}', "{", '{"a": 1}'])
def test_kind_of_anything_else_is_refused_with_its_name(tmp_path: Path, text: str):
    path = tmp_path / "some.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError, match=r"some\.json: "):
        document_kind(path)


def test_bytes_are_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "picture.png"
    write_bytes(path, b"\x89\r\n")
    assert path.read_bytes() == b"\x89\r\n"
    with pytest.raises(FileFormatError, match="cannot write"):
        write_bytes(tmp_path / "missing" / "picture.png", b"")
    assert [p.name for p in tmp_path.iterdir()] == ["picture.png"]
