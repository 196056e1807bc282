"""Chooses a transport, with the reason, and opens its ends."""

from __future__ import annotations

from typing import Any

from jvlab._errors import ConfigError
from jvlab.transport._peer import (
    Clock,
    LoopbackSender,
    Receiver,
    Sender,
    open_loopback,
)

NAMES = ("loopback", "shm", "tcp", "disk", "ipc", "nccl", "nixl")
# shm: 1 MiB slots halve the rate, 64 MiB slots add a fifth for 4 times the memory
SLOT_BYTES = 16 << 20
SLOTS = 3
STREAMS = 4  # of tcp: one connection rarely fills a fast link; each costs a thread at both ends


def choose(
    wanted: str,
    same_host: bool,
    device: str,
    shm_free_bytes: int,
    need_bytes: int,
    engine: str = "cpu",
    no_ipc: str = "",
) -> tuple[str, str]:
    """The transport's name and the reason for it. An explicit choice that can't work is refused with a remedy.

    `need_bytes` is the size of all rings on this host, `shm_free_bytes` the memory available for them. `engine` is the
    device that the engines run on, `no_ipc` why the trainer can't write their memory, if it is known that it can't.

    >>> jv.transport.choose("auto", True, "cpu", shm_free_bytes=1 << 30, need_bytes=1 << 20)
    ('shm', 'both sides are on one host, which has 1,024 MiB free')
    """
    if engine == "cuda" or wanted == "ipc":
        no_ipc = no_ipc or _ipc_problem(same_host, device, engine)
        if wanted in ("auto", "ipc") and not no_ipc:
            return (
                "ipc",
                "both sides are on the GPUs of one host: the trainer writes the engines' memory itself",
            )
        if wanted == "auto" and not same_host and not _nccl_problem(device, engine):
            return "nccl", "both sides are on GPUs, on different hosts"
        if wanted in ("auto", "ipc"):
            raise ConfigError(f"ipc: {no_ipc}", remedy=_without_ipc(device, engine))
    if wanted == "nccl" or (wanted == "nixl" and engine == "cuda"):
        if problem := _nccl_problem(device, engine):
            raise ConfigError(f"{wanted}: {problem}", remedy='use transport="auto"')
        if wanted == "nixl":
            _check_asked(wanted, same_host)
            return wanted, "asked for; from GPU memory to GPU memory"
        alike = (
            "; processes that share a GPU need different NCCL_HOSTIDs"
            if same_host
            else ""
        )
        return wanted, f"asked for{alike}"
    fits = shm_free_bytes >= need_bytes
    sizes = f"the rings need {_mib(need_bytes)} of memory and {_mib(shm_free_bytes)} are free"
    through = "" if device == "cpu" else f"; the bytes of {device} cross host memory"
    if wanted == "auto" and same_host and fits:
        why = f"both sides are on one host, which has {_mib(shm_free_bytes)} free"
        return "shm", f"{why}{through}"
    if wanted == "auto":
        why = sizes if same_host else "the sides are on different hosts"
        return "tcp", f"{why}{through}"
    if wanted == "shm" and same_host and not fits:
        raise ConfigError(
            f"shm: {sizes}",
            remedy='use fewer or smaller slots, or transport="tcp" or "disk"',
            need_bytes=need_bytes,
            free_bytes=shm_free_bytes,
        )
    _check_asked(wanted, same_host)
    seen = (
        "; the folder must be one that both hosts see"
        if wanted == "disk" and not same_host
        else ""
    )
    return wanted, f"asked for{seen}{through}"


def _check_asked(wanted: str, same_host: bool) -> None:
    """Raise if an explicitly requested transport can't work here."""
    if wanted == "shm" and not same_host:
        raise ConfigError(
            "shm: the sides are on different hosts",
            remedy='use transport="tcp", or "auto"',
        )
    if wanted == "loopback":
        raise ConfigError(
            "loopback joins two ends in one process, but an engine is another process",
            remedy='use jvlab.transport.pair() in tests; for an engine "auto", "shm", "tcp" or "disk"',
        )
    if wanted == "nixl":
        from jvlab.transport._nixl import check_installed

        check_installed()
    elif wanted not in ("shm", "tcp", "disk"):
        raise _unknown(wanted)


