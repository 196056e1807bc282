"""Tokens that nobody waits for stay in the engine core until somebody does. Checked against vLLM 0.32.0.

vLLM's core sends every token of every request to its front end as it is made: 512 requests are 512 small messages a
step, packed in the core, unpacked and filed in the front end, while both have something better to do. A request that
asked for its final output only, and whose text is not watched for stop strings, can wait:

    first token      sent at once: it carries when the request was queued, scheduled and begun
    later tokens     held, with their log-probabilities
    all held tokens  sent before the weights' label changes or generation is paused or aborted (each message bears one
                     label), and every HOLD_SECONDS, so that rates which others watch stay true
    the last token   sent with what is held of its request

What arrives is what would have arrived, in fewer messages: vLLM's front end takes several tokens in one, as it does
after speculative decoding. To be removed when vLLM's scheduler heeds RequestOutputKind.FINAL_ONLY itself.
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


class _Waiting:
    """What is held of one request."""

    __slots__ = ("client", "logprobs", "tokens")

    def __init__(self, client: int) -> None:
        self.client = client
        self.tokens: list[int] = []
        self.logprobs: list[LogprobsLists] = []

    def give(self, tokens: list[int], logprobs: LogprobsLists | None) -> None:
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
    """The held tokens of one scheduler. No I/O: outputs go in and come out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._clock, self._released = clock, clock()

    def __len__(self) -> int:
        return len(self._waiting)

    def sift(self, outputs: dict[int, EngineCoreOutputs], requests: dict[str, Any]) -> None:
        """Take out of one step's outputs what can wait, and put in what has waited for its request's last token."""
        waiting = self._waiting
        for client, group in outputs.items():
            sent = []
            for output in group.outputs:
                name = output.request_id
                held = waiting.get(name)
                if held is None:
                    if output.finish_reason is None and _can_wait(requests.get(name)):
                        waiting[name] = _Waiting(client)
                elif output.finish_reason is None and _is_plain(output):
                    held.give(output.new_token_ids, output.new_logprobs)
                    continue
                else:
                    if held.tokens:
                        held.give(output.new_token_ids, output.new_logprobs)
                        output.new_token_ids, output.new_logprobs = held.take()
                    if output.finish_reason is not None:
                        del waiting[name]
                sent.append(output)
            group.outputs = sent
        if waiting and self._clock() - self._released > HOLD_SECONDS:
            for client, late in self.release().items():
                outputs.setdefault(client, EngineCoreOutputs()).outputs.extend(late.outputs)
        for client, group in list(outputs.items()):
            if not group.outputs and not group.finished_requests and group.scheduler_stats is None:
                del outputs[client]  # an empty message

    def release(self) -> dict[int, EngineCoreOutputs]:
        """All that is held, by client; their requests go on."""
        self._released = self._clock()
        groups: dict[int, EngineCoreOutputs] = {}
        for name, held in self._waiting.items():
            if held.tokens:
                tokens, logprobs = held.take()
                group = groups.setdefault(held.client, EngineCoreOutputs())
                group.outputs.append(EngineCoreOutput(name, tokens, new_logprobs=logprobs))
        return groups

    def drop(self, names: Iterable[str]) -> None:
        """These requests are over, and nobody will read more of them."""
        for name in names:
            self._waiting.pop(name, None)


def _can_wait(request: Any) -> bool:
    """Whether nobody looks at this request's tokens before it ends."""
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
    """Tokens and log-probabilities, and nothing that needs a message of its own."""
    return (
        output.events is None
        and output.prefill_stats is None
        and output.new_prompt_logprobs_tensors is None
        and output.prompt_token_id_logprobs is None
        and output.pooling_output is None
        and output.new_sampling_mask is None
        and output.routed_experts is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.trace_headers is None
        and not output.num_nans_in_logits
    )
