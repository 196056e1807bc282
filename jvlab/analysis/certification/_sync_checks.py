"""Checks around a sync: it arrives bit for bit, a failed one leaves the old version, old prefix caches are dead."""

from __future__ import annotations

from typing import Any

import numpy as np

from jvlab._errors import JvlabError, SyncError, VerifyError
from jvlab._units import human_bytes
from jvlab.analysis.certification._certificate import Finding
from jvlab.analysis.certification._known_values import Memory, differences
from jvlab.analysis.certification._subject import REFUSALS, Subject
from jvlab.sync._bucket_senders import jobs_of
from jvlab.transport._faults import Faults

DIRTY_SECONDS = 20.0  # for an engine to refuse a request


def compare(subject: Subject, wanted: Memory, what: str) -> Finding:
    """Compare the memory of every replica with what is wanted."""
    size = sum(flat.nbytes for flat in wanted.values())
    for index, replica in enumerate(subject.replicas):
        wrong = differences(wanted, subject.read(index))
        if wrong:
            return Finding.failed(f"{len(wrong)} of {len(wanted)} parameters of {replica} {what}", str(wrong[0]))
    ways = []
    if subject.unreadable:
        ways.append(f"{len(subject.unreadable)} can't be read: {next(iter(subject.unreadable.values()))}")
    if subject.through_loader:
        ways.append(f"{len(subject.through_loader)} tensors go through vLLM's own loader, compared when restored")
    more = f" ({'; '.join(ways)})" if ways else ""
    replicas = f", {len(subject.replicas)} replicas" if len(subject.replicas) > 1 else ""
    ranks = len({rank for rank, _ in wanted})
    text = f"{len(wanted)} parameters, {human_bytes(size)}, {ranks} rank{'s' if ranks > 1 else ''}{replicas}"
    return Finding.passed(f"{text}: read back from live memory, every bit equal{more}")


def arrives(subject: Subject, mode: str) -> Finding:
    """Sync known values, and read them back."""
    if subject.refused:
        return Finding.skipped(subject.refused)
    if mode == "direct" and subject.no_direct:
        return Finding.skipped(f"live memory can't be mapped: {subject.no_direct}")
    which = "other" if subject.held == "known" else "known"  # never what it already holds
    try:
        subject.sync(which, mode)
    except REFUSALS as error:
        return Finding.skipped(f"no {mode} sync here: {error.message.splitlines()[0]}")
    except VerifyError as error:
        return Finding.failed(f"the sync did not commit: {error.message.splitlines()[0]}", _named(error))
    wanted = {key: flat for key, flat in subject.expected(which).items() if key[1] not in loader_only(subject)}
    if not wanted:
        return Finding.skipped("no parameter of this engine can be read back")
    return compare(subject, wanted, f"do not hold what was synced ({mode})")


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
    covered |= {f.scale for layout in subject.layouts for f in layout.formats if f.parameter in covered}
    return {parameter.name for layout in subject.layouts for parameter in layout.parameters} - covered


def restored(subject: Subject) -> Finding:
    """Sync the values of the beginning, and compare with the memory of the beginning."""
    if subject.refused:
        return Finding.skipped(f"nothing was synced: {subject.refused}")
    subject.sync("original")
    found = compare(subject, subject.loaded, "are not what the engine held before")
    sample = subject.say(subject.prompt(8))
    if found.state == "pass" and set(sample.versions.tolist()) != {subject.version}:
        return Finding.failed(f"samples are labelled {set(sample.versions.tolist())}, not {subject.version}")
    return found


# Log-probabilities ------------------------------------------------------------------------------------------------


def scored(subject: Subject) -> Finding:
    """Sample, then score the same tokens in one pass."""
    samples = [subject.say(subject.prompt(n, n), r, 12) for r in subject.replicas for n in (3, 9, 20, 40)]
    rows = subject.score(samples)
    worst = 0.0
    for sample, row in zip(samples, rows, strict=True):
        worst = max(worst, gap := subject.gap(sample.logprobs, row))
        if not gap <= subject.tolerance:
            at = int(np.argmax(np.nan_to_num(np.abs(sample.logprobs - row), nan=np.inf)))
            first = (
                f"token {at} after a prompt of {len(sample.prompt_token_ids)}: sampled with {sample.logprobs[at]:.5g}"
            )
            return Finding.failed(
                f"sampled and scored log-probabilities are {gap:.2g} nats apart on {sample.replica}",
                f"{first}, scored {row[at]:.5g}",
            )
    tokens = sum(len(s.token_ids) for s in samples)
    measure = "mean" if subject.half else "largest difference"
    return Finding.passed(
        f"{tokens} tokens sampled and scored: {measure} {worst:.1e} nats, at most {subject.tolerance:g}"
    )


