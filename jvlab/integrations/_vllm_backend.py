"""vLLM's two sockets: `Engine` in each rank of its server, `TrainerEngine` in a trainer that has vLLM.

Checked against vLLM 0.32.0; 0.33.0 has the same seam, with another `WeightSource`. Each rank's work is that of
`jvlab.engine.worker`, as in engines that jvlab launches; `_vllm_server.py` has the protocol.
"""

from __future__ import annotations

import inspect
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from jvlab._errors import ConfigError, EngineDirty, JvlabError, SyncError, Unsupported
from jvlab._files import Plain
from jvlab._version import __version__

if TYPE_CHECKING:
    from jvlab.engine._engine_sync import SyncState
    from jvlab.engine.worker._rank_sync import WorkerSync
    from jvlab.sync._link import Link
    from jvlab.wire._core_channel import CoreChannel

logger = init_logger(__name__)
# orders of each kind of call
INSPECT = ("trace", "open", "close", "check", "peek", "forget")
UPDATE = ("prepare", "move", "verify")
FINISH = ("commit",)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the trainer listens; without a path, a conversation of the session that is open."""

    session: str
    seconds: float
    path: str = ""
    key: str = ""
    jvlab: str = __version__


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Whose orders, and how long they may take."""

    session: str
    seconds: float


