"""Trainers of several processes, as the gateway sees them: who belongs together, and who is notified when one leaves.

    forming ──all members joined──▶ running ──one leaves, however──▶ over (the others' streams end, with the reason)

A table without I/O (`TeamTable`), and the gRPC stream around it (`Teams`). The gateway passes messages on unread: what
member 0 says goes to all others, what another says to member 0, and bad news to all. Two trainers that give different
`team` texts are never mixed. Who joins as a member that is there already takes its place: the older one is a ghost.
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
Letter = tuple["Seat", pb.TeamEvent]  # to whom, what


@dataclass(eq=False)
class Seat:
    """One member's place in a team."""

    member: int
    name: str
    team: TrainerTeam
    letters: asyncio.Queue[pb.TeamEvent] = field(default_factory=asyncio.Queue, repr=False)


@dataclass(eq=False)
class TrainerTeam:
    """The processes of one trainer."""

    size: int
    seats: dict[int, Seat] = field(default_factory=dict)
    running: bool = False

    def roll(self) -> pb.TeamEvent:
        names = [self.seats[k].name if k in self.seats else "" for k in range(self.size)]
        return pb.TeamEvent(roll=pb.TeamRoll(names=names, complete=self.running))


class TeamTable:
    """Every team. Calls return letters, in the order in which they are to be delivered."""

    def __init__(self) -> None:
        self._forming: dict[tuple[str, str, int], TrainerTeam] = {}

    def join(self, order: pb.TeamJoin) -> tuple[Seat, list[Letter]]:
        """Take a seat; raises if there can be none."""
        problem = ""
        if not 2 <= order.size <= MAX_MEMBERS:
            problem = f"a team of {order.size}: 2 to {MAX_MEMBERS} processes make one"
        elif order.member >= order.size:
            problem = f"member {order.member} of {order.size}: members count from 0"
        if problem:
            raise refused(problem)
        key = (order.pool, order.team, order.size)
        team = self._forming.setdefault(key, TrainerTeam(order.size))
        letters: list[Letter] = []
        if (ghost := team.seats.get(order.member)) is not None:
            letters.append((ghost, _over(f"{order.name} joined as member {order.member} too, after {ghost.name}")))
        seat = team.seats[order.member] = Seat(order.member, order.name, team)
        if len(team.seats) == team.size:
            team.running = True
            del self._forming[key]
        return seat, letters + self._call_roll(team)

    def _call_roll(self, team: TrainerTeam) -> list[Letter]:
        """To everybody once all are there; until then to the leader, who says whom it waits for."""
        roll = team.roll()
        return [(seat, roll) for seat in team.seats.values() if team.running or not seat.member]

    def deliver(self, seat: Seat, payload: bytes, to_all: bool = False) -> list[Letter]:
        """A message, to whom it goes."""
        team = seat.team
        if not team.running:
            raise refused("a message before all members are there")
        event = pb.TeamEvent(delivery=pb.TeamDelivery(member=seat.member, payload=payload))
        whole = to_all or not seat.member
        return [(other, event) for other in team.seats.values() if other is not seat and (whole or not other.member)]

    def leave(self, seat: Seat) -> list[Letter]:
        """Its stream ended, however it did."""
        team = seat.team
        if team.seats.get(seat.member) is not seat:  # another has its place, or the team is over
            return []
        del team.seats[seat.member]
        if not team.running:
            self._forming = {key: t for key, t in self._forming.items() if t is not team or t.seats}
            return self._call_roll(team)
        rest, team.seats = list(team.seats.values()), {}
        over = _over(f"member {seat.member} of {team.size} ({seat.name}) has gone")
        return [(other, over) for other in rest]


def _over(why: str) -> pb.TeamEvent:
    return pb.TeamEvent(over=why)


class Teams:
    """The streams of every team's members."""

    def __init__(self) -> None:
        self.table = TeamTable()

    async def serve(self, context: Context) -> None:
        """One member's stream, until it or the team ends."""
        first = await context.read()
        if first is EOF or first.WhichOneof("kind") != "join":
            raise refused("the first message of a team must be join")
        seat, letters = self.table.join(first.join)
        listening = asyncio.create_task(self._listen(seat, context))
        try:
            self._deliver(letters)
            while True:
                event = await seat.letters.get()
                await context.write(event)
                if event.WhichOneof("kind") == "over":
                    return
        finally:  # also when the call is cancelled: a process that was killed ends here
            listening.cancel()
            self._deliver(self.table.leave(seat))

    async def _listen(self, seat: Seat, context: Context) -> None:
        why = "it ended its stream"
        try:
            while (message := await context.read()) is not EOF:
                self._deliver(self.table.deliver(seat, message.payload, message.to_all))
        except CallFailed as error:
            why = error.message
        except Exception as error:  # however a stream breaks: this member is gone, and the others are notified
            why = f"its stream broke: {error}"
        seat.letters.put_nowait(_over(why))

    def _deliver(self, letters: list[Letter]) -> None:
        for seat, event in letters:
            seat.letters.put_nowait(event)
