"""Checks of what a GPU engine does with its weights: sleep and wake, and CUDA graphs captured before a sync."""

from __future__ import annotations

import re

import numpy as np

from jvlab._errors import JvlabError, Unsupported
from jvlab.analysis.certification._certificate import Finding
from jvlab.analysis.certification._subject import Subject
from jvlab.analysis.certification._sync_checks import DIRTY_SECONDS, compare

POWER = 4.0  # two sets of weights must differ by this many tolerances, or nothing can be told from log-probabilities
MOST_KINDS = 200  # kinds of tensors that are synced alone to find the one that a graph does not see


def sleep_keeps(subject: Subject) -> Finding:
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
        return Finding.failed(f"log-probabilities are {gap:.2g} nats from those before the sleep", "memory is equal")
    if after.cached_tokens:
        return Finding.failed("the prefix cache outlived the sleep, and its memory did not", "KV of prompt token 0")
    return Finding.passed(f"{len(subject.loaded)} parameters hold the same bits after sleep and wake, and say the same")


def sleep_drops(subject: Subject) -> Finding:
    """Sleep at level 2 and wake: nothing is served before a sync, and all of it after."""
    if subject.refused:
        return Finding.skipped(subject.refused)
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
            return Finding.failed(f"{replica} generates with weights that were dropped", "every parameter")
    subject.sync("known", "staged" if subject.no_direct else None)
    found = compare(subject, subject.expected("known"), "do not hold what was synced after a sleep at level 2")
    if found.state != "pass":
        return found
    return Finding.passed(f"dropped weights were not served ({refusal}); after a sync, {found.detail}")


def _sleeping(subject: Subject) -> bool:
    return all(r["sleeping"] for r in subject.pool.status(timeout=subject.deadline)["replicas"])


def graphs(subject: Subject) -> Finding:
    """Sync other weights under graphs that were captured before, and compare their results with those of no graph."""
    if subject.refused:
        return Finding.skipped(subject.refused)
    if subject.device != "cuda":
        return Finding.skipped(f"CUDA graphs are a GPU's; this engine runs on {subject.device}")
    captured = int(subject.facts.graph_tokens)
    if not captured:
        return Finding.skipped("the engine runs without graphs (enforce_eager)")
    prompt = subject.prompt(captured + 1, 3)  # the prefill of prompt and tokens is too long for a graph
    subject.hold("original")
    subject.say(prompt)
    subject.sync("known")
    sample = subject.say(prompt, tokens=12)
    (new,) = subject.score([sample])
    gap = subject.gap(sample.logprobs, new)
    subject.sync("original")
    (old,) = subject.score([sample])
    apart, stale = subject.gap(new, old), subject.gap(sample.logprobs, old)
    if not apart > POWER * subject.tolerance:
        return Finding.skipped(
            f"two sets of weights give log-probabilities only {apart:.2g} nats apart: what a graph read can't be told"
        )
    if gap <= subject.tolerance:
        alone = "" if len(prompt) > captured else "; no prompt is too long for a graph, so scoring used one too"
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
    original, known = subject.values("original"), subject.values("known")
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
