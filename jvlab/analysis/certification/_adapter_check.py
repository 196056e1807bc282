"""The check of adapters: one synced into a slot arrives bit for bit, and computes what merged weights compute."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import ml_dtypes
import numpy as np

from jvlab.analysis.certification._certificate import Finding
from jvlab.analysis.certification._device_checks import POWER
from jvlab.analysis.certification._known_values import Memory, Values, as_loaded, differences, is_float
from jvlab.analysis.certification._subject import REFUSALS, Subject
from jvlab.layout._plan_types import FP8, numpy_dtype
from jvlab.layout._types import CheckpointTensor
from jvlab.trainer.decoder._lora import PREFIX, TARGETS

RANK = 4
STRENGTH = 0.5  # of an adapter's product, in standard deviations of the weight that it is added to
ROUNDINGS = 2.0  # merged weights and an adapter's sums are rounded apart: so often as far as one step of every weight


class KnownAdapter(dict[str, Any]):
    """An adapter's tensors by PEFT's names, as `lab.connect` takes them. A JAX pytree."""

    def peft_tensors(self) -> list[CheckpointTensor]:
        return [CheckpointTensor(name, tuple(a.shape), str(a.dtype)) for name, a in self.items()]


def _register() -> None:
    import jax

    keys = lambda tree: tuple(sorted(tree))
    with contextlib.suppress(ValueError):  # done by an earlier call
        jax.tree_util.register_pytree_with_keys(
            KnownAdapter,
            lambda tree: ([(jax.tree_util.DictKey(k), tree[k]) for k in keys(tree)], keys(tree)),
            lambda names, leaves: KnownAdapter(zip(names, leaves, strict=True)),
        )


def known_adapter(subject: Subject) -> KnownAdapter:
    """A and B for every linear map that PEFT adapts and this checkpoint names; experts are left out."""
    dtype = numpy_dtype(str(subject.facts.dtype))
    drawn = np.random.default_rng([subject.seed, 11])
    out = KnownAdapter()
    for name, weight in subject.values("original").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in TARGETS or weight.ndim != 2 or ".experts." in name or module == name:
            continue
        if str(weight.dtype) == FP8:  # a checkpoint with scales of its own: products can't be added to its values
            continue
        outputs, inputs = weight.shape
        spread = STRENGTH * float(weight.astype(np.float32).std()) * math.sqrt(inputs / RANK)
        a = drawn.standard_normal((RANK, inputs), np.float32) / math.sqrt(inputs)
        b = drawn.standard_normal((outputs, RANK), np.float32) * spread
        out[f"{PREFIX}{module}.lora_A.weight"] = a.astype(dtype)
        out[f"{PREFIX}{module}.lora_B.weight"] = b.astype(dtype)
    return out


def merged(values: Values, adapter: KnownAdapter) -> Values:
    """The weights with the adapter's products added."""
    out = dict(values)
    for name in adapter:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            product = adapter[f"{module}.lora_B.weight"].astype(np.float32) @ adapter[name].astype(np.float32)
            weight = f"{module.removeprefix(PREFIX)}.weight"
            out[weight] = (values[weight].astype(np.float32) + product).astype(values[weight].dtype)
    return out


def rounded_apart(subject: Subject, values: Values) -> Values:
    """The matrices with every weight moved up or down by half a step of the dtype in which the engine holds it."""
    dtype = FP8 if any(layout.formats for layout in subject.layouts) else str(subject.facts.dtype)
    step = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) / 2
    drawn = np.random.default_rng([subject.seed, 13])
    out = dict(values)
    for name, array in values.items():
        if array.ndim > 1 and is_float(array.dtype):
            signs = drawn.choice(np.array([-1, 1], np.float32), array.shape)
            out[name] = (array.astype(np.float32) * (1 + step * signs)).astype(array.dtype)
    return out


def adapters(subject: Subject) -> Finding:
    """Sync a known adapter, read it back, and compare with the merged weights."""
    if not subject.facts.max_adapters:
        return Finding.skipped("the engine was started without LoRA")
    if subject.refused:
        return Finding.skipped(subject.refused)
    adapter = known_adapter(subject)
    if not adapter:
        return Finding.skipped(f"no linear map of this checkpoint, in 16 bits or more, is one of {', '.join(TARGETS)}")
    _register()
    subject.hold("original")
    tree = KnownAdapter(subject.on_device(adapter))
    try:
        layouts = subject.pool.trace(adapter.peft_tensors(), timeout=subject.deadline)
        link = subject.connect(tree=tree)
        link.sync(tree, mode=subject.mode, progress=False, timeout=subject.deadline.left())
    except REFUSALS as error:
        return Finding.skipped(f"no adapter can be synced: {error.message.splitlines()[0]}")
    count, wrong = _compare(subject, layouts, adapter)
    if wrong:
        return Finding.failed(f"{len(wrong)} of {count} parts of a slot do not hold what was synced", str(wrong[0]))
    sample = subject.say(subject.prompt(12, 5), tokens=12)
    (row,) = subject.score([sample])
    values = merged(subject.values("original"), adapter)
    subject.sync_values(values)
    (base,) = subject.score([sample])
    subject.sync_values(rounded_apart(subject, values))
    (apart,) = subject.score([sample])
    subject.sync("original")
    (without,) = subject.score([sample])
    if not subject.agree(sample.logprobs, row):
        nats = subject.gap(sample.logprobs, row)
        return Finding.failed(f"with an adapter, sampled and scored log-probabilities are {nats:.2g} nats apart")
    gap = subject.gap
    return judge(gap(sample.logprobs, base), gap(base, without), gap(base, apart), subject.tolerance, count)


def _compare(subject: Subject, layouts: Any, adapter: KnownAdapter) -> tuple[int, list[Any]]:
    """The number of parts of the slot, and those that differ from what vLLM's own `set_lora` would leave there."""
    count, wrong = 0, []
    for index in range(len(subject.replicas)):
        for layout in layouts:
            found: Memory = {}
            for number in np.unique(layout.parameter).tolist():
                part = layout.parameters[number]
                found[layout.rank, part.name] = subject.peek(part, layout.rank, index)
            empty = {key: np.zeros_like(flat) for key, flat in found.items()}
            wrong += differences(as_loaded([layout], adapter, empty), found)
            count += len(found)
    return count, wrong


def judge(gap: float, moved: float, rounding: float, tolerance: float, count: int) -> Finding:
    """All in nats: from adapter to merged weights, from those to none, and what half a step of every weight does.

    Weights of 16 bits round what is merged, and an adapter's sums are rounded elsewhere: the bound is what such
    differences do to this model, and a slot that holds something else moves it as far as the adapter does.
    """
    bound = max(tolerance, ROUNDINGS * rounding)
    if not moved > POWER * bound:
        return Finding.skipped(
            f"the adapter moves log-probabilities by {moved:.2g} nats, too little to tell: rounding moves them by "
            f"{rounding:.2g}"
        )
    if not gap <= bound:
        return Finding.failed(
            f"an adapter is {gap:.2g} nats from the same weights merged, which moves {moved:.2g}; at most {bound:.2g} "
            "is rounding"
        )
    return Finding.passed(
        f"{count} parts of a slot hold a known adapter bit for bit; it computes what merged weights do "
        f"({gap:.1e} nats apart, at most {bound:.1e}; without it {moved:.1e}), and a sync of the base removes it"
    )
