"""What is disk's own: files any safetensors reader reads, a full disk, a private folder."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jvlab._errors import ConfigError, TransportError
from jvlab.transport import Header, listen, open_receiver
from tests.transport.other_end import Remote, pattern


def test_files_are_safetensors(clean: None, folder: Path) -> None:
    from safetensors import safe_open

    sender = listen("disk", directory=str(folder), slot_bytes=100, slots=2, fsync=True)
    receiver = open_receiver(sender.endpoint(), 5)
    sender.ready(5)
    sender.send(
        Header(7, 2, 9, 77),
        lambda view: view.__setitem__(slice(None), pattern(9, 77)),
        5,
    )
    (path,) = folder.rglob("*.safetensors")
    with safe_open(path, "np") as file:
        assert file.metadata() == {"version": "7", "device": "2", "bucket": "9"}
        assert file.get_tensor("bucket").tobytes() == pattern(9, 77)
    receiver.close()
    sender.close()


def test_a_receiver_that_closes_after_its_last_release(
    clean: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last release and the end both fall between two looks of the sender: all the same it was received."""
    sender = listen("disk", directory=str(folder), slot_bytes=100, slots=2)
    receiver = open_receiver(sender.endpoint(), 5)
    sender.ready(5)
    sender.send(Header(1, 0, 0, 8), lambda view: None, 5)
    bucket = receiver.recv(5)
    count = sender._count
    looks = []

    def released_after_the_look() -> int:
        looks.append(count())
        if len(looks) == 2:  # the first is for the message
            receiver.release(bucket)
            receiver.close()
        return looks[-1]

    monkeypatch.setattr(sender, "_count", released_after_the_look)
    sender.flush(5)
    assert looks[:2] == [1, 1]
    with pytest.raises(TransportError, match="closed"):
        sender.send(Header(1, 0, 1, 8), lambda view: None, 5)
    sender.close()


def test_a_full_disk(clean: None, folder: Path, remote: Callable[[], Remote]) -> None:
    """The system's own refusal of a file over a limit, which is what a quota or a full disk gives."""
    trainer, rank = remote(), remote()
    trainer.spoilt = True
    options = {"slot_bytes": 1 << 20, "slots": 2, "directory": str(folder)}
    endpoint = trainer.call("listen", transport="disk", **options).ok()
    opening = rank.start("open", endpoint=endpoint, deadline=60)
    trainer.call("ready", deadline=60).ok()
    opening.result(60).ok()
    trainer.call("file_limit", nbytes=100_000).ok()
    answer = trainer.call("send", bucket=0, nbytes=500_000, deadline=60)
    assert answer["reason"] == "full"
    assert "500000 bytes" in answer["error"]
    assert str(folder) in answer["error"]
    assert not list(folder.rglob("*.part"))
    assert not list(folder.rglob("*.safetensors"))
    assert (
        trainer.call("send", bucket=1, nbytes=10, deadline=60)["reason"] == "half sent"
    )


def test_the_folder_is_private(clean: None, folder: Path) -> None:
    sender = listen("disk", directory=str(folder))
    made = Path(sender.endpoint()["folder"])
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.chmod(0o755)
    with pytest.raises(TransportError, match="private"):
        open_receiver(sender.endpoint(), 1)
    sender.close()
    with pytest.raises(TransportError, match="does not exist"):
        open_receiver(sender.endpoint(), 1)
    with pytest.raises(ConfigError, match="not a folder"):
        listen("disk", directory=str(folder / "missing"))


def test_a_foreign_file_is_refused(clean: None, folder: Path) -> None:
    sender = listen("disk", directory=str(folder))
    receiver = open_receiver(sender.endpoint(), 1)
    where = Path(sender.endpoint()["folder"]) / "00000000.safetensors"
    where.write_bytes(b"no bucket at all")
    with pytest.raises(TransportError, match="is not a bucket"):
        receiver.recv(1)
    receiver.close()
    sender.close()


def test_the_default_is_a_temporary_folder(
    clean: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    sender = listen("disk")
    assert os.listdir(folder)
    sender.close()
    assert not os.listdir(folder)


def test_half_removed_folders_are_swept(clean: None, folder: Path) -> None:
    old, young = folder / "jvlab-disk-old", folder / "jvlab-disk-young"
    for made in (old, young):
        made.mkdir(mode=0o700)
        (made / "receiver-closed").touch()
    os.utime(old, (1, 1))
    listen("disk", directory=str(folder)).close()
    assert os.listdir(folder) == [young.name]  # that one may be in the making
    shutil.rmtree(young)


def test_both_ends_closing_at_once_leave_nothing(clean: None, folder: Path) -> None:
    for _ in range(100):
        sender = listen("disk", directory=str(folder))
        receiver = open_receiver(sender.endpoint(), 5)
        threads = [threading.Thread(target=end.close) for end in (sender, receiver)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.listdir(folder) == []


def test_a_dropped_sender_removes_its_folder(clean: None, folder: Path) -> None:
    sender = listen("disk", directory=str(folder))
    assert os.listdir(folder)
    del sender
    assert not os.listdir(folder)
