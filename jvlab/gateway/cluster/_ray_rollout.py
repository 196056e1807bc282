"""The Ray actor that runs one rollout process, `jvlab rollout --gateway`, as its child; both end together.

    actor ──pipe──▶ agent (`jvlab rollout --gateway`) ──pipe──▶ supervisor ──▶ vLLM

The actor's death closes the pipe, which ends all below. If the agent ends without being told to, so does the actor,
and Ray restarts it. It is a child process, not a thread: this process belongs to Ray, and can't fork safely once
Python's gRPC runs in it; so nothing here imports gRPC.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import ray


class RolloutActor:
    """Offers one rollout process to the lab's gateway while this actor lives."""

    def __init__(
        self, replica: str, gateway: str, token: str, pem: tuple[str, str], shared: bool
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "jvlab",
            "rollout",
            "--gateway",
            gateway,
            "--name",
            replica,
        ]
        command += ["--supervised", "--invited"]
        if shared:
            command.append("--share-host")
        if pem[0]:
            command += ["--bind", ray.util.get_node_ip_address()]
        # for vLLM's Ray executor, which connects by itself
        environment = {
            **os.environ,
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        }
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, start_new_session=True
        )
        # Passed by pipe: files would be left behind if this process is killed, and environment variables would be
        # inherited by every process below.
        invitation = json.dumps({"token": token, "certificate": pem[0], "key": pem[1]})
        assert self._child.stdin is not None
        self._child.stdin.write(f"{invitation}\n".encode())
        self._child.stdin.flush()
        self._told_to_end = False
        threading.Thread(target=self._watch, name="jvlab-agent", daemon=True).start()

    def _watch(self) -> None:
        # no deadline: a thread that does nothing else
        if self._child.wait() and not self._told_to_end:
            os._exit(1)  # Ray restarts the actor

    def end(self, seconds: float) -> bool:
        """End the agent, so that it removes its files: Ray kills it with this actor. Whether it has ended."""
        self._told_to_end = True
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def node(self) -> str:
        """The actor's node id; also used as a liveness probe."""
        return ray.get_runtime_context().get_node_id()
