"""`jvlab bench sync --delta`: syncs of what changed beside whole ones, in one run, each verified.

Two sets of parameters that differ in a drawn share of their values are synced in turn, whole and then as changes. With
`--adam` parameters are what real steps of Adam made of them. Times are from the call until the engine generates again;
the pause is how long it did not. The headline is 1 % changed, staged, over a transport between hosts: tcp on a CPU,
nccl on a GPU (on one GPU its bytes go over the loopback interface).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import LaunchError
from jvlab._files import Plain
from jvlab._units import human_bytes
from jvlab.bench._shapes import shaped
from jvlab.bench._side import folder_for, median_ms, model_of, vllm_build
from jvlab.bench._sync import SIZES
from jvlab.lab._launch_settings import resolve_device

SHARES = (0.001, 0.01, 0.1, 0.5)
HEADLINE = 0.01
MODES = ("direct", "staged")
TRANSPORTS = {"cpu": ("tcp", "shm"), "cuda": ("nccl",)}
BESIDE = ("nixl", "nccl", "ipc")  # on one GPU, in one run; the headline's first
# a bucket costs about a millisecond of Python at each end, whatever is in it
BUCKET_MIB = {"cpu": 16, "cuda": 128}
# two processes on one GPU form a communicator only as if on two hosts
LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
}
PARTS = ("total", "pause", "find", "move", "digest", "repack")
RATES = (1e-6, 3e-6)  # of Adam
PROMPTS = 8
LENGTH = 64  # tokens of a prompt, and of its completion


@contextmanager
def _linked(
    model: str | None, device: str, size: str, adam: bool
) -> Iterator[tuple[Any, Any, Any]]:
    """A policy, with float32 parameters for Adam, a pool of one engine, and how to connect them."""
    import jvlab as jv

    dtype = "float32" if adam else "bfloat16"
    with ExitStack() as stack:
        env = {}
        if device == "cuda":
            # read by this process's first NCCL call, and by JAX's first allocation
            os.environ.update({**LOOPBACK, "NCCL_HOSTID": "trainer"})
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            policy = shaped(folder, size, dtype)
            env = {**LOOPBACK, "NCCL_HOSTID": "engine"}
            engine: Plain = {
                "max_model_len": 512,
                "gpu_memory_utilization": 0.3,
                "kv_cache_memory_bytes": 4 << 30,
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "enforce_eager": True,
            }
        else:
            if adam:
                path = jv.models.resolve(model) if model else jv.models.smollm2()
            else:
                folder, _ = folder_for(3e9, stack)
                path = model_of(model, path=folder / "model", **SIZES)
            policy = jv.Policy.from_pretrained(path)
            engine = {"max_model_len": 256} | ({"dtype": "bfloat16"} if adam else {})
        lab = stack.enter_context(jv.Lab())
        pool = lab.launch(
            str(policy.source), load="dummy", engine=engine, env=env, device=device
        ).wait(500)
        linked = lambda transport: lab.connect(
            policy.params,
            pool,
            rules="policy",
            transport=transport,
            bucket_mib=BUCKET_MIB[device],
        )
        yield policy, pool, linked


def run_bench_beside(rounds: int, size: str = "4") -> Plain:
    """Measure whole syncs, and those of 1 % changed, by every transport between two processes of one GPU."""
    return run_bench_delta(rounds, None, "cuda", size, BESIDE, (HEADLINE,))


def run_bench_delta(
    rounds: int,
    model: str | None = None,
    device: str = "auto",
    size: str = "4",
    transports: Sequence[str] = (),
    shares: Sequence[float] = SHARES,
) -> Plain:
    """Measure every transport, mode and share; prints a line for each, returns the facts."""
    device = resolve_device(device)
    rows = []
    transports = transports or TRANSPORTS[device]
    with _linked(model, device, size, adam=False) as (policy, _, linked):
        for transport in transports:
            with linked(transport) as link:
                print(f"{link!r}", flush=True)
                for share in shares:
                    other = changed(policy.params, share)
                    for mode in MODES:
                        row = _row(link, policy.params, other, mode, rounds)
                        rows.append({"transport": transport, "share": share, **row})
                        print(_line(rows[-1]), flush=True)
    head = next(
        row
        for row in rows
        if (row["transport"], row["mode"], row["share"])
        == (transports[0], "staged", HEADLINE)
    )
    return {
        "device": device,
        "vllm": vllm_build(),
        "rounds": rounds,
        "bucket_mib": BUCKET_MIB[device],
        "rows": rows,
        "delta_vs_full_ratio": head["full_total_ms"] / head["delta_total_ms"],
        "changed_share": head["changed"],
        "delta_bytes": head["delta_bytes"],
        "full_bytes": head["full_bytes"],
        "pause_ms": head["delta_pause_ms"],
        "full_pause_ms": head["full_pause_ms"],
    }


def run_bench_adam(
    steps: int = 8, model: str | None = None, device: str = "auto", size: str = "4"
) -> Plain:
    """Syncs after each of so many steps of Adam, from the same parameters at each rate; prints a line for each step.

    A step is one of policy gradients: the engine's own samples, with drawn advantages.
    """
    import jax
    import jax.numpy as jnp

    device = resolve_device(device)
    rows: list[Plain] = []
    with (
        _linked(model, device, size, adam=True) as (policy, pool, linked),
        linked(TRANSPORTS[device][0]) as link,
    ):
        print(f"{link!r}", flush=True)
        for rate in RATES:
            update, state = _adam(policy, rate)
            params = jax.tree.map(jnp.copy, policy.params)
            link.sync(params, delta="auto", mode="staged", progress=False)
            for step in range(1, steps + 1):
                samples = _samples(pool, step, policy.config.vocab)
                params, state = update(params, state, *samples)
                jax.block_until_ready(params)
                row = _stepped(link, params)
                rows.append({"rate": rate, "step": step, **row})
                print(_adam_line(rows[-1]), flush=True)
            del params, state
    return {
        "device": device,
        "vllm": vllm_build(),
        "model": str(policy.source),
        "transport": TRANSPORTS[device][0],
        "bucket_mib": BUCKET_MIB[device],
        "steps": steps,
        "rows": rows,
    }


def _adam(policy: Any, rate: float) -> tuple[Any, Any]:
    """A compiled step, and its first state."""
    import jax
    import optax

    optimiser = optax.adam(rate)

    def loss(params: Any, tokens: Any, advantages: Any) -> Any:
        chosen = policy.logprobs_fn(params, tokens)[:, LENGTH:]
        return -(advantages[:, None] * chosen).mean()

    def update(params: Any, state: Any, tokens: Any, advantages: Any) -> Any:
        gradients = jax.grad(loss)(params, tokens, advantages)
        updates, state = optimiser.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(update, donate_argnums=(0, 1)), jax.jit(optimiser.init)(
        policy.params
    )


def _samples(pool: Any, step: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens that the engine completed, and an advantage for each."""
    drawn = np.random.default_rng(step)
    prompts = drawn.integers(100, vocabulary, (PROMPTS, LENGTH)).tolist()
    batch = pool.generate(
        prompts, seed=step, max_tokens=LENGTH, ignore_eos=True, progress=False
    )
    rows = [[*sample.prompt_token_ids, *sample.token_ids] for sample in batch]
    return np.array(rows, np.int32), drawn.normal(size=PROMPTS).astype(np.float32)


