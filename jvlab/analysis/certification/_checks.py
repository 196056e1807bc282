"""The checks of a certificate, each a function of the subject: what it saw, and whether that is right.

First those around a sync, then what a GPU does with its weights, adapters, and last the comparisons with what jvlab
did not make: transformers' computation, and the values that were loaded or committed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jvlab._errors import JvlabError, SyncError, Unsupported, VerifyError
from jvlab._progress import without_transformers_bar
from jvlab._units import human_bytes
from jvlab.analysis.certification._certificate import Finding
from jvlab.analysis.certification._subject import (
    REFUSALS,
    Memory,
    Subject,
    Values,
    as_loaded,
    differences,
    first_line,
    is_float,
)
from jvlab.engine._patches import settle_vector_math
from jvlab.layout._plan_types import FP8, numpy_dtype
from jvlab.layout._types import CheckpointTensor
from jvlab.sync._senders import jobs_of
from jvlab.trainer.decoder._lora import PREFIX, TARGETS
from jvlab.transport._faults import Faults

if TYPE_CHECKING:
    from jvlab.record._sample import Sample

DIRTY_SECONDS = 20.0  # for an engine to refuse a request


def needs_link(check: Callable[..., Finding]) -> Callable[..., Finding]:
    """A check that does not apply to an engine to which no link can be made."""

    @functools.wraps(check)
    def asked(subject: Subject, *arguments: Any) -> Finding:
        if subject.refused:
            return Finding.skipped(subject.refused)
        return check(subject, *arguments)

    return asked


def compare(subject: Subject, wanted: Memory, what: str) -> Finding:
    """Compare the memory of every replica with what is wanted."""
    size = sum(flat.nbytes for flat in wanted.values())
    for index, replica in enumerate(subject.replicas):
        wrong = differences(wanted, subject.read(index))
        if wrong:
            return Finding.failed(
                f"{len(wrong)} of {len(wanted)} parameters of {replica} {what}",
                str(wrong[0]),
            )
    ways = []
    if subject.unreadable:
        ways.append(
            f"{len(subject.unreadable)} can't be read: {next(iter(subject.unreadable.values()))}"
        )
    if subject.through_loader:
        ways.append(
            f"{len(subject.through_loader)} tensors go through vLLM's own loader, compared when restored"
        )
    more = f" ({'; '.join(ways)})" if ways else ""
    replicas = (
        f", {len(subject.replicas)} replicas" if len(subject.replicas) > 1 else ""
    )
    ranks = len({rank for rank, _ in wanted})
    text = f"{len(wanted)} parameters, {human_bytes(size)}, {ranks} rank{'s' if ranks > 1 else ''}{replicas}"
    return Finding.passed(f"{text}: read back from live memory, every bit equal{more}")


@needs_link
def arrives(subject: Subject, mode: str) -> Finding:
    """Sync known values, and read them back."""
    if mode == "direct" and subject.no_direct:
        return Finding.skipped(f"live memory can't be mapped: {subject.no_direct}")
    # never what it already holds
    which = "other" if subject.held == "known" else "known"
    try:
        subject.sync(which, mode)
    except REFUSALS as error:
        return Finding.skipped(f"no {mode} sync here: {first_line(error)}")
    except VerifyError as error:
        return Finding.failed(
            f"the sync did not commit: {first_line(error)}", _named(error)
        )
    wanted = {
        key: flat
        for key, flat in subject.expected(which).items()
        if key[1] not in loader_only(subject)
    }
    if not wanted:
        return Finding.skipped("no parameter of this engine can be read back")
    return compare(subject, wanted, f"do not hold what was synced ({mode})")


def arrives_direct(subject: Subject) -> Finding:
    return arrives(subject, "direct")


def arrives_staged(subject: Subject) -> Finding:
    return arrives(subject, "staged")


def _named(error: JvlabError) -> str:
    """The first tensor that an error names."""
    outcomes = getattr(error.fields.get("reply"), "outcomes", ())
    return next((name for outcome in outcomes for name in outcome.differing), "")


def loader_only(subject: Subject) -> set[str]:
    """Parameters that the layout's copies do not explain: the model's own code computes them."""
    covered = {
        layout.parameters[int(p)].name
        for layout in subject.layouts
        for p, t in zip(layout.parameter, layout.tensor, strict=True)
        if layout.tensors[int(t)].name not in subject.through_loader
    }
    covered |= {
        f.scale
        for layout in subject.layouts
        for f in layout.formats
        if f.parameter in covered
    }
    return {
        parameter.name for layout in subject.layouts for parameter in layout.parameters
    } - covered


def restored(subject: Subject) -> Finding:
    """Sync the values of the beginning, and compare with the memory of the beginning."""
    if subject.refused:
        return Finding.skipped(f"nothing was synced: {subject.refused}")
    subject.sync("original")
    found = compare(subject, subject.loaded, "are not what the engine held before")
    sample = subject.say(subject.prompt(8))
    if found.state == "pass" and set(sample.versions.tolist()) != {subject.version}:
        return Finding.failed(
            f"samples are labelled {set(sample.versions.tolist())}, not {subject.version}"
        )
    return found


# Log-probabilities ------------------------------------------------------------------------------------------------


def scored(subject: Subject) -> Finding:
    """Sample, then score the same tokens in one pass."""
    samples = some_samples(subject)
    return compare_logprobs(
        subject,
        samples,
        [sample.logprobs for sample in samples],
        ("sampled with", "scored"),
        "sampled and scored log-probabilities are {gap:.2g} nats apart on {replica}",
        "{tokens} tokens sampled and scored",
    )


def some_samples(subject: Subject) -> list[Sample]:
    """Of every replica, after prompts of several lengths: a rotary table that is wrong shows with distance."""
    return [
        subject.say(subject.prompt(n, n), replica, 12)
        for replica in subject.replicas
        for n in (3, 9, 20, 40)
    ]


def compare_logprobs(
    subject: Subject,
    samples: Sequence[Sample],
    others: Sequence[np.ndarray],
    names: tuple[str, str],
    apart: str,
    equal: str,
) -> Finding:
    """Compare the engine's scores of the samples with others of the same tokens.

    names   of the other number and of the engine's
    apart   what is said if they differ: {gap} and {replica} are filled in
    equal   what is said if they do not: {tokens}
    """
    worst = 0.0
    for sample, other, row in zip(samples, others, subject.score(samples), strict=True):
        gap = subject.gap(other, row)
        worst = max(worst, gap)
        if not gap <= subject.tolerance:
            at = int(np.argmax(np.nan_to_num(np.abs(other - row), nan=np.inf)))
            return Finding.failed(
                apart.format(gap=gap, replica=sample.replica),
                f"token {at} after a prompt of {len(sample.prompt_token_ids)}: {names[0]} {other[at]:.5g}, "
                f"{names[1]} {row[at]:.5g}",
            )
    tokens = sum(len(s.token_ids) for s in samples)
    measure = "mean" if subject.half else "largest difference"
    return Finding.passed(
        f"{equal.format(tokens=tokens)}: {measure} {worst:.1e} nats, at most {subject.tolerance:g}"
    )


@needs_link
def prefix_cache(subject: Subject) -> Finding:
    """Fill the prefix cache, sync other weights, and ask the same again."""
    block = int(subject.facts.block_size)
    if not subject.facts.prefix_caching:
        return Finding.skipped(
            "the engine keeps no prefix cache (enable_prefix_caching is off)"
        )
    prompt = subject.prompt(3 * block + 1, 1)
    if len(prompt) <= block:
        return Finding.skipped(
            f"no prompt of this engine fills a block: {subject.facts.max_model_len} tokens, {block}"
        )
    subject.hold("known" if subject.held == "known" else "original")
    found = []
    for replica in subject.replicas:
        subject.say(prompt, replica)
        found.append(subject.say(prompt, replica).cached_tokens)
    if not all(found):
        return Finding.skipped(
            "the engine caches nothing of a repeated prompt of this model"
        )
    subject.sync("original" if subject.held == "known" else "known")
    for replica in subject.replicas:
        sample = subject.say(prompt, replica)
        (row,) = subject.score([sample])
        gap = subject.gap(sample.logprobs, row)
        if sample.cached_tokens or not gap <= subject.tolerance:
            what = f"{sample.cached_tokens} of {len(prompt)} tokens came from the cache of the old weights"
            return Finding.failed(
                f"{replica}: {what}; log-probabilities are {gap:.2g} nats from those of the new weights",
                f"KV of prompt token 0, up to token {max(0, sample.cached_tokens - 1)}",
            )
    return Finding.passed(
        f"{found[0]} tokens of a prompt were cached before a sync, none after it"
    )


# Failures ---------------------------------------------------------------------------------------------------------


@needs_link
def failed_staged(subject: Subject) -> Finding:
    """Let a staged sync fail half-way: the old version must go on as if nothing had happened."""
    subject.hold("original")
    version = subject.version
    seen = []
    for fault in _faults(subject):
        try:
            errors = _fail(subject, "staged", fault)
        except REFUSALS as error:
            return Finding.skipped(f"no staged sync here: {first_line(error)}")
        if errors is None:
            subject.held = None
            return Finding.failed(
                f"a staged sync with a fault ({fault}) reported success"
            )
        if subject.version != version:
            subject.held = None
            return Finding.failed(
                f"the version is {subject.version} after a failed sync ({fault}), and was {version}"
            )
        found = compare(
            subject, subject.loaded, f"changed in a staged sync that failed ({fault})"
        )
        if found.state != "pass":
            subject.held = None
            return found
        for replica in subject.replicas:
            versions = set(subject.say(subject.prompt(8), replica).versions.tolist())
            if versions != {version}:
                return Finding.failed(
                    f"{replica} says that version {versions} made its tokens, not {version}"
                )
        seen.append(f"{fault}: {errors}")
    return Finding.passed(
        f"version {version} kept its bits and went on serving after {'; '.join(seen)}"
    )


@needs_link
def failed_direct(subject: Subject) -> Finding:
    """Let a direct sync fail half-way: the engine may serve the old version or nothing, but no mixture of two."""
    if subject.no_direct:
        return Finding.skipped(f"live memory can't be mapped: {subject.no_direct}")
    seen = []
    # a channel that breaks may have written little yet; a wrong digest comes at the end
    for fault in _faults(subject):
        subject.hold("original")
        version = subject.version
        errors = _fail(subject, "direct", fault)
        subject.held = None
        if errors is None:
            return Finding.failed(
                f"a direct sync with a fault ({fault}) reported success"
            )
        served = "serves version"
        for index, replica in enumerate(subject.replicas):
            try:
                sample = subject.say(subject.prompt(8), replica, seconds=DIRTY_SECONDS)
            except JvlabError as error:
                served = f"refuses to generate ({type(error).__name__}) instead of mixing versions with"
                continue
            wrong = differences(subject.loaded, subject.read(index))
            if wrong or set(sample.versions.tolist()) != {version}:
                return Finding.failed(
                    f"{replica} generates after a failed direct sync, with parts of two versions: "
                    f"{len(wrong)} parameters",
                    str(wrong[0])
                    if wrong
                    else f"tokens labelled {set(sample.versions.tolist())}, not {version}",
                )
        subject.sync("original")
        for replica in subject.replicas:
            subject.say(subject.prompt(8), replica)
        seen.append(f"after {fault} ({errors}) it {served} {version}")
    return Finding.passed(f"{'; '.join(seen)}; the next sync recovered it")


def _faults(subject: Subject) -> list[str]:
    # the trainer writes the memory itself: there is no channel to break
    if subject.link.transport == "ipc":
        return ["abort"]
    return ["fail", "flip"]


def _fail(subject: Subject, mode: str, fault: str) -> str | None:
    """Sync known values with this fault half-way; the error's name, or None if the sync reported success."""
    tree: Any = subject.on_device("known" if subject.held != "known" else "other")
    if fault == "abort":
        stepper = subject.link.stepper(
            tree, mode=mode, timeout=max(1.0, subject.deadline.left())
        )
        for _ in range(max(1, (len(stepper) - 2) // 2)):
            stepper.step()
        stepper.abort()
        return f"stopped after {len(stepper.steps)} of {len(stepper) - 2} tensors"
    bucket = _middle_bucket(subject)
    faults = Faults(fail=bucket) if fault == "fail" else Faults(flip=bucket)
    try:
        # no deadline: `Subject.connect` uses the certificate's
        subject.connect(faults).sync(
            tree, mode=mode, progress=False, timeout=subject.deadline.left()
        )
    except SyncError as error:
        if not faults.fired:
            raise  # it failed for a reason of its own
        name = _named(error)
        return (
            f"{type(error).__name__}{f' of {name}' if name else ''} at bucket {bucket}"
        )
    finally:
        subject.close()
    if not faults.fired:
        raise SyncError(
            f"no fault was injected: bucket {bucket} was never sent",
            remedy="report this as a bug",
        )
    return None


def _middle_bucket(subject: Subject) -> int:
    """A bucket about half-way whose middle byte is a weight's: boxes are aligned, and what lies between is not read."""
    jobs = jobs_of(subject.link.plan, 0, 0)
    order = sorted(range(len(jobs)), key=lambda i: abs(i - len(jobs) // 2))
    for number in order:
        pack = jobs[number].pack
        bucket = jobs[number].bucket
        middle = pack.sizes[bucket] // 2
        if any(
            box.at <= middle < box.at + box.nbytes for _, box in pack.buckets[bucket]
        ):
            return bucket
    return jobs[order[0]].bucket


# Checks of what a GPU engine does with its weights: sleep and wake, and CUDA graphs captured before a sync.

# two sets of weights must differ by this many tolerances, or nothing can be told from log-probabilities
POWER = 4.0
# kinds of tensors that are synced alone to find the one that a graph does not see
MOST_KINDS = 200


def sleep_1(subject: Subject) -> Finding:
    """Sleep at level 1 and wake: every weight is as before."""
    if not subject.refused:
        subject.hold("original")
    prompt = subject.prompt(2 * int(subject.facts.block_size) + 1, 2)
    before = subject.say(prompt)
    try:
        subject.pool.sleep(1, timeout=subject.deadline)
    except Unsupported as error:
        return Finding.skipped(error.message)
    asleep = _sleeping(subject)
    subject.pool.wake(timeout=subject.deadline)
    if not asleep:
        return Finding.failed("pool.sleep(1) returned, and no engine slept")
    if subject.loaded:
        found = compare(subject, subject.loaded, "changed while the engine slept")
        if found.state != "pass":
            return found
    after = subject.say(prompt)
    (row,) = subject.score([before])
    if not subject.agree(before.logprobs, row):
        gap = subject.gap(before.logprobs, row)
        return Finding.failed(
            f"log-probabilities are {gap:.2g} nats from those before the sleep",
            "memory is equal",
        )
    if after.cached_tokens:
        return Finding.failed(
            "the prefix cache outlived the sleep, and its memory did not",
            "KV of prompt token 0",
        )
    return Finding.passed(
        f"{len(subject.loaded)} parameters hold the same bits after sleep and wake, and say the same"
    )


@needs_link
def sleep_2(subject: Subject) -> Finding:
    """Sleep at level 2 and wake: nothing is served before a sync, and all of it after."""
    subject.hold("original")
    try:
        subject.pool.sleep(2, timeout=subject.deadline)
    except Unsupported as error:
        return Finding.skipped(error.message)
    subject.held = None
    asleep = _sleeping(subject)
    subject.pool.wake(timeout=subject.deadline)
    if not asleep:
        return Finding.failed("pool.sleep(2) returned, and no engine slept")
    refusal = ""
    for replica in subject.replicas:
        try:
            subject.say(subject.prompt(8), replica, seconds=DIRTY_SECONDS)
        except JvlabError as error:
            refusal = type(error).__name__
        else:
            return Finding.failed(
                f"{replica} generates with weights that were dropped", "every parameter"
            )
    subject.sync("known", "staged" if subject.no_direct else None)
    found = compare(
        subject,
        subject.expected("known"),
        "do not hold what was synced after a sleep at level 2",
    )
    if found.state != "pass":
        return found
    return Finding.passed(
        f"dropped weights were not served ({refusal}); after a sync, {found.detail}"
    )


def _sleeping(subject: Subject) -> bool:
    return all(
        r["sleeping"] for r in subject.pool.status(timeout=subject.deadline)["replicas"]
    )


@needs_link
def graphs(subject: Subject) -> Finding:
    """Sync other weights under graphs that were captured before, and compare their results with those of no graph."""
    if subject.device != "cuda":
        return Finding.skipped(
            f"CUDA graphs are a GPU's; this engine runs on {subject.device}"
        )
    captured = int(subject.facts.graph_tokens)
    if not captured:
        return Finding.skipped("the engine runs without graphs (enforce_eager)")
    # the prefill of prompt and tokens is too long for a graph
    prompt = subject.prompt(captured + 1, 3)
    subject.hold("original")
    subject.say(prompt)
    subject.sync("known")
    sample = subject.say(prompt, tokens=12)
    (new,) = subject.score([sample])
    gap = subject.gap(sample.logprobs, new)
    subject.sync("original")
    (old,) = subject.score([sample])
    apart = subject.gap(new, old)
    stale = subject.gap(sample.logprobs, old)
    if not apart > POWER * subject.tolerance:
        return Finding.skipped(
            f"two sets of weights give log-probabilities only {apart:.2g} nats apart: what a graph read can't be told"
        )
    if gap <= subject.tolerance:
        alone = (
            ""
            if len(prompt) > captured
            else "; no prompt is too long for a graph, so scoring used one too"
        )
        return Finding.passed(
            f"tokens decoded by graphs of up to {captured} tokens, captured before the sync: {gap:.1e} nats from the "
            f"new weights, {stale:.1e} from the old{alone}"
        )
    return Finding.failed(
        f"tokens decoded by a graph are {gap:.2g} nats from the weights that were synced, {stale:.2g} from the old",
        unseen_tensor(subject),
    )


def unseen_tensor(subject: Subject) -> str:
    """The first kind of tensor that decoding does not see: each is synced alone."""
    original = subject.values("original")
    known = subject.values("known")
    kinds: dict[str, list[str]] = {}
    for name in original:
        kinds.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(name)
    for names in list(kinds.values())[:MOST_KINDS]:
        if all(np.array_equal(original[n], known[n]) for n in names):
            continue
        subject.sync_values({**original, **{n: known[n] for n in names}})
        sample = subject.say(subject.prompt(8, 4), tokens=12)
        (row,) = subject.score([sample])
        if not subject.agree(sample.logprobs, row):
            return f"{names[0]}: a change of it alone is not seen"
    return "no tensor by itself: the change is seen if one kind alone is synced"


# The check of adapters: one synced into a slot arrives bit for bit, and computes what merged weights compute.

RANK = 4
# of an adapter's product, in standard deviations of the weight that it is added to
STRENGTH = 0.5
# merged weights and an adapter's sums are rounded apart: so often as far as one step of every weight
ROUNDINGS = 2.0


class KnownAdapter(dict[str, Any]):
    """An adapter's tensors by PEFT's names, as `lab.connect` takes them. A JAX pytree."""

    def peft_tensors(self) -> list[CheckpointTensor]:
        return [
            CheckpointTensor(name, tuple(a.shape), str(a.dtype))
            for name, a in self.items()
        ]


def _register() -> None:
    import jax

    keys = lambda tree: tuple(sorted(tree))
    with contextlib.suppress(ValueError):  # done by an earlier call
        jax.tree_util.register_pytree_with_keys(
            KnownAdapter,
            lambda tree: (
                [(jax.tree_util.DictKey(k), tree[k]) for k in keys(tree)],
                keys(tree),
            ),
            lambda names, leaves: KnownAdapter(zip(names, leaves, strict=True)),
        )


def known_adapter(subject: Subject) -> KnownAdapter:
    """A and B for every linear map that PEFT adapts and this checkpoint names; experts are left out."""
    dtype = numpy_dtype(str(subject.facts.dtype))
    drawn = np.random.default_rng([subject.seed, 11])
    out = KnownAdapter()
    for name, weight in subject.values("original").items():
        module = name.removesuffix(".weight")
        if (
            module.rpartition(".")[2] not in TARGETS
            or weight.ndim != 2
            or ".experts." in name
            or module == name
        ):
            continue
        # a checkpoint with scales of its own: products can't be added to its values
        if str(weight.dtype) == FP8:
            continue
        outputs, inputs = weight.shape
        spread = (
            STRENGTH * float(weight.astype(np.float32).std()) * math.sqrt(inputs / RANK)
        )
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
            product = adapter[f"{module}.lora_B.weight"].astype(np.float32) @ adapter[
                name
            ].astype(np.float32)
            weight = f"{module.removeprefix(PREFIX)}.weight"
            out[weight] = (values[weight].astype(np.float32) + product).astype(
                values[weight].dtype
            )
    return out


def rounded_apart(subject: Subject, values: Values) -> Values:
    """The matrices with every weight moved up or down by half a step of the dtype in which the engine holds it."""
    dtype = (
        FP8
        if any(layout.formats for layout in subject.layouts)
        else str(subject.facts.dtype)
    )
    step = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) / 2
    drawn = np.random.default_rng([subject.seed, 13])
    out = dict(values)
    for name, array in values.items():
        if array.ndim > 1 and is_float(array.dtype):
            signs = drawn.choice(np.array([-1, 1], np.float32), array.shape)
            out[name] = (array.astype(np.float32) * (1 + step * signs)).astype(
                array.dtype
            )
    return out


@needs_link
def adapters(subject: Subject) -> Finding:
    """Sync a known adapter, read it back, and compare with the merged weights."""
    if not subject.facts.max_adapters:
        return Finding.skipped("the engine was started without LoRA")
    adapter = known_adapter(subject)
    if not adapter:
        return Finding.skipped(
            f"no linear map of this checkpoint, in 16 bits or more, is one of {', '.join(TARGETS)}"
        )
    _register()
    subject.hold("original")
    tree = KnownAdapter(subject.on_device(adapter))
    try:
        layouts = subject.pool.trace(adapter.peft_tensors(), timeout=subject.deadline)
        link = subject.connect(tree=tree)
        link.sync(
            tree, mode=subject.mode, progress=False, timeout=subject.deadline.left()
        )
    except REFUSALS as error:
        return Finding.skipped(f"no adapter can be synced: {first_line(error)}")
    count, wrong = _compare(subject, layouts, adapter)
    if wrong:
        return Finding.failed(
            f"{len(wrong)} of {count} parts of a slot do not hold what was synced",
            str(wrong[0]),
        )
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
        return Finding.failed(
            f"with an adapter, sampled and scored log-probabilities are {nats:.2g} nats apart"
        )
    gap = subject.gap
    return judge(
        gap(sample.logprobs, base),
        gap(base, without),
        gap(base, apart),
        subject.tolerance,
        count,
    )


def _compare(
    subject: Subject, layouts: Any, adapter: KnownAdapter
) -> tuple[int, list[Any]]:
    """The number of parts of the slot, and those that differ from what vLLM's own `set_lora` would leave there."""
    count = 0
    wrong = []
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


def judge(
    gap: float, moved: float, rounding: float, tolerance: float, count: int
) -> Finding:
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


# Checks against what jvlab did not make: transformers' own computation, and the values that were loaded or committed.
# The other checks compare an engine with itself. One that computes wrongly with the right weights (a reversed rotary
# table, another epsilon) passes all of them: only a second implementation of the model tells.

# of float32: transformers computes on the CPU, in memory that the trainer may need
LARGEST_BYTES = 8e9


@needs_link
def reference(subject: Subject) -> Finding:
    """Sample, and let transformers compute the same tokens' log-probabilities with the values that the engine holds."""
    if subject.facts.quantization:
        return Finding.skipped(
            f"transformers computes without {subject.facts.quantization} activations"
        )
    values = subject.values("original")
    size = 4 * sum(array.size for array in values.values())
    if size > LARGEST_BYTES:
        return Finding.skipped(
            f"{human_bytes(size)} in float32 is more than the reference may take"
        )
    try:
        model = transformers_model(subject.pool.model, values)
    # whatever transformers raises: it does not know this model, or its weights do not fit
    except Exception as error:
        return Finding.skipped(
            f"transformers could not load it: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        )
    subject.hold("original")
    samples = some_samples(subject)
    return compare_logprobs(
        subject,
        samples,
        [logprobs_of(model, sample) for sample in samples],
        ("transformers", "engine"),
        "engine and transformers are {gap:.2g} nats apart with the same weights ({replica}): one of them, or the "
        "engine's configuration, computes another model",
        "{tokens} tokens computed by transformers in float32 with the engine's values",
    )


def transformers_model(folder: str, values: Any) -> Any:
    """Transformers' model of this config with these values, in float32 on the CPU; raises if one is missing."""
    import torch
    import transformers
    from safetensors.numpy import save_file

    settle_vector_math()
    with tempfile.TemporaryDirectory(prefix="jvlab-") as made:
        for file in Path(folder).glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, made)
        # as a checkpoint, so that transformers' own conversions apply (fused and stacked tensors)
        wide = {
            name: np.ascontiguousarray(array, np.float32)
            for name, array in values.items()
        }
        save_file(wide, f"{made}/model.safetensors", metadata={"format": "pt"})
        with without_transformers_bar():
            model, told = transformers.AutoModelForCausalLM.from_pretrained(
                made,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
                local_files_only=True,
            )
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(set(told["missing_keys"]) - tied)
    if missing or told["mismatched_keys"]:
        raise ValueError(
            f"no value for {', '.join(missing[:3]) or told['mismatched_keys']}"
        )
    return model.eval()


def logprobs_of(model: Any, sample: Any) -> np.ndarray:
    """Log-probabilities of a sample's tokens, in one pass over the whole sequence."""
    import torch

    prompt = len(sample.prompt_token_ids)
    tokens = torch.tensor(
        [[*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]]
    )
    with torch.inference_mode():
        logits = model(tokens).logits[0, prompt - 1 : -1].double()
    chosen = torch.log_softmax(logits, -1).gather(1, tokens[0, prompt:, None])
    return chosen[:, 0].numpy()


@needs_link
def unchanged(subject: Subject) -> Finding:
    """Compare what the engines held at the beginning with what was last committed, or loaded."""
    if subject.verified is not None:
        wrong = subject.verified.differing
        if wrong or not subject.verified.ok:
            return Finding.failed(
                "the engine does not hold what was last committed",
                wrong[0] if wrong else "",
            )
        return Finding.passed(
            f"digests of live memory are those of version {subject.verified.version}"
        )
    if subject.given is None and subject.began_with:
        return Finding.skipped(
            f"version {subject.began_with} was synced by another process: pass params={{checkpoint name: array}}"
        )
    try:
        source = subject.given if subject.given is not None else subject.checkpoint()
    except JvlabError as error:
        return Finding.skipped(first_line(error))
    wanted = loaded_from(subject, source)
    wrong = differences(wanted, {key: subject.loaded[key] for key in wanted})
    what = "the params given" if subject.given is not None else "the checkpoint's files"
    if len(wrong) > len(wanted) / 2:
        return Finding.skipped(
            f"the engine was not loaded from {what}: {len(wrong)} of {len(wanted)} parameters differ"
        )
    if wrong:
        return Finding.failed(
            f"{len(wrong)} of {len(wanted)} parameters are not as in {what}",
            str(wrong[0]),
        )
    return Finding.passed(f"{len(wanted)} parameters, every bit as in {what}")


def loaded_from(subject: Subject, values: Any) -> Memory:
    """The engine's memory as its loader leaves it with these values, but for what the model's own code computes."""
    apart = loader_only(subject)
    named = {
        layout.tensors[int(t)].name for layout in subject.layouts for t in layout.tensor
    }
    found = {name: np.asarray(values[name]) for name in named if name in values}
    memory = as_loaded(subject.layouts, found, subject.loaded)
    return {key: flat for key, flat in memory.items() if key[1] not in apart}