def in_one_process(
    wanted: str, device: str, engine: str, no_ipc: str = ""
) -> tuple[str, str]:
    """As `choose`, for an engine in the trainer's own process."""
    name = "ipc" if engine == "cuda" else "loopback"
    if wanted not in ("auto", name):
        raise ConfigError(
            f"transport={wanted!r}: trainer and engine are one process, and its memory is nearer than any wire",
            remedy=f'leave it out, or say "{name}"',
            transport=wanted,
        )
    if name == "loopback":
        return (
            name,
            "trainer and engine are one process: buckets are handed over in its memory",
        )
    if problem := no_ipc or _ipc_problem(True, device, engine):
        raise ConfigError(f"ipc: {problem}", remedy=_without_ipc(device, engine))
    return (
        name,
        "trainer and engine are one process: the trainer writes the engine's memory itself",
    )


def _ipc_problem(same_host: bool, device: str, engine: str) -> str:
    if not same_host:
        return (
            "the sides are on different hosts, and CUDA IPC reaches no further than one"
        )
    return _nccl_problem(device, engine)


def _nccl_problem(device: str, engine: str) -> str:
    if engine != "cuda":
        return f"the engines run on {engine}"
    return (
        ""
        if device in ("gpu", "cuda")
        else f"the parameters are on {device}, the engines on cuda"
    )


def _without_ipc(device: str, engine: str) -> str:
    if engine != "cuda":
        return 'use transport="auto"'
    if device not in ("gpu", "cuda"):
        return 'put the parameters on the GPU (jax.device_put), or launch with device="cpu"'
    return 'use transport="nccl", or launch without that kernel or quantisation'


def _unknown(name: Any) -> ConfigError:
    return ConfigError(
        f"unknown transport {name!r}",
        remedy=f'use one of {", ".join(NAMES)}; lab.connect also takes "auto"',
        transport=name,
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def listen(
    name: str,
    *,
    slot_bytes: int = SLOT_BYTES,
    slots: int = SLOTS,
    peer: str = "the receiver",
    label: str = "the trainer",
    host: str = "127.0.0.1",
    directory: str | None = None,
    fsync: bool = False,
    streams: int = STREAMS,
    tls: bool | None = None,
    on_gpu: bool = False,
) -> Sender:
    """Open the trainer's end of one channel.

    `slot_bytes` is the largest bucket, `slots` how many may be in flight. `peer` names the receiver in our errors and
    `label` names us in its. `host` is the address that tcp, nccl and nixl bind to; `directory` and `fsync` apply to
    disk, `streams` (connections for bytes) to tcp, `tls` (if left out: unless `host` is loopback) to tcp and nixl, and
    `on_gpu` (slots in device memory, at both ends) to nixl.

    >>> sender = jv.transport.listen("loopback")
    >>> receiver = jv.transport.open_receiver(sender.endpoint(), deadline=5)
    >>> sender.ready(deadline=5)                # the other end is open
    >>> sender.close()
    """
    if name == "shm":
        from jvlab.transport._shm import ShmSender

        return ShmSender(slot_bytes, slots, peer, label)
    if name == "tcp":
        from jvlab.transport._tcp import TcpSender

        return TcpSender(slot_bytes, slots, peer, label, host, streams, tls)
    if name == "nixl":
        from jvlab.transport._nixl import NixlSender

        return NixlSender(slot_bytes, slots, peer, label, host, tls, on_gpu)
    if name == "nccl":
        from jvlab.transport._nccl import NcclSender

        return NcclSender(slot_bytes, slots, peer, label, host)
    if name == "disk":
        from jvlab.transport._disk import DiskSender

        return DiskSender(slot_bytes, slots, peer, label, directory, fsync=fsync)
    if name == "loopback":
        return LoopbackSender(slot_bytes, slots, peer, label)
    raise _unknown(name)


def open_receiver(
    endpoint: dict[str, Any], deadline: float, *, label: str = "the rank"
) -> Receiver:
    """Open the rank's end of the channel that an endpoint describes, within `deadline` seconds.

    >>> sender = jv.transport.listen("loopback")
    >>> jv.transport.open_receiver(sender.endpoint(), deadline=5).name
    'loopback'
    """
    name = endpoint.get("transport")
    clock = Clock(deadline)
    if name == "shm":
        from jvlab.transport._shm import ShmReceiver

        return ShmReceiver(endpoint, clock, label)
    if name == "tcp":
        from jvlab.transport._tcp import TcpReceiver

        return TcpReceiver(endpoint, clock, label)
    if name == "nixl":
        from jvlab.transport._nixl import NixlReceiver

        return NixlReceiver(endpoint, clock, label)
    if name == "nccl":
        from jvlab.transport._nccl import NcclReceiver

        return NcclReceiver(endpoint, clock, label)
    if name == "disk":
        from jvlab.transport._disk import DiskReceiver

        return DiskReceiver(endpoint, label)
    if name == "loopback":
        return open_loopback(endpoint)
    raise _unknown(name)
