"""Weights through storage: what another reader makes of a published folder, and every way in which it can be wrong."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import pyarrow
import pytest
import xxhash
from safetensors.numpy import save_file

import jvlab as jv
from jvlab import errors
from jvlab._deadline import Deadline
from jvlab.layout._checkpoint import INDEX
from jvlab.sync._publish import Follower, Publisher
from jvlab.transport import _storage
from jvlab.transport._storage import Copy, Index, Lock, Patient, Shelf, Why
from tests.waiting import until

Tree = dict[str, np.ndarray]
SIZES = {"F32": 4, "BF16": 2, "U8": 1, "F16": 2}


# A trainer, and a reader that shares no code with jvlab's -------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few tensors, of three dtypes; the smallest has one element, the widest is last by name."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file(tree(0), folder / "model.safetensors")
    return folder


def tree(seed: int) -> Tree:
    """Values of a checkpoint's tensors."""
    made = np.random.default_rng(seed)
    return {
        "embed.weight": made.normal(size=(64, 48)).astype(ml_dtypes.bfloat16),
        "gate": made.normal(size=(1,)).astype(np.float32),
        "norm.weight": made.normal(size=(48,)).astype(np.float32),
        "out.weight": made.normal(size=(33, 7)).astype(np.float16),
        "tail": made.normal(size=(5, 3, 11)).astype(np.float32),
    }


def trained(values: Tree, seed: int, share: float = 0.01) -> Tree:
    """The tree with a share of its values changed, all of one tensor left alone."""
    made = np.random.default_rng(seed)
    out = {}
    for name, array in values.items():
        mask = made.random(array.shape) < (0 if name == "tail" else share)
        out[name] = np.where(mask, -array - 1, array).astype(array.dtype)
    return out


def files_of(where: str) -> dict[str, bytes]:
    """Everything below a folder or bucket."""
    fs, root = fsspec.core.url_to_fs(where)
    found = fs.find(root)
    return {path[len(root.rstrip("/")) + 1 :]: fs.cat_file(path) for path in found}