def _stepped(link: Any, params: Any) -> Plain:
    """What changed, then everything, of one step."""
    changes = link.sync(params, delta="auto", mode="staged", progress=False)
    whole = link.sync(params, delta="never", mode="staged", progress=False)
    # the next step's changes are to be those of one step
    link.sync(params, delta="auto", mode="staged", progress=False)
    row = {"changed": changes.changed, "why_full": changes.why_full}
    row["find_ms"] = 1e3 * changes.seconds["find"]
    for way, report in (("delta", changes), ("full", whole)):
        row[f"{way}_bytes"] = report.bytes
        row[f"{way}_ms"] = 1e3 * report.seconds["total"]
        row[f"{way}_pause_ms"] = 1e3 * report.seconds["pause"]
    return row


def _adam_line(row: Plain) -> str:
    return (
        f"  rate {row['rate']:g}, step {row['step']}: {row['changed']:.2%} changed, "
        f"{human_bytes(row['delta_bytes'])}, {row['delta_ms']:.0f} ms against {row['full_ms']:.0f}, "
        f"pause {row['delta_pause_ms']:.1f} against {row['full_pause_ms']:.1f}"
    )


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


def _row(link: Any, params: Any, other: Any, mode: str, rounds: int) -> Plain:
    row: Plain = {"mode": mode}
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


def _line(row: Plain) -> str:
    ratio = row["full_total_ms"] / row["delta_total_ms"]
    return (
        f"  {row['transport']:5} {row['mode']:6} {row['changed'] or 0:6.2%} changed: "
        f"{human_bytes(row['delta_bytes'])} of {human_bytes(row['full_bytes'])}, "
        f"{row['delta_total_ms']:.0f} ms against {row['full_total_ms']:.0f} ({ratio:.2f}×), pause "
        f"{row['delta_pause_ms']:.1f} against {row['full_pause_ms']:.1f}, find {row['delta_find_ms']:.0f}, "
        f"move {row['delta_move_ms']:.0f} against {row['full_move_ms']:.0f}; {row['why_full'] or 'all sparse'}"
    )
