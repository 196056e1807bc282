"""Works around vLLM 0.30 and 0.31: their outputs do not say which weights made a token. Ends with vLLM 0.32.0.

Since 0.32.0 the engine core puts its weight version into every message to the front end, which makes spans of it
(`CompletionOutput.weight_versions`). Here the same is added to older versions, at the same places:

    core        EngineCoreOutputs gets the field `weight_version`; it is set where a step's details are attached
    front end   a message's outputs become a list that knows its version; a request's state collects where versions
                begin; a finished output gets its spans

In vLLM 0.32.0 and later both functions return without a change.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

FIELD = "weight_version"


@dataclass
class WeightVersionSpan:
    """Output tokens `[start, end)` were sampled by weights labelled `version`; as vLLM's own."""

    version: str
    start: int
    end: int


class LabelledOutputs(list[Any]):
    """The outputs of one message, and of its parts: vLLM processes a large message in slices."""

    weight_version: str | None = None

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        if not isinstance(at, slice):
            return found
        part = LabelledOutputs(found)
        part.weight_version = self.weight_version
        return part


def has_labels() -> bool:
    """Whether vLLM's messages carry the version, by vLLM or by this file."""
    import vllm.v1.engine as engine

    return FIELD in engine.EngineCoreOutputs.__struct_fields__


def label_core() -> None:
    """In the core's process: every message with outputs carries the version of the weights."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "_attach_weight_version"):
        return
    _widen_messages()

    def attach(self: Any, outputs: dict[int, Any]) -> None:
        for group in outputs.values():
            group.weight_version = self._weight_version

    details = EngineCore._attach_iteration_details

    @functools.wraps(details)
    def attach_both(self: Any, outputs: dict[int, Any], *args: Any) -> None:
        details(self, outputs, *args)
        attach(self, outputs)

    EngineCore._attach_weight_version = attach  # type: ignore[attr-defined]
    EngineCore._attach_iteration_details = attach_both  # type: ignore[method-assign]


def label_front_end() -> None:
    """In the front end's process, before an AsyncLLM is made: finished outputs have `weight_versions`."""
    import vllm.outputs as results
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    if hasattr(results, "WeightVersionSpan"):
        return
    _widen_messages()
    results.WeightVersionSpan = WeightVersionSpan  # type: ignore[attr-defined]
    results.CompletionOutput.weight_versions = None  # type: ignore[attr-defined]
    _wrap(AsyncMPClient, "get_output_async", _labelling)
    _wrap(OutputProcessor, "process_outputs", _tracking)
    _wrap(RequestState, "_new_completion_output", _with_spans)
    _wrap(results.RequestOutput, "add", _keeping_spans)


def _wrap(owner: type, name: str, around: Any) -> None:
    method = getattr(owner, name)
    setattr(owner, name, functools.wraps(method)(around(method)))


def _widen_messages() -> None:
    """EngineCoreOutputs with one more field, in every module that has imported it: they make and decode messages."""
    if has_labels():
        return
    import vllm.v1.engine as engine

    plain: Any = engine.EngineCoreOutputs

    class EngineCoreOutputs(plain, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]  # options of msgspec
        weight_version: str | None = None

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("EngineCoreOutputs") is plain:
            module.EngineCoreOutputs = EngineCoreOutputs  # type: ignore[attr-defined]


def _labelling(method: Any) -> Any:
    async def get_output_async(self: Any) -> Any:
        message = await method(self)
        message.outputs = LabelledOutputs(message.outputs)
        message.outputs.weight_version = message.weight_version
        return message

    return get_output_async


def _tracking(method: Any) -> Any:
    def process_outputs(self: Any, outputs: Any, *args: Any, **options: Any) -> Any:
        version = getattr(outputs, FIELD, None)
        if version is not None:
            for output in outputs:
                state = self.request_states.get(output.request_id)
                if (
                    state is not None
                    and state.detokenizer is not None
                    and output.new_token_ids
                ):
                    track(state, version)
        return method(self, outputs, *args, **options)

    return process_outputs


def track(state: Any, version: str) -> None:
    """Begin a span of this request if its weights have changed."""
    starts = state.__dict__.setdefault("weight_version_starts", [])
    if not starts or starts[-1][0] != version:
        starts.append((version, state.detokenizer.num_output_tokens()))


def spans(state: Any) -> list[Any] | None:
    """The spans of a request's tokens; None if no version was reported for them."""
    starts = state.__dict__.get("weight_version_starts", [])
    tokens = state.detokenizer.num_output_tokens()
    if not starts and tokens:
        return None
    ends = [start for _, start in starts[1:]] + [tokens]
    return [
        WeightVersionSpan(version, start, end)
        for (version, start), end in zip(starts, ends, strict=True)
    ]


def _with_spans(method: Any) -> Any:
    def _new_completion_output(
        self: Any, token_ids: Any, finish_reason: Any, *args: Any, **options: Any
    ) -> Any:
        completion = method(self, token_ids, finish_reason, *args, **options)
        completion.weight_versions = spans(self) if finish_reason is not None else None
        return completion

    return _new_completion_output


def _keeping_spans(method: Any) -> Any:
    """RequestOutput.add merges a later output into this one; spans come with the last."""

    def add(self: Any, later: Any, *args: Any, **options: Any) -> Any:
        result = method(self, later, *args, **options)
        last = {
            completion.index: completion.weight_versions for completion in later.outputs
        }
        for completion in self.outputs:
            if completion.index in last:
                completion.weight_versions = last[completion.index]
        return result

    return add
