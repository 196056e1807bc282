"""The Ray actor that holds one rollout process: `jvlab rollout --gateway` as its child, both ending together.

    actor ──pipe──▶ agent (`jvlab rollout --gateway`) ──pipe──▶ supervisor ──▶ vLLM

The actor's death closes the pipe, and all below ends. The agent's end, unless it was ordered, ends the actor, so Ray
starts it anew. A child and no thread: this process is Ray's own, and forks badly once gRPC for Python runs in it; so
nothing here imports that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import ray


class RolloutActor:
    """One offer to the lab's gateway, for as long as this actor lives."""

    def __init__(self, replica: str, gateway: str, token: str, pem: tuple[str, str], shared: bool) -> None:
        command = [sys.executable, "-m", "jvlab", "rollout", "--gateway", gateway, "--name", replica]
        command += ["--supervised", "--invited"]
        if shared:
            command.append("--share-host")
        if pem[0]:
            command += ["--bind", ray.util.get_node_ip_address()]
        # vLLM's own executor on Ray connects by itself
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        # Not in files of ours: this process may be killed at any time, and could not remove them. Nor in the child's
        # environment, which every process below it would inherit.
        invitation = json.dumps({"token": token, "certificate": pem[0], "key": pem[1]})
        assert self._child.stdin is not None
        self._child.stdin.write(f"{invitation}\n".encode())
        self._child.stdin.flush()
        threading.Thread(target=self._watch, name="jvlab-agent", daemon=True).start()

    def _watch(self) -> None:
        if self._child.wait():
            os._exit(1)  # Ray starts it anew

    def node(self) -> str:
        """Where it is; also a sign of life."""
        return ray.get_runtime_context().get_node_id()
