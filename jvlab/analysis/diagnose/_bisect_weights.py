"""Bisection checks of the weights: the replicas' state, what is in memory, and which version it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jvlab._errors import JvlabError
from jvlab.analysis.diagnose._bisect_base import NAMED, Base, Found, names
from jvlab.analysis.diagnose._bisection import Check, largest

if TYPE_CHECKING:
    from jvlab.sync._diff import TensorDiff


class WeightChecks(Base):
    """Does the engine hold the trainer's weights? Each check returns its evidence, or raises `Found`."""

    def state(self) -> Check:
        """Is every replica ready, clean and running?"""
        self.status = self.pool.status(timeout=self.timeout)
        for r in self.status["replicas"]:
            for flag, wrong, remedy in (
                ("dirty", "is dirty: it holds parts of two versions", "link.sync(params)"),
                ("stale", "missed the last sync and is not served from", "link.sync(params)"),
                ("sleeping", "is asleep", "pool.wake()"),
                ("paused", "is paused", "pool.resume()"),
            ):
                if r[flag]:
                    if flag == "dirty":
                        self._dirty_by_meaning(str(r["replica"]))
                    text = f"{r['replica']} {wrong}"
                    raise Found(Check("state", "cause", text, {flag: True}), text, remedy)
            if r["state"] != "ready":
                text = f"{r['replica']} is not ready: {r['state']}"
                raise Found(Check("state", "cause", text), text, "pool.wait(), or pool.restart(index)")
        count = len(self.status["replicas"])
        return Check("state", "ok", f"{count} of {count} replicas ready, none dirty, paused or stale")

    def _dirty_by_meaning(self, replica: str) -> None:
        """A failed meaning check marks replicas dirty too: then the cause is the mapping."""
        meaning = getattr(self.link, "meaning", None)
        if getattr(meaning, "state", "") != "failed":
            return
        if (wrong := self._by_value()) is not None:
            raise self._wrong_rule(wrong, None)
        text = f"{replica} is dirty because it does not compute what the trainer does: {getattr(meaning, 'why', '')}"
        raise Found(
            Check("rule", "cause", text, {"how": "function"}),
            f"wrong rule: {text}",
            'link = lab.connect(params, pool, meaning="off"); link.sync(params); link.bisect(prompt, policy) names it',
        )

    def tensor(self) -> Check:
        """Does live memory still hold what the last sync committed?"""
        if not self.link.version:
            return Check("tensor", "skipped", "nothing was synced yet: there is no commit to compare with")
        report = self.link.verify(timeout=self.timeout)
        if report.differing:
            shown = names(report.differing)
            self._read_values(report.differing)
            text = f"{len(report.differing)} of {len(report.digests)} digests differ from the last commit: {shown}"
            raise Found(
                Check("tensor", "cause", text + self._largest_change(), {"differing": list(report.differing)}),
                f"the engine's memory changed after version {self.link.version} was verified: {shown}",
                "link.sync(params) writes it again; if it recurs, something else writes there",
            )
        partly = sum(report.evidence.get(how, 0) for how in ("sampled", "loader", "unread"))
        note = f"; {partly} of them are packed and were read back in part (report.evidence)" if partly else ""
        text = f"all {len(report.digests)} digests of live memory are those of version {report.version}{note}"
        return Check("tensor", "ok", text, {"digests": len(report.digests)})

    def version(self) -> Check:
        """Is it the version that the trainer holds?"""
        mine = self.link.version
        found = {r["replica"]: int(r["version"]) for r in self.status["replicas"]}
        behind = [f"{name} holds {v}" for name, v in found.items() if v != mine]
        if behind:
            text = f"the link's last version is {mine}, but {names(behind)}"
            raise Found(Check("version", "cause", text, found), f"stale version: {text}", "link.sync(params)")
        if self.given is not None and (old := sorted(set(self.given.versions.tolist()) - {mine})):
            text = f"tokens of this sample were made by version {names(old)}; the engine holds {mine} now"
            remedy = "compare it with the parameters of that version, or generate again"
            raise Found(
                Check("version", "cause", text, {"sample": old, "engine": mine}), f"stale version: {text}", remedy
            )
        if self.params is None:
            return Check("version", "ok", f"every replica holds version {mine}; no trainer was given to compare with")
        report = self.link.verify(self.params, timeout=self.timeout)
        read = {f"{name} (rank {rank})" for name, rank in report.digests}
        differing = [entry for entry in report.differing if entry.partition(": ")[2] in read]
        unread = len(report.differing) - len(differing)
        if differing:
            if not mine and (wrong := self._by_value()) is not None:  # a sync would make it worse
                raise self._wrong_rule(wrong, None)
            self._read_values(differing)
            text = f"{len(differing)} of {len(report.digests)} digests differ from the trainer's parameters now"
            facts = {"engine": mine, "differing": differing}
            check = Check("version", "cause", f"{text}: {names(differing)}{self._largest_change()}", facts)
            raise Found(check, f"stale version: {self._why_old()}", "link.sync(policy.params)")
        if unread:  # packed by the engine before the first sync: only its log-probabilities can be compared
            return self._unread(unread)
        text = f"every replica holds version {mine}, bit for bit what the rules make of the trainer's parameters"
        return Check("version", "ok", text)

    def _why_old(self) -> str:
        if self.link.version:
            return f"the trainer has moved on since version {self.link.version} was synced"
        return "nothing was ever synced: the engine holds what it loaded itself"

    def _unread(self, count: int) -> Check:
        text = f"{count} parameters were packed before a first sync and can't be read"
        if self.policy is None:
            return Check("version", "skipped", f"{text}; sync once, then bisect again")
        self._take(self._draw(skip_reading_prefix_cache=True) if self.given is None else self.given)
        assert self.engine is not None
        self.trainer = self._by_trainer(self.policy, self.params)
        gap = largest(self.engine, self.trainer)
        if gap <= self.tolerance:
            return Check("version", "ok", f"{text}, but the engine's numbers are the trainer's, to {gap:.2g} nats")
        check = Check("version", "cause", f"{text}; the engine's numbers are {gap:.2g} nats from the trainer's")
        raise Found(check, f"stale version: {self._why_old()}", "link.sync(policy.params)")

    def _read_values(self, differing: Any) -> None:
        """Diff the values of the first tensors that differ, if they can be read."""
        if self.params is None:
            return
        seen: list[TensorDiff] = []
        for entry in differing[:NAMED]:
            name = entry.partition(": ")[2].rpartition(" (rank ")[0]
            if any(t.parameter == name for t in seen):
                continue
            try:
                seen += self.link.diff(name, self.params)
            except JvlabError:  # packed or opaque: only its digest is available
                continue
        self.tensors = tuple(seen)

    def _largest_change(self) -> str:
        if not self.tensors:
            return ""
        worst = max(self.tensors, key=lambda t: t.max_change)
        return f"; the largest change is {worst.max_change:.3g}, in {worst.parameter}"
