"""The driver of a Ray cluster on hosts of their own: a replica and trainers on its nodes. Facts as one line of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jvlab as jv
from tests.waiting import until

STEPS = 3
CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count="}


def train(model: str, folder: str, dies: str = "") -> list[Any]:
    """A process of a run; the one of this number is killed once, after two of three steps."""
    import jax

    jax.distributed.initialize()
    lab = jv.Lab.attach()
    policy = jv.Policy.from_pretrained(model, mesh=jv.mesh())
    pool = lab.pools["p"]
    due = Path(f"{folder}-due")
    gone = Path(f"{folder}-gone")

    def each(event: Any) -> None:
        if event.step == 1:
            due.touch()

    def end() -> None:
        until(due.exists, "the second step", 300, 0.01)
        gone.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if dies == str(jax.process_index()) and not gone.exists():
        threading.Thread(target=end, daemon=True).start()
    run = jv.grpo(
        policy,
        pool,
        lab.connect(policy, pool),
        "digits",
        steps=STEPS,
        group_size=4,
        prompts_per_step=4,
        learning_rate=1e-3,
        seed=3,
        max_staleness=0,
        checkpoint_every=1,
        resume="auto",
        folder=folder,
        background=False,
        progress=each,
    )
    return [run.status.state, run.status.step, jax.device_count(), os.uname().nodename]


def too_early(lab: jv.Lab, far: str) -> str:
    """What is said of a replica on a host that joined after the lab was made, whose gateway it could not reach."""
    import ray

    print("ready", flush=True)
    addresses = lambda: {node["NodeManagerAddress"] for node in ray.nodes()}
    until(lambda: far in addresses(), "the other node", 200)
    try:
        lab.launch("tiny:llama", place={"nodes": [far]}).wait(200)
    except jv.errors.LaunchError as error:
        return error.message
    return ""


def work(lab: jv.Lab, here: str, far: str, folder: Path) -> dict[str, Any]:
    model = jv.models.tiny("llama", vocab_size=288)
    engine = {"max_model_len": 256}
    pool = lab.launch(model, name="p", engine=engine, place={"nodes": [far]}).wait(400)
    policy = jv.Policy.from_pretrained(model)
    link = lab.connect(policy, pool)
    report = link.sync(policy.params)
    sample = pool.generate(["Once"], max_tokens=8, temperature=0.0)[0]
    facts: dict[str, Any] = {
        "transport": link.transport,
        "verified": report.verified,
        "versions": sorted({int(version) for version in sample.versions}),
        "replica": pool.snapshot.replicas[0].facts.host,
    }
    link.close()
    alone = {**CPU, "XLA_FLAGS": CPU["XLA_FLAGS"] + "2"}
    apart = {**CPU, "XLA_FLAGS": CPU["XLA_FLAGS"] + "1"}
    first = lab.train(train, model, str(folder / "1"), env=alone)
    facts["alone"] = first.wait(300)
    nodes = {"nodes": [here, far]}
    words = (model, str(folder / "2"), "1")
    second = lab.train(train, *words, processes=2, place=nodes, env=apart)
    facts["apart"] = second.wait(300)
    facts["restarts"] = second.restarts
    return facts


def main(address: str, here: str, far: str, folder: str) -> None:
    with jv.Lab(cluster="ray", address=address) as lab:
        said = too_early(lab, far)
    with jv.Lab(cluster="ray", address=address) as lab:
        facts = work(lab, here, far, Path(folder)) | {"too early": said}
    print("FACTS " + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
