"""Run as a program: one real engine, a fake trainer, every kind of sync. Prints one line of facts as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

from jvlab._errors import EngineDirty, JvlabError, VerifyError
from jvlab.engine import _defaults
from jvlab.engine._engine import Engine
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._layout_codec import layout_from_plain
from jvlab.transport._choose import listen
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._core_channel import CoreOrders
from tests.engine.one_replica import OneReplica
from tests.engine.worker.fake_trainer import FakeTrainer, Values, checkpoint
from tests.live import stand_in

BEFORE = {"direct": [pb.PREPARE, pb.HALT, pb.MOVE], "staged": [pb.PREPARE, pb.MOVE]}
AFTER = {
    "direct": [pb.VERIFY, pb.COMMIT, pb.GO_ON],
    "staged": [pb.VERIFY, pb.HALT, pb.COMMIT, pb.GO_ON],
}
PROMPT = [5 + i % 90 for i in range(70)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class World:
    """The engine, the trainer, and the link between them."""

    def __init__(self, engine: Engine, trainer: FakeTrainer, ranks: int) -> None:
        self.engine, self.trainer, self.ranks = engine, trainer, ranks
        self.senders: list[Any] = []
        self.link = ""

    async def open(self, link: str) -> pb.ReplicaOutcome:
        for sender in self.senders:
            sender.close()
        room = self.trainer.plan.bucket_bytes
        self.senders = [
            listen("shm", slot_bytes=room, slots=3) for _ in range(self.ranks)
        ]
        order = pb.RolloutOpen(
            transport="shm",
            plan=self.trainer.plan.to_bytes(),
            index=0,
            ranks_json=[json.dumps([s.endpoint()]) for s in self.senders],
        )
        self.link = link
        ready = asyncio.create_task(
            asyncio.to_thread(lambda: [s.ready(120.0) for s in self.senders])
        )
        outcome = (
            await self.engine.sync(pb.RolloutSyncRequest(link=link, open=order))
        ).outcome
        assert not outcome.error, outcome
        await ready
        return outcome

    async def phases(self, phases: list[Any], **more: Any) -> pb.ReplicaOutcome:
        return (
            await self.engine.sync(
                pb.RolloutSyncRequest(link=self.link, phases=phases, **more)
            )
        ).outcome

    def expected(self, values: Values) -> pb.ReplicaDigests:
        rows = sorted(
            (name, rank, value)
            for (name, rank), value in self.trainer.digests(values).items()
        )
        return pb.ReplicaDigests(
            parameters=[r[0] for r in rows],
            ranks=[r[1] for r in rows],
            values=[r[2] for r in rows],
        )

    async def sync(
        self,
        values: Values,
        version: int,
        mode: str,
        between=lambda number: None,
        **terms: Any,
    ):
        first = await self.phases(
            BEFORE[mode], terms=pb.SyncTerms(version=version, mode=mode, **terms)
        )
        assert not first.error, first
        moved = await asyncio.to_thread(
            self.trainer.send, self.senders, values, version, 120.0, between
        )
        last = await self.phases(AFTER[mode], digests=self.expected(values))
        assert not last.error, last
        assert last.bytes == moved
        return last

    async def generated(self, more: int, requests: int = 1) -> None:
        """Until so many requests run, and the engine has made so many tokens more since."""
        meter = self.engine.meter
        async with asyncio.timeout(120):
            while meter.stats.running < requests:
                await asyncio.sleep(0.005)
            goal = meter.stats.generated_tokens + more
            while meter.stats.generated_tokens < goal:
                await asyncio.sleep(0.005)

    async def tokens(self, prompt: list[int], count: int, **more: Any) -> pb.Sample:
        work = [
            pb.PromptWork(
                prompt_index=0,
                prompt=pb.Prompt(tokens=pb.TokenIds(ids=prompt)),
                sample_indexes=[0],
            )
        ]
        sampling = json.dumps({**GREEDY, "max_tokens": count, **more})
        async for batch in self.engine.generate(work, sampling):
            return batch[0]
        raise AssertionError("no sample")


def both(sample: pb.Sample) -> list[Any]:
    return [list(sample.token_ids), list(sample.logprobs)]


def spans(sample: pb.Sample) -> list[list[int]]:
    return [[s.version, s.start, s.stop] for s in sample.versions]


async def exactness(w: World, b: Values, c: Values, facts: dict[str, Any]) -> None:
    """B was loaded by vLLM itself. C and back, both modes: answers must be those of vLLM's own load, to the bit."""
    own = both(await w.tokens(PROMPT, 24))
    seconds: dict[str, Any] = {}
    answers: dict[int, list[Any]] = {}
    steps = (
        (1, "direct", c),
        (2, "staged", b),
        (3, "staged", c),
        (4, "direct", b),
        (5, "staged", b),
    )
    for version, mode, values in steps:
        outcome = await w.sync(values, version, mode)
        seconds[f"{version} {mode}"] = {
            s.name: round(s.seconds, 5) for s in outcome.seconds
        }
        assert (outcome.state, outcome.version) == ("committed", version), outcome
        sample = await w.tokens(PROMPT, 24)
        answers[version] = both(sample)
        assert spans(sample) == [[version, 0, 24]], spans(sample)
        assert sample.cached_tokens == 0
    facts["own_again"] = [answers[v] == own for v in (2, 4, 5)]
    facts["c_twice"] = answers[1] == answers[3]
    facts["c_differs"] = answers[1] != own
    facts["seconds"] = seconds
    checked = await w.phases([pb.CHECK])
    facts["check"] = [checked.error, len(checked.found.values)]
    wrong = w.expected(c)
    checked = await w.phases([pb.CHECK], digests=wrong)
    facts["check_of_others"] = [checked.failed, len(checked.differing)]
    piece = b"".join([p async for p in w.engine.peek(0, "model.norm.weight")])
    facts["peek"] = piece == w.trainer.memory(b)[0, "model.norm.weight"].tobytes()


