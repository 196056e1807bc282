"""`jv.Lab(cluster="ray")`, driver side: starts or joins a Ray cluster and runs the lab's gateway and trainers on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from jvlab._deadline import Deadline
from jvlab._errors import (
    ConfigError,
    DeadlineExceeded,
    GatewayUnreachable,
    TrainerLost,
)
from jvlab.gateway.cluster._ray_replica import (
    Failure,
    Resources,
    TrainerActor,
    actor_options,
    check_reach,
    import_ray,
    no_room,
)

if TYPE_CHECKING:
    from jvlab.gateway._serve import GatewayOptions
    from jvlab.wire.processes._labs import LabInfo

NAMESPACE = "jvlab"
START_SECONDS = 120.0
CAUSE_SECONDS = 5.0  # after one process failed, for another to say why
RESTARTS = 3
DIED = "died"
RANKS = {DIED: 0, "TrainerLost": 2}  # of what a process says, the first is the cause
OBJECT_STORE_BYTES = 80 * 2**20  # of a cluster we start: nothing large goes through it


class RayCluster:
    """A connection to Ray, and the gateway's actor. `end` removes what is ours; a cluster we joined keeps running."""

    def __init__(
        self, address: str | None, gateway: GatewayOptions, name: str | None = None
    ) -> None:
        self._ray = ray = import_ray()
        self._folder = ""
        self._actor: Any = None
        self._trainings: list[Training] = []
        self._connected = not ray.is_initialized()
        self._started = (
            self._connected and address is None and not os.environ.get("RAY_ADDRESS")
        )
        if self._connected:
            _connect(ray, address)
        elif (
            address not in (None, "auto")
            and ray.get_runtime_context().gcs_address != address
        ):
            raise ConfigError(
                f"this process is already connected to Ray at {ray.get_runtime_context().gcs_address}",
                remedy="leave address= out, or ray.shutdown() first",
            )
        try:
            remote = (address or "").startswith("ray://")
            self.content = self._start(name, gateway, remote)
        except BaseException:
            self.end(5.0)
            raise

    def _start(
        self, name: str | None, gateway: GatewayOptions, remote: bool
    ) -> dict[str, Any]:
        from jvlab.gateway import _launcher
        from jvlab.gateway.cluster._ray_actors import GatewayActor

        ray = self._ray
        lab = name or _launcher.new_name()
        if name is not None and _launcher.taken(name):
            raise ConfigError(
                f"a lab called {name!r} is running", remedy="choose another name"
            )
        # Detached: the lab outlives this process for its lease, like any lab, if the cluster does.
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 4,
            "name": lab,
            "namespace": NAMESPACE,
            "lifetime": "detached",
        }
        if not remote:  # on the trainer's node, if possible
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                here, soft=True
            )
        self._actor = (
            ray.remote(GatewayActor).options(**options).remote(lab, gateway, remote)
        )
        try:
            content = ray.get(self._actor.content.remote(), timeout=START_SECONDS)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise GatewayUnreachable(
                f"the gateway did not start on Ray: {error}",
                remedy="install the same version of jvlab on every node; see the cluster's logs",
            ) from error
        content["tls_ca"] = None
        if content["pem"]:
            from jvlab.wire._channels import write_private

            self._folder = tempfile.mkdtemp(prefix="jvlab-ray-")
            content["tls_ca"] = str(
                write_private(os.path.join(self._folder, "cert.pem"), content["pem"])
            )
            content["address"] = content["public_address"]
        return content

    def train(
        self,
        program: str | Callable[..., Any],
        arguments: Sequence[str],
        processes: int,
        place: Mapping[str, Any],
        env: dict[str, str],
        lab: LabInfo,
        deadline: Deadline,
    ) -> Training:
        """For `Lab.train`."""
        if processes < 1:
            raise ConfigError(f"at least 1 process must train, not {processes}")
        if not callable(program):
            program = os.path.abspath(program)
        made = Training(
            self._ray,
            program,
            arguments,
            processes,
            Resources.of(place),
            env,
            lab,
            deadline,
        )
        self._trainings.append(made)
        return made

    def end_training(self, timeout: float) -> None:
        """End every process of `train`."""
        deadline = Deadline(timeout)
        for training in self._trainings:
            training.stop(max(0.1, deadline.left()))

    def check_detach(self) -> None:
        """Raise if this lab can't outlive this process."""
        if self._started:
            raise ConfigError(
                "this lab runs on a Ray cluster that this process started and that ends with it",
                remedy='start one with `ray start --head` and use jv.Lab(cluster="ray", address="auto")',
            )

    def guard(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call it; on failure, remove everything of ours from the cluster."""
        try:
            call(*arguments)
        except BaseException:
            self.end(5.0)
            raise

    def end(self, timeout: float) -> None:
        """Wait for the gateway to end, then release everything. Can be called twice."""
        ray = self._ray
        actor = self._actor
        self._actor = None
        if actor is not None and ray.is_initialized():
            # gone already, or too slow: it is killed below
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.wait_ended.remote(), timeout=timeout)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)
        if self._connected:
            self._connected = False
            ray.shutdown()  # no deadline: Ray's, which takes none
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


class Training:
    """A program in several processes on Ray, each an actor; `lab.train` starts it.

    No process of `jax.distributed` can go on without one of the others. So if one dies, all are started again, each in
    its place, and run the program from its beginning.
    """

    def __init__(
        self,
        ray: Any,
        program: str | Callable[..., Any],
        arguments: Sequence[str],
        processes: int,
        resources: Resources,
        env: dict[str, str],
        lab: LabInfo,
        deadline: Deadline,
    ) -> None:
        """Find room, and start; raises if there is none."""
        from ray.util.placement_group import placement_group, remove_placement_group

        self.processes = processes
        self.restarts = 0  # how often a process died and all were started again
        self._ray = ray
        self._program = program
        self._arguments = arguments
        self._resources = resources
        self._given = (env, lab)
        self._stopping = threading.Event()
        self._result: Future[list[Any]] = Future()
        bundle = resources.bundle("cpu", 1, {})
        nodes = [resources.node(number, ray.nodes()) for number in range(processes)]
        labels = [{"ray.io/node-id": node} for node in nodes if node is not None]
        where: Any = labels or None
        self._group = placement_group(
            # Ray has no empty bundles
            [bundle or {"CPU": 0.001}] * processes,
            strategy="PACK",
            bundle_label_selector=where,
        )
        try:
            self._find_room(deadline)
            check_reach(self._group, lab.address)
        except BaseException:
            remove_placement_group(self._group)
            raise
        threading.Thread(target=self._drive, name="jvlab-training", daemon=True).start()

    def _find_room(self, deadline: Deadline) -> None:
        """Wait until Ray has placed all processes, which takes no time unless a node was lost."""
        if not self._group.wait(deadline.left()):
            raise no_room(
                f"{self.processes} × {self._resources.bundle('cpu', 1, {})}",
                deadline.seconds,
                'ask for less with train(place={"cpus": ..., "gpus": ...}), or for fewer processes',
            )

    def _drive(self) -> None:
        """A thread: from the first start to the end, after which nothing of it is left on Ray."""
        from ray.util.placement_group import remove_placement_group

        try:
            try:
                ends = self._complete()
            finally:
                # else Ray would start a cluster
                if self._ray.is_initialized():
                    remove_placement_group(self._group)
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(ends)

    def _complete(self) -> list[Any]:
        """Run the program in all processes, and again if one of them dies."""
        given = self._resources.restarts
        left = RESTARTS if given is None else given
        while True:
            ends = self._run()
            failures = {
                number: end
                for number, end in enumerate(ends)
                if isinstance(end, Failure)
            }
            if not failures:
                return ends
            # others fail because of it, and may only have heard of it
            cause = min(failures, key=lambda n: RANKS.get(failures[n].kind, 1))
            if failures[cause].kind != DIED or not left:
                raise TrainerLost(
                    f"trainer process {cause} of {self.processes} {failures[cause].text}",
                    remedy="if it died, its log is in Ray's; an exception is not repeated: mend it, call train again",
                )
            left -= 1
            self.restarts += 1

    def _run(self) -> list[Any]:
        """In new processes: what came of it in each, None if it was not waited for."""
        self._find_room(Deadline(START_SECONDS))
        ray = self._ray
        bundle = self._resources.bundle("cpu", 1, {})
        made = ray.remote(TrainerActor)
        actors = [
            made.options(**actor_options(bundle, self._group, number)).remote(
                number, *self._given
            )
            for number in range(self.processes)
        ]
        try:
            coordinator = ray.get(actors[0].listen.remote(), timeout=START_SECONDS)
            calls = [
                actor.run.remote(
                    self._program, self._arguments, coordinator, self.processes
                )
                for actor in actors
            ]
            ends: dict[Any, Any] = {}
            patience: Deadline | None = None
            # no deadline while all go well: training takes as long as it takes
            while len(ends) < len(calls) and not (patience and patience.over):
                if self._stopping.is_set():
                    raise TrainerLost("the training was stopped")
                waiting = [call for call in calls if call not in ends]
                for call in ray.wait(waiting, timeout=1.0)[0]:
                    ends[call] = self._end_of(call)
                    if isinstance(ends[call], Failure):
                        patience = patience or Deadline(CAUSE_SECONDS)
            return [ends.get(call) for call in calls]
        except ray.exceptions.RayError as error:
            return [Failure(DIED, f"did not start: {error}")]
        finally:
            for actor in actors if ray.is_initialized() else ():
                ray.kill(actor)

    def _end_of(self, call: Any) -> Any:
        """What came of a call that is over."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(call, timeout=START_SECONDS)
        except exceptions.RayActorError as error:
            return Failure(DIED, f"died: {error}")
        except exceptions.RayError as error:
            return Failure("", f"failed: {error}")

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for the program's end: what it returned in each process. Raises TrainerLost if it failed."""
        deadline = Deadline.of(timeout)
        try:
            return self._result.result(deadline.left())
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self!r} has not ended within {deadline.seconds:g} s",
                remedy="wait again, or stop()",
            ) from None

    def stop(self, timeout: float = 30.0) -> None:
        """End all its processes, wherever they are in the program."""
        self._stopping.set()
        with contextlib.suppress(TimeoutError):
            self._result.exception(Deadline.of(timeout).left())

    def __repr__(self) -> str:
        state = "running"
        if self._result.done():
            state = "failed" if self._result.exception(0) else "finished"
        name = os.path.basename(str(getattr(self._program, "__name__", self._program)))
        return f"Training({name}, {self.processes} processes, {state})"


def _connect(ray: Any, address: str | None) -> None:
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
    if address is None and not os.environ.get("RAY_ADDRESS"):
        options |= {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises plain exceptions too
        raise ConfigError(
            f"Ray at {address or 'this machine'} can't be reached: {error}",
            remedy="is the cluster up? `ray status` shows it; one with a token needs RAY_AUTH_MODE=token here, too; "
            "without address= a local cluster is started",
        ) from error
