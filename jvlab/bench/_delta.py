"""`jvlab bench sync --delta`: syncs of what changed beside whole ones, in one run, over shares of changed values.

Two sets of parameters that differ in a share of their values are synced in turn, whole and then as changes, each way
verified. Changed values are drawn at random. Times are from the call until the engine generates again; the pause is
how long it did not. The headline is 1 % changed, staged, over a transport between
hosts: tcp on a CPU, nccl on a GPU (on one GPU its bytes go over the loopback interface).
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jvlab._errors import LaunchError
from jvlab._units import human_bytes
from jvlab.bench._shapes import shaped
from jvlab.bench._side import folder_for, median_ms, model_of, vllm_build
from jvlab.bench._sync import SIZES

SHARES = (0.001, 0.01, 0.1, 0.5)
HEADLINE = 0.01
MODES = ("direct", "staged")
TRANSPORTS = {"cpu": ("tcp", "shm"), "cuda": ("nccl",)}
# two processes on one GPU form a communicator only as if on two hosts
LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
}
PARTS = ("total", "pause", "find", "move", "digest", "repack")


def run_bench_delta(
    rounds: int, model: str | None, device: str, size: str = "4"
) -> dict[str, Any]:
    """Measure every transport, mode and share; prints a line for each, returns the facts."""
    with ExitStack() as stack:
        if device == "cuda":
            # read by this process's first NCCL call, and by JAX's first allocation
            os.environ.update({**LOOPBACK, "NCCL_HOSTID": "trainer"})
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            policy = shaped(folder, size)
            env = {**LOOPBACK, "NCCL_HOSTID": "engine"}
            engine: dict[str, Any] = {
                "max_model_len": 512,
                "gpu_memory_utilization": 0.3,
                "kv_cache_memory_bytes": 4 << 30,
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "enforce_eager": True,
            }
        else:
            from jvlab.trainer._policy import Policy

            folder, _ = folder_for(3e9, stack)
            path = model_of(model, path=folder / "model", **SIZES)
            policy = Policy.from_pretrained(path)
            env = {}
            engine = {"max_model_len": 256}
        rows = _measure(policy, rounds, device, engine, env)
    head = next(
        row
        for row in rows
        if (row["transport"], row["mode"], row["share"])
        == (TRANSPORTS[device][0], "staged", HEADLINE)
    )
    return {
        "device": device,
        "vllm": vllm_build(),
        "rounds": rounds,
        "rows": rows,
        "delta_vs_full_ratio": head["full_total_ms"] / head["delta_total_ms"],
        "changed_share": head["changed"],
        "delta_bytes": head["delta_bytes"],
        "full_bytes": head["full_bytes"],
        "pause_ms": head["delta_pause_ms"],
        "full_pause_ms": head["full_pause_ms"],
    }


def _measure(
    policy: Any, rounds: int, device: str, engine: dict[str, Any], env: dict[str, str]
) -> list[dict[str, Any]]:
    import jvlab as jv

    rows = []
    with jv.Lab() as lab:
        pool = lab.launch(
            str(policy.source), load="dummy", engine=engine, env=env, device=device
        ).wait(500)
        for transport in TRANSPORTS[device]:
            with lab.connect(
                policy.params, pool, rules="policy", transport=transport
            ) as link:
                print(f"{link!r}", flush=True)
                for share in SHARES:
                    other = changed(policy.params, share)
                    for mode in MODES:
                        row = _row(link, policy.params, other, mode, rounds)
                        rows.append({"transport": transport, "share": share, **row})
                        print(_line(rows[-1]), flush=True)
    return rows


def changed(params: Any, share: float) -> Any:
    """The parameters with a share of their values changed, in every dtype that an engine has."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(leaf: Any, key: Any) -> Any:
        some = jax.random.uniform(key, leaf.shape) < share
        moved = leaf.astype(jnp.float32) * 1.25 + 0.01
        return jnp.where(some, moved.astype(leaf.dtype), leaf)

    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    new = [
        jax.device_put(step(x, k), x.sharding)
        for x, k in zip(leaves, keys, strict=True)
    ]
    jax.block_until_ready(new)
    return jax.tree.unflatten(tree, new)


def _row(link: Any, params: Any, other: Any, mode: str, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"mode": mode}
    for way, delta in (("full", "never"), ("delta", "auto")):
        reports = []
        # the first two make the base and warm up
        for turn in range(rounds + 2):
            now = other if turn % 2 else params
            report = link.sync(now, mode=mode, delta=delta, progress=False)
            if turn > 1:
                reports.append(report)
        if not link.verify(now):
            raise LaunchError(f"{way}: the engine does not hold what was synced")
        for part in PARTS:
            row[f"{way}_{part}_ms"] = median_ms(
                r.seconds.get(part, 0.0) for r in reports
            )
        row[f"{way}_bytes"] = reports[-1].bytes
        row["changed"] = reports[-1].changed
        row["why_full"] = reports[-1].why_full
    return row


def _line(row: dict[str, Any]) -> str:
    ratio = row["full_total_ms"] / row["delta_total_ms"]
    return (
        f"  {row['transport']:5} {row['mode']:6} {row['changed'] or 0:6.2%} changed: "
        f"{human_bytes(row['delta_bytes'])} of {human_bytes(row['full_bytes'])}, "
        f"{row['delta_total_ms']:.0f} ms against {row['full_total_ms']:.0f} ({ratio:.2f}×), pause "
        f"{row['delta_pause_ms']:.1f} against {row['full_pause_ms']:.1f}, find {row['delta_find_ms']:.0f}, "
        f"move {row['delta_move_ms']:.0f} against {row['full_move_ms']:.0f}; {row['why_full'] or 'all sparse'}"
    )
