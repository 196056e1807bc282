"""Run where the supervisor stands: a simulated replica in a process of its own, until its standard input closes."""

from __future__ import annotations

import os
import sys

# the supervisor is started without site-packages; a simulated replica needs them
if sys.flags.isolated:
    os.execv(sys.executable, [sys.executable, *sys.argv])

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio

from jvlab.engine._process import Order, _listen
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._channels import Trust, open_channel
from jvlab.wire.processes._identity import read_secret
from tests.gateway.fake_lab import FACTS, FakeReplica


class Marker:
    """As an `asyncio.Event` that is set for another process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def set(self) -> None:
        self.file.touch()


class Simulated(FakeReplica):
    """Listens and registers as the real rollout process does, with TLS where its order says so.

    In the folder FAKE_FOLDER of its environment the file `hang` names a phase, and `delay` has seconds for each sample.
    """

    def __init__(self, order: Order, token: str) -> None:
        super().__init__(order.replica, order.gateway, token)
        self.run = order.run
        self.order = order
        self.folder = Path(order.env.get("FAKE_FOLDER", "/nowhere"))
        self.reached: Any = Marker(self.folder / f"reached-{order.index}")

    def told(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    async def sync(self, request: pb.RolloutSyncRequest) -> pb.ReplicaOutcome:
        self.hang = self.told("hang")
        return await super().sync(request)

    async def Generate(self, request: pb.RolloutRequest, context: Any) -> Any:
        self.delay = float(self.told("delay") or 0.0)
        async for batch in super().Generate(request, context):
            yield batch

    async def start(self) -> None:
        self.server = grpc.aio.server(
            interceptors=[_security.TokenInterceptor(self.token)]
        )
        rpc.add_RolloutServicer_to_server(self, self.server)
        self.address, self.pem = _listen(self.server, self.order)
        await self.server.start()
        self.channel = open_channel(
            self.gateway, Trust.of_file(self.order.tls_ca, self.order.tls_name)
        )
        self.beating = asyncio.create_task(self.beat())

    async def register(self) -> None:
        request = pb.RegisterRequest(
            replica=self.name,
            address=self.address,
            facts=FACTS,
            stats=self.stats(),
            tls_pem=self.pem,
            tls_name=self.order.tls_name,
            run=self.run,
        )
        metadata = _security.authorization(self.token)
        reply = await rpc.RegistryStub(self.channel).Register(
            request, timeout=5, metadata=metadata
        )
        self.epoch, self.every = reply.epoch, reply.beat_seconds


async def main(log: str) -> int:
    order = Order(**json.loads(os.environ["JVLAB_ORDER"]))
    with open(log, "a") as out:
        out.write(
            f"simulated {order.replica}: index {order.index} of {order.replicas}\n"
        )
    if order.engine.get("broken"):
        with open(log, "a") as out:
            out.write("ValueError: broken by the test\n")
        return 3
    assert "JVLAB_TOKEN" not in os.environ
    replica = Simulated(order, read_secret())
    await replica.start()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await replica.stop()
    return 0


if __name__ == "__main__":
    print(os.getpid(), flush=True)
    sys.exit(asyncio.run(main(sys.argv[1])))
