"""One of every object that a notebook shows, with names that would break a page which does not escape them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import jvlab as jv
from jvlab.analysis.certification._certificate import Certificate, CertificateRow
from jvlab.lab._determinism import Case, DeterminismReport
from jvlab.lab._lab import Lab
from jvlab.lab._pool import Pool
from jvlab.lab._session import Session, Sessions, Turn
from jvlab.layout._compile import compile_plan
from jvlab.layout._tree import MeshSpec
from jvlab.record._record import Record
from jvlab.sync._coordinator import Coordinator
from jvlab.sync._diff import TensorDiff
from jvlab.sync._link import Link
from jvlab.sync._mapping import Mapping
from jvlab.sync._meaning import Meaning
from jvlab.sync._transaction import CheckReport, Outcome, SyncReport
from jvlab.sync._value_check import LeafEvidence
from jvlab.sync.diagnose._bisect import Bisection, Check
from jvlab.trainer._run import Run
from jvlab.wire import jvlab_pb2 as pb
from tests.layout.plan_world import Size, World, transformer
from tests.record.synthetic import made_up
from tests.views.batches import EVIL, compared, make_batch
from tests.views.panels.fake_stepper import stepper

NAME = '<b>&"'


def pool() -> Pool:
    """A pool that stands still: no gateway behind it."""
    replicas = [
        pb.ReplicaStatus(
            replica=f"{NAME}/0", stage="ready", state=pb.READY, pid=4711, seconds=12.5
        ),
        pb.ReplicaStatus(
            replica=f"{NAME}/1", stage="failed", state=pb.FAILED, cause=EVIL * 20
        ),
    ]
    made = Pool.__new__(Pool)
    made.snapshot = pb.PoolStatus(
        pool=NAME,
        model=f"/home/x/{NAME}",
        device="cpu",
        tensor_parallel=2,
        replicas=replicas,
    )
    made.name, made.model, made.listeners = NAME, f"/home/x/{NAME}", []
    made.client = SimpleNamespace(link=lambda: None)  # type: ignore[assignment]  # nobody answers
    return made


def lab() -> Lab:
    made = Lab.__new__(Lab)
    made._closed = made._detached = False
    made.known_pools = {NAME: pool()}
    made.name, made.address = "lab", "127.0.0.1:1"
    return made


def mapping() -> Mapping:
    """As large as a small model's, with evil in what people write: rules and reasons."""
    world = transformer(
        World(MeshSpec.parse("fsdp=3,tp=2"), 2, "bfloat16"),
        Size(layers=24),
        layout="einsum",
        rotary=True,
    )
    bindings = [
        dataclasses.replace(b, rule=f"{b.leaf} -> {NAME}", reason=NAME)
        for b in world.bindings
    ]
    return Mapping(
        compile_plan(world.leaves, bindings, world.layouts, title=NAME),
        bindings,
        world.layouts,
    )


def report() -> SyncReport:
    outcomes = (
        Outcome(NAME, "committed", 3, 10**6),
        Outcome("p/1", "dirty", 2, error=EVIL, differing=(NAME,) * 20),
    )
    seconds = {"total": 0.5, "pause": 0.1, "move": 0.25, "pack": 0.1}
    return SyncReport(
        3, 10**6, seconds, outcomes, notes=(EVIL,), transport=NAME, mode=NAME
    )


def meaning() -> Meaning:
    return Meaning(
        "failed",
        "value",
        EVIL,
        {NAME: LeafEvidence("different", 256, 3, 0.01, rule=EVIL)},
        {NAME: EVIL},
    )


def link(found: Mapping) -> Link:
    made = Link.__new__(Link)
    check = SimpleNamespace(meaning=meaning())
    made._agreed = SimpleNamespace(  # type: ignore
        plan=found.plan,
        mapping=found,
        transport="shm",
        reason=EVIL,
        meaning=check,
        part="model",
        folder="",
    )
    made.pool = pool()
    made.mode = "direct"
    made._coordinator = Coordinator(made.pool, made._agreed, None)
    made._coordinator.version = 3
    made._coordinator.drop = lambda: None  # type: ignore[method-assign]
    made._coordinator.last = report()
    made._on_close = lambda _: None
    return made


