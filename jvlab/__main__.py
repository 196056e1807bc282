"""`python -m jvlab` is the `jvlab` command."""

import os
import sys

# set by a rollout process for the workers that vLLM starts from it
if os.environ.get("JVLAB_WITHOUT_RAY"):
    sys.modules.setdefault("ray", None)  # type: ignore[arg-type]

from jvlab.cli._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
