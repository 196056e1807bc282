"""Run as a program: one process of a trainer of several, with a pool and a link without engines. One line of JSON for
each run.

crew_script.py PROCESS PROCESSES PORT ADDRESS TOKEN FOLDER RUNS
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jvlab as jv
from jvlab._errors import SyncError
from jvlab._names import own_name
from jvlab.trainer import _processes
from jvlab.trainer._grpo import grpo
from jvlab.trainer._processes import whole
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import TeamStream
from tests.trainer.fake_pool import FakeLink, FakePool, logprobs_fn, task
from tests.trainer.settled import Made, take_in_order

# batches of these runs are handed out in several parts
_processes.PART = 700
PROCESS, PROCESSES, PORT = map(int, sys.argv[1:4])


take_in_order()


class TeamLink(FakeLink):
    """Called in every process, as the real one; the pool of process 0 is the one that generates."""

    def __init__(self, client: Any, plan: dict[str, Any]) -> None:
        pool = FakePool()
        self._made = Made(pool)
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
        if PROCESS == 0 and "calls" in self._plan:
            self._made.wait(self._plan["calls"][version - 1])
        try:
            table = whole(params)
        except (ValueError, RuntimeError) as error:  # of gloo: a process has gone
            raise SyncError(str(error)) from error
        return super().sync(table, version, **options)


def sharded(seed: int) -> dict[str, Any]:
    """The table of `fresh_params`, its rows over all devices of all processes."""
    table = np.random.default_rng(seed).normal(0, 0.3, (12, 12)).astype(np.float32)
    where = NamedSharding(
        Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec("fsdp")
    )
    return {
        "table": jax.make_array_from_callback(table.shape, where, table.__getitem__)
    }


def go(lab: jv.Lab, folder: str, plan: dict[str, Any]) -> dict[str, Any]:
    """One run; what it came to."""
    link = TeamLink(lab.client, plan)
    options = {
        "group_size": 4,
        "prompts_per_step": 3,
        "learning_rate": 0.1,
        "checkpoint_every": 0,
        "seed": 5,
        "micro_batch": 6,
        # a loss that is not 0 on-policy
        "algorithm": jv.Algorithm.named("grpo", kl_coef=5.0),
        **plan["options"],
        **plan.get(f"of_{PROCESS}", {}),
    }
    try:
        run = grpo(
            (sharded(0), logprobs_fn),
            link.pool,  # type: ignore
            link,  # type: ignore
            task(),
            folder=os.path.join(folder, plan["name"]),
            background=True,
            progress=False,
            **options,
        )
        for call in plan.get("then", {}).get(str(PROCESS), ()):
            getattr(run, call)()
        run.wait(360)
    except jv.JvlabError as error:
        kind = type(error).__name__
        return {"error": kind, "message": error.message, "remedy": error.remedy}
    found = {"state": run.status.state, "step": run.status.step}
    found["table"] = np.asarray(whole(run.params)["table"], np.float64).tolist()
    if PROCESS == 0:
        found["losses"] = run.record.steps()["loss"].tolist()
        syncs: Any = run.record.events("sync")
        found["versions"] = [event.version for event in syncs]
    return found


def main(address: str, token: str, folder: str, plans: str) -> None:
    # who waits too long for this process asks it where it is
    faulthandler.register(signal.SIGUSR1)
    if PROCESSES > 1:
        jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS)
    lab = jv.Lab.attach(address, token)
    found: dict[str, Any] = {}
    for plan in json.loads(plans):
        found = go(lab, folder, plan)
        print(json.dumps(found), flush=True)
    lab._leave()
    if "error" in found:
        os._exit(0)  # jax would wait here for a process that was killed


if __name__ == "__main__":
    main(*sys.argv[4:8])
