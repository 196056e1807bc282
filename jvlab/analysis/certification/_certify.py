"""`jv.certify`: run the checks on a running pool, and put its weights back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, JvlabError
from jvlab._progress import Progress
from jvlab._tracebacks import brief
from jvlab._version import __version__
from jvlab.analysis.certification._certificate import (
    CHECKS,
    Certificate,
    CertificateRow,
    Finding,
)
from jvlab.analysis.certification._subject import Subject, named_line

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool

CHECKING = 0.8  # of the time is for checks; the rest is left to restore the weights


def _function(name: str) -> Callable[[Subject], Finding]:
    """A check, by its name."""
    from jvlab.analysis.certification import _checks

    return getattr(_checks, name.replace(" ", "_"))


@brief
def certify(
    pool: Pool,
    checks: Sequence[str] | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    transport: str = "auto",
    seed: int = 0,
    timeout: float | Deadline = 1800.0,
    progress: bool | None = None,
) -> Certificate:
    """Can this engine configuration be trusted? Checks on the running pool, each with pass, fail or not applicable.

    checks     names of those to run; default: all. Whatever is run, the initial weights are put back at the
               end ("restored")
    params     what the pool serves, by checkpoint name; only needed for tensors that can't be read from its engines
    transport  of the syncs, as for `lab.connect`
    seed       of the known values and the prompts
    timeout    of everything; a fifth of it is left to put the weights back

    Known values are synced and read back from live memory, where vLLM's own loader would have put them: no digest is
    involved. Syncs are made to fail half-way; if the engine can, it is put to sleep, and an adapter is synced. No other
    request should run meanwhile, since the pool serves other weights. Links of this process let go of the pool and open
    again with their next call; version numbers keep counting. An adapter that a link has synced is cleared: sync it
    again.

    On a GPU the values are JAX arrays on the first GPU, so a second copy of the weights must fit there.

    >>> certificate = jv.certify(pool, ["arrives staged", "sleep 1"])     # by default all checks
    >>> certificate.ok, certificate["sleep 1"].state     # on a CPU
    (True, 'not applicable')
    >>> certificate.failed
    ()
    """
    wanted = _chosen(checks)
    whole = Deadline.of(timeout)
    began = time.perf_counter()
    subject = Subject(pool, Deadline(CHECKING * whole.left()), transport, seed)
    subject.open(params)
    rows: list[CertificateRow] = []
    try:
        with Progress(
            len(wanted), f"{pool.name}: certify", unit="check", show=progress
        ) as bar:
            for name in wanted:
                bar.remark(name)
                if name == "restored":
                    subject.deadline = whole
                rows.append(_row(name, _function(name), subject))
                bar.advance(1, name)
    # a bug, or an interrupt: the pool must not keep values of ours
    except BaseException:
        subject.deadline = whole
        if not subject.refused and subject.held != "original":
            _row("restored", _function("restored"), subject)
        raise
    finally:
        subject.close()
    return Certificate(
        Path(pool.model).name,
        _engine(subject),
        tuple(rows),
        int(pool.snapshot.version),
        time.perf_counter() - began,
        _notes(subject),
    )


def _chosen(checks: Sequence[str] | None) -> list[str]:
    if checks is None:
        return list(CHECKS)
    names = [checks] if isinstance(checks, str) else list(checks)
    if unknown := [name for name in names if name not in CHECKS]:
        raise ConfigError(
            f"no check is called {unknown[0]!r}", remedy=f"checks: {', '.join(CHECKS)}"
        )
    return [name for name in CHECKS if name in names or name == "restored"]


def _row(
    name: str, check: Callable[[Subject], Finding], subject: Subject
) -> CertificateRow:
    """Run one check; an error in it is a failure of what it checks, unless the time was up."""
    start = time.perf_counter()
    try:
        found = check(subject) if not subject.deadline.over else Finding.late()
    except JvlabError as error:
        subject.held = None
        said = f"it ended with {named_line(error)}"
        found = Finding.late(said) if subject.deadline.over else Finding.failed(said)
    seconds = time.perf_counter() - start
    return CertificateRow(
        name, CHECKS[name], found.state, found.detail, found.first_wrong, seconds
    )


def _engine(subject: Subject) -> dict[str, Any]:
    facts = subject.facts
    snapshot = subject.pool.snapshot
    return {
        "device": subject.device,
        "architecture": facts.architecture,
        "dtype": facts.dtype,
        "quantization": facts.quantization or "none",
        "tensor_parallel": int(snapshot.tensor_parallel) or 1,
        "replicas": len(subject.replicas),
        "graphs": f"up to {facts.graph_tokens} tokens"
        if facts.graph_tokens
        else "none",
        "adapters": int(facts.max_adapters),
        "transport": subject.transport,
        "vllm": facts.vllm_version,
        "jvlab": __version__,
    }


def _notes(subject: Subject) -> tuple[str, ...]:
    notes = []
    if subject.refused:
        notes.append(f"nothing was synced: {subject.refused}")
    elif subject.held != "original":
        notes.append(
            "the pool does not hold the weights of the beginning: sync yours again"
        )
    if subject.facts.max_adapters and not subject.refused:
        notes.append("an adapter that a link has synced was cleared: sync it again")
    return tuple(notes)
