"""A run on another process's pool that kills itself after step 2: ADDRESS TOKEN POOL MODEL FOLDER."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import jvlab as jv
from tests.live.test_grpo import train


def main() -> None:
    address, token, name, model, folder = sys.argv[1:]
    lab = jv.Lab.attach(address, token)

    def each(event: object) -> None:
        if event.step == 2:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    train(lab, lab.pools[name], model, Path(folder), checkpoint_every=2, progress=each)


if __name__ == "__main__":
    main()
