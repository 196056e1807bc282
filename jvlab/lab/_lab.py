"""`Lab`: a gateway process and the pools it runs."""

from __future__ import annotations

import asyncio
import builtins
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jvlab import _faces
from jvlab._deadline import LONGEST, Deadline, check_timeout
from jvlab._errors import (
    ConfigError,
    ControlError,
    DeadlineExceeded,
    GatewayUnreachable,
    LabNotFound,
    UnknownName,
)
from jvlab._names import check_name, own_name
from jvlab._tracebacks import brief
from jvlab.gateway._serve import GatewayOptions
from jvlab.lab import _script_end
from jvlab.lab._launch_settings import LaunchArguments, LaunchOptions, shows_options
from jvlab.lab._pool import Pool
from jvlab.record._events import runs
from jvlab.record._record import Record, calls_of
from jvlab.sync._connections import Connections, ConnectOptions, check_pool
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._channels import (
    Trust,
    fetch_pinned,
    host_of,
    join_line,
    write_private,
)
from jvlab.wire._client import Client
from jvlab.wire._security import Tls, is_loopback
from jvlab.wire.processes._identity import Identity
from jvlab.wire.processes._labs import LabInfo, find_lab, kill_tree, list_labs

if TYPE_CHECKING:
    from typing import Unpack

    from matplotlib.figure import Figure

    from jvlab.gateway.cluster._ray import RayCluster, Training
    from jvlab.sync._link import Link
    from jvlab.sync._publish import Follower
    from jvlab.views._cards import ProcessRow
    from jvlab.views._timeline import Timeline
    from jvlab.views.panels._live import Panel


# Labs on Ray and SLURM: what `Lab` calls for them.


def open_cluster(
    cluster: str | None,
    address: str | None,
    gateway: GatewayOptions,
    name: str | None = None,
) -> RayCluster | None:
    """The cluster on which the lab's gateway now runs; None for this machine."""
    if cluster is None:
        if address is not None:
            raise ConfigError(
                "address= needs a cluster",
                remedy='pass cluster="ray" too; jv.Lab.attach(address, token) rejoins a lab',
            )
        return None
    if cluster != "ray":
        raise ConfigError(
            f"cluster={cluster!r} is not known",
            remedy='"ray"; for SLURM use jv.Lab.from_slurm() inside a job',
        )
    defaults = GatewayOptions()
    for option in ("tls", "host", "port", "metrics_port"):
        if getattr(gateway, option) != getattr(defaults, option):
            raise ConfigError(
                f"{option}= is for a gateway on this machine; on Ray jvlab chooses address, port and certificate",
                remedy="leave it out",
            )
    from jvlab.gateway.cluster._ray import RayCluster

    return RayCluster(address, gateway, name)


class PoolTable(dict[str, Pool]):
    """What `lab.pools` returns: an unknown name is an error that lists the known ones."""

    def __missing__(self, name: object) -> Pool:
        raise UnknownName.of(
            "open pool of this lab",
            name,
            self,
            'lab.launch(model, name="...") starts one',
        )


# `lab.plot` and `lab.timeline()`: figures of the lab's last run, or of a given one.


class LabPlots:
    """Figures of what happened in a lab: `lab.plot.staleness()`, `.throughput()`, `.run()`, `.timeline()`.

    Each takes a `Run`, a `Record` or a run's folder; default: the last run that this process started in the lab.
    `timeline` without any run shows what was generated, scored and synced.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def _record(self, run: Any) -> Record:
        if run is None:
            found = runs.get(self._client, [])
            if not found:
                raise ConfigError(
                    "this process has started no run in this lab",
                    remedy="jv.grpo(...) first, or name one: lab.plot.staleness('runs/<name>')",
                )
            run = found[-1]
        if isinstance(run, Record):
            return run
        return run.record if hasattr(run, "record") else Record.open(run)

    def _happened(self, run: Any) -> Record:
        """The record of a run; without any run, what this process asked of the lab's pools."""
        if run is not None or runs.get(self._client):
            return self._record(run)
        found = calls_of(self._client)
        if not found.events():
            raise ConfigError(
                "nothing has happened in this lab yet: this process has not generated, synced or started a run",
                remedy="pool.generate(...), link.sync(...) or jv.grpo(...) first; or name a run: "
                "lab.timeline('runs/<name>')",
            )
        return found

    def staleness(self, run: Any = None) -> Figure:
        """How old the tokens were that each step trained on."""
        return _faces.draw(self._record(run), "staleness")

    def throughput(self, run: Any = None) -> Figure:
        """Tokens and samples per second, sync speed, who was busy."""
        return _faces.draw(self._record(run), "throughput")

    def run(self, run: Any = None) -> Figure:
        """Reward, loss and other metrics over the run."""
        return _faces.draw(self._record(run), "run")

    def timeline(self, run: Any = None, **options: Any) -> Figure:
        """Which process was busy when, and which version each rollout used."""
        return _faces.draw(self._happened(run), "timeline", **options)

    def lanes(self, run: Any = None, **options: Any) -> Timeline:
        """The interactive timeline: `lab.timeline()`."""
        return _faces.draw(self._happened(run), "lanes", **options)

    def __repr__(self) -> str:
        return "LabPlots(staleness, throughput, run, timeline)"