def parse_file(data: bytes) -> tuple[dict[str, str], dict[str, tuple[Any, bytes]]]:
    """A safetensors file by its specification: metadata, and name → (header entry, bytes)."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    body = data[8 + size :]
    return metadata, {
        name: (entry, body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def independent(where: str, version: int) -> dict[str, bytes]:
    """A version's tensors as slime's reader puts them together: seed from a full version, then overwrite bytes."""
    files = files_of(where)

    def index_of(number: int) -> dict[str, Any]:
        return json.loads(files[f"weight_v{number:06d}/model.safetensors.index.json"])

    start = version
    while "delta_encoding" in (metadata := index_of(start)["metadata"]):
        assert metadata["delta_encoding"] == "overwrite"
        assert metadata["compression_format"] == "zstd"
        assert metadata["checksum_format"] == "xxh3-128"
        start = int(metadata["base_version"])
    state: dict[str, bytearray] = {}
    chain = [
        n for n in range(start, version + 1) if f"weight_v{n:06d}/{INDEX}" in files
    ]
    for number in chain:
        index = index_of(number)
        assert int(index["metadata"]["version"]) == number
        for file in sorted(set(index["weight_map"].values())):
            metadata, tensors = parse_file(files[f"weight_v{number:06d}/{file}"])
            for name, (entry, data) in tensors.items():
                assert index["weight_map"][name] == file
                if number == start:
                    assert entry["data_offsets"][0] % SIZES[entry["dtype"]] == 0
                    state[name] = bytearray(data)
                else:
                    size = int.from_bytes(data[6:14], "little")
                    plain = pyarrow.decompress(data, size, codec="zstd").to_pybytes()
                    count = int.from_bytes(plain[:4], "little")
                    at = np.frombuffer(plain[4 : 4 + 4 * count], "<u4")
                    memory = np.frombuffer(state[name], np.uint8)
                    memory[at] = np.frombuffer(plain[4 + 4 * count :], np.uint8)
                assert xxhash.xxh3_128(bytes(state[name])).hexdigest() == metadata[name]
    return {name: bytes(data) for name, data in state.items()}


def plain(values: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in values.items()}


@pytest.fixture(params=["folder", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "published")
        return
    fs = fsspec.filesystem("memory")
    yield f"memory://{tmp_path.name}"
    fs.rm("/", recursive=True)


def publisher(where: str, model: Path, **options: Any) -> Any:
    return Publisher(where, tree(0), like=model, rules="checkpoint", **options)


def shelf(where: str) -> Shelf:
    return Shelf(Patient(_storage.open_store(where)))


def read(where: str, version: int | None = None) -> Copy:
    """As a late joiner does: the newest version that has an index."""
    found = shelf(where)
    deadline = Deadline(60)
    names = found.names(deadline)
    complete = [
        n
        for n in _storage.versions_in(names)
        if INDEX in found.store.names(_storage.version_name(n))
    ]
    wanted = version or next(iter(complete), 0)
    if not wanted:
        text = "all that were listed are pruned"
        raise errors.StorageError(text, remedy="look again", why=Why.MISSING)
    index = found.complete(wanted, names, deadline)
    copy = Copy()
    for step in found.chain(index, names, None, deadline):
        get = lambda path, n: found.read_file(path, n, deadline)
        if step.base is None:
            copy = Copy.read(step, get)
        else:
            copy.apply(step, get)
    return copy


# Format ---------------------------------------------------------------------------------------------------------------


def test_another_reader_gets_the_trainers_bytes(where: str, model: Path):
    values = tree(0)
    kinds = []
    with publisher(where, model, full_every=3, keep=9, shard_mib=1) as out:
        for step in range(1, 9):
            report = out.publish(values)
            kinds.append(report.kind)
            assert report.version == step
            assert independent(where, step) == plain(values), step
            assert plain(read(where).tensors) == plain(values)
            if report.kind == "delta":
                assert report.bytes < report.total_bytes / 2
            values = trained(values, step)
    assert kinds == ["full", *["delta"] * 3, "full", *["delta"] * 3]


@pytest.mark.vllm
def test_a_full_version_is_a_checkpoint(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    policy = jv.Policy.from_pretrained(jv.models.tiny("llama"))
    with Publisher(tmp_path, policy, dtype="float32", shard_mib=1) as out:
        assert out.publish(policy.params).kind == "full"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "weight_v000001"
    )
    theirs = {n: t.numpy() for n, t in loaded.state_dict().items()}
    ours = read(str(tmp_path)).tensors
    assert ours.keys() <= theirs.keys()
    assert all(np.array_equal(theirs[name], array) for name, array in ours.items())
    files = files_of(str(tmp_path / "weight_v000001"))
    assert sum(name.endswith(".safetensors") for name in files) > 1
    assert "tokenizer.json" in files


def test_a_delta_that_would_not_be_smaller_is_full(where: str, model: Path):
    with publisher(where, model) as out:
        out.publish(tree(0))
        report = out.publish(tree(1))
        assert (report.kind, report.why_full) == (
            "full",
            "a delta would not be smaller",
        )
        # and the one after it changes that
        assert out.publish(trained(tree(1), 5)).base == 2
        assert independent(where, 3) == plain(trained(tree(1), 5))


def test_nothing_changed(where: str, model: Path):
    with publisher(where, model) as out:
        out.publish(tree(0))
        report = out.publish(tree(0))
        assert (report.kind, report.bytes, report.changed) == ("delta", 0, 0.0)
        assert independent(where, 2) == plain(tree(0))


@pytest.mark.parametrize("size", [0, 1, 131_071, 131_072, 131_073, 400_000])
def test_frames_are_zstd(size: int):
    content = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    frame = _storage.framed(content)
    theirs = pyarrow.decompress(frame, size, codec="zstd").to_pybytes() if size else b""
    assert theirs == content.tobytes()
    assert np.array_equal(_storage.unframed(np.frombuffer(frame, np.uint8)), content)
    huge = frame[:6] + b"\xff" * 5 + bytes(3) + frame[14:]
    with pytest.raises(ValueError, match="zstd"):
        _storage.unframed(np.frombuffer(huge, np.uint8))
    for cut in (0, 5, 13, len(frame) - 1):
        with pytest.raises(ValueError, match="zstd"):
            _storage.unframed(np.frombuffer(frame[:cut], np.uint8))


def test_changes_may_be_applied_twice_and_a_delta_may_not(where: str, model: Path):
    new = trained(tree(0), 1)
    with publisher(where, model) as out:
        out.publish(tree(0))
        out.publish(new)
    found = shelf(where)
    deadline = Deadline(60)
    index = found.index(2, deadline)
    get = lambda path, n: found.read_file(path, n, deadline)
    copy = read(where, 1)
    assert copy.apply(index, get) > 0
    with pytest.raises(errors.StorageError) as refused:
        copy.apply(index, get)
    assert refused.value.fields["why"] is Why.BASE
    # and even without that check
    copy.state = index.base_state
    copy.apply(index, get)
    assert plain(copy.tensors) == plain(new)


# What is published last, and what is visible --------------------------------------------------------------------------


class Crash(Exception):
    """The trainer dies here."""


@pytest.mark.parametrize("reply", ["never shown", "shown, reply lost"])
def test_a_crash_before_the_version_is_known(
    where: str, model: Path, reply: str, monkeypatch: pytest.MonkeyPatch
):
    """slime#2104: the sender's snapshot was ahead of what receivers could see."""
    second, third = trained(tree(0), 1), trained(tree(0), 2)
    with publisher(where, model) as out:
        out.publish(tree(0))
        store = out._store
        show = store.show

        def crash(*given: Any) -> bool:
            if reply.startswith("shown"):
                show(*given)
            raise Crash

        monkeypatch.setattr(store, "show", crash)
        with pytest.raises(Crash):
            out.publish(second)
        monkeypatch.undo()
        visible = read(where)
        assert plain(visible.tensors) == plain(
            second if reply.startswith("shown") else tree(0)
        )
        report = out.publish(third)
        # on what is visible, or on nothing
        assert report.base in (None, visible.version)
        assert plain(read(where).tensors) == plain(third)
        assert plain(read(where, visible.version).tensors) == plain(visible.tensors)