class Stranger(SyncError):
    """A call of a trainer that is not, or no longer, the one that this rank serves."""


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One rank of a server, as a link's receiver. `state` is this rank's: what it holds, and whether it is dirty."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _worker: SimpleNamespace
    _sync: WorkerSync
    _state: SyncState
    _channel: CoreChannel | None = None

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: Any
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        if self.parallel_config.data_parallel_size > 1:
            raise Unsupported(
                "the jvlab backend serves one data-parallel replica",
                remedy="start a server for each replica, and connect each",
            )
        self._ranks: int = self.parallel_config.world_size
        self._rank: int = self.parallel_config.rank
        self._session = ""
        self._met = False  # a trainer: then there are worker, sync and state
        # what vLLM's worker knows as an active update
        self._started = False
        self._forgiven = False
        self._seconds = 60.0

    # vLLM's calls

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet a trainer, or carry out orders of the one that is known, outside of syncs."""
        self._guarded(lambda: self._init(init_info))

    def start_weight_update(self) -> None:
        """An update begins; its orders come with `update_weights`."""
        self._forgiven = False
        self._guarded(self._need_trainer)
        self._started = True

    def update_weights(self, update_info: Plain) -> None:
        """Carry out a sync's orders; bytes arrive meanwhile."""
        # not vLLM's own: it synchronises an accelerator, which a CPU has not
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if not self._guarded(lambda: self._update(update_info)):
            self._started = self._rank != self._ranks - 1  # vLLM ends it by the error

    def finish_weight_update(self) -> None:
        """Commit what arrived and was verified."""
        if self._forgiven:
            self._forgiven = self._started = False
            return
        if self._guarded(lambda: self._converse(FINISH, self._seconds)):
            self._started = False

    def shutdown(self) -> None:
        """Close the link; the weights stay."""
        if self._met:
            self._sync.close()
        self._hang_up()

    # Failing

    def _guarded(self, work: Callable[[], object]) -> bool:
        """Do it. A failure abandons the sync, and the last rank raises it: see _vllm_server.py."""
        try:
            work()
            return True
        except Exception as error:
            failed = error if isinstance(error, Stranger) else self._abandoned(error)
            if self._rank == self._ranks - 1:
                raise failed from error
            logger.warning("rank %d: %s", self._rank, failed)
            return False

    def _abandoned(self, error: Exception) -> Exception:
        """Abandon what is open; the error, and what this rank holds now."""
        self._hang_up()
        if not self._met:
            return error
        self._sync.abandon()
        self._state.abandoned()
        said = getattr(error, "message", str(error))
        if self._state.dirty:
            return EngineDirty(
                f"{said}. This server is dirty: a sync after version {self._state.version} did not commit, so its "
                "weights may be parts of two versions",
                remedy="sync again; do not resume generation before a sync commits",
            )
        return SyncError(
            f"{said}. This server holds version {self._state.version}, as before",
            remedy=getattr(error, "remedy", "") or "sync again",
        )

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._session = ""

    # Conversations

    def _init(self, info: InitInfo) -> None:
        if info.path:
            if info.jvlab != __version__:
                raise ConfigError(
                    f"the trainer has jvlab {info.jvlab}, this server {__version__}",
                    remedy="install the same version for both",
                )
            self._meet(info)
        self._check_session(info.session)
        self._converse(INSPECT, info.seconds)

    def _update(self, info: UpdateInfo) -> None:
        self._check_session(info.session)
        self._seconds = info.seconds
        self._converse(UPDATE, info.seconds)

    def _check_session(self, session: str) -> None:
        if session != self._session:
            raise Stranger(
                "another trainer has connected to this server since",
                remedy="sync again, if that one is done: the last to connect writes",
            )

    def _meet(self, info: InitInfo) -> None:
        # only now: a worker that starts must not have numba loaded
        from jvlab.engine._engine_sync import SyncState
        from jvlab.engine.worker._rank_sync import WorkerSync
        from jvlab.integrations._vllm_server import HELLO, encode
        from jvlab.wire._core_channel import CoreChannel

        if not self._met:
            self._worker = SimpleNamespace(
                vllm_config=self.vllm_config,
                model_config=self.model_config,
                device=self.device,
                get_model=lambda: self.model,
            )
            self._sync = WorkerSync(self._worker)
            self._state = SyncState()
            self._met = True
        self._hang_up()
        self._sync.abandon()
        self._state.abandoned()
        hello = info.key.encode() + encode(self._facts())
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.settimeout(5.0)
        try:
            # no deadline: the socket has one
            end.connect(f"\0{info.path}")
        except OSError as error:
            end.close()
            raise SyncError(
                f"rank {self._rank} can't reach the trainer's socket: {error}",
                remedy="trainer and server must run on one host, in one network namespace",
            ) from None
        self._channel = CoreChannel(end)
        self._session = info.session
        self._channel.send(HELLO, 0, hello)

    def _facts(self) -> Plain:
        from jvlab.engine._vllm_versions import build

        distribution, version = build()
        config = self.model_config
        return {
            "rank": self._rank,
            "world": self._ranks,
            "jvlab": __version__,
            "version": self._state.version,
            "dirty": self._state.dirty,
            "started": self._started,
            "model": _folder(config.model),
            "device": self.device.type,
            "facts": {
                "vllm_version": version,
                "vllm_build": distribution,
                "dtype": str(config.dtype).removeprefix("torch."),
                "vocab_size": config.get_vocab_size(),
                "max_model_len": config.max_model_len,
                "architecture": config.architecture,
                "pid": os.getpid(),
            },
        }

    def _need_trainer(self) -> CoreChannel:
        if self._channel is None:
            raise SyncError(
                "no trainer is connected",
                remedy="call init_weight_transfer_engine first; after a failure, again",
            )
        return self._channel

    def _converse(self, known: tuple[str, ...], seconds: float) -> None:
        """Carry out the trainer's orders until it says how this ended."""
        from jvlab.integrations import _vllm_server as words

        channel = self._need_trainer()
        until = time.monotonic() + seconds
        failed: Plain | None = None
        while True:
            try:
                kind, _, payload = channel.receive(until)
            except TimeoutError:
                raise SyncError(
                    f"the trainer gave no order for {seconds:.3g} s"
                ) from None
            except ConnectionError:
                raise SyncError("the trainer went away") from None
            if kind == words.END and failed is None:
                return
            if kind != words.ORDER:
                said = payload.decode(errors="replace") or "the trainer gave up"
                raise SyncError(failed["error"] if failed else said)
            order = words.decode(payload)
            answer = self._carry_out(order["do"], order["args"], known)
            failed = answer if "error" in answer else None
            channel.send(words.ANSWER, 0, words.encode(answer))

    def _carry_out(self, do: str, args: list[Any], known: tuple[str, ...]) -> Plain:
        """One order; errors are returned."""
        try:
            if do not in known:
                raise SyncError(f"no order here: {do!r}", remedy="use the same jvlab")
            return {"rank": self._rank, **self._run(do, args)}
        except JvlabError as error:
            kind = type(error).__name__
            said = {"error": error.message, "remedy": error.remedy, "kind": kind}
        except Exception as error:  # of vLLM, torch or CUDA
            text = f"{type(error).__name__}: {error}"
            said = {"error": text, "remedy": "see the server's log", "kind": ""}
        return {"rank": self._rank, **said}

    def _run(self, do: str, args: list[Any]) -> Plain:
        from jvlab.engine.tracing._trace import trace_worker
        from jvlab.layout._layout_codec import plain_to_bytes
        from jvlab.wire._sync_words import Terms

        sync = self._sync
        state = self._state
        if do == "forget":
            self._forgiven = True
            return {}
        if do == "trace":
            return {"layout": plain_to_bytes(trace_worker(self._worker, args[0]))}
        if do in INSPECT:
            return getattr(sync, do)(*args)
        terms = Terms(**args[0]) if do == "prepare" else None
        state.check(do, terms)
        state.enter(do)
        answer = getattr(sync, do)(*args)
        if "error" not in answer and answer.get("done", True):
            self._did(do, terms)
        return answer

    def _did(self, do: str, terms: Any) -> None:
        """Note a phase; those that halt generation are the trainer's."""
        state = self._state
        state.did(do, terms)
        mode = state.terms.mode if state.terms is not None else ""
        if (do, mode) in (("prepare", "direct"), ("verify", "staged")):
            state.did("halt")
        if do == "commit":
            state.did("go_on")


