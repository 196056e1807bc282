"""Files that somebody altered, cut off or made on purpose: one error of ours each, in bounded time and memory.

Each reader is given hand-made attacks, and a good file with random bytes changed, cut or put in (hypothesis).
"""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvlab import _files
from jvlab._errors import (
    ConfigError,
    JvlabError,
    ModelError,
    TraceError,
    TransportError,
)
from jvlab.engine._defaults import checkpoint_dtype
from jvlab.layout._checkpoint import (
    CheckpointValues,
    checkpoint_tensors,
    read_config_file,
    read_header,
    read_weight_map,
)
from jvlab.layout._layout_codec import (
    _WIRE_VERSION,
    layout_from_bytes,
    layout_from_plain,
)
from jvlab.layout._plan import MAGIC, TransferPlan
from jvlab.record._batch import RolloutBatch
from jvlab.record._events import RunStart, StepEvent
from jvlab.record._log import EVENTS, SAMPLES, LogReader, encode
from jvlab.record._record import Record
from jvlab.record._sample import Sample
from jvlab.record._samples import SampleRecord
from jvlab.record._writer import RecordWriter
from tests.fuzzing import examples

pytestmark = pytest.mark.slow
DEEP = b"[" * 200_000
SECONDS, BYTES = 10.0, 300 << 20


@contextmanager
def bounded() -> Iterator[None]:
    """What is read in here takes little time and memory, whatever the file says."""
    tracemalloc.start()
    began = time.monotonic()
    try:
        yield
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert time.monotonic() - began < SECONDS
    assert peak < BYTES, f"{peak / 2**20:.0f} MiB"