def test_a_new_publisher_knows_nothing_of_the_old_ones_values(where: str, model: Path):
    with publisher(where, model) as out:
        out.publish(tree(0))
        out.publish(trained(tree(0), 1))
    with publisher(where, model) as out:
        assert out.version == 2
        report = out.publish(trained(tree(0), 1))
        assert (report.version, report.kind) == (3, "full")
    files = files_of(where)
    assert sorted(n for n in files if n.startswith("writer")) == ["writer-000002.json"]


def test_what_a_killed_writer_left_is_removed(where: str, model: Path):
    with publisher(where, model) as out:
        out.publish(tree(0))
        staged = out._store.begin("weight_v000002", "e0001")
        out._store.put(f"{staged}/model.safetensors", [b"half"])
    with publisher(where, model) as out:
        assert not [n for n in files_of(where) if "v000002" in n]
        assert out.publish(tree(1)).version == 2


def test_pruning_keeps_what_late_joiners_need(where: str, model: Path):
    values = tree(0)
    with publisher(where, model, full_every=2, keep=2) as out:
        for step in range(1, 14):
            report = out.publish(values)
            # whoever joins now gets it
            assert plain(read(where).tensors) == plain(values)
            # and whatever is kept can be reached
            kept = _storage.versions_in(shelf(where).names(Deadline(60)))
            assert all(read(where, version).version == version for version in kept)
            assert len(kept) <= 6
            values = trained(values, step)
        assert report.version == 13
        assert 1 not in kept
        assert any(read(where, v).version for v in kept)


def test_a_pruned_base_leads_to_a_full_version(where: str, model: Path):
    values = [tree(0), trained(tree(0), 1), trained(tree(0), 2)]
    with publisher(where, model, full_every=9) as out:
        for value in values:
            out.publish(value)
        link = FakeLink()
        with follow(where, link) as follower:
            # 1 and 2 are gone before anybody joins
            pass
        for gone in ("weight_v000001", "weight_v000002"):
            out._store.remove(gone)
        with follow(where, FakeLink()) as follower:
            until(lambda: follower.error, "the reason", 60)
            assert follower.version == 0
            assert isinstance(follower.error, errors.StorageError)
            assert follower.error.fields["why"] is Why.MISSING
            out.publish(values[2], full=True)
            assert follower.wait(4, 60).last.read == (4,)
            until(lambda: follower.error is None, "the error's end", 60)


# Damage ---------------------------------------------------------------------------------------------------------------


def change(where: str, path: str, edit: Callable[[bytes], bytes | None]) -> None:
    """Edit one file of a folder or bucket; None removes it."""
    fs, root = fsspec.core.url_to_fs(where)
    (name,) = fs.glob(f"{root}/{path}")
    new = edit(fs.cat_file(name))
    fs.rm_file(name)
    if new is not None:
        fs.pipe_file(name, new)