# ----------------------------------------------------------------------------------------------------

JOIN_SECONDS = 30.0
TRAINING_SECONDS = 5.0  # for processes of `lab.train` to be killed
FOLLOWER_SECONDS = 2.0  # for a follower to leave a sync or a store that hangs


class Lab:
    """A gateway process on loopback, with a fresh token, and the pools of vLLM replicas it runs.

    >>> lab = jv.Lab()
    >>> model = jv.models.tiny("llama")             # or a path, or a hub id
    >>> pool = lab.launch(model, name="demo")       # returns at once
    >>> pool.wait()                                 # half a minute for a real vLLM engine
    Pool('demo', 'llama', 1 replica × TP 1 on ..., ready)
    >>> policy = jv.Policy.from_pretrained(model)
    >>> link = lab.connect(policy.params, pool)
    >>> link.sync(policy.params)
    SyncReport(version 1, ... direct over ... to 1 replica, arrived; meaning checked by value)

    `lab.close()` ends everything; `lab.status()`, `lab.pools`, `lab.panel()` show it.

    A notebook's lab outlives its kernel: after a restart `jv.Lab.attach()` finds it again, or `jv.Lab.attach(name)` if
    you have several (`name=` sets its name). If no process holds it for ten minutes, it ends itself and all its
    processes. A script's lab ends with the script: at its exit and at SIGTERM, and seconds after SIGKILL. `lease=` sets
    how many seconds a lab stays after the last process that held it, in both; `lab.detach()` keeps it running until
    it is closed.
    `host="10.0.0.1"`, an address of this machine, lets other hosts in, over TLS: with `tls=(certificate, key)`, or with
    a certificate that the gateway makes; `lab.join_line` is what to paste on a host that is to run replicas.
    A lab's gateway is not started again if it dies. One that is to come back runs as `jvlab gateway --state FILE`, and
    `jv.Lab.attach()` joins it; its replicas are hosts that joined.
    `metrics_port=0` (any free one) serves Prometheus metrics at `lab.metrics_url`, on loopback, with the lab's token.

    `jv.Lab(cluster="ray")` runs gateway and replicas as Ray actors: on a new local cluster, or, with `address="auto"`
    or `"ray://..."`, on a running one; `lab.train` runs trainers there. `jv.Lab.from_slurm()` is the lab of a
    SLURM job.
    """

    _cluster: Any = None  # the Ray cluster, ended with the lab
    slurm: Any = None  # the job's nodes, for a lab of from_slurm()
    _ends_with_script = False

    @brief
    def __init__(
        self,
        *,
        lease: float | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: tuple[str, str] | None = None,
        beat: float = 1.0,
        missed_beats: int = 10,
        metrics_port: int | None = None,
        cluster: str | None = None,
        address: str | None = None,
        name: str | None = None,
    ) -> None:
        from jvlab.gateway import _launcher

        if name is not None:
            check_name("lab", name)

        pair = Tls(*tls) if tls else None
        self._ends_with_script = lease is None and not _script_end.in_session()
        lease = _script_end.default_lease(cluster) if lease is None else lease
        _script_end.unwind_at_sigterm()
        gateway = GatewayOptions(
            lease, beat, missed_beats, host, port, pair, metrics_port
        ).check()
        self._cluster = open_cluster(cluster, address, gateway, name)
        if self._cluster is None:
            content, _ = _launcher.start_gateway(gateway, name)
            self._join(content["address"], content["token"], Trust())
        else:
            content = self._cluster.content
            self._cluster.guard(
                self._join,
                content["address"],
                content["token"],
                Trust.of_file(content["tls_ca"]),
            )

    @classmethod
    def attach(
        cls,
        address: str | None = None,
        token: str | None = None,
        *,
        tls_ca: str | None = None,
        fingerprint: str | None = None,
        timeout: float = 30.0,
    ) -> Lab:
        """Rejoin a running lab: `attach()` for your only one, `attach(name)` for one of several (`jv.Lab.list()` shows
        the names), `attach(address, token)` for any lab.

        To one on another host belongs the certificate that it shows: `fingerprint="sha256:…"`, which it printed and
        `lab.join_line` has, or `tls_ca`, the file of the certificate or its CA. If another is shown, no token is sent.
        """
        deadline = Deadline.of(timeout)
        if address is None and token is not None:
            raise ConfigError(
                "a token without an address",
                remedy="pass both, or neither to find your lab",
            )
        if token is None:
            try:
                found = find_lab(address)
            except LabNotFound:
                if address is None or ":" not in address:  # names have no colon
                    raise
                raise ConfigError(
                    f"no token for the lab at {address}",
                    remedy="it is in that lab's lab.json",
                ) from None
            address = found.address
            token = found.token
            fingerprint = fingerprint or found.fingerprint or None
        if fingerprint is None:
            trust = Trust.of_file(tls_ca)
        elif tls_ca is None:
            trust = fetch_pinned(str(address), fingerprint, deadline)
        else:
            raise ConfigError(
                "a certificate and the fingerprint of one", remedy="pass one of them"
            )
        lab = cls.__new__(cls)
        lab._join(str(address), token, trust, deadline)
        return lab

    @classmethod
    def list(cls) -> builtins.list[LabInfo]:
        """Your running labs, newest first: name, state, pools, holders. `jvlab ps` prints the same."""
        return list_labs()

    @classmethod
    def from_slurm(cls, *, trainers: int | None = None, patience: float = 300.0) -> Lab:
        """The lab of the SLURM job that this process is part of, as started by the script of `jvlab slurm`.

        `lab.slurm` says which nodes train and which roll out; `lab.launch(model, replicas=lab.slurm.replicas)` uses
        the rollout processes that wait there. `patience`: seconds to wait for a gateway that is still starting.
        """
        from jvlab.gateway.cluster._slurm import JobNodes

        nodes = JobNodes.of_job(trainers=trainers)
        deadline = Deadline(check_timeout(patience, "patience"))
        token, certificate = nodes.token(deadline.left())
        while True:
            try:
                lab = cls.attach(nodes.address, token, tls_ca=certificate)
                break
            except GatewayUnreachable:  # it writes its files before it listens
                if deadline.over:
                    raise
                time.sleep(0.5)
        lab.slurm = nodes
        return lab

    @property
    def join_line(self) -> str:
        """What to paste on another host, which then offers itself to this lab; it asks for the lab's token.

        It holds no secret: the fingerprint of the gateway's certificate, so that the token goes to this gateway alone.
        """
        if not self._fingerprint:
            raise ConfigError(
                f"lab {self.name!r} listens on this machine alone",
                remedy='jv.Lab(host="an address of this machine") lets others join',
            )
        return join_line(self.public_address, self._fingerprint)

    def write_token(self, path: str) -> None:
        """Write the lab's token to a file that only you can read, for `jvlab rollout --gateway ... --token-file`."""
        write_private(path, self._token + "\n")

    def _join(
        self,
        address: str,
        token: str,
        trust: Trust,
        deadline: Deadline | None = None,
    ) -> None:
        self.address = address
        self._token = token
        self._holder = own_name()
        self._closed = self._detached = False
        self.client = Client(address, token, trust)
        deadline = deadline or Deadline(JOIN_SECONDS)
        try:
            status = self.client.call("Describe", pb.DescribeRequest(), deadline)
        except BaseException:
            self.client.close()
            raise
        self.name: str = status.lab
        # An address that is not on loopback is one for others too; that of a gateway on "0.0.0.0" would say less.
        near = is_loopback(host_of(address))
        self.public_address: str = (status.public_address if near else "") or address
        self.metrics_url: str | None = status.metrics_url or None
        self._fingerprint: str = status.fingerprint
        self._gateway = Identity(status.pid, status.host, status.started)
        self._is_local = self._gateway.process() is not None
        # another process takes the place of one that comes back
        self.client.away = status.away_seconds
        self.client.gone = lambda: (
            self._is_local and not self.client.away and self._gateway.process() is None
        )
        # those that this process knows of, without asking the gateway
        self.known_pools: dict[str, Pool] = {}
        self._connections = Connections()
        self._followers: set[Follower] = set()
        self._held = asyncio.Event()
        self._holding = self.client.loop.submit(self._hold())
        try:
            self.client.loop.run(self._wait_held(deadline))
        except BaseException:
            self.client.close()
            raise
        _script_end.open_labs.add(self)

    # Holding the lab ----------------------------------------------------------------------------------------------

    async def _wait_held(self, deadline: Deadline) -> None:
        """Wait until the gateway has registered our hold."""
        try:
            await asyncio.wait_for(self._held.wait(), deadline.left())
        except TimeoutError:
            raise GatewayUnreachable(
                f"the gateway at {self.address} did not confirm our hold within {deadline.seconds:g} s",
                remedy="is its process stopped? try again with a larger timeout= if it is only slow",
            ) from None

    async def _hold(self) -> None:
        request = pb.HoldRequest(holder=self._holder)
        metadata = self.client.metadata
        # without an end of its own: this process may be stopped, or short of the GIL, when it had to be renewed
        open_stream = lambda: self.client.stub.Hold(
            request, timeout=LONGEST, metadata=metadata
        )
        await self.client.follow(open_stream, lambda _: self._held.set())

    @property
    def _starts_here(self) -> bool:
        """Whether the gateway starts replicas on this machine unless it is told where."""
        return self._is_local and self._cluster is None and self.slurm is None

    # Pools --------------------------------------------------------------------------------------------------------

    @shows_options(LaunchOptions)
    @brief
    def launch(self, model: str, **options: Unpack[LaunchArguments]) -> Pool:
        """Start a pool of vLLM replicas and return at once; `pool.wait()` waits and shows progress.

        model            local path, hub id, "tiny:llama" or "smollm2"
        load             "auto" reads the weights; "dummy" uses random values (a sync brings the real ones)
        device           "auto", "cpu" or "cuda"
        engine           any vLLM engine argument by its name, over jvlab's defaults; also head_dtype="float32", the
                         output head computed in float32. dtype is the checkpoint's, or float32 on a CPU that has no
                         instructions for it (`jvlab doctor` shows that; `pool.wait()` warns).
                         With enable_return_routed_experts=True samples hold the
                         experts that each token was given (`Sample.expert_ids`, on a CPU with their weights, and
                         then without a prefix cache unless enable_prefix_caching=True is given too)
        env              environment variables of the rollout processes
        colocate         trainer and engine share a GPU: limits both sides' memory; it sleeps while `jv.grpo` trains
        routing          which replica gets a prompt: "least" (in flight) or "prefix"; see `pool.generate`
        place            where replicas start: "local" (by the gateway), "join" (hosts that run `jvlab rollout
                         --gateway`), or on Ray what each needs: {"cpus": 1, "gpus": 1, "resources": {}, "nodes": []}
        limits           maxima for one call: {"n": samples per prompt, "prompts": ..., "samples": prompts × n,
                         "tokens": ...}, None for no limit; `pool.limits` shows them, the defaults follow engine size
        restarts         how often a replica that dies is started again by itself, after 1, 2, 4, … seconds; with 0 it
                         stays failed. Ten minutes of service give it all its tries back; `pool.status()` shows how
                         many are left, and why it died. If the pool was ever synced, it gets requests again after the
                         next sync, as in a run of `jv.grpo`. A launch that fails is not repeated. With place="join"
                         the next host that joins takes its place; on Ray it is the number of Ray's own restarts
        http             True, or a port: also serve vLLM's OpenAI API at `pool.http_url` (`api_key=pool.http_token`)
        http_key         True: `pool.http_key_url` generates too, for clients that can send no token; see there
        deterministic    a fixed engine seed, and on CUDA batch-invariant kernels with Triton attention; on a CPU one
                         request at a time without prefix cache, which is slow. To repeat, sampling also needs seed=...
                         in each call. `pool.check_determinism()` measures the effect
        speculative      vLLM's speculative_config, such as {"method": "ngram", "num_speculative_tokens": 3,
                         "prompt_lookup_max": 3}, or {"method": "draft_model", "model": folder,
                         "num_speculative_tokens": 3}; the acceptance rate, also by version, is in `pool.status()`.
                         A sync of the model leaves a draft model as it is: `connect(..., part="draft")` syncs that
        """
        from jvlab.engine import _cpu

        asked = LaunchOptions.of("lab.launch", model, options)
        asked.check_counts()
        order = asked.request()
        here = asked.place in (None, "local") and self._starts_here
        if order.device == "cpu" and here:
            # now, not when a process has started
            _cpu.check_dtype(asked.engine or {})
        pool = Pool(self.client, self.client.call("Launch", order))
        pool.colocated = asked.colocate
        # closed, or the name would not have been free
        if before := self.known_pools.get(pool.name):
            before.forget("it was closed, and another pool has its name")
        self._drop_closed()
        self.known_pools[pool.name] = pool
        return pool

    @shows_options(Connections.connect)
    @brief
    def connect(
        self,
        params: Any,
        pool: Pool,
        rules: Any = "auto",
        transport: str = "auto",
        mode: str = "direct",
        **options: Unpack[ConnectOptions],
    ) -> Link:
        """Connect a tree of parameters to a pool: `link.sync(params)` then writes them into the engines.

        params     any pytree of arrays: `policy.params`, nnx state, dicts; later syncs must keep shapes and shardings.
                   Or a `jv.Policy` or `(params, logprobs_fn)`, which can then also score tokens, see `meaning`.
                   `policy.lora` goes into an adapter slot of a pool launched with engine={"enable_lora": True}, whose
                   requests then use it unless they name another adapter; a sync of base weights makes it zero
        rules      how leaves correspond to checkpoint tensors: "auto" infers it; see `jv.plan`
        transport  "auto" chooses (`link.reason` says why); "ipc" (one host's GPUs), "nccl", "shm", "tcp", "nixl",
                   "disk"
        mode       "direct" (fastest) or "staged" (generation continues while bytes move; twice the weight memory)
        bucket_mib bucket size; a few buckets bound the extra memory on both sides. Each costs a millisecond of
                   Python at both ends: 128 makes syncs of changes by nccl four times as fast
        faults     wraps each channel, to test your own recovery: `jv.transport.Faults(...)`
        nonfinite  what its syncs do with NaN and Inf: "refuse" (an error names the leaves) or "allow"
        checkpoint where the parameters were loaded from; default: the pool's model
        meaning    "auto" compares the trainer's values with the checkpoint's, and refuses rules that put them in the
                   wrong place; if they differ from the checkpoint's, the first sync scores tokens on both sides.
                   "function" does only the latter, "off" neither. `link.meaning` has the result. Each connect compares
                   again, and so does the first sync if its values differ
        part       "model", or "draft": the tree is that of the model that drafts tokens (`speculative=`), and of
                   EAGLE and MTP heads what they do not share with the model; values are compared with its own
                   checkpoint. Its link takes turns with the model's: neither closes the other. Each sync makes a
                   version. One of drafts changes how many are accepted, and no token's distribution; KV that older
                   draft weights left does no more
        timeout    includes waiting for a pool that is starting, tracing its engines and opening channels
        options    of the transport: host="10.0.0.1" (bind address) for tcp, nccl, nixl, directory="..." for disk

        A second connect with the same shapes returns the same link. All mismatches are reported now, in one error.

        An engine that quantises while loading (engine={"quantization": "fp8"}) gets fp8 values and scales, bit-equal to
        its own, made of float32 or bfloat16 leaves on their devices; it takes one more byte per parameter there
        during a sync. Other formats are refused by name.

        A PyTorch trainer passes `model.state_dict()`, DTensors of FSDP2 included. If the arrays span several processes
        (`jax.distributed`, `torch.distributed`), each attaches to the lab and calls connect and sync.
        """
        check_pool(pool, "lab.connect(params, pool)")
        self._check_owner(pool)
        return self._connections.connect(
            params, pool, rules, transport, mode, **options
        )

    def follow(
        self,
        pool: Pool,
        path: str | os.PathLike[str],
        *,
        poll: float = 1.0,
        transport: str = "auto",
        mode: str = "direct",
        delta: str = "never",
        nonfinite: str = "refuse",
        storage_options: dict[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> Follower:
        """Keep a pool at the newest version that a trainer publishes; returns at once, and follows in the background.

        path       where `jv.Publisher(path, ...)` or `link.publish(path, params)` writes: a folder, or "s3://bucket/run"
        poll       seconds between two looks
        transport, mode, delta, nonfinite   of the syncs, as for `connect` and `link.sync`
        storage_options   of fsspec: credentials, an endpoint
        timeout    seconds for reading one version, and for one sync

        `follower.wait(version)` waits for one, `follower.version` is the one that is served, `follower.error` says what
        is wrong with a newer one, `follower.close()` ends it. It takes one version's memory in this process.
        """
        from jvlab.sync._publish import Follower

        seconds = check_timeout(timeout)
        check_pool(pool, "lab.follow(pool, path)")
        self._check_owner(pool)

        def connect(tensors: Any) -> Link:
            return self._connections.connect(
                tensors,
                pool,
                "checkpoint",
                transport,
                mode,
                nonfinite=nonfinite,
                timeout=seconds,
            )

        follower = Follower(
            path,
            connect,
            pool,
            poll=poll,
            delta=delta,
            storage_options=storage_options,
            timeout=seconds,
            on_close=self._followers.discard,
        )
        self._followers.add(follower)
        return follower

    def _check_owner(self, pool: Pool) -> None:
        """Raise if the pool is not one of this lab's: its engines take orders from another gateway."""
        if pool.one_process:
            raise ConfigError(
                f"pool {pool.name!r} is in this process, not in a lab",
                remedy="link = pool.connect(params)",
            )
        # perhaps of another Lab object: attach() makes one
        if pool.client.address == self.client.address:
            return
        owner = next(
            (lab.name for lab in _script_end.open_labs if lab.client is pool.client),
            "one that was closed",
        )
        raise ConfigError(
            f"pool {pool.name!r} is not of this lab, {self.name}, but of {owner}",
            remedy="call connect of the lab that launched the pool, or launch a pool in this one",
        )

    @brief
    def train(
        self,
        program: str | Callable[..., Any],
        *arguments: str,
        processes: int = 1,
        place: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = 120.0,
    ) -> Training:
        """Run a trainer's script on the cluster of a lab on Ray, in so many processes of one `jax.distributed` job.

            training = lab.train("train.py", processes=2, place={"gpus": 1})
            training.wait()

        In the script, as under srun, `jax.distributed.initialize()` needs no arguments; `jv.Lab.attach()` is this lab.

        program    a script's path, the same on every node, with its `arguments`; or a function, whose results `wait`
                   returns
        place      what each process needs, and where it may be, as in `lab.launch`: {"cpus": 1, "gpus": 1,
                   "resources": {}, "nodes": [], "restarts": 3}. If one of them dies, all are started again in their
                   places, so often; `jv.grpo(..., resume="auto")` then goes on from its last checkpoint. An exception
                   of the program ends all of them
        env        environment variables of these processes
        timeout    for Ray to find room; the training itself takes as long as it takes

        It ends with this process and with the lab.
        """
        deadline = Deadline.of(timeout)
        if self._cluster is None:
            raise ConfigError(
                "this Lab object has no Ray cluster on which train could place processes",
                remedy='jv.Lab(cluster="ray").train(...); elsewhere start the script once for each process, by hand '
                "or by `jvlab slurm`",
            )
        lab = LabInfo(
            self.name,
            "running",
            self.public_address,
            token=self._token,
            fingerprint=self._fingerprint,
        )
        return self._cluster.train(
            program, arguments, processes, place or {}, dict(env or {}), lab, deadline
        )

    @property
    def pools(self) -> dict[str, Pool]:
        """The open pools of this lab by name, including those that earlier holders launched."""
        self.update_pools(self.client.call("Describe", pb.DescribeRequest()))
        return PoolTable(self.known_pools)

    def update_pools(self, status: Any) -> None:
        """Add the gateway's pools that are new to this process, and remove closed ones."""
        self._drop_closed()  # another may have the name of one
        for snapshot in status.pools:
            if snapshot.closed:
                self.known_pools.pop(snapshot.pool, None)
            elif snapshot.pool not in self.known_pools:
                self.known_pools[snapshot.pool] = Pool(self.client, snapshot)

    def _drop_closed(self) -> None:
        for name, pool in list(self.known_pools.items()):
            if pool.snapshot.closed:
                self.known_pools.pop(name, None)

    def status(self) -> dict[str, Any]:
        """One snapshot: holders, lease, pools and their replicas."""
        from google.protobuf.json_format import MessageToDict

        reply = self.client.call("Describe", pb.DescribeRequest())
        return MessageToDict(
            reply,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )

    def processes(self) -> builtins.list[ProcessRow]:
        """Gateway, replicas and their workers: state, pid, device, memory, version, heartbeat, load."""
        from jvlab.views._cards import ProcessRows

        return ProcessRows(self).read()[1]

    def look(self, seconds: float) -> pb.LabStatus:
        """What the gateway says now, within a time; for displays. New pools are known from then on."""
        status = self.client.describe(seconds)
        self.update_pools(status)
        return status

    @property
    def closed(self) -> bool:
        """Whether this process has closed or left the lab."""
        return self._closed

    # Plots --------------------------------------------------------------------------------------------------------

    @property
    def plot(self) -> LabPlots:
        """Figures of the last run in this lab: `lab.plot.staleness()`, `.throughput()`, `.run()`."""

        return LabPlots(self.client)

    def timeline(self, run: Any = None, **options: Any) -> Any:
        """Which process was busy when, and which version each sample used, in the last run or the given one.

        Without a run: what this process generated, scored and synced in this lab.
        Interactive in a notebook (wheel, drag, hover); `.figure()` is a matplotlib figure of it.
        """
        return self.plot.lanes(run, **options)

    # Closing ------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Leave the lab running without a lease; `jv.Lab.attach()` rejoins it, `close()` ends it."""
        if self._closed:
            return
        if self._cluster is not None:
            self._cluster.check_detach()
        self.client.call("Detach", pb.DetachRequest())
        self._detached = True
        self._leave()

    def close(self, timeout: float = 30.0) -> None:
        """End every pool and the gateway; what has not ended within the timeout is killed."""
        deadline = Deadline.of(timeout)
        if self._closed:
            return
        if self._cluster is not None:
            self._cluster.end_training(deadline.within(TRAINING_SECONDS))
        try:
            if self.client.away:  # it may be another process by now
                now = self.client.call(
                    "Describe", pb.DescribeRequest(), deadline.within(5.0)
                )
                self._gateway = Identity(now.pid, now.host, now.started)
            # half of the time: a gateway that does not reply must be killed, which takes time too
            self.client.call(
                "Close",
                pb.CloseRequest(reason="close() was called"),
                min(deadline.seconds / 2, 5.0),
            )
        except ControlError as error:
            if not isinstance(error, (GatewayUnreachable, DeadlineExceeded)):
                raise
        self._leave()
        if self._cluster is not None:
            self._cluster.end(max(1.0, deadline.left()))
        # only ever this lab's own, and only on this machine
        while (gateway := self._gateway.process()) is not None:
            if deadline.over:
                kill_tree(gateway)
                break
            time.sleep(0.05)

    def _leave(self) -> None:
        self._closed = True
        for follower in list(self._followers):
            follower.close(FOLLOWER_SECONDS)
        self._connections.close()
        # a panel's thread may add a pool in the meantime
        for pool in list(self.known_pools.values()):
            pool.forget("the lab was closed or left")
        self.client.close()
        _script_end.open_labs.discard(self)
        _faces.draw(self, "end")

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "detached" if self._detached else "closed" if self._closed else "open"
        return f"Lab({state}, {len(self.known_pools)} pool{'s' if len(self.known_pools) != 1 else ''})"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")

    def panel(self) -> Panel | None:
        """Show the live panel: processes, load, logs, control buttons. None where only a table can be shown."""
        return _faces.draw(self, "panel")

    def _ipython_display_(self) -> None:
        self.panel()