def prefix_cache(subject: Subject) -> Finding:
    """Fill the prefix cache, sync other weights, and ask the same again."""
    if subject.refused:
        return Finding.skipped(subject.refused)
    block = int(subject.facts.block_size)
    if not subject.facts.prefix_caching:
        return Finding.skipped("the engine keeps no prefix cache (enable_prefix_caching is off)")
    prompt = subject.prompt(3 * block + 1, 1)
    if len(prompt) <= block:
        return Finding.skipped(f"no prompt of this engine fills a block: {subject.facts.max_model_len} tokens, {block}")
    subject.hold("known" if subject.held == "known" else "original")
    found = []
    for replica in subject.replicas:
        subject.say(prompt, replica)
        found.append(subject.say(prompt, replica).cached_tokens)
    if not all(found):
        return Finding.skipped("the engine caches nothing of a repeated prompt of this model")
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
    return Finding.passed(f"{found[0]} tokens of a prompt were cached before a sync, none after it")


# Failures ---------------------------------------------------------------------------------------------------------


def failed_staged(subject: Subject) -> Finding:
    """Let a staged sync fail half-way: the old version must go on as if nothing had happened."""
    if subject.refused:
        return Finding.skipped(subject.refused)
    subject.hold("original")
    version = subject.version
    seen = []
    for fault in _faults(subject):
        try:
            errors = _fail(subject, "staged", fault)
        except REFUSALS as error:
            return Finding.skipped(f"no staged sync here: {error.message.splitlines()[0]}")
        if errors is None:
            subject.held = None
            return Finding.failed(f"a staged sync with a fault ({fault}) reported success")
        if subject.version != version:
            subject.held = None
            return Finding.failed(f"the version is {subject.version} after a failed sync ({fault}), and was {version}")
        found = compare(subject, subject.loaded, f"changed in a staged sync that failed ({fault})")
        if found.state != "pass":
            subject.held = None
            return found
        for replica in subject.replicas:
            versions = set(subject.say(subject.prompt(8), replica).versions.tolist())
            if versions != {version}:
                return Finding.failed(f"{replica} says that version {versions} made its tokens, not {version}")
        seen.append(f"{fault}: {errors}")
    return Finding.passed(f"version {version} kept its bits and went on serving after {'; '.join(seen)}")


def failed_direct(subject: Subject) -> Finding:
    """Let a direct sync fail half-way: the engine may serve the old version or nothing, but no mixture of two."""
    if subject.refused:
        return Finding.skipped(subject.refused)
    if subject.no_direct:
        return Finding.skipped(f"live memory can't be mapped: {subject.no_direct}")
    seen = []
    for fault in _faults(subject):  # a channel that breaks may have written little yet; a wrong digest comes at the end
        subject.hold("original")
        version = subject.version
        errors = _fail(subject, "direct", fault)
        subject.held = None
        if errors is None:
            return Finding.failed(f"a direct sync with a fault ({fault}) reported success")
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
                    str(wrong[0]) if wrong else f"tokens labelled {set(sample.versions.tolist())}, not {version}",
                )
        subject.sync("original")
        for replica in subject.replicas:
            subject.say(subject.prompt(8), replica)
        seen.append(f"after {fault} ({errors}) it {served} {version}")
    return Finding.passed(f"{'; '.join(seen)}; the next sync recovered it")


def _faults(subject: Subject) -> list[str]:
    if subject.link.transport == "ipc":  # the trainer writes the memory itself: there is no channel to break
        return ["abort"]
    return ["fail", "flip"]


def _fail(subject: Subject, mode: str, fault: str) -> str | None:
    """Sync known values with this fault half-way; the error's name, or None if the sync reported success."""
    tree: Any = subject.on_device("known" if subject.held != "known" else "other")
    if fault == "abort":
        stepper = subject.link.stepper(tree, mode=mode, timeout=max(1.0, subject.deadline.left()))
        for _ in range(max(1, (len(stepper) - 2) // 2)):
            stepper.step()
        stepper.abort()
        return f"stopped after {len(stepper.steps)} of {len(stepper) - 2} tensors"
    bucket = _middle_bucket(subject)
    faults = Faults(fail=bucket) if fault == "fail" else Faults(flip=bucket)
    try:
        # no deadline: `Subject.connect` uses the certificate's
        subject.connect(faults).sync(tree, mode=mode, progress=False, timeout=subject.deadline.left())
    except SyncError as error:
        if not faults.fired:
            raise  # it failed for a reason of its own
        name = _named(error)
        return f"{type(error).__name__}{f' of {name}' if name else ''} at bucket {bucket}"
    finally:
        subject.close()
    if not faults.fired:
        raise SyncError(f"no fault was injected: bucket {bucket} was never sent", remedy="report this as a bug")
    return None


def _middle_bucket(subject: Subject) -> int:
    """A bucket about half-way whose middle byte is a weight's: boxes are aligned, and what lies between is not read."""
    jobs = jobs_of(subject.link.plan, 0, 0)
    order = sorted(range(len(jobs)), key=lambda i: abs(i - len(jobs) // 2))
    for number in order:
        pack, bucket = jobs[number].pack, jobs[number].bucket
        middle = pack.sizes[bucket] // 2
        if any(box.at <= middle < box.at + box.nbytes for _, box in pack.buckets[bucket]):
            return bucket
    return jobs[order[0]].bucket
