"""A pool's snapshot as plain values and short texts, for status, HTTP, metrics and views."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jvlab._names import model_words
from jvlab._states import State, state, worst
from jvlab.wire import jvlab_pb2 as pb

LEAVING = ("draining", "closed")  # after pool.scale: no longer part of the pool
# fields of a replica, and of its stats, that a summary has by their own names
OF_REPLICA = (
    "pid",
    "epoch",
    "served",
    "dirty",
    "stale",
    "beat_age",
    "restarts",
    "restarts_left",
    "awaited",
)
OF_STATS = (
    "running",
    "waiting",
    "kv_use",
    "tokens_per_s",
    "generated_tokens",
    "paused",
    "sleeping",
)


def staying(snapshot: Any) -> list[Any]:
    """The replicas that are not leaving; of a closed pool, all it had."""
    return [r for r in snapshot.replicas if snapshot.closed or r.stage not in LEAVING]


def pool_state(snapshot: Any) -> str:
    """One word for the whole pool."""
    if snapshot.closed:
        return "closed"
    stages = [replica.stage for replica in staying(snapshot)]
    leaving = len(snapshot.replicas) - len(stages)
    leaves = f", {leaving} draining" if leaving else ""
    if all(stage == "ready" for stage in stages):
        return f"ready{leaves}"
    counts = {
        "failed": stages.count("failed"),
        "lost": stages.count("lost"),
        "restarting": sum(map(is_returning, snapshot.replicas)),
    }
    for stage, count in counts.items():
        if count:
            ready = sum(
                is_well(replica, snapshot.sync) for replica in snapshot.replicas
            )
            return f"{ready}/{len(stages)} ready, {count} {stage}{leaves}"
    return (f"starting: {stages[0]}" if len(set(stages)) == 1 else "starting") + leaves


def model_name(snapshot: Any) -> str:
    return model_words(snapshot.model)


def pool_summary(snapshot: Any) -> dict[str, Any]:
    """A snapshot as plain values."""
    replicas = []
    for r in snapshot.replicas:
        s = r.stats
        replicas.append(
            {
                "replica": r.replica,
                "state": r.stage,
                "version": s.weight_version,
                "health": replica_health(r, snapshot.sync)[0],
                "ready": is_well(r, snapshot.sync),
                "in_flight": r.routed,
                "prefix_hit_rate": s.prefix_hits / s.prefix_queries
                if s.prefix_queries
                else 0.0,
                "cause": r.cause or None,
                "deaths": list(r.deaths),
                "acceptance_rate": _accepted([r]),
                "http_url": r.facts.http_url or None,
                "adapters": {a.name: a.version for a in s.adapters},
            }
            | {name: getattr(r, name) for name in OF_REPLICA}
            | {name: getattr(s, name) for name in OF_STATS}
        )
    queries = sum(r.stats.prefix_queries for r in snapshot.replicas)
    hits = sum(r.stats.prefix_hits for r in snapshot.replicas)
    facts = next((r.facts for r in snapshot.replicas if r.HasField("facts")), None)
    return {
        "pool": snapshot.pool,
        "model": snapshot.model,
        "state": pool_health(snapshot)[0],
        "device": snapshot.device,
        "version": snapshot.version,
        "trainer": snapshot.trainer or None,
        "sync": snapshot.sync or "idle",
        "routing": snapshot.routing,
        "tensor_parallel": snapshot.tensor_parallel,
        "http_url": snapshot.http_url or None,
        "dtype": facts.dtype if facts else None,
        "healthy": sum(is_well(r, snapshot.sync) for r in snapshot.replicas),
        "replicas": replicas,
        "in_flight": sum(r["in_flight"] for r in replicas),
        "tokens_per_s": sum(r["tokens_per_s"] for r in replicas),
        "prefix_hit_rate": hits / queries if queries else 0.0,
        "prefix_caching": facts.prefix_caching if facts else None,
        "speculative": _speculative(snapshot, facts),
    }


def _accepted(replicas: Any) -> float | None:
    """Share of drafted tokens that the model accepted; None before the first draft."""
    drafted = sum(r.stats.draft_tokens for r in replicas)
    return sum(r.stats.accepted_tokens for r in replicas) / drafted if drafted else None


def _speculative(snapshot: Any, facts: Any) -> dict[str, Any] | None:
    """How tokens are drafted, how often they are accepted, and whether the draft model is older than the weights."""
    if facts is None or not facts.speculative:
        return None
    stats = [r.stats for r in snapshot.replicas]
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for count in (c for s in stats for c in s.drafts):
        drafted[count.version] += count.drafted
        accepted[count.version] += count.accepted
    return {
        "method": facts.speculative,
        "acceptance_rate": _accepted(snapshot.replicas),
        "draft_tokens": sum(s.draft_tokens for s in stats),
        # of the newest versions
        "acceptance_by_version": {
            version: accepted[version] / count
            for version, count in sorted(drafted.items())
            if count
        },
        # a sync of the model does not write the draft model, which has a link of its own
        "draft_version": min((s.draft_version for s in stats), default=0)
        if facts.draft_weights
        else None,
        "draft_stale": facts.draft_weights
        and any(s.weight_version > s.draft_version for s in stats),
    }


def replica_state(replica: Any, sync: str = "") -> State:
    """The worst that is true of a replica. `sync`: the stage of the pool's open sync."""
    if replica.stage != "ready":
        return state(replica.stage)
    if replica.dirty and sync in ("", "idle"):  # during a sync, dirty is expected
        return state("dirty")
    if replica.stale:
        return state("stale")
    if replica.stats.sleeping:
        return state("asleep")
    if sync in ("halted", "moving", "verified") and (
        replica.stats.paused or replica.dirty
    ):
        return state("paused for a sync")
    return state("paused") if replica.stats.paused else state("ready")


