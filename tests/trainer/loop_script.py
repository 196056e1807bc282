"""A run to be killed or interrupted: python -m tests.trainer.loop_script FOLDER STEPS KILL_AT."""

from __future__ import annotations

import os
import signal
import sys

from jvlab.trainer._grpo import grpo
from jvlab.trainer._run import Run
from tests.trainer.fake_pool import fresh_params, logprobs_fn, task, world


def go(folder: str, steps: int, **options: object) -> Run:
    """The run that both sides of a comparison make."""
    pool, link = world()
    settings = {
        "group_size": 4,
        "prompts_per_step": 3,
        "learning_rate": 0.05,
        "checkpoint_every": 2,
        "seed": 5,
    }
    given = {**settings, **options}
    return grpo(
        (fresh_params(), logprobs_fn),
        pool,  # type: ignore
        link,  # type: ignore
        task(),
        steps=steps,
        folder=folder,
        **given,
    )


def main() -> None:
    folder, steps, kill_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def each(event: object) -> None:
        print(f"step {event.step}", flush=True)  # type: ignore[attr-defined]
        if event.step == kill_at:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    run = go(folder, steps, progress=each)
    print(f"ended {run.status.state} after {run.status.step}", flush=True)


if __name__ == "__main__":
    main()