def flip(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1 << (at % 8)
    return bytes(changed)


WEIGHTS = "model-00001-of-00001-e0001-*.safetensors"
DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None], Why]] = {
    "a flipped bit": (WEIGHTS, lambda d: flip(d, len(d) - 9), Why.DAMAGED),
    "a flipped bit in its header": (WEIGHTS, lambda d: flip(d, 40), Why.DAMAGED),
    "a truncated file": (WEIGHTS, lambda d: d[: len(d) // 2], Why.DAMAGED),
    "a file that grew": (WEIGHTS, lambda d: d + b"x", Why.DAMAGED),
    "an empty file": (WEIGHTS, lambda d: b"", Why.DAMAGED),
    "a missing file": (WEIGHTS, lambda d: None, Why.MISSING),
    "no index": (INDEX, lambda d: None, Why.MISSING),
    "a torn index": (INDEX, lambda d: d[:-40], Why.DAMAGED),
    "an altered index": (
        INDEX,
        lambda d: d.replace(b'"epoch": 1', b'"epoch": 2'),
        Why.DAMAGED,
    ),
    "another writer's index": (
        INDEX,
        lambda d: d.replace(b'"jvlab"', b'"other"'),
        Why.FOREIGN,
    ),
}


@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_version_is_never_served(
    where: str, model: Path, damage: str, kind: str
):
    file, edit, why = DAMAGE[damage]
    second, third = trained(tree(0), 1), trained(tree(0), 2)
    link = FakeLink()
    with publisher(where, model) as out:
        out.publish(tree(0))
        with follow(where, link) as follower:
            follower.wait(1, 60)
            # published and damaged while nobody looks
            with paused(follower):
                assert out.publish(second, full=kind == "full").kind == kind
                change(where, f"weight_v000002/{file}", edit)
            if damage == "no index":  # then it is no version yet
                with paused(follower):
                    assert follower.error is None
            else:
                problem = until(lambda: follower.error, "the reason", 60)
                assert isinstance(problem, errors.StorageError)
                assert problem.fields["why"] is why
                assert "weight_v000002" in problem.message
            assert (follower.version, len(link.synced)) == (1, 1)
            # a full version heals it
            out.publish(third, full=True)
            follower.wait(3, 60)
            until(lambda: follower.error is None, "the error's end", 60)
    assert [version for version, _ in link.synced] == [1, 3]
    assert plain(link.synced[-1][1]) == plain(third)


@pytest.mark.parametrize("version", [1, 2])
def test_any_flipped_bit_is_noticed(tmp_path: Path, model: Path, version: int):
    where = str(tmp_path)
    with publisher(where, model) as out:
        out.publish(tree(0))
        out.publish(trained(tree(0), 1))
    chance = random.Random(version)
    folder = tmp_path / f"weight_v{version:06d}"
    read_files = [f for f in folder.iterdir() if f.suffix != ".json" or f.name == INDEX]
    for file in read_files:
        data = file.read_bytes()
        for _ in range(40):
            at = chance.randrange(len(data))
            file.write_bytes(flip(data, at))
            try:
                copy = read(where, version)
            except errors.StorageError:
                continue
            # a bit of white space that no reader looks at
            assert file.name == INDEX
            assert data[at : at + 1].isspace(), (file.name, at)
            assert plain(copy.tensors) == plain(
                [tree(0), trained(tree(0), 1)][version - 1]
            )
        file.write_bytes(data)
    assert read(where, version).version == version


def test_a_delta_that_fails_leaves_the_copy_as_it_was(tmp_path: Path, model: Path):
    """With right file checksums, and a result that is not the trainer's."""
    where = str(tmp_path)
    with publisher(where, model) as out:
        out.publish(tree(0))
        out.publish(trained(tree(0), 1))
    found = shelf(where)
    deadline = Deadline(60)
    index = found.index(2, deadline)
    copy = read(where, 1)
    copy.tensors["tail"][0, 0, 0] += 1  # what it holds is not what was published
    before = plain(copy.tensors)
    sums = dict(copy.checksums)
    copy.checksums["tail"] = _storage.checksum(_storage.raw(copy.tensors["tail"]))
    with pytest.raises(errors.StorageError, match="other values than the trainer's"):
        copy.apply(index, lambda path, n: found.read_file(path, n, deadline))
    assert plain(copy.tensors) == before
    assert copy.version == 1
    # a changed tensor whose base differs
    copy.checksums = sums
    copy.tensors["embed.weight"][:] = 0
    zeros = plain(copy.tensors)
    with pytest.raises(errors.StorageError, match="not the trainer's after it"):
        copy.apply(index, lambda path, n: found.read_file(path, n, deadline))
    assert plain(copy.tensors) == zeros
    assert copy.checksums == sums


def test_another_models_version_is_refused(where: str, model: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "own"}')
    save_file({"else": np.ones(4, np.float32)}, other / "model.safetensors")
    link = FakeLink()
    with publisher(where, model) as out:
        out.publish(tree(0))
    with pytest.raises(errors.ConfigError, match="another model"):
        Publisher(where, {"else": np.ones(4, np.float32)}, like=other)
    with follow(where, link) as follower:
        follower.wait(1, 60)
        # by whoever removed what was there
        change(where, "weight_v000001/" + INDEX, lambda d: None)
        with Publisher(where, {"else": np.ones(4, np.float32)}, like=other) as out:
            out.publish({"else": np.ones(4, np.float32)}, version=9)
            # first that the folder was emptied, then this
            until(lambda: reason(follower) is Why.FOREIGN, "the reason", 60)
        assert (follower.version, len(link.synced)) == (1, 1)


def test_an_index_cannot_name_files_elsewhere(where: str, model: Path):
    with publisher(where, model) as out:
        out.publish(tree(0))
    found = shelf(where).index(1, Deadline(60))
    wrong = Index(**{**vars(found), "files": {"../../etc": (1, "")}, "weight_map": {}})
    with pytest.raises(errors.StorageError, match="does not describe it"):
        Index.parse(wrong.to_bytes(), 1)


def test_an_index_cannot_lead_in_circles(where: str, model: Path):
    with publisher(where, model) as out:
        out.publish(tree(0))
    found = shelf(where).index(1, Deadline(20))
    for base in (1, 2):
        wrong = Index(**{**vars(found), "base": base, "base_state": found.state})
        with pytest.raises(errors.StorageError, match="does not describe it"):
            Index.parse(wrong.to_bytes(), 1)


def test_any_folder_of_a_model_can_be_published(tmp_path: Path, model: Path):
    """Readers take plain names only."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    for name in ("._config.json", "notes (2).txt", "README.txt"):
        (folder / name).write_text("{}")
    where = str(tmp_path / "out")
    with publisher(where, folder) as out:
        out.publish(tree(0))
        assert plain(read(where).tensors) == plain(tree(0))
        assert out.publish(tree(0)).kind == "delta"
    names = {name.rpartition("/")[2] for name in files_of(where)}
    assert {"README.txt", "config.json"} < names
    assert not {"._config.json", "notes (2).txt"} & names


def test_versions_may_be_times(where: str, model: Path):
    version = 1_763_000_000_000_000_000
    with publisher(where, model) as out:
        out.publish(tree(0), version)
        assert out.publish(tree(0)).base == version
    assert read(where).version == version + 1


def test_readers_beside_a_writer_see_only_whole_versions(tmp_path: Path, model: Path):
    """A reader that reads as fast as it can, while versions come and are pruned under it."""
    where = str(tmp_path)
    states = []
    done = threading.Event()
    seen: set[str] = set()
    wrong: list[BaseException] = []

    def look() -> None:
        while not done.is_set():
            try:
                copy = read(where)
                seen.add(copy.state)
                assert _storage.state_of(copy.tensors, copy.checksums) == copy.state
            except errors.StorageError as error:
                if error.fields.get("why") is not Why.MISSING:
                    wrong.append(error)
            except BaseException as error:
                wrong.append(error)

    with publisher(where, model, full_every=1, keep=1) as out:
        out.publish(tree(0))
        states.append(read(where).state)
        readers = [threading.Thread(target=look) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            began = time.monotonic()
            for step in itertools.count():
                out.publish(trained(tree(0), step))
                states.append(out._held.state)
                # on a busy machine all that they began to read may be pruned meanwhile
                looked = len(seen) > 1 or time.monotonic() - began > 120
                if step >= 39 and looked:
                    break
        finally:
            done.set()
            for reader in readers:
                reader.join(60)
    assert not wrong
    assert seen <= set(states)
    assert len(seen) > 1


# Two writers ----------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused(where: str, model: Path):
    with publisher(where, model) as out:
        out.publish(tree(0))
        with pytest.raises(errors.LinkBusy) as refused:
            publisher(where, model)
        assert "python" in str(refused.value.fields["owner"])
        # nothing was disturbed
        assert out.publish(tree(1)).version == 2
    publisher(where, model).close()


def lock_of_another(where: str, **changes: Any) -> Callable[..., None]:
    """The lock of a writer on another machine; returns what writes it again."""
    store = _storage.open_store(where)
    given = {"epoch": 1, "token": "x", "by": "python 1 on far", "host": "far", "pid": 1}
    lock = Lock(**{**given, "lease": 0.5, **changes})
    assert store.create(_storage.lock_name(lock.epoch), lock.to_bytes())

    def again(**more: Any) -> None:
        new = Lock(**{**vars(lock), **more})
        store.replace(_storage.lock_name(lock.epoch), new.to_bytes())

    return again


def test_a_writer_elsewhere_whose_heart_beats_is_refused(where: str, model: Path):
    again = lock_of_another(where, lease=3.0)
    done = threading.Event()

    def beat() -> None:
        count = 1
        while not done.wait(0.05):
            again(beat=count)
            count += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(errors.LinkBusy, match="python 1 on far"):
            publisher(where, model)
    finally:
        done.set()
        thread.join(60)


@pytest.mark.parametrize("how", ["silent", "released", "dead", "half written"])
def test_a_writer_that_ended_is_replaced(where: str, model: Path, how: str):
    again = lock_of_another(where)
    if how == "released":
        again(released=True, lease=1e6)
    if how == "dead":
        own = _storage.Identity.own()
        again(host=own.host, pid=2**22 + 1, lease=1e6)
    if how == "half written":
        change(where, "writer-000001.json", lambda data: data[:20])
    with publisher(where, model, lease=0.5) as out:
        assert out._lease.epoch == 2
        assert out.publish(tree(0)).version == 1


def test_a_writer_that_comes_back_is_refused(
    where: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    link = FakeLink()
    old = publisher(where, model, lease=1e6)
    old.publish(tree(0))
    with follow(where, link) as follower:
        follower.wait(1, 60)
        # it slept, or was cut off, for longer than it had promised
        name = _storage.lock_name(1)
        change(where, name, lambda d: d.replace(b'"host": "', b'"host": "far-'))
        change(where, name, lambda d: d.replace(b'"lease": 1000000.0', b'"lease": 0.2'))
        with publisher(where, model) as new:
            with pytest.raises(errors.LinkBusy, match="has taken over") as lost:
                old.publish(tree(1))
            assert lost.value.fields["lost"]
            assert old.closed
            # even if it does not look: readers know
            monkeypatch.setattr(old._lease, "check", lambda deadline: None)
            late = old.publish(tree(1))
            problem = until(lambda: follower.error, "the reason", 60)
            assert problem.fields["why"] is Why.FENCED
            assert follower.version == 1
            report = new.publish(tree(2))
            assert report.version > late.version
            assert report.kind == "full"
            follower.wait(report.version, 60)
            until(lambda: follower.error is None, "the error's end", 60)
    assert plain(link.synced[-1][1]) == plain(tree(2))
    assert len(link.synced) == 2
    old.close()


def test_a_lock_half_written_opens_no_fence(where: str, model: Path):
    with publisher(where, model) as out:
        out.publish(tree(0))
    lock_of_another(where, epoch=2, fences=((2, 0),))
    lock_of_another(where, epoch=3)
    change(where, "writer-000003.json", lambda data: data[:20])
    with pytest.raises(errors.StorageError) as refused:
        read(where)
    assert refused.value.fields["why"] is Why.FENCED


def test_a_process_may_end_without_closing(
    where: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """From Python 3.12 on, no thread can be started while the interpreter ends."""
    out = publisher(where, model)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        out._release()


def test_of_several_that_begin_at_once_one_writes(tmp_path: Path, model: Path):
    for attempt in range(8):
        won, refused = begin_at_once(str(tmp_path / str(attempt)), model)
        assert (len(won), len(refused)) == (1, 3)
        assert won[0].publish(tree(0)).version == 1
        won[0].close()


def begin_at_once(where: str, model: Path) -> tuple[list[Publisher], list[Exception]]:
    barrier = threading.Barrier(4)
    won: list[Publisher] = []
    refused: list[Exception] = []

    def begin() -> None:
        barrier.wait(60)
        try:
            won.append(publisher(where, model))
        except errors.LinkBusy as error:
            refused.append(error)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return won, refused


# Following ------------------------------------------------------------------------------------------------------------


class FakeLink:
    """What a follower needs of a link; keeps what was synced."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.closed = False
        self.synced: list[tuple[int, Tree]] = []
        self.fails: list[errors.SyncError] = []
        self.caught_up = 0

    def sync(self, tensors: Tree, version: int | None, **options: Any) -> Any:
        if self.fails:
            raise self.fails.pop()
        assert version is None or version > self.version
        self.version = self.version + 1 if version is None else version
        copies = {name: array.copy() for name, array in tensors.items()}
        self.synced.append((self.version, copies))
        return SimpleNamespace(version=self.version)

    def catch_up(self, tensors: Tree, **options: Any) -> None:
        assert plain(tensors) == plain(self.synced[-1][1])
        self.caught_up += 1

    def close(self) -> None:
        self.closed = True


def follow(where: str, link: FakeLink, **options: Any) -> Any:
    return Follower(where, lambda tensors: link, **{"poll": 0.02, **options})


def reason(follower: Follower) -> object:
    """Why a newer version is not served."""
    return follower.error.fields.get("why") if follower.error is not None else None


class paused:
    """A follower that looks at nothing meanwhile."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.names = follower._shelf.names

    def __enter__(self) -> None:
        waiting = threading.Event()
        self.go_on = threading.Event()

        def names(deadline: Deadline) -> list[str]:
            waiting.set()
            assert self.go_on.wait(60)
            return self.names(deadline)

        self.follower._poll = 0.02
        self.follower._shelf.names = names  # type: ignore[method-assign]
        assert waiting.wait(60)

    def __exit__(self, *_: object) -> None:
        self.follower._shelf.names = self.names  # type: ignore[method-assign]
        self.go_on.set()


def test_a_follower_serves_the_newest_and_skips_the_rest(where: str, model: Path):
    values = tree(0)
    link = FakeLink()
    with publisher(where, model, full_every=2, keep=9) as out:
        for step in range(1, 6):
            out.publish(values)
            values = trained(values, step)
        with follow(where, link) as follower:
            applied = follower.wait(5, 60).last
            # from the newest full version on, in one sync
            assert applied.read == (4, 5)
            assert [version for version, _ in link.synced] == [5]
            out.publish(values)
            assert follower.wait(6, 60).last.read == (6,)
            assert plain(link.synced[-1][1]) == plain(values)
            assert "version 6 served" in repr(follower)
    assert link.closed
    assert follower.closed


def test_what_leads_to_a_damaged_version_is_served(where: str, model: Path):
    link = FakeLink()
    values = [tree(0), tree(1), trained(tree(1), 2), trained(tree(1), 3)]
    with publisher(where, model) as out:
        out.publish(values[0])
        with follow(where, link) as follower:
            follower.wait(1, 60)
            with paused(follower):
                for value in values[1:]:
                    out.publish(value)
                file = f"weight_v000004/{WEIGHTS}"
                change(where, file, lambda data: flip(data, 60))
            # all but the last delta, read once
            assert follower.wait(3, 60).last.read == (2, 3)
            assert until(lambda: follower.error, "the reason", 60)
    assert plain(link.synced[-1][1]) == plain(values[2])


def test_a_version_in_which_nothing_changed_is_served_too(where: str, model: Path):
    link = FakeLink()
    with publisher(where, model) as out, follow(where, link) as follower:
        out.publish(tree(0))
        follower.wait(1, 20)
        out.publish(tree(0))
        assert follower.wait(2, 20).last.bytes == 0
        # back to what was served, after a sync that may have left half of another
        link.fails = [errors.SyncError("dirty")] * 3
        out.publish(tree(1))
        until(lambda: len(link.fails) < 3, "a sync that fails", 20)
        out.publish(tree(0))
        follower.wait(4, 20)
    assert [version for version, _ in link.synced] == [1, 2, 4]


def test_versions_in_another_dtype_are_served(where: str, model: Path):
    """A new trainer of the same model may publish in another dtype: the link is made for the old one."""
    links: list[FakeLink] = []

    class Typed(FakeLink):
        def __init__(self, tensors: Tree) -> None:
            super().__init__(len(links))
            self.types = {name: array.dtype for name, array in tensors.items()}

        def sync(self, tensors: Tree, version: int | None, **options: Any) -> Any:
            if self.types != {name: array.dtype for name, array in tensors.items()}:
                raise errors.LayoutError("leaves differ from what was connected")
            return super().sync(tensors, version, **options)

    def connect(tensors: Any) -> FakeLink:
        links.append(Typed(tensors))
        return links[-1]

    with Follower(where, connect, poll=0.02) as follower:
        for number, dtype in enumerate(["float32", "bfloat16"], 1):
            with publisher(where, model, dtype=dtype) as out:
                out.publish(tree(0))
            follower.wait(number, 20)
        until(lambda: follower.error is None, "the error's end", 20)
    assert [len(link.synced) for link in links] == [1, 1]


def test_a_folder_that_was_emptied_is_reported(where: str, model: Path):
    link = FakeLink()
    with publisher(where, model) as out:
        out.publish(tree(0), version=5)
        with follow(where, link) as follower:
            follower.wait(5, 60)
            out._store.remove("weight_v000005")
            problem = until(lambda: follower.error, "the reason", 60)
            assert "5 was read from it" in problem.message
            assert follower.version == 5
            # the trainer goes on, from what is visible
            assert out.publish(tree(1)).kind == "full"
            follower.wait(6, 60)
    assert [version for version, _ in link.synced] == [5, 6]


def test_a_pool_that_counts_further_gets_its_own_numbers(where: str, model: Path):
    link = FakeLink(version=40)
    with publisher(where, model) as out:
        out.publish(tree(0))
        with follow(where, link) as follower:
            assert follower.wait(1, 60).last.pool_version == 41
            out.publish(tree(1), version=60)
            assert follower.wait(60, 60).last.pool_version == 60


def test_a_sync_that_fails_is_tried_again(where: str, model: Path):
    link = FakeLink()
    link.fails = [errors.SyncError("no replica"), errors.SyncError("no replica")]
    with publisher(where, model) as out, follow(where, link) as follower:
        out.publish(tree(0))
        assert follower.wait(1, 60).version == 1
        until(lambda: follower.error is None, "the error's end", 60)
    assert not link.fails


def test_a_link_that_was_closed_is_opened_again(where: str, model: Path):
    links = [FakeLink(), FakeLink()]
    made = []

    def connect(tensors: Any) -> FakeLink:
        made.append(links[len(made)])
        return made[-1]

    with publisher(where, model) as out, Follower(where, connect, poll=0.02) as f:
        out.publish(tree(0))
        f.wait(1, 60)
        links[0].close()
        out.publish(tree(1))
        f.wait(2, 60)
    assert [len(link.synced) for link in links] == [1, 1]


def test_newcomers_are_brought_to_what_is_served(where: str, model: Path):
    replicas = [SimpleNamespace(replica="p/0", state=0, version=1)]
    snapshot = SimpleNamespace(closed=False, version=1, replicas=replicas)
    pool: Any = SimpleNamespace(snapshot=snapshot)
    link = FakeLink()
    from jvlab.wire import jvlab_pb2 as pb

    with publisher(where, model) as out:
        out.publish(tree(0))
        with follow(where, link, pool=pool) as follower:
            follower.wait(1, 60)
            assert not link.caught_up
            new = SimpleNamespace(replica="p/1", state=pb.READY, version=0)
            replicas.append(new)
            until(lambda: link.caught_up, "catching up", 60)
            replicas.clear()
            snapshot.closed = True
            until(lambda: follower.closed, "its end", 60)
            with pytest.raises(errors.SyncError, match="closed"):
                follower.wait(2, 60)


def test_waiting_says_what_is_missing(where: str):
    follower = follow(where, FakeLink())
    with pytest.raises(errors.DeadlineExceeded, match="no version was seen"):
        follower.wait(1, 0.1)
    follower.close()
    with pytest.raises(errors.SyncError, match="closed"):
        follower.wait(1, 5)


# Stores that hang or refuse -------------------------------------------------------------------------------------------


def test_a_store_that_hangs_ends_nobody(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    where = str(tmp_path)
    go_on = threading.Event()
    with publisher(where, model) as out:
        out.publish(tree(0))
        follower = follow(where, FakeLink())
        follower.wait(1, 60)
        store = _storage.Folder

        def hangs(*_: Any) -> None:
            go_on.wait(120)
            raise OSError("it was away")

        for name in ("names", "read", "replace"):
            monkeypatch.setattr(store, name, hangs)
        began = time.monotonic()
        follower.close()
        with pytest.raises(errors.DeadlineExceeded, match="did not list it within"):
            out.publish(tree(1), timeout=0.5)
        # not one thread more for each try
        for _ in range(6):
            with pytest.raises(errors.DeadlineExceeded):
                out.publish(tree(1), timeout=0.2)
        assert len(out._calls._stuck) <= _storage.STUCK
        out.close()
        assert time.monotonic() - began < 60
        go_on.set()
        monkeypatch.undo()
    until(lambda: not _named("jvlab-storage"), "the end of calls", 60)
    until(lambda: not _named("jvlab-follow"), "the follower's end", 60)


def test_what_is_written_too_late_harms_no_other_version(
    where: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """A slow upload that ends after its publisher gave up, and wrote the next one with that number."""
    go_on = threading.Event()
    with publisher(where, model) as out:
        out.publish(tree(0))
        put = out._store.put

        def late(*given: Any) -> None:
            assert go_on.wait(60)
            put(*given)

        with monkeypatch.context() as patched:
            patched.setattr(out._store, "put", late)
            with pytest.raises(errors.DeadlineExceeded):
                out.publish(tree(1), timeout=0.3)
        assert out.publish(tree(2)).version == 2
        go_on.set()
        until(lambda: not _named("jvlab-storage"), "the end of calls", 20)
        assert plain(read(where).tensors) == plain(tree(2))


def _named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_full_disk_is_an_error_and_the_version_before_stays(
    where: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    with publisher(where, model) as out:
        out.publish(tree(0))

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(out._store, "put", full)
        with pytest.raises(errors.StorageError, match="make room"):
            out.publish(tree(1))
        monkeypatch.undo()
        assert read(where).version == 1
        assert out.publish(tree(1)).kind == "full"


def test_a_publisher_nobody_kept_blocks_nobody(where: str, model: Path):
    out = publisher(where, model, lease=1e6)
    out.publish(tree(0))
    del out
    with publisher(where, model) as other:
        assert other.version == 1


# What is refused ------------------------------------------------------------------------------------------------------


def test_nan_is_refused_before_anything_is_visible(where: str, model: Path):
    bad = tree(1)
    bad["norm.weight"][3] = np.nan
    with publisher(where, model) as out:
        out.publish(tree(0))
        with pytest.raises(errors.NonFiniteError) as refused:
            out.publish(bad)
        assert refused.value.fields["leaves"] == ["norm.weight"]
        assert read(where).version == 1
    with publisher(where, model, nonfinite="allow") as out:
        out.publish(bad)
        assert independent(where, 2) == plain(bad)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": 0}, "keep must be"),
        ({"full_every": 1.5}, "full_every must be"),
        ({"nonfinite": "maybe"}, "nonfinite must be"),
        ({"lease": -1}, "lease must be"),
        ({"dtype": "float7"}, "float7"),
        ({"storage_options": {"key": "x"}}, "storage_options"),
        ({"like": "/does/not/exist"}, "exist"),
        ({"like": None}, "like= is needed"),
    ],
)
def test_wrong_options(tmp_path: Path, model: Path, options: Any, match: str):
    given = {"like": model, "rules": "checkpoint", **options}
    with pytest.raises(errors.JvlabError, match=match):
        Publisher(tmp_path / "out", tree(0), **given)
    assert not (tmp_path / "out").exists()


def test_wrong_calls(where: str, model: Path):
    with publisher(where, model) as out:
        out.publish(tree(0), version=7)
        for version in (7, 3, True, 1.5):
            with pytest.raises(errors.ConfigError, match="larger than 7"):
                out.publish(tree(0), version=version)  # type: ignore[arg-type]
        short = {**tree(0), "gate": np.zeros(2, np.float32)}
        with pytest.raises(errors.LayoutError, match="gate"):
            out.publish(short)
        assert out.publish(trained(tree(0), 3)).base == 7
        adapter = type("Adapter", (dict,), {"peft_tensors": None})(tree(0))
        with pytest.raises(errors.Unsupported, match="adapter"):
            out.publish(adapter)
    with pytest.raises(errors.StorageError, match="closed"):
        out.publish(tree(0))
    with pytest.raises(errors.ConfigError, match="nowhere"):
        Publisher("nowhere://x", tree(0), like=model, rules="checkpoint")
