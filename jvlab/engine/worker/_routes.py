"""The experts that a CPU engine chose for each token, and their weights. Checked against vLLM 0.32.0.

vLLM's own routed-experts output needs its second model runner, which has no CPU version, and returns ids only. Here:

    worker      `RouteCapture` wraps the routers of a model's layers and the runner's step, and adds to a step's output
                what each request's tokens were given: [tokens, layers, chosen]
    core        `RequestRoutes` collects them by request and position; a finished request's output takes them along in
                vLLM's own field, `routed_experts`
    front end   `read_routes` reads that, or what vLLM itself put there on a GPU

Positions that the prefix cache knew are not computed, so nothing is known of them: such an engine has no prefix cache
unless the caller asks for one. To be removed when vLLM's output comes on CPUs too, with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jvlab._errors import Unsupported

# ids and weights of a step's tokens, [tokens, chosen]
Chosen = tuple[np.ndarray, np.ndarray]
# request, position of the first, ids and weights [n, layers, chosen]
Rows = tuple[str, int, np.ndarray, np.ndarray]
ATTRIBUTE = "jv_routes"  # of a step's output


class RouteCapture:
    """Records what every router of a runner's model chooses in a step."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._layers = expert_layers(runner)
        self._step: list[Chosen | None] | None = None  # None: between steps
        self._done: list[Rows] | None = None
        for index, layer in enumerate(self._layers):
            router = layer.router
            router.select_experts = partial(self._select, router.select_experts, index)
        runner.execute_model = partial(self._execute, runner.execute_model)
        runner.sample_tokens = partial(self._sample, runner.sample_tokens)

    def _select(
        self, select: Callable[..., Any], index: int, *args: Any, **options: Any
    ) -> Any:
        weights, ids = select(*args, **options)
        if self._step is not None:
            chosen = ids.short().numpy().copy(), weights.float().numpy().copy()
            self._step[index] = chosen
        return weights, ids

    def _execute(
        self, execute: Callable[..., Any], scheduled: Any, *args: Any, **options: Any
    ) -> Any:
        step: list[Chosen | None] = [None] * len(self._layers)
        self._step = step
        self._done = None
        try:
            out = execute(scheduled, *args, **options)
            if out is None:  # its tokens are sampled by the next call
                self._done = self._by_request(scheduled, step)
        finally:
            self._step = None
        return out

    def _sample(self, sample: Callable[..., Any], *args: Any, **options: Any) -> Any:
        out = sample(*args, **options)
        done = self._done
        self._done = None
        if done is not None and out is not None:
            setattr(out, ATTRIBUTE, done)
        return out

    def _by_request(self, scheduled: Any, step: Sequence[Chosen | None]) -> list[Rows]:
        """The rows of a step, which lie in the order of the runner's batch."""
        batch = self._runner.input_batch
        counts = scheduled.num_scheduled_tokens
        out = []
        start = 0
        known = [layer for layer in step if layer is not None]
        if len(known) < len(step) or {len(ids) for ids, _ in known} != {
            scheduled.total_num_scheduled_tokens
        }:
            found = [0 if layer is None else len(layer[0]) for layer in step]
            raise Unsupported(
                f"of {scheduled.total_num_scheduled_tokens} tokens the layers' routers saw {found}"
            )
        ids, weights = (np.stack(parts, axis=1) for parts in zip(*known, strict=True))
        for row, name in enumerate(batch.req_ids):
            stop = start + counts[name]
            out.append(
                (
                    name,
                    int(batch.num_computed_tokens_cpu[row]),
                    ids[start:stop],
                    weights[start:stop],
                )
            )
            start = stop
        return out


def expert_layers(runner: Any) -> list[Any]:
    """The layers of a runner's model that have routers, in order; raises if they cannot be observed."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    found = [
        module
        for module in runner.get_model().modules()
        if isinstance(module, MoERunner)
    ]
    remedy = "launch without enable_return_routed_experts"
    if not found:
        raise Unsupported("this model has no experts to return", remedy=remedy)
    if any(layer._quant_method.is_monolithic for layer in found):
        raise Unsupported(
            "this model's kernels choose experts themselves, unseen by vLLM",
            remedy=remedy,
        )
    parallel = runner.vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise Unsupported(
            "experts are not returned with pipeline or data parallelism", remedy=remedy
        )
    if not runner.vllm_config.model_config.enforce_eager:
        raise Unsupported(
            "compiled layers cannot be observed",
            remedy="leave enforce_eager out: it is on by default",
        )
    return sorted(found, key=lambda layer: layer.layer_id)


class RequestRoutes:
    """The routes of the requests in a scheduler, by position. No I/O."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Rows]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, step: Iterable[Rows], requests: Mapping[str, Any]) -> None:
        """Keep a step's rows; not of requests that have ended, or are only scored."""
        for rows in step:
            params = getattr(requests.get(rows[0]), "sampling_params", None)
            if params is not None and params.prompt_logprobs is None:
                self._rows.setdefault(rows[0], []).append(rows)

    def attach(self, groups: Mapping[int, Any]) -> None:
        """Put the routes of finished requests into their outputs."""
        for group in groups.values():
            for output in group.outputs:
                if output.finish_reason is not None and output.request_id in self._rows:
                    output.routed_experts = _joined(self._rows.pop(output.request_id))

    def drop(self, names: Iterable[str]) -> None:
        """These requests were aborted."""
        for name in names:
            self._rows.pop(name, None)


def _joined(parts: Sequence[Rows]) -> np.ndarray:
    """Float32 [positions, layers, 2, chosen]: ids, -1 where nothing is known, and weights.

    A position that was computed again, after a preemption or a rejected draft, has its last values.
    """
    _, _, first, _ = parts[0]
    out = np.zeros(
        (
            max(start + len(ids) for _, start, ids, _ in parts),
            first.shape[1],
            2,
            first.shape[2],
        ),
        np.float32,
    )
    out[:, :, 0] = -1
    for _, start, ids, weights in parts:
        out[start : start + len(ids), :, 0] = ids
        out[start : start + len(ids), :, 1] = weights
    return out


def read_routes(found: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Ids int16 and weights float32 of so many tokens, [tokens, layers, chosen]; of vLLM's own output ids alone.

    The last token is in no step, so its ids are -1.
    """
    ids, weights = (
        (found, None) if found.ndim == 3 else (found[:, :, 0], found[:, :, 1])
    )
    known = min(len(ids), tokens - 1)
    out = np.full((tokens, *ids.shape[1:]), -1, np.int16)
    out[:known] = ids[:known]
    if weights is None:
        return out, None
    weighed = np.zeros(out.shape, np.float32)
    weighed[:known] = weights[:known]
    return out, weighed
