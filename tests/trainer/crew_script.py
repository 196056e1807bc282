"""Run as a program: one process of a trainer of several, with a pool and a link without engines. One line of JSON.

crew_script.py PROCESS PROCESSES PORT ADDRESS TOKEN FOLDER OPTIONS
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jvlab as jv
from jvlab._errors import SyncError
from jvlab._names import own_name
from jvlab.trainer._grpo import grpo
from jvlab.trainer._processes import whole
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import TeamStream
from tests.trainer.fake_pool import FakeLink, FakePool, logprobs_fn, share, task

PROCESS, PROCESSES, PORT = map(int, sys.argv[1:4])


class TeamLink(FakeLink):
    """Called in every process, as the real one; the pool of process 0 is the one that generates."""

    def __init__(self, pool: FakePool, client: Any, plan: dict[str, Any]) -> None:
        super().__init__(pool, fail=plan.get("fail", 0))
        self._client = client
        self._plan = plan

    def stream_beside(self, purpose: str) -> TeamStream | None:
        if PROCESSES == 1:
            return None
        join = pb.TeamJoin(
            pool="p",
            team=f"{PORT}/{purpose}",
            member=PROCESS,
            size=PROCESSES,
            name=own_name(),
        )
        return TeamStream(self._client, join)

    def sync(self, params: Any, version: int, **options: Any) -> Any:
        if self._plan.get("dies_at") == version and self._plan["dies"] == PROCESS:
            os.kill(os.getpid(), self._plan.get("signal", signal.SIGKILL))
        try:
            table = whole(params)
        except ValueError as error:  # of gloo: a process has gone
            raise SyncError(str(error)) from error
        return super().sync(table, version, **options)


def sharded(seed: int) -> dict[str, Any]:
    """The table of `fresh_params`, its rows over all devices of all processes."""
    table = np.random.default_rng(seed).normal(0, 0.3, (12, 12)).astype(np.float32)
    where = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec("fsdp"))
    return {
        "table": jax.make_array_from_callback(table.shape, where, table.__getitem__)
    }


def failing(sample: Any, example: Any) -> float:
    """A reward that fails at the tenth group."""
    assert example.prompt != [10]
    return share(sample, example)


def main(address: str, token: str, folder: str, text: str) -> None:
    # who waits too long for this process asks it where it is
    faulthandler.register(signal.SIGUSR1)
    plan = json.loads(text)
    if PROCESSES > 1:
        jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS)
    lab = jv.Lab.attach(address, token)
    pool = FakePool(delay=plan.get("delay", 0.0))
    link = TeamLink(pool, lab.client, plan)
    options = {
        "steps": 4,
        "group_size": 4,
        "prompts_per_step": 3,
        "learning_rate": 0.05,
        "checkpoint_every": 0,
        "seed": 5,
        "micro_batch": 6,
        **plan.get("options", {}),
        **plan.get(f"of_{PROCESS}", {}),
    }
    if options.get("algorithm") == "kl":
        options["algorithm"] = jv.Algorithm.named("grpo", kl_coef=0.05)
    found: dict[str, Any] = {}
    try:
        run = grpo(
            (sharded(0), logprobs_fn),
            pool,  # type: ignore
            link,  # type: ignore
            task(),
            folder=folder,
            background=True,
            progress=False,
            **options,
        )
        for call in plan.get("calls", {}).get(str(PROCESS), ()):
            getattr(run, call)()
        run.wait(240)
        table = np.asarray(whole(run.params)["table"], np.float64)
        found = {"state": run.status.state, "step": run.status.step}
        found["table"] = table.tolist()
        if PROCESS == 0:
            found["losses"] = run.record.steps()["loss"].tolist()
            found["versions"] = [e.version for e in run.record.events("sync")]
    except jv.JvlabError as error:
        found = {"error": type(error).__name__, "message": error.message}
        found["remedy"] = error.remedy
    print(json.dumps(found), flush=True)
    lab._leave()
    if "error" in found:
        os._exit(0)  # jax would wait here for a process that was killed


if __name__ == "__main__":
    # a test's output is its last line
    Path(sys.argv[6]).parent.mkdir(exist_ok=True)
    main(*sys.argv[4:8])