def changed(draw: Callable[..., Any], good: bytes) -> bytes:
    """Some bytes changed, put in, or cut off."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["change", "put in", "cut out", "cut off"])):
            case "change":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "put in":
                data[at:at] = draw(st.binary(max_size=8))
            case "cut out":
                del data[at : at + draw(st.integers(1, 16))]
            case _:
                del data[at:]
    return bytes(data)


def survives(read: Callable[[], Any], *errors: type[JvlabError]) -> Any:
    """What it read, or None for one error of ours."""
    try:
        return read()
    except errors:
        return None


# Batch files ----------------------------------------------------------------------------------------------------------


def batch(count: int = 3) -> RolloutBatch:
    ids, logprobs = np.array([7, 8, 9]), np.array([-0.5, -1.0, -1.5])
    spans = ((3, 0, 2), (4, 2, 3))
    make = lambda k: Sample(
        0, k, np.array([5, 6]), ids, logprobs, prompt="p", text="abc", versions=spans
    )
    return RolloutBatch([make(k) for k in range(count)], model="m").compare(
        [[-0.5, -1.0, -1.5]] * count
    )


@pytest.fixture(scope="module")
def good_batch(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return Path(batch().save(tmp_path_factory.mktemp("batch") / "b.npz")).read_bytes()


def repacked(
    path: Path, good: bytes, change: Callable[[dict[str, bytes]], Any], **options: Any
) -> Path:
    """The good file with its members changed."""
    (path / "good.npz").write_bytes(good)
    with zipfile.ZipFile(path / "good.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(
        path / "bad.npz", "w", **{"compression": zipfile.ZIP_DEFLATED, **options}
    ) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path / "bad.npz"


def npy(array: np.ndarray) -> bytes:
    import io

    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def text_member(value: Any) -> bytes:
    return npy(
        np.frombuffer(
            value if isinstance(value, bytes) else json.dumps(value).encode(), np.uint8
        )
    )


def altered(**fields: Any) -> Callable[[dict[str, bytes]], None]:
    """The header with a part of every sample changed."""

    def change(members: dict[str, bytes]) -> None:
        header = json.loads(members["header.npy"][128:])
        for entry in header["samples"]:
            entry.update(fields)
        members["header.npy"] = text_member(header)

    return change


def put(name: str, data: bytes) -> Callable[[dict[str, bytes]], Any]:
    return lambda members: members.update({f"{name}.npy": data})


SHAPES = {
    "prompt_token_ids": [2],
    "token_ids": [3],
    "logprobs": [3],
    "versions": [3],
    "trainer_logprobs": [3],
}
HUGE_SHAPE = (
    npy(np.zeros(9, np.int32))
    .replace(b"(9,), }", b"(9" + b"0" * 15 + b",), }")
    .replace(b" " * 15 + b"\n", b"\n")
)
BATCHES = {
    "a deep header": put("header", text_member(DEEP)),
    "a header of many parts": put("header", text_member(b"[" + b"[]," * 5_000_000 + b"[]]")),
    "a header of other things": put("header", text_member([1, 2])),
    "no text": put("header", text_member(b"\xff\xfe\x00")),
    "many digits": put("header", text_member(b'{"format": ' + b"9" * 100_000 + b"}")),
    "no shapes": altered(shapes={}),
    "negative shapes": altered(shapes={**SHAPES, "token_ids": [-3]}),
    "shapes of no array": altered(shapes={**SHAPES, "token_ids": []}),
    "shapes of more than there is": altered(shapes={**SHAPES, "token_ids": [4]}),
    "shapes of less": altered(shapes={**SHAPES, "logprobs": [2]}),
    "shapes of an unknown array": altered(shapes={**SHAPES, "evil": [0]}),
    "shapes of digits": altered(shapes={**SHAPES, "token_ids": [10**300]}),
    "shapes of text": altered(shapes="abc"),
    "numbers of another kind": put("token_ids", npy(np.zeros(9, np.float64))),
    "objects": put("token_ids", npy(np.zeros(9, np.int32)).replace(b"'<i4'", b"'|O' ")),
    "a shape that is not there": put("token_ids", HUGE_SHAPE),
    "a strange array header": put("token_ids", npy(np.zeros(9, np.int32)).replace(b"{'descr'", b"[[[[[[[[")),
    "another array": put("evil", npy(np.zeros(1))),
    "no arrays": lambda members: members.clear(),
    "an index that is a text": altered(prompt_index="x"),
    "an index of many digits": altered(prompt_index=10**300),
    "a text that is none": altered(text=["a"]),
    "seconds that are none": altered(seconds={"total": "long"}),
    "an adapter of three": altered(adapter=["a", 1, 2]),
    "an unknown reason": altered(finish_reason="boredom"),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_hostile_batch_files_are_refused(name: str, tmp_path: Path, good_batch: bytes):
    path = repacked(tmp_path, good_batch, BATCHES[name])
    with bounded(), pytest.raises(ConfigError, match="is not a rollout batch"):
        RolloutBatch.load(path)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_hostile_batch_files_of_other_compression_are_refused(
    kind: int, tmp_path: Path, good_batch: bytes
):
    path = repacked(tmp_path, good_batch, lambda members: None, compression=kind)
    with pytest.raises(ConfigError, match="compressed"):
        RolloutBatch.load(path)


def test_hostile_batch_with_a_broken_stream(tmp_path: Path, good_batch: bytes):
    """zlib's own errors, which are none of zipfile's."""
    found = good_batch.find(b"token_ids.npy")
    broken = bytearray(good_batch)
    start = found + len(b"token_ids.npy") + 20
    broken[start : start + 8] = b"\xff" * 8
    (tmp_path / "b.npz").write_bytes(broken)
    with pytest.raises(ConfigError, match="is not a rollout batch"):
        RolloutBatch.load(tmp_path / "b.npz")


def test_hostile_bombs_are_refused_before_they_are_read(
    tmp_path: Path, good_batch: bytes
):
    path = repacked(
        tmp_path, good_batch, put("token_ids", npy(np.zeros(10_000_000, np.int32)))
    )
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(ConfigError, match="declares 40,0"):
        RolloutBatch.load(path, max_bytes=20_000_000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    lying = path.read_bytes().replace(
        struct.pack("<I", 40_000_128), struct.pack("<I", 164)
    )
    path.write_bytes(lying)  # declares little and would expand to a lot
    with bounded(), pytest.raises(ConfigError, match="is not a rollout batch"):
        RolloutBatch.load(path, max_bytes=20_000_000)


def test_hostile_sizes_do_not_refuse_what_a_user_asks_for(tmp_path: Path):
    path = batch(50).save(tmp_path / "b.npz")
    with pytest.raises(ConfigError, match="more than max_bytes=1,000"):
        RolloutBatch.load(path, max_bytes=1000)
    assert RolloutBatch.load(path, max_bytes=1 << 20) == batch(50)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_hostile_batches_fuzzed(
    tmp_path_factory: pytest.TempPathFactory, good_batch: bytes, data: st.DataObject
):
    path = tmp_path_factory.getbasetemp() / "fuzzed.npz"
    path.write_bytes(changed(data.draw, good_batch))
    found = survives(lambda: RolloutBatch.load(path), ConfigError)
    assert found is None or len(found) == 3


# Records --------------------------------------------------------------------------------------------------------------


def line(body: bytes) -> bytes:
    """A line whose checksum fits, whatever it holds."""
    import zlib

    return b'%b,"crc":"%08x"}\n' % (body[:-1], zlib.crc32(body))


GOOD = [
    StepEvent(
        step=i, version=i, start=float(i), stop=i + 0.5, tokens=3, versions={i: 3}
    )
    for i in range(3)
]
LINES = {
    "no JSON": line(b'{"kind":"step",}'),
    "deep": line(b'{"kind":' + DEEP + b"}"),
    "a list": line(b"[1,2,3]"),
    "digits": line(b'{"kind":"step","step":' + b"9" * 5000 + b"}"),
    "a large step": line(b'{"kind":"step","step":' + b"9" * 30 + b',"version":1,"start":0,"stop":1}'),
    "a large version": line(b'{"kind":"step","step":9,"version":1,"start":0,"versions":{"' + b"9" * 30 + b'":1}}'),
    "endless times": line(b'{"kind":"rollout","start":1e999,"stop":1e999,"samples":1}'),
    "times of many digits": line(b'{"kind":"rollout","start":1' + b"0" * 390 + b',"stop":2}'),
    "no text": line(b'{"kind":"\xff\xfe"}'),
    "a kind that is a list": line(b'{"kind":[1]}'),
    "a start without a wall": line(b'{"kind":"run_start","start":"NaN","wall":"Infinity","resumed":3}'),
    "unknown times": line(b'{"kind":"new","start":1' + b"0" * 390 + b"}"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_hostile_lines_make_nothing_else_unreadable(name: str, tmp_path: Path):
    """A valid checksum and a bad content, between two good events."""
    events = [encode(e.to_json()) for e in [RunStart.now("r"), *GOOD]]
    (tmp_path / EVENTS).write_bytes(b"".join([*events[:2], LINES[name], *events[2:]]))
    with bounded():
        record = Record.open(tmp_path)
        assert record.steps()["step"].tolist() == [0, 1, 2]
        assert len(record.events()) + record.damaged == 5
        assert record.summary()["steps"] == 3
        assert record.summary()["tokens"] == 0
        for look in (
            record.__repr__,
            record._repr_html_,
            record.staleness,
            lambda: record.table("rollout"),
        ):
            look()


@pytest.mark.parametrize("name", LINES)
def test_hostile_lines_among_samples_are_counted_and_passed_by(
    name: str, tmp_path: Path
):
    with RecordWriter(tmp_path, run="r") as writer:
        writer.write_samples(
            [
                SampleRecord(step=0, group=i, tokens=(1, 2), versions=((0, 0, 2),))
                for i in range(2)
            ]
        )
    good = (tmp_path / SAMPLES).read_bytes().splitlines(keepends=True)
    (tmp_path / SAMPLES).write_bytes(
        good[0] + LINES[name] + line(b'{"kind":"sample","tokens":"x"}') + good[1]
    )
    record = Record.open(tmp_path)
    with bounded():
        assert {0, 1} <= {s.group for s in record.samples()} <= {-1, 0, 1}
    assert record.damaged >= 1
    assert f"{record.damaged} damaged" in repr(record)


def test_hostile_line_without_an_end_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jvlab.record._log.LONGEST_LINE", 1 << 16)
    monkeypatch.setattr("jvlab.record._log.CHUNK", 1 << 12)
    first, last = encode({"kind": "a"}), encode({"kind": "b"})
    (tmp_path / EVENTS).write_bytes(first + b"x" * 30_000_000 + b"\n" + last)
    reader = LogReader(tmp_path / EVENTS)
    tracemalloc.start()
    assert [fields["kind"] for fields in reader.read()] == ["a", "b"]
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    assert reader.damaged == 1
    (tmp_path / EVENTS).write_bytes(first + b"x" * 300_000)
    reader = LogReader(tmp_path / EVENTS)
    assert [fields["kind"] for fields in reader.read()] == ["a"]
    assert reader.offset == len(first), "it may still be being written"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just("NaN"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "kind",
        "step",
        "version",
        "versions",
        "start",
        "stop",
        "samples",
        "tokens",
        "groups",
        "ratios",
        "staleness",
        "ratios_by_staleness",
        "resumed",
        "wall",
        "bytes",
        "pause",
        "config",
        "gap_alarm",
        "logprob_gap",
        "fault",
        "extra",
    ]
)
KIND = st.sampled_from(
    [
        "step",
        "rollout",
        "sync",
        "run_start",
        "run_stop",
        "fault",
        "pause",
        "score",
        "reward",
        "x",
    ]
)


@settings(max_examples=examples(60))
@given(
    strange=st.lists(
        st.tuples(KIND, st.dictionaries(FIELDS, JSON, max_size=8)), max_size=4
    )
)
def test_hostile_events_fuzzed(
    tmp_path_factory: pytest.TempPathFactory, strange: list[tuple[str, dict[str, Any]]]
):
    """Events of any content, checksums in order: what is around them can be read, and so can they."""
    folder = tmp_path_factory.getbasetemp() / "fuzzed-record"
    folder.mkdir(exist_ok=True)
    bad = [
        line(json.dumps({**fields, "kind": kind}).encode()) for kind, fields in strange
    ]
    events = [encode(e.to_json()) for e in [RunStart.now("r"), *GOOD]]
    (folder / EVENTS).write_bytes(b"".join([*events[:2], *bad, *events[2:]]))
    record = Record.open(folder)
    assert len(record.events()) + record.damaged == 4 + len(bad)
    assert {e.step for e in record.events("step") if isinstance(e, StepEvent)} >= {
        0,
        1,
        2,
    }
    for event in record.events():
        json.dumps(event.to_json(), allow_nan=False)


# Plans and layouts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_plan() -> bytes:
    from jvlab.layout._compile import compile_plan
    from tests.layout.plan_world import square

    world = square(transposed=True, tp=2)
    return compile_plan(world.leaves, world.bindings, world.layouts).to_bytes()


def plan_bytes(header: bytes, size: int | None = None, rest: bytes = b"") -> bytes:
    return (
        MAGIC
        + (len(header) if size is None else size).to_bytes(8, "little")
        + header
        + rest
    )


PLANS = {
    "no plan": b"hello",
    "nothing": b"",
    "only its name": MAGIC,
    "deep": plan_bytes(DEEP),
    "a large size": plan_bytes(b"{}", 1 << 62),
    "a list": plan_bytes(b"[]"),
    "empty": plan_bytes(b"{}"),
    "an array of objects": plan_bytes(
        b'{"arrays": [["x", "|O", [1]]]}', rest=b"\0" * 8
    ),
    "a negative shape": plan_bytes(b'{"arrays": [["x", "<i8", [-1]]]}'),
    "a large shape": plan_bytes(
        b'{"arrays": [["x", "<i8", [4611686018427387904, 4611686018427387904]]]}'
    ),
    "a name that is a list": plan_bytes(b'{"arrays": [[[1], "<i8", [0]]]}'),
}


@pytest.mark.parametrize("name", PLANS)
def test_hostile_plans_are_refused(name: str):
    with bounded(), pytest.raises(ConfigError):
        TransferPlan.from_bytes(PLANS[name])


@settings(max_examples=examples(60))
@given(data=st.data())
def test_hostile_plans_fuzzed(good_plan: bytes, data: st.DataObject):
    survives(
        lambda: TransferPlan.from_bytes(changed(data.draw, good_plan)), ConfigError
    )


LAYOUTS: dict[str, bytes] = {
    "nothing": b"",
    "deep": DEEP,
    "a list": b"[]",
    "another version": b'{"wire": 1, "columns": {}}',
    "no columns": b'{"wire": %d}' % _WIRE_VERSION,
    "columns of another kind": b'{"wire": %d, "columns": {"tensor": 3}}'
    % _WIRE_VERSION,
    "odd bytes": b'{"wire": %d, "columns": {"tensor": [[1], "AAA="]}}' % _WIRE_VERSION,
    "no base64": b'{"wire": %d, "columns": {"tensor": [[1], 5]}}' % _WIRE_VERSION,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_hostile_layouts_are_refused(name: str):
    with bounded(), pytest.raises(TraceError):
        layout_from_bytes(LAYOUTS[name])


@settings(max_examples=examples(100))
@given(
    plain=st.dictionaries(
        st.sampled_from(["wire", "columns", "rank", "notes", "tensors"]), JSON
    )
)
def test_hostile_layouts_fuzzed(plain: dict[str, Any]):
    with pytest.raises(TraceError):
        layout_from_plain({**plain, "wire": _WIRE_VERSION})


# Checkpoints ----------------------------------------------------------------------------------------------------------


def tensors(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), place: Any = (0, 8)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": place}}


HEADERS = {
    "nothing": b"", "half a length": b"\1\2", "a large length": tensors({}, size=1 << 63), "deep": tensors(DEEP),
    "longer than the file": tensors(entry(), b"\0" * 8, size=10_000), "a list": tensors([1]),
    "an entry that is none": tensors({"w": 3}), "no dtype": tensors({"w": {"shape": [], "data_offsets": [0, 4]}}),
    "a shape that is none": tensors(entry(shape="x"), b"\0" * 8),
    "a negative size": tensors(entry(shape=[-2]), b"\0" * 8),
    "a large shape": tensors(entry(shape=[10**18, 10**18]), b"\0" * 8),
    "bytes that do not fit": tensors(entry(shape=[3]), b"\0" * 8),
    "bytes backwards": tensors(entry(place=[8, 0]), b"\0" * 8),
    "negative bytes": tensors(entry(place=[-8, 0]), b"\0" * 8),
    "digits": tensors(b'{"w": {"shape": [' + b"9" * 5000 + b"]}}"), "no text": tensors(b"\xff\xfe{}"),
}  # fmt: skip


def readers(folder: Path) -> list[Callable[[], Any]]:
    """Everything that reads safetensors headers by itself."""
    from jvlab.lab._checkpoint_trainer import read_checkpoint
    from jvlab.trainer.decoder._checkpoint import TensorFiles

    return [
        lambda: checkpoint_tensors(folder),
        lambda: CheckpointValues(folder),
        lambda: TensorFiles(folder),
        lambda: read_checkpoint(str(folder)),
        lambda: read_header(folder / "model.safetensors"),
    ]


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_safetensors_are_refused_by_every_reader(name: str, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(HEADERS[name])
    for read in readers(tmp_path):
        with bounded(), pytest.raises(ModelError, match=r"model\.safetensors"):
            read()


def test_hostile_file_that_ends_early_is_refused_where_its_values_are_read(
    tmp_path: Path,
):
    header = tensors(entry(shape=[1 << 40], place=[0, 4 << 40]))
    (tmp_path / "model.safetensors").write_bytes(header)
    assert len(CheckpointValues(tmp_path)) == 0
    (tmp_path / "model.safetensors").write_bytes(header + bytes(100))
    assert checkpoint_tensors(tmp_path)[0].shape == (1 << 40,), (
        "a header alone is enough to plan with"
    )
    for read in readers(tmp_path)[1:]:
        with bounded(), pytest.raises(ModelError, match="ends before w"):
            read()


@settings(max_examples=examples(60))
@given(data=st.data())
def test_hostile_safetensors_fuzzed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    folder = tmp_path_factory.getbasetemp() / "fuzzed-tensors"
    folder.mkdir(exist_ok=True)
    good = tensors(
        {
            "__metadata__": {"format": "pt"},
            **entry(),
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [8, 16]},
        }
    )
    (folder / "model.safetensors").write_bytes(changed(data.draw, good + bytes(16)))
    for read in readers(folder):
        survives(read, ModelError)


TEXTS = {
    "nothing": b"",
    "deep": DEEP,
    "a list": b"[]",
    "a number": b"3",
    "no text": b"\xff\xfe",
    "half": b'{"a": ',
}


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_configs_and_indices_are_refused(name: str, tmp_path: Path):
    from jvlab.layout._checkpoint import read_config as plan_config

    (tmp_path / "config.json").write_bytes(TEXTS[name])
    for read in (
        lambda: read_config_file(tmp_path),
        lambda: plan_config(tmp_path),
        lambda: checkpoint_tensors(tmp_path),
    ):
        with bounded(), pytest.raises(ModelError):
            read()
    assert checkpoint_dtype(str(tmp_path)) is None
    (tmp_path / "model.safetensors.index.json").write_bytes(TEXTS[name])
    with bounded(), pytest.raises(ModelError):
        checkpoint_tensors(tmp_path)


def test_hostile_index_names_no_file_outside(tmp_path: Path):
    index = tmp_path / "index.json"
    for name in ("../x.safetensors", "/etc/x.safetensors", "a/../../x", "a\0b"):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(ModelError, match="outside its folder"):
            read_weight_map(index)
    for value in (3, [], {"w": 3}, None):
        index.write_text(json.dumps({"weight_map": value}))
        with pytest.raises(ModelError, match="weight_map"):
            read_weight_map(index)


def test_hostile_size_is_looked_at_before_reading(tmp_path: Path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 40)  # a sparse file: a terabyte that nobody has
    with bounded(), pytest.raises(ModelError, match="more than"):
        read_config_file(tmp_path)


# Runs and buckets -----------------------------------------------------------------------------------------------------

POSITION = {
    "format": 1,
    "step": 1,
    "version": 1,
    "seed": 0,
    "groups": 3,
    "pending": [[1, 0]],
    "task": {},
}
POSITIONS = {
    **TEXTS, "another format": json.dumps({**POSITION, "format": 2}).encode(),
    "a step that is none": json.dumps({**POSITION, "step": "x"}).encode(),
    "a field more": json.dumps({**POSITION, "evil": 1}).encode(),
    "pending of another kind": json.dumps({**POSITION, "pending": [1]}).encode(),
    "a task that is none": json.dumps({**POSITION, "task": []}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONS)
def test_hostile_run_checkpoints_are_refused(name: str, tmp_path: Path):
    from jvlab.trainer._run_checkpoint import Checkpoints

    folder = tmp_path / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    (folder / "position.json").write_bytes(json.dumps(POSITION).encode())
    found = Checkpoints(tmp_path)
    assert found.position(folder).pending == ((1, 0),)
    (folder / "position.json").write_bytes(POSITIONS[name])
    with bounded(), pytest.raises(ConfigError, match=r"step-000001|position"):
        found.position(folder)


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_buckets_are_refused(name: str, tmp_path: Path):
    import mmap

    from jvlab.transport._disk import _read_head

    path = tmp_path / "0.safetensors"
    path.write_bytes(HEADERS[name] or b"\0")
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with memory, bounded(), pytest.raises(TransportError):
        _read_head(memory, path)


def test_hostile_bounds_are_what_they_say(tmp_path: Path):
    assert _files.parse_json(b"[" * 60 + b"]" * 60) is not None
    with pytest.raises(ValueError, match="deep"):
        _files.parse_json(b"[" * 150 + b"]" * 150)
    with pytest.raises(ValueError, match="deep"):
        _files.parse_json(b'{"a":' * 150 + b"1" + b"}" * 150)
    with pytest.raises(ValueError, match="values"):
        _files.parse_json(b"[" + b"1," * 100 + b"1]", parts=50)