async def flying(w: World, b: Values, c: Values, facts: dict[str, Any]) -> None:
    """Requests in flight across a sync: their own KV, everybody else's answers those of an empty cache."""
    await w.sync(c, 10, "direct")
    fresh = both(await w.tokens(PROMPT, 24))
    await w.sync(b, 11, "direct")
    await w.tokens(PROMPT, 4)  # B's blocks are in the cache
    for version, mode in ((12, "direct"), (15, "staged")):
        # both seats of the engine
        longs = [asyncio.create_task(w.tokens(PROMPT, 300)) for _ in range(2)]
        await w.generated(12, 2)
        waiting = asyncio.create_task(w.tokens(PROMPT, 24))
        await asyncio.sleep(0.1)
        assert not any(t.done() for t in longs), "the model is too fast for this test"
        outcome = await w.sync(c, version, mode)
        facts[f"{mode} pause"] = {s.name: round(s.seconds, 5) for s in outcome.seconds}
        samples = [await t for t in longs]
        facts[f"{mode} crossing"] = [spans(s) for s in samples]
        queued = await waiting
        facts[f"{mode} waiting"] = [both(queued) == fresh, spans(queued)]
        after = await w.tokens(PROMPT, 24)
        facts[f"{mode} same prompt"] = both(after) == fresh
        turn = PROMPT + list(samples[0].token_ids)[:128]
        second = await w.tokens(turn, 8)
        await w.sync(c, version + 1, "direct")  # the same weights, and nothing cached
        facts[f"{mode} second turn"] = both(second) == both(await w.tokens(turn, 8))
        await w.sync(b, version + 2, "direct")
        await w.tokens(PROMPT, 4)


async def recompute(w: World, b: Values, c: Values, facts: dict[str, Any]) -> None:
    """kv="recompute": the rest of a request is what the new weights say of the whole of it."""
    task = asyncio.create_task(w.tokens(PROMPT, 300))
    await w.generated(12)
    await w.sync(b, 50, "direct", kv="recompute")
    sample = await task
    (_, _, cut), (version, _, _) = spans(sample)
    again = await w.tokens(PROMPT + list(sample.token_ids)[:cut], 40)
    facts["recompute"] = [
        version,
        list(again.token_ids) == list(sample.token_ids)[cut : cut + 40],
    ]
    task = asyncio.create_task(w.tokens(PROMPT, 300))
    await w.generated(12)
    await w.sync(c, 51, "staged", pause="abort")
    facts["abort"] = (await task).finish_reason


