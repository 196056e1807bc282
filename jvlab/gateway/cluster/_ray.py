"""`jv.Lab(cluster="ray")`, driver side: starts or joins a Ray cluster and runs the lab's gateway on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, GatewayUnreachable
from jvlab.gateway.cluster._ray_replica import import_ray

if TYPE_CHECKING:
    from jvlab.gateway._serve import GatewayOptions

NAMESPACE = "jvlab"
START_SECONDS = 120.0
OBJECT_STORE_BYTES = 80 * 2**20  # of a cluster we start: nothing large goes through it


class RayCluster:
    """A connection to Ray, and the gateway's actor. `end` removes what is ours; a cluster we joined keeps running."""

    def __init__(
        self, address: str | None, gateway: GatewayOptions, name: str | None = None
    ) -> None:
        self._ray = ray = import_ray()
        self._folder = ""
        self._actor: Any = None
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
            remedy="is the cluster up? `ray status` shows it; without address= a local cluster is started",
        ) from error
