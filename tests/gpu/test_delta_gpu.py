"""Sparse buckets on a GPU: the kernels against numpy, and syncs of changes by nccl into a live engine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab.layout import _sparse
from tests.gpu.card import ending_lab, greedy, tiny
from tests.gpu.test_nccl_engine_gpu import ENGINE, LOOPBACK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.2, 1.0])
def test_the_kernels_do_what_numpy_does(item: int, share: float) -> None:
    import cupy as cp

    from jvlab.transport import _sparse_kernels

    drawn = np.random.default_rng(item)
    shape = (67, 211)  # neither whole warps nor whole blocks
    old = drawn.integers(0, 256, 67 * 211 * item, np.uint8).view(f"u{item}")
    new = np.where(drawn.random(old.size) < share, old ^ old.dtype.type(1), old)
    positions = _sparse.changed(new, old.view(np.uint8))
    (part,), total = _sparse.sections([len(positions)], [old.size], [item])
    wanted = np.zeros(total, np.uint8)
    _sparse.pack_box(part, new, positions, wanted)
    now = cp.asarray(new.view(np.uint8))
    table = _sparse_kernels.Boxes([(0, old.size, item)], 0)
    mask, until, counts = table.differing(now, cp.asarray(old.view("u1")))
    assert counts == [len(positions)]
    out = cp.zeros(total, np.uint8)
    table.fill([part], now, mask, until, out)
    np.testing.assert_array_equal(out.get(), wanted)
    if part.whole or not part.count:
        return
    # transposed, in a wider matrix
    memory = np.zeros((211, 80), f"u{item}")
    memory[:, 5:72] = old.reshape(shape).T
    engine = cp.asarray(memory)
    memory[:, 5:72] = new.reshape(shape).T
    place = _sparse_kernels.Place(part, engine.data.ptr, 5, shape, (1, 80))
    _sparse_kernels.put([place], out.data.ptr, 0)
    np.testing.assert_array_equal(engine.get(), memory)


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    # before this process's first NCCL call
    os.environ.update({**LOOPBACK, "NCCL_HOSTID": "trainer"})
    with ending_lab() as made:
        yield made


def trained(params: Any, seed: int, share: float = 0.01) -> Any:
    import jax
    import jax.numpy as jnp

    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = [
        jnp.where(jax.random.uniform(k, x.shape) < share, x * 1.25 + 0.01, x)
        for x, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, [x.astype(leaves[0].dtype) for x in new])


@pytest.mark.parametrize("quantization", [None, "fp8", "fp8_per_channel"])
def test_changes_by_nccl(
    lab: jv.Lab, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live weights, weights that are quantised before they are sent, and layers that vLLM's own reload processes."""
    from jvlab.sync._device_pack import DevicePack

    more = {} if quantization is None else {"quantization": quantization}
    pool = lab.launch(
        tiny(0),
        name=f"delta-{quantization or 'plain'}".replace("_", "-"),
        engine={**ENGINE, **more},
        env={**LOOPBACK, "NCCL_HOSTID": f"engine-{quantization}"},
    ).wait(400)
    params: Any = jv.Policy.from_pretrained(tiny(0), dtype="bfloat16").params
    link = lab.connect(params, pool, rules="policy", transport="nccl", bucket_mib=0.25)
    assert not link.sync(params, delta="auto").delta
    for seed, (mode, share) in enumerate(
        [("direct", 0.01), ("staged", 0.01), ("staged", 0.2), ("direct", 0.0)]
    ):
        params = trained(params, seed, share)
        report = link.sync(params, mode=mode, delta="auto")
        print(report, report.why_full)
        assert report.verified
        assert report.delta, report.why_full
        assert report.bytes < report.full_bytes
        assert link.verify(params)
    tokens = greedy(pool)
    link.sync(params)
    assert greedy(pool) == tokens
    # an element that is left out is found, and everything is sent
    link.sync(params, delta="auto")
    encode = DevicePack.encode
    planted = []

    def wrong(self: Any, bucket: int, values: Any, held: Any) -> Any:
        encoded = encode(self, bucket, values, held)
        if planted or not encoded.sparse or not encoded.changed:
            return encoded
        payload = encoded.payload.copy()
        table = payload[: 8 * len(self.buckets[bucket])].get().view(np.int64)
        sections, _ = self.sections(bucket, table.tolist())
        part = next((s for s in sections if s.count > 1 and not s.masked), None)
        if part is None or part.whole:
            return encoded
        index = payload[part.at : part.at + 8].view(np.uint32)
        values_of = payload[part.values_at :][: 2 * part.item]
        index[0] = index[1]
        values_of[: part.item] = values_of[part.item :]
        planted.append(part)
        return dataclasses.replace(encoded, payload=payload)

    monkeypatch.setattr(DevicePack, "encode", wrong)
    params = trained(params, 9)
    report = link.sync(params, delta="auto")
    assert planted
    assert not report.delta
    assert "a sparse sync was not proven" in report.why_full
    assert link.verify(params)
    link.close()
    pool.close()