async def staged_goes_on(w: World, b: Values, facts: dict[str, Any]) -> None:
    """Generation runs while a staged move does."""
    task = asyncio.create_task(w.tokens(PROMPT, 400))
    await w.generated(5)
    seen: list[int] = []

    def slow(number: int) -> None:
        until = time.monotonic() + (2.0 if seen and number < 30 else 0.0)
        while (
            time.monotonic() < until
            and w.engine.meter.stats.generated_tokens == seen[-1]
        ):
            # a bucket for each token; for two seconds at most, if generation stands still
            time.sleep(0.002)
        seen.append(w.engine.meter.stats.generated_tokens)

    await w.sync(b, 60, "staged", slow)
    facts["generated_during_move"] = seen[-1] - seen[0]
    await task


async def failures(w: World, b: Values, c: Values, facts: dict[str, Any]) -> None:
    """Wrong bits, abandoned moves, refusals; and healing."""
    own = both(await w.tokens(PROMPT, 16))
    # staged, wrong digests: nothing changes
    await w.phases(BEFORE["staged"], terms=pb.SyncTerms(version=70, mode="staged"))
    await asyncio.to_thread(w.trainer.send, w.senders, c, 70)
    bad = await w.phases(AFTER["staged"], digests=w.expected(b))
    facts["mismatch"] = [bad.failed, bad.state, len(bad.differing) > 10]
    gone = await w.phases([pb.ABANDON])
    facts["staged abandoned"] = [
        gone.state,
        gone.version,
        both(await w.tokens(PROMPT, 16)) == own,
    ]
    # staged, abandoned in the middle of the move: the channels are gone, the version is old
    await w.phases(BEFORE["staged"], terms=pb.SyncTerms(version=70, mode="staged"))
    gone = await w.phases([pb.ABANDON])
    facts["moving abandoned"] = [gone.state, both(await w.tokens(PROMPT, 16)) == own]
    refused = await w.phases(
        [pb.PREPARE], terms=pb.SyncTerms(version=70, mode="staged")
    )
    facts["closed channels"] = refused.error
    await w.open("second")
    # direct, abandoned: dirty, and refuses
    await w.phases(BEFORE["direct"], terms=pb.SyncTerms(version=70, mode="direct"))
    gone = await w.phases([pb.ABANDON])
    stats = await w.engine.stats()
    facts["dirty"] = [gone.state, gone.version, stats.dirty]
    for name, call in (
        ("generate", w.tokens(PROMPT, 4)),
        ("resume", w.engine.steer(pb.SteerCall(what=pb.RESUME))),
    ):
        try:
            await call
            facts[f"dirty {name}"] = "went through"
        except EngineDirty as error:
            facts[f"dirty {name}"] = str(error)[:6]
    await w.open("third")
    healed = await w.sync(c, 70, "staged")
    count = len((await w.tokens(PROMPT, 4)).token_ids)
    facts["healed"] = [
        healed.state,
        healed.version,
        (await w.engine.stats()).dirty,
        count,
    ]
    # a bucket that never comes ends in the deadline, by its number
    await w.phases(
        BEFORE["staged"],
        terms=pb.SyncTerms(version=71, mode="staged", bucket_seconds=0.5),
    )
    late = await w.phases([pb.VERIFY], digests=w.expected(b), seconds=3)
    facts["late"] = [late.failed, late.error]
    await w.phases([pb.ABANDON])
    # paused by the user before: stays so
    await w.open("fourth")
    await w.engine.steer(pb.SteerCall(what=pb.PAUSE, mode="keep"))
    await w.sync(b, 72, "direct")
    task = asyncio.create_task(w.tokens(PROMPT, 4))
    done, _ = await asyncio.wait({task}, timeout=0.5)
    facts["user pause kept"] = not done
    await w.engine.steer(pb.SteerCall(what=pb.RESUME))
    await asyncio.wait_for(task, 120)


async def staged_swap(w: World, trainer: CoreOrders, facts: dict[str, Any]) -> None:
    """The end of a staged sync as the real core runs it, in one call, a request in flight."""
    expected = pb.ReplicaDigests(
        replica="r/0", parameters=stand_in.NAMES, ranks=[0, 0], values=stand_in.DIGESTS
    )
    terms = pb.SyncTerms(
        version=83,
        mode="staged",
        verify="full",
        pause="keep",
        kv="keep",
        bucket_seconds=stand_in.SECONDS,
    )
    task = asyncio.create_task(w.tokens(PROMPT, 300))
    await w.generated(20)
    await asyncio.to_thread(trainer.prepare, terms, 60.0, lambda: None)
    await w.generated(20)  # it goes on meanwhile
    claimed = np.array(stand_in.DIGESTS, np.uint64).tobytes()
    reply = await asyncio.to_thread(
        trainer.swap, terms, 60.0, [expected], claimed, False
    )
    await asyncio.to_thread(trainer._stream.settle, 60.0)
    facts["swap"] = [
        reply.outcomes[0].state,
        sorted(s.name for s in reply.outcomes[0].seconds),
    ]
    facts["swap crossing"] = spans(await asyncio.wait_for(task, 120))


