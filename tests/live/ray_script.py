"""Run as a program: a Ray cluster of two nodes, a pool, a sync, a killed actor, recovery. Prints facts as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

# as tests/conftest.py
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import psutil

import jvlab as jv

NODE = {"num_cpus": 1, "object_store_memory": 78 * 2**20, "include_dashboard": False}
PROMPTS = [[5 + i, 6, 7] for i in range(12)]


def until(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.1)
    return found


def rows(pool: jv.Pool) -> dict[str, Any]:
    return {r["replica"]: r for r in pool.status()["replicas"]}


def actor_of(pid: int) -> psutil.Process:
    """The Ray worker process above a rollout process."""
    return next(
        p
        for p in psutil.Process(pid).parents()
        if "ray::RolloutActor" in " ".join(p.cmdline())
    )


def work(lab: jv.Lab, facts: dict[str, Any]) -> None:
    model = jv.models.tiny("llama")
    began = time.perf_counter()
    pool = lab.launch(model, replicas=2, name="p", engine={"max_num_seqs": 4}).wait(400)
    facts["start_s"] = round(time.perf_counter() - began, 1)
    policy = jv.Policy.from_pretrained(model)
    link = lab.connect(policy.params, pool, rules="policy")
    report = link.sync(policy.params)
    facts["synced"] = [
        report.version,
        report.verified,
        sorted(o.replica for o in report.outcomes),
    ]
    before = pool.generate(PROMPTS, max_tokens=8, temperature=0.0, ignore_eos=True)
    facts["served_by"] = sorted({s.replica for s in before})
    old = rows(pool)["p/1"]["pid"]
    actor = actor_of(old)
    # each node's raylet
    parents = {actor_of(r["pid"]).ppid() for r in rows(pool).values()}
    facts["hosts"] = len(parents)
    began = time.perf_counter()
    os.kill(actor.pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(old), 30)
    facts["old_ended_s"] = round(time.perf_counter() - began, 1)
    during = pool.generate(PROMPTS, max_tokens=8, temperature=0.0, ignore_eos=True)
    facts["during"] = sorted({s.replica for s in during})
    again = until(
        lambda: (
            (r := rows(pool)["p/1"])["state"] == "ready"
            and r["pid"] not in (0, old)
            and r
        )
    )
    facts["back_s"] = round(time.perf_counter() - began, 1)
    facts["back"] = [again["version"], again["stale"]]
    report = link.catch_up(policy.params)
    assert report is not None
    facts["caught_up"] = [
        report.version,
        report.verified,
        [o.replica for o in report.outcomes],
    ]
    after = pool.generate(PROMPTS, max_tokens=8, temperature=0.0, ignore_eos=True)
    facts["after"] = sorted({(s.replica, int(s.versions[0])) for s in after})
    facts["same"] = [list(s.token_ids) for s in after] == [
        list(s.token_ids) for s in before
    ]
    facts["verified"] = bool(link.verify(policy.params))


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    facts: dict[str, Any] = {}
    began = time.perf_counter()
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        cluster.add_node(**NODE)
        facts["cluster_s"] = round(time.perf_counter() - began, 1)
        lab = jv.Lab(cluster="ray", address=cluster.address, lease=120)
        try:
            facts["nodes"] = len(ray.nodes())
            work(lab, facts)
            ours = psutil.Process(lab._gateway.pid)
        finally:
            lab.close(60)
        # Ray kills it, and does not wait for its end
        facts["left"] = until(lambda: not ours.is_running(), 10)
        facts["disconnected"] = not ray.is_initialized()
        ray.init(address=cluster.address, log_to_driver=False)
        facts["cluster_stays"] = [
            sum(node["Alive"] for node in ray.nodes()),
            ray.available_resources().get("CPU"),
        ]
        ray.shutdown()
    finally:
        cluster.shutdown()
        facts["total_s"] = round(time.perf_counter() - began, 1)
        print("FACTS " + json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