def _folder(model: str) -> str:
    """The folder of a model: of a hub id, that of its files on this host."""
    if os.path.isdir(model):
        return os.path.abspath(model)
    from huggingface_hub import snapshot_download

    return snapshot_download(model, local_files_only=True)


# The trainer's side --------------------------------------------------------------------------------------------------


@dataclass
class JvlabTrainerInitInfo(TrainerInitInfo):
    """How a trainer sends; the fields are those of `jv.integrations.vllm.connect`.

    mode   "staged" by default: after a failure the server holds its old weights. "direct" needs no second copy of the
           weights; the server must be paused then, and a failure leaves it dirty
    """

    backend: ClassVar[str] = "jvlab"
    mode: str = "staged"
    transport: str = "auto"
    verify: str = "full"
    rules: Any = "auto"
    timeout: float = 600.0


class TrainerEngine(TrainerWeightTransferEngine[JvlabTrainerInitInfo]):
    """Sends a `WeightSource`'s tensors by a plan; `report` is the last sync's.

    Other ranks than 0 take part in gathering the source's tensors, and send nothing.
    """

    init_info_cls = JvlabTrainerInitInfo
    report: Any = None

    def __init__(
        self,
        init_info: JvlabTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
    ) -> None:
        rank = init_info.rank
        given = {
            "client": client,
            "source": source,
            "is_sender": rank == 0,
            "rank": rank,
        }
        # 0.33 takes a rank
        known = inspect.signature(TrainerWeightTransferEngine.__init__).parameters
        super().__init__(**{name: given[name] for name in given if name in known})
        self._info = init_info
        self._link: Link | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: JvlabTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        if source is None:
            raise ConfigError(
                "the jvlab backend sends a WeightSource",
                remedy="trainer_init(init_info, client=client, source=ModuleSource(model))",
            )
        engine = cls(init_info, client=client, source=source)
        engine.connect()
        return engine

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        source: Any = self.source
        whole = getattr(source, "iter_full", None)  # 0.33
        return iter(source) if whole is None else whole()

    def connect(self) -> None:
        """Make the plan; every rank gathers the tensors, and rank 0 connects."""
        from jvlab.integrations._vllm_server import connect

        tensors = dict(self._tensors())
        info = self._info
        if info.rank == 0:
            self._link = connect(
                self.client,
                tensors,
                rules=info.rules,
                transport=info.transport,
                mode=info.mode,
                timeout=info.timeout,
            )

    def send_weights(self, weight_version: int | None = None) -> None:
        """Make the server hold the source's tensors; raises if it does not, and says what it holds then."""
        tensors = dict(self._tensors())
        if self._link is not None:
            self.report = self._link.sync(
                tensors,
                weight_version,
                verify=self._info.verify,
                timeout=self._info.timeout,
                progress=False,
            )

    def shutdown(self) -> None:
        """Close the link; the server keeps its weights."""
        if self._link is not None:
            self._link.close()
            self._link = None