def is_returning(replica: Any) -> bool:
    """Whether it died and is being started again."""
    starting = replica.stage not in ("ready", "lost", "failed", *LEAVING)
    return replica.stage == "restarting" or (starting and len(replica.deaths) > 0)


def absent(snapshot: Any) -> str:
    """Who is lost or being started again, and why; empty if nobody is."""
    words = [
        f"{r.replica} is {_words(r, r.stage)} ({r.cause})"
        for r in snapshot.replicas
        if r.stage == "lost" or is_returning(r)
    ]
    return ", ".join(words)


def _words(replica: Any, words: str) -> str:
    """A replica's state, with the number of its restart while it is being started again."""
    if not is_returning(replica):
        return words
    number = len(replica.deaths)
    restart = f"{number} of {number + replica.restarts_left}"
    if replica.stage == "restarting":
        return f"restarting ({restart})"
    return f"{words} (restart {restart})"


def out_of_sight(snapshot: pb.PoolStatus) -> pb.PoolStatus:
    """Of a pool whose gateway died and comes back: until it says more, no replica is known to be ready."""
    unknown = pb.PoolStatus()
    unknown.CopyFrom(snapshot)
    for replica in unknown.replicas:
        if replica.state == pb.READY:
            replica.state = pb.LOST
            replica.stage = "lost"
            replica.awaited = True
            replica.cause = "its gateway does not answer"
    return unknown


def is_well(replica: Any, sync: str = "") -> bool:
    """Whether it is up and holds weights that it may serve: "ready", for headlines that count."""
    return replica.stage == "ready" and replica_state(replica, sync).name not in (
        "dirty",
        "stale",
    )


def replica_health(replica: Any, sync: str = "") -> tuple[str, str]:
    """(text, tone) of a replica: the worst that is true of it; the tone is good, bad, idle or wait."""
    found = replica_state(replica, sync)
    if found.name == "paused for a sync":
        return f"{found.words}: {stage_word(sync)}", found.tone
    words = replica.stage if replica.stage != "ready" else found.words
    return _words(replica, words), found.tone


def pool_health(snapshot: Any, lost: bool = False) -> tuple[str, State]:
    """(text, state) for a pool's header: the worst of its replicas. `lost`: it was closed by the gateway's death."""
    if snapshot.closed:
        found = state("gone" if lost else "closed")
        return ("gone with its gateway" if lost else found.words), found
    here = staying(snapshot)
    found = worst([replica_state(r, snapshot.sync).name for r in here])
    text = pool_state(snapshot)
    if found.name == "ready" or any(r.stage != "ready" for r in here):
        return text, found
    worse = [r for r in here if replica_state(r, snapshot.sync) == found]
    words = replica_health(worse[0], snapshot.sync)[0]
    if len(worse) < len(here):
        words = f"{len(worse)} of {len(here)} {words}"
    return words, found


def waiting_for(snapshot: Any, me: str = "") -> str:
    """What work that does not arrive waits for, and what lets it continue; empty: nothing, its replicas work.

    `me`: this process, as the gateway knows it.
    """
    if snapshot.closed:
        return ""
    who = lambda name: "this process" if name == me else name
    if snapshot.paused_by:
        return f"{snapshot.pool} was paused by {who(snapshot.paused_by)}; pool.resume() lets it continue"
    if snapshot.asleep_by:
        return f"{snapshot.pool} was put to sleep by {who(snapshot.asleep_by)}; pool.wake() lets it continue"
    here = staying(snapshot)
    dirty = any(r.dirty for r in here)
    # a staged one halts late
    if snapshot.sync == "halted" or (dirty and snapshot.sync in ("moving", "verified")):
        how = "has open in a stepper" if snapshot.stepping else "runs"
        return (
            f"a sync that {who(snapshot.trainer)} {how} ({stage_word(snapshot.sync)})"
        )
    found = {r.replica: replica_state(r, snapshot.sync) for r in here}
    idle = all(state.name != "ready" for state in found.values())
    # with a replica that works, only those matter that hold some of the work
    late = [r for r in here if found[r.replica].name != "ready" and (idle or r.routed)]
    back = lambda r: f", after: {r.cause}" if is_returning(r) and r.cause else ""
    return ", ".join(
        f"{r.replica} is {_words(r, found[r.replica].words)}{back(r)}" for r in late
    )


def stage_word(sync: str) -> str:
    """A sync's stage for display; "verified" is shown as what it means so far."""
    return state(sync).words
