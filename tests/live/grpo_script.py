"""A run on another process's pool: ADDRESS TOKEN POOL MODEL FOLDER kills itself after step 2.

With PROCESSES PROCESS COORDINATOR (or "slurm") it is one process of a trainer of several, which shard the policy over
all their devices; STALENESS and the gateway's CERTIFICATE may follow. The first launches the pool if there is none.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jvlab as jv
from tests.live.test_grpo import train
from tests.trainer.settled import Made, groups_before, take_in_order

STEPS = 3
PER_STEP = 4


def several(
    lab: jv.Lab,
    name: str,
    model: str,
    folder: str,
    processes: str,
    process: str,
    coordinator: str,
    staleness: str = "0",
    *_: str,
) -> None:
    """Print how it ended here. Groups are made and taken in one order, so that runs can be compared."""
    import jax

    if process == "0" and name not in lab.pools:
        lab.launch(model, name=name, engine={"max_model_len": 256}).wait(400)
    if coordinator == "slurm":  # as under srun, jax reads its variables
        jax.distributed.initialize()
    elif processes != "1":
        jax.distributed.initialize(coordinator, int(processes), int(process))
    policy = jv.Policy.from_pretrained(model, mesh=jv.mesh())
    pool = lab.pools[name]
    link = lab.connect(policy, pool)
    made = Made(pool)
    sync = link.sync

    def settled(params: Any, version: int, **options: Any) -> Any:
        if process == "0":
            made.wait(groups_before(version, STEPS, int(staleness), PER_STEP))
        return sync(params, version, **options)

    link.sync = settled  # type: ignore[method-assign]
    take_in_order()
    run = jv.grpo(
        policy,
        pool,
        link,
        "digits",
        steps=STEPS,
        group_size=4,
        prompts_per_step=PER_STEP,
        learning_rate=1e-3,
        seed=3,
        max_staleness=int(staleness),
        checkpoint_every=3,
        evaluate="digits",
        evaluate_prompts=4,
        folder=folder,
        background=False,
    )
    print(f"{run.status.state} after {run.status.step}", flush=True)


def main() -> None:
    address, token, name, model, folder, *team = sys.argv[1:]
    lab = jv.Lab.attach(address, token, tls_ca=team[4] if len(team) > 4 else None)
    if team:
        several(lab, name, model, folder, *team)
        return

    def each(event: object) -> None:
        if event.step == 2:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    train(lab, lab.pools[name], model, Path(folder), checkpoint_every=2, progress=each)


if __name__ == "__main__":
    main()