def record() -> Record:
    """A run's record with an evil name."""
    events = made_up(steps=30)
    events[0] = dataclasses.replace(events[0], run=NAME)  # type: ignore[call-arg]
    return Record.of(events)


def run(folder: Path) -> Run:
    from jvlab.trainer._grpo import grpo
    from tests.trainer.fake_pool import fresh_params, logprobs_fn, task, world

    fake, its_link = world()
    return grpo(
        (fresh_params(), logprobs_fn),
        fake,  # type: ignore[arg-type]
        its_link,  # type: ignore[arg-type]
        task(),
        folder=folder,
        steps=3,
        group_size=4,
        prompts_per_step=2,  # type: ignore[arg-type]
        progress=False,
        checkpoint_every=0,
    )


def bisection() -> Bisection:
    checks = (
        Check("state", "ok", "fine"),
        Check("tensor", "cause", EVIL),
        Check("version", "skipped", NAME),
    )
    diffs = (TensorDiff(NAME, 0, (3, 4), 1.0, 1.5, 0.5, 0.25, 0.75),)
    row = np.linspace(-3, 0, 40).astype(np.float32)
    return Bisection(
        "tensor",
        EVIL,
        NAME,
        checks,
        np.arange(40, dtype=np.int32),
        row,
        row + 0.01,
        diffs,
    )


def session() -> Session:
    """Two turns with a model that says evil things."""
    made = Session(pool(), EVIL, {})
    for number in range(2):
        prompt = np.arange(3 + 4 * number, dtype=np.int32)
        sample = jv.Sample(
            0,
            0,
            prompt,
            prompt[:2] + 3 + 4 * number,
            np.zeros(2),
            text=EVIL,
            versions=((0, 0, 2),),
            cached_tokens=2,
            replica=NAME,
        )
        made.turns.append(Turn.of(sample, NAME, (EVIL,)))
    return made


def determinism() -> DeterminismReport:
    cases = (
        Case(NAME, 3, 3, 3, 0.0, None),
        Case("b", 3, 3, 1, 1e-5, None),
        Case("c", 3, 1, 1, 0.5, 2),
    )
    scored = Case("scored", 3, 3, 2, 1e-6, None)
    return DeterminismReport(cases, 3, 8, {"stop": EVIL}, "cpu", 0, scored, (EVIL,))


def certificate() -> Certificate:
    rows = [
        CertificateRow(NAME, NAME, state, EVIL, NAME, 0.5)
        for state in ("pass", "fail", "not applicable")
    ]
    return Certificate(
        NAME, {"device": NAME, "dtype": EVIL}, tuple(rows), 3, 1.5, (EVIL,)
    )


def every(model: str, folder: Path) -> dict[str, Any]:
    """Name -> object."""
    found = mapping()
    policy = jv.Policy.from_pretrained(model)
    policy.config = dataclasses.replace(policy.config, family=NAME)
    check = CheckReport(3, report().outcomes, {("a", 0): 1}, 0.25, (EVIL,))
    return {
        "Lab": lab(),
        "Pool": pool(),
        "Link": link(found),
        "Mapping": found,
        "TransferPlan": found.plan,
        "Explanation": found.explain("layers.0.o"),
        "SyncReport": report(),
        "CheckReport": check,
        "Stepper": stepper(),
        "RolloutBatch": compared(make_batch(model, prompts=50)),
        "Policy": policy,
        "Run": run(folder / NAME),
        "Record": record(),
        "Bisection": bisection(),
        "Session": session(),
        "Sessions": Sessions([session()] * 30),
        "DeterminismReport": determinism(),
        "Meaning": meaning(),
        "Certificate": certificate(),
    }
