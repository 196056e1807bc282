"""NaN and Inf by ipc on a real card: found by the kernels that copy, refused by default, gone with the next sync."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from jvlab import _errors as errors
from tests.gpu.card import ending_lab, greedy, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
ENGINE = {
    "gpu_memory_utilization": 0.12,
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 30,
}


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    with ending_lab() as made:
        yield made


@pytest.fixture(scope="module")
def pool(lab: jv.Lab) -> jv.Pool:
    return lab.launch(tiny(0), name="poisoned", engine=ENGINE).wait(300)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def trainer(
    request: pytest.FixtureRequest, lab: jv.Lab, pool: jv.Pool
) -> Iterator[tuple[jv.Link, Any, list[Any]]]:
    """A link by ipc, parameters in the engine's dtype or wider ones, and the tokens that these make."""
    params = jv.Policy.from_pretrained(tiny(0), dtype=request.param).params
    link = lab.connect(params, pool, rules="policy")
    assert link.transport == "ipc", link.reason
    link.sync(params)
    yield link, params, greedy(pool)
    link.close()


def planted(params: Any, value: float, name: str = "'v'") -> tuple[Any, str]:
    """The tree with one value of the first such leaf changed, and that leaf's path."""
    import jax

    from jvlab.layout._tree import flatten

    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    ]
    chosen = next(path for path in paths if name in path)

    def leaf(path: Any, old: Any) -> Any:
        if jax.tree_util.keystr(path) != chosen:
            return old
        return jax.device_put(old.at[(-1,) * old.ndim].set(value), old.sharding)

    changed = jax.tree_util.tree_map_with_path(leaf, params)
    before, after = flatten(params).arrays, flatten(changed).arrays
    (moved,) = [path for path in before if before[path] is not after[path]]
    return changed, moved


def logprobs(pool: jv.Pool) -> np.ndarray:
    made = pool.generate(
        [[5, 6, 7, 8]],
        n=8,
        max_tokens=24,
        temperature=1.0,
        ignore_eos=True,
        progress=False,
    )
    return np.concatenate([np.asarray(sample.logprobs, float) for sample in made])


@pytest.mark.parametrize("verify", ["full", "off", "sampled"])
@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_poison_is_refused(
    pool: jv.Pool,
    trainer: tuple[jv.Link, Any, list[Any]],
    mode: str,
    verify: str,
    value: float,
):
    link, params, wanted = trainer
    version = link.version
    for name in ("'v'", "lm_head", "norm"):  # turned tiles, and lines
        bad, leaf = planted(params, value, name)
        with pytest.raises(errors.NonFiniteError) as caught:
            link.sync(bad, mode=mode, verify=verify)
        nan = int(np.isnan(value))
        assert caught.value.fields["leaves"] == {
            leaf: {"nan": nan, "inf": 1 - nan, "overflow": 0}
        }
        if mode == "staged":
            assert greedy(pool) == wanted, "the old version serves"
        else:
            with pytest.raises(errors.EngineDirty):
                greedy(pool)
    assert pool.status()["replicas"][0]["version"] == version
    assert link.sync(params, mode=mode).verified
    assert greedy(pool) == wanted


def test_poison_made_by_the_cast_is_refused(
    pool: jv.Pool, trainer: tuple[jv.Link, Any, list[Any]]
):
    link, params, wanted = trainer
    bad, leaf = planted(params, 3.4e38)  # a float32; beyond what bfloat16 holds
    if "bfloat16" in str(next(iter(_leaves(params))).dtype):
        pytest.skip("nothing is cast")
    with pytest.raises(
        errors.NonFiniteError, match="beyond what bfloat16 holds"
    ) as caught:
        link.sync(bad, mode="staged")
    assert caught.value.fields["leaves"] == {leaf: {"nan": 0, "inf": 0, "overflow": 1}}
    assert greedy(pool) == wanted


def _leaves(params: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(params)


def test_poison_in_a_step(pool: jv.Pool, trainer: tuple[jv.Link, Any, list[Any]]):
    link, params, wanted = trainer
    bad, leaf = planted(params, np.nan)
    with (
        pytest.raises(errors.NonFiniteError, match=leaf),
        link.stepper(bad, mode="staged") as stepper,
    ):
        stepper.run()
    assert greedy(pool) == wanted


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_poison_that_was_allowed_is_gone_with_its_version(
    pool: jv.Pool, trainer: tuple[jv.Link, Any, list[Any]], mode: str, verify: str
):
    link, params, wanted = trainer
    bad, leaf = planted(params, np.nan)
    report = link.sync(bad, mode=mode, verify=verify, nonfinite="allow")
    assert len(report.nonfinite) == 1
    assert leaf in report.nonfinite[0]
    for _ in range(3):  # blocks are cleared when they are handed out, from now on
        assert np.isnan(logprobs(pool)).all()
    assert link.sync(params, mode=mode).verified
    assert greedy(pool) == wanted
    assert np.isfinite(logprobs(pool)).all()


def test_poison_costs_next_to_nothing():
    """The copy kernels with the look and without it, in turn, in one run: half a gigabyte, turned and by lines."""
    import cupy

    from jvlab.layout._plan_types import ValueTransform, item_bytes
    from jvlab.transport._ipc_kernels import Launcher
    from jvlab.transport._ipc_tables import IpcBox, tables

    side, found = 1 << 14, {}
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as stream:
        for transform in (
            ValueTransform("bfloat16", "bfloat16"),
            ValueTransform("float32", "bfloat16"),
            ValueTransform("float32", "float32"),
        ):
            source = cupy.zeros(side * side * item_bytes(transform.source), np.uint8)
            target = cupy.zeros(side * side * item_bytes(transform.wire), np.uint8)
            pointers = [
                cupy.asarray(np.array([memory.data.ptr], np.uint64))
                for memory in (source, target)
            ]
            for form, axes in (
                ("tiles", ((side, side, 1), (side, 1, side))),
                ("rows", ((side * side, 1, 1),)),
            ):
                made = tables([IpcBox(0, 0, 0, 0, axes, transform, side, 0)])
                assert {table.program.form for table in made} == {form}
                launchers = {
                    look: Launcher(0, made, 1, look=look) for look in (False, True)
                }
                for digest in (False, True):
                    times: dict[bool, list[float]] = {False: [], True: []}
                    for _ in range(25):
                        for look, launcher in launchers.items():
                            begun, done = cupy.cuda.Event(), cupy.cuda.Event()
                            begun.record(stream)
                            launcher.launch(stream, *pointers, digest=digest)
                            done.record(stream)
                            done.synchronize()
                            times[look].append(cupy.cuda.get_elapsed_time(begun, done))
                    assert not launchers[True].flawed(stream)
                    name = f"{transform.source}→{transform.wire} {form}{' with digest' if digest else ''}"
                    found[name] = (min(times[False]), min(times[True]))
            del source, target
    for name, (without, with_look) in found.items():
        print(
            f"{name:44} {without:.3f} ms, looking {with_look:.3f} ms ({with_look / without - 1:+.1%})"
        )
    assert all(looking < 1.1 * without for without, looking in found.values()), found
