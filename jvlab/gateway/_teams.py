"""Trainers of several processes (teams): membership, and messages between members.

    forming ──all members joined──▶ running ──one leaves──▶ over (the others' streams end, with the reason)

A table without I/O (`TeamTable`), and the gRPC stream around it (`Teams`). The gateway forwards messages unread: those
of member 0 go to all others, those of another to member 0, or to all if marked so. Trainers with different `team` texts
are never mixed. A process that joins as a member that is already there replaces it: the older one is a dead stream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc
import grpc.aio

from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._rpc_errors import CallFailed, refused

MAX_MEMBERS = 65_536
EOF: object = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
Context = grpc.aio.ServicerContext
Delivery = tuple["TeamMember", pb.TeamEvent]  # recipient, event


@dataclass(eq=False)
class TeamMember:
    """One process of a team, and the events to send to it."""

    member: int
    name: str
    team: TrainerTeam
    outbox: asyncio.Queue[pb.TeamEvent] = field(default_factory=asyncio.Queue, repr=False)


@dataclass(eq=False)
class TrainerTeam:
    """The processes of one trainer."""

    size: int
    members: dict[int, TeamMember] = field(default_factory=dict)
    running: bool = False

    def roll(self) -> pb.TeamEvent:
        names = [self.members[k].name if k in self.members else "" for k in range(self.size)]
        return pb.TeamEvent(roll=pb.TeamRoll(names=names, complete=self.running))


class TeamTable:
    """Every team. Methods return the events to deliver, in order."""

    def __init__(self) -> None:
        self._forming: dict[tuple[str, str, int], TrainerTeam] = {}

    def join(self, order: pb.TeamJoin) -> tuple[TeamMember, list[Delivery]]:
        """Add a member; raises if its number or the team's size is invalid."""
        problem = ""
        if not 2 <= order.size <= MAX_MEMBERS:
            problem = f"a team of {order.size}: 2 to {MAX_MEMBERS} processes make one"
        elif order.member >= order.size:
            problem = f"member {order.member} of {order.size}: members count from 0"
        if problem:
            raise refused(problem)
        key = (order.pool, order.team, order.size)
        team = self._forming.setdefault(key, TrainerTeam(order.size))
        deliveries: list[Delivery] = []
        if (old := team.members.get(order.member)) is not None:
            deliveries.append((old, _over(f"{order.name} joined as member {order.member} too, after {old.name}")))
        member = team.members[order.member] = TeamMember(order.member, order.name, team)
        if len(team.members) == team.size:
            team.running = True
            del self._forming[key]
        return member, deliveries + self._rolls(team)

    def _rolls(self, team: TrainerTeam) -> list[Delivery]:
        """The roll, to everybody once all have joined; until then to the leader, which reports whom it waits for."""
        roll = team.roll()
        return [(member, roll) for member in team.members.values() if team.running or not member.member]

    def deliver(self, sender: TeamMember, payload: bytes, to_all: bool = False) -> list[Delivery]:
        """A message for each of its recipients."""
        team = sender.team
        if not team.running:
            raise refused("a message before all members are there")
        event = pb.TeamEvent(delivery=pb.TeamDelivery(member=sender.member, payload=payload))
        everyone = to_all or not sender.member
        others = [other for other in team.members.values() if other is not sender]
        return [(other, event) for other in others if everyone or not other.member]

    def leave(self, member: TeamMember) -> list[Delivery]:
        """Its stream has ended."""
        team = member.team
        if team.members.get(member.member) is not member:  # it was replaced, or the team is over
            return []
        del team.members[member.member]
        if not team.running:
            self._forming = {key: t for key, t in self._forming.items() if t is not team or t.members}
            return self._rolls(team)
        rest, team.members = list(team.members.values()), {}
        over = _over(f"member {member.member} of {team.size} ({member.name}) has gone")
        return [(other, over) for other in rest]


def _over(why: str) -> pb.TeamEvent:
    return pb.TeamEvent(over=why)


class Teams:
    """The streams of every team's members."""

    def __init__(self) -> None:
        self.table = TeamTable()

    async def serve(self, context: Context) -> None:
        """One member's stream, until it or the team ends."""
        first = await context.read()  # no deadline: only its own call waits, and ends with its connection
        if first is EOF or first.WhichOneof("kind") != "join":
            raise refused("the first message of a team must be join")
        member, deliveries = self.table.join(first.join)
        reading = asyncio.create_task(self._read(member, context))
        try:
            self._deliver(deliveries)
            while True:
                # no deadline: members are silent between two syncs; `_read` reports the end of the stream
                event = await member.outbox.get()
                await context.write(event)
                if event.WhichOneof("kind") == "over":
                    return
        finally:  # also when the call is cancelled, as when the process was killed
            reading.cancel()
            self._deliver(self.table.leave(member))

    async def _read(self, member: TeamMember, context: Context) -> None:
        why = "it ended its stream"
        try:
            # no deadline: members are silent between two syncs; their connections are watched
            while (message := await context.read()) is not EOF:
                self._deliver(self.table.deliver(member, message.payload, message.to_all))
        except CallFailed as error:
            why = error.message
        except Exception as error:  # however a stream breaks, the others must be notified
            why = f"its stream broke: {error}"
        member.outbox.put_nowait(_over(why))

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for member, event in deliveries:
            member.outbox.put_nowait(event)