async def exchange(w: World, b: Values, c: Values, facts: dict[str, Any]) -> None:
    """A direct sync that the real core runs whole, called at its door, a request in flight; the card is a stand-in."""
    sync = w.engine._sync
    sync._ipc, sync.names = True, {0: stand_in.NAMES}
    await sync._open_core_channel(True)
    stream = OneReplica(w.engine.sync, asyncio.get_running_loop(), w.link)
    trainer = await asyncio.to_thread(CoreOrders, stream, "r/0", sync.core_channel)

    async def run(version: int, *values: int) -> str:
        terms = pb.SyncTerms(
            version=version,
            mode="direct",
            verify="full",
            pause="keep",
            kv="keep",
            bucket_seconds=stand_in.SECONDS,
        )
        nothing, claims = lambda: None, lambda: np.array(values, np.uint64).tobytes()
        try:
            if version != 81:
                await asyncio.to_thread(trainer.wake_up)
            reply = await asyncio.to_thread(
                trainer.direct, terms, 60.0, nothing, nothing, claims
            )
            return reply.outcomes[0].state
        except VerifyError as error:
            return str(error)

    task = asyncio.create_task(w.tokens(PROMPT, 300))
    await w.generated(20)
    first = await run(80, *stand_in.DIGESTS)
    facts["exchange crossing"] = spans(await asyncio.wait_for(task, 120))
    wrong, dirty = await run(81, 7, 8), (await w.engine.stats()).dirty
    again = await run(82, *stand_in.DIGESTS)
    count = len((await asyncio.wait_for(w.tokens(PROMPT, 4), 120)).token_ids)
    await asyncio.to_thread(stream.settle, 60.0)
    await staged_swap(w, trainer, facts)
    facts["exchange"] = [
        first,
        wrong,
        dirty,
        again,
        count,
        (await w.engine.stats()).weight_version,
    ]
    trainer.close()
    await asyncio.to_thread(stream.end)
    await sync._open_core_channel(False)
    sync._ipc = False


async def main(model: str, other: str, ranks: int, parts: list[str]) -> None:
    arguments = _defaults.engine_arguments(
        model,
        "cpu",
        ranks,
        "auto",
        {"max_model_len": 512, "max_num_seqs": 2, "block_size": 32},
    )
    if "exchange" in parts:
        arguments["worker_extension_cls"] = "tests.live.stand_in.Extension"
    engine = Engine(arguments, "cpu", "r/0")
    await engine.begin()
    facts: dict[str, Any] = {}
    try:
        tensors = [[t.name, list(t.shape), t.dtype] for t in checkpoint_tensors(model)]
        layouts = sorted(
            (layout_from_plain(p) for p in await engine.trace(tensors)),
            key=lambda x: x.rank,
        )
        world = World(engine, FakeTrainer.of(layouts), ranks)
        await world.open("first")
        b, c = checkpoint(model), checkpoint(other)
        for part in parts:
            start = time.perf_counter()
            match part:
                case "exactness" | "flying" | "recompute" | "failures" | "exchange":
                    await globals()[part](world, b, c, facts)
                case "staged_goes_on":
                    await staged_goes_on(world, b, facts)
            print(
                part,
                f"{time.perf_counter() - start:.1f} s",
                json.dumps(facts),
                file=sys.stderr,
                flush=True,
            )
        closed = (
            await engine.sync(pb.RolloutSyncRequest(link=world.link, close=True))
        ).outcome
        facts["closed"] = closed.error
        for sender in world.senders:
            sender.close()
    except JvlabError as error:
        facts["raised"] = str(error)
        raise
    finally:
        print("FACTS " + json.dumps(facts), flush=True)
        engine.close()


if __name__ == "__main__":
    asyncio.run(
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].split(","))
    )
