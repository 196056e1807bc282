"""The other end of a channel under a test's control: commands as JSON lines in, one JSON answer each.

As a process: `python other_end.py`. In this process (loopback has no other): `Local()`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jvlab._errors import TransportError
from jvlab.transport import Header, listen, open_receiver

LABEL = "rank 1 of replica-0"


def pattern(bucket: int, nbytes: int) -> bytes:
    """Bytes that belong to this bucket and no other."""
    return hashlib.shake_128(f"bucket {bucket}".encode()).digest(nbytes)


class End:
    """Holds one sender or receiver; `do_*` are the commands."""

    def __init__(self) -> None:
        self.sender: Any = None
        self.receiver: Any = None
        self.buckets: list[Any] = []
        self.tidy = True  # close at the end of the process

    def do_import_torch(self) -> None:
        import torch.distributed  # noqa: F401

    def do_listen(self, transport: str, **options: Any) -> Any:
        self.sender = listen(transport, **options)
        return self.sender.endpoint()

    def do_ready(self, deadline: float) -> None:
        self.sender.ready(deadline)

    def do_send(self, bucket: int, nbytes: int, deadline: float) -> None:
        data = pattern(bucket, nbytes)
        self.sender.send(
            Header(7, 2, bucket, nbytes),
            lambda view: view.__setitem__(slice(None), data),
            deadline,
        )

    def do_flush(self, deadline: float) -> None:
        self.sender.flush(deadline)

    def do_open(self, endpoint: dict[str, Any], deadline: float) -> None:
        self.receiver = open_receiver(endpoint, deadline, label=LABEL)

    def do_recv(self, deadline: float) -> Any:
        received = self.receiver.recv(deadline)
        self.buckets.append(received)
        h = received.header
        right = bytes(received.data) == pattern(h.bucket, h.nbytes)
        return {
            "header": [h.version, h.device, h.bucket, h.nbytes],
            "right": right,
            "readonly": received.data.readonly,
        }

    def do_release(self) -> None:
        self.receiver.release(self.buckets.pop(0))

    def do_release_again(self) -> None:
        received = self.buckets.pop(0)
        self.receiver.release(received)
        self.receiver.release(received)

    def do_take(self, count: int, deadline: float) -> Any:
        """Receive and release `count` buckets."""
        out = []
        for _ in range(count):
            out.append(self.do_recv(deadline))
            self.do_release()
        return out

    def do_take_as_a_rank(self, count: int, deadline: float) -> Any:
        """The same; a failure is told to the sender, as engine/worker/_receivers.py does."""
        try:
            return self.do_take(count, deadline)
        except TransportError as error:
            self.receiver.fail(str(error))
            raise

    def do_fail(self, message: str) -> None:
        self.receiver.fail(message)

    def do_close(self) -> None:
        for end in (self.sender, self.receiver):
            if end is not None:
                end.close()

    def do_reset(self) -> None:
        self.do_close()
        self.__init__()

    def do_untidy(self) -> None:
        self.tidy = False

    def do_fork(self) -> int:
        """A child that lives on with copies of all our sockets."""
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        return child

    def do_file_limit(self, nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))

    def do_plan_listen(self, device: int, transport: str) -> Any:
        """A trainer process that holds one device: a channel to each rank."""
        from tests.transport.plan_ends import PlanSender

        self.plan = PlanSender(device, transport)
        return [sender.endpoint() for sender in self.plan.senders]

    def do_plan_send(self) -> int:
        return self.plan.send()

    def do_plan_receive(self, rank: int, endpoints: list[dict[str, Any]]) -> Any:
        """A rank: one channel from each device, a thread for each; what it holds in the end."""
        from tests.transport.plan_ends import receive

        return receive(rank, endpoints)

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        try:
            value = getattr(self, "do_" + command.pop("do"))(**command)
            return {"value": value, "seconds": time.monotonic() - started}
        except Exception as e:
            kind = type(e).__name__
            reason = getattr(e, "fields", {}).get("reason", "")
            return {
                "error": str(e),
                "kind": kind,
                "reason": reason,
                "seconds": time.monotonic() - started,
            }


class Answer(dict[str, Any]):
    """What came back: either `value` or `error`."""

    def ok(self) -> Any:
        assert "error" not in self, self["error"]
        return self["value"]


class Local:
    """An End in this process, worked by one thread, as a real one is."""

    def __init__(self) -> None:
        self.end = End()
        self._thread = ThreadPoolExecutor(1)

    def start(self, do: str, **arguments: Any) -> Future[Answer]:
        return self._thread.submit(
            lambda: Answer(self.end.answer({"do": do, **arguments}))
        )

    def call(self, do: str, **arguments: Any) -> Answer:
        return self.start(do, **arguments).result(400)

    def stop(self) -> None:
        self.end.do_close()
        self._thread.shutdown()


class Remote:
    """An End in a process of its own."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        self._thread = ThreadPoolExecutor(1)
        self.spoilt = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, do: str, **arguments: Any) -> Future[Answer]:
        """Without waiting for the answer, but only once the process has the command."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._thread.submit(self._read)

    def _read(self) -> Answer:
        assert self.process.stdout
        line = self.process.stdout.readline()
        return Answer(
            json.loads(line)
            if line
            else {"error": "the process ended", "kind": "Ended"}
        )

    def call(self, do: str, **arguments: Any) -> Answer:
        return self.start(do, **arguments).result(400)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, not reaped yet: to the other side a zombie must count as dead."""
        self.spoilt = True
        self.signal(signal.SIGKILL)

    def reset(self) -> bool:
        """Ready for another test? Starting a process that imports torch takes seconds, so a sound one is kept."""
        if self.spoilt or self.process.poll() is not None:
            return False
        return "error" not in self.call("reset")

    def stop(self) -> None:
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(200)
        finally:
            self.process.kill()
            self.process.wait()
            self._thread.shutdown()
            if self.process.stdout:
                self.process.stdout.close()


def main() -> None:
    end = End()
    try:
        for line in sys.stdin:
            print(json.dumps(end.answer(json.loads(line))), flush=True)
    finally:
        if end.tidy:
            end.do_close()


if __name__ == "__main__":
    main()
