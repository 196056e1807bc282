"""Run as a program: trainer processes on a Ray cluster of this machine, without engines. Prints facts as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jvlab as jv

CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
SLOW = 300.0


def met(word: str) -> list[Any]:
    """Who this process is, as jax sees it, and whether it found the lab."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    jax.distributed.initialize()
    found = multihost_utils.process_allgather(jnp.asarray(jax.process_index()))
    known = bool(jv.Lab.attach().status()["lab"])
    return [word, jax.process_index(), jax.device_count(), len(found), known]


def dies_once(folder: str) -> int:
    """Process 1 kills itself the first time; process 0 waits for it in a collective."""
    mark = Path(folder) / "died"
    _, number, *_ = met("")
    if number and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("both are there")
    return int(mark.exists())


def raises() -> None:
    _, number, *_ = met("")
    if number:
        raise ValueError("boom")
    time.sleep(SLOW)


def failed(training: Any) -> str:
    try:
        training.wait(SLOW)
    except jv.JvlabError as error:
        return error.message
    return ""


def work(lab: jv.Lab, folder: Path, facts: dict[str, Any]) -> None:
    facts["met"] = lab.train(met, "a", processes=2, env=CPU).wait(SLOW)
    facts["alone"] = lab.train(met, "", env=CPU).wait(SLOW)[0][1:4]
    script = folder / "train.py"
    script.write_text(
        "import sys, beside, jax\njax.distributed.initialize()\n"
        "open(sys.argv[1], 'w').write(f'{beside.WORD} {jax.process_index()}')\n"
    )
    (folder / "beside.py").write_text("WORD = 'well'\n")
    lab.train(str(script), str(folder / "said"), env=CPU).wait(SLOW)
    facts["script"] = [
        json.loads(w) if w.isdigit() else w
        for w in (folder / "said").read_text().split()
    ]
    training = lab.train(dies_once, str(folder), processes=2, env=CPU)
    facts["died"] = [training.wait(SLOW), training.restarts]
    (folder / "died").unlink()
    never = lab.train(
        dies_once, str(folder), processes=2, env=CPU, place={"restarts": 0}
    )
    facts["died for good"] = failed(never)
    facts["raised"] = failed(lab.train(raises, processes=2, env=CPU))
    try:
        lab.train(met, "", processes=2, place={"cpus": 1000}, timeout=3)
    except jv.errors.ConfigError as error:
        facts["no room"] = error.message
        facts["remedy"] = error.remedy
    stopped = lab.train(time.sleep, SLOW, processes=2)  # type: ignore[arg-type]
    try:
        stopped.wait(0.2)
    except jv.errors.DeadlineExceeded as error:
        facts["late"] = error.message
    stopped.stop()
    facts["stopped"] = failed(stopped)


def main() -> None:
    import ray

    facts: dict[str, Any] = {}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    with jv.Lab(cluster="ray", lease=120) as lab:
        work(lab, Path(sys.argv[1]), facts)
        deadline = time.monotonic() + 30
        while ray.available_resources().get("CPU") != 2.0:
            assert time.monotonic() < deadline, ray.available_resources()
            time.sleep(0.1)
        facts["free"] = ray.available_resources()["CPU"]
        training = lab.train(time.sleep, SLOW, processes=2)  # type: ignore[arg-type]
    facts["closed"] = failed(training)
    ray.shutdown()
    print("FACTS " + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
