"""Holds output tokens in the engine core until they are needed. Checked against vLLM 0.32.0.

vLLM's core sends every token of every request to its front end as it is generated: 512 requests are 512 small messages
a step, which cost both sides time. Requests that asked for their final output only, and have no stop strings to check,
can wait:

    first token      sent at once: it carries the times at which the request was queued, scheduled and started
    later tokens     held, with their log-probabilities
    all held tokens  sent before the weight version changes or generation is paused or aborted (a message carries one
                     version), and every HOLD_SECONDS, so that token rates stay up to date
    the last token   sent with the held tokens of its request

The front end receives the same in fewer messages; it accepts several tokens in one, as after speculative decoding. To
be removed when vLLM's scheduler respects RequestOutputKind.FINAL_ONLY itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

HOLD_SECONDS = 0.5  # the longest that tokens are held


class _Held:
    """The held tokens of one request."""

    __slots__ = ("client", "logprobs", "tokens")

    def __init__(self, client: int) -> None:
        self.client = client
        self.tokens: list[int] = []
        self.logprobs: list[LogprobsLists] = []

    def add(self, tokens: list[int], logprobs: LogprobsLists | None) -> None:
        self.tokens += tokens
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def take(self) -> tuple[list[int], LogprobsLists | None]:
        tokens, parts = self.tokens, self.logprobs
        self.tokens, self.logprobs = [], []
        if len(parts) < 2:
            return tokens, parts[0] if parts else None
        ids, values, ranks, _ = zip(*parts, strict=True)
        return tokens, LogprobsLists(np.concatenate(ids), np.concatenate(values), np.concatenate(ranks), None)


class HeldOutputs:
    """The held tokens of one scheduler. No I/O."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._held: dict[str, _Held] = {}
        self._clock, self._released = clock, clock()

    def __len__(self) -> int:
        return len(self._held)

    def filter(self, outputs: dict[int, EngineCoreOutputs], requests: dict[str, Any]) -> None:
        """Remove from one step's outputs what can be held, and add held tokens to their request's last output."""
        all_held = self._held
        for client, group in outputs.items():
            sent = []
            for output in group.outputs:
                name = output.request_id
                held = all_held.get(name)
                if held is None:
                    if output.finish_reason is None and _can_wait(requests.get(name)):
                        all_held[name] = _Held(client)
                elif output.finish_reason is None and _is_plain(output):
                    held.add(output.new_token_ids, output.new_logprobs)
                    continue
                else:
                    if held.tokens:
                        held.add(output.new_token_ids, output.new_logprobs)
                        output.new_token_ids, output.new_logprobs = held.take()
                    if output.finish_reason is not None:
                        del all_held[name]
                sent.append(output)
            group.outputs = sent
        if all_held and self._clock() - self._released > HOLD_SECONDS:
            for client, late in self.release().items():
                outputs.setdefault(client, EngineCoreOutputs()).outputs.extend(late.outputs)
        for client, group in list(outputs.items()):
            if not group.outputs and not group.finished_requests and group.scheduler_stats is None:
                del outputs[client]  # an empty message

    def release(self) -> dict[int, EngineCoreOutputs]:
        """All held tokens, by client; their requests continue."""
        self._released = self._clock()
        groups: dict[int, EngineCoreOutputs] = {}
        for name, held in self._held.items():
            if held.tokens:
                tokens, logprobs = held.take()
                group = groups.setdefault(held.client, EngineCoreOutputs())
                group.outputs.append(EngineCoreOutput(name, tokens, new_logprobs=logprobs))
        return groups

    def drop(self, names: Iterable[str]) -> None:
        """These requests have ended; discard their tokens."""
        for name in names:
            self._held.pop(name, None)


def _can_wait(request: Any) -> bool:
    """Whether this request's tokens are not needed before it ends."""
    if request is None:
        return False
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and not request.resumable
    )


def _is_plain(output: EngineCoreOutput) -> bool:
    """Whether it has only tokens and log-probabilities, nothing that needs a message of its own."""
    return (
        output.events is None
        and output.prefill_stats is None
        and output.new_prompt_logprobs_tensors is None
        and getattr(output, "prompt_token_id_logprobs", None) is None  # vLLM 0.30 has no such field; ends with 0.31
        and output.pooling_output is None
        and output.new_sampling_mask is None
        and output.routed_experts is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.trace_headers is None
        and not output.num_nans_in_logits
    )
