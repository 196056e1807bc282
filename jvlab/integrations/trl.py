"""TRL's GRPO trainers on a pool: vLLM generates there, and every new version of the weights is synced and proven.

    pool = lab.launch(folder, http=True, http_key=True)
    AsyncGRPOTrainer(folder, ..., weight_transfer=jv.integrations.trl.Transfer(pool),
                     args=AsyncGRPOConfig(..., vllm_server_base_url=pool.http_key_url))

    pool = lab.launch(folder)
    GRPOTrainer(folder, ..., rollout_func=jv.integrations.trl.rollout_func(pool))

Checked against TRL 1.16.0, unpatched. Do not install its extra `vllm`, which wants an older one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, MissingDependency, Unsupported
from jvlab.sync._connections import Connections, check_pool
from jvlab.sync._link import Link
from jvlab.sync._transaction import SyncReport

__all__ = ["Transfer", "rollout_func"]

SECONDS = 1800.0  # for one call of the pool; TRL's own limit for a sync


class Transfer:
    """For `AsyncGRPOTrainer(weight_transfer=...)`: TRL's torch parameters go through a link, as a verified sync.

        transfer.link       the `jv.Link`: mapping, plan, `meaning`
        transfer.reports    a `jv.SyncReport` for each sync

    target     a `jv.Pool`, connected when TRL first sends its weights; or a `jv.Link`, made from a state dict with the
               names of `model.named_parameters()`
    rules      as for `lab.connect`, with a pool; the names of Hugging Face need none
    mode       "direct" or "staged", as for `lab.connect`, with a pool
    timeout    seconds for one sync

    A sync that fails raises its reason out of `trainer.train()`; the pool then serves the old weights, or refuses to
    generate. Tensors go to the link as TRL holds them, on their device. TRL gathers the shards of FSDP2 before.
    """

    def __init__(
        self,
        target: Any,
        *,
        rules: Any = "auto",
        mode: str = "direct",
        timeout: float = SECONDS,
    ) -> None:
        self.link: Link | None = target if hasattr(target, "sync") else None
        self._owns = self.link is None
        self.pool = target if self.link is None else self.link.pool
        if self.link is None:
            check_pool(target, "jv.integrations.trl.Transfer(pool), or of a link")
        self.reports: list[SyncReport] = []
        self._connections = Connections()
        # an engine in this process has links of its own
        self._connect = functools.partial(
            getattr(self.pool, "connect", None)
            or functools.partial(self._connections.connect, pool=self.pool),
            rules=rules,
            mode=mode,
        )
        self._timeout = timeout

    def init_weight_transfer(self) -> None:
        """Before the first sync: wait until the pool is up."""
        self.pool.wait(self._timeout, progress=False)

    def pause(self) -> None:
        """Nothing: a sync pauses the engines itself, while it writes; requests in flight go on after it."""

    def resume(self) -> None:
        """Nothing: see `pause`."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """A verified sync of these tensors, by their names in the checkpoint."""
        deadline = Deadline(self._timeout)
        params = dict(iterator)
        if self.link is None or (self._owns and self.link.closed):
            self.link = self._connect(params, timeout=deadline)
        self.reports.append(self.link.sync(params, timeout=deadline, progress=False))

    def destroy(self) -> None:
        """Close the link, if it was made here; the pool stays, and training again connects again."""
        self._connections.close()


class Rollouts:
    """`rollout_func(pool)`: what GRPOTrainer calls to generate. `link` and `reports` are those of a `Transfer`."""

    def __init__(self, transfer: Transfer, timeout: float) -> None:
        self.transfer = transfer
        self._timeout = timeout
        # (trainer, step) whose weights the pool holds
        self._held: tuple[int, int] | None = None

    @property
    def link(self) -> Link | None:
        return self.transfer.link

    @property
    def reports(self) -> list[SyncReport]:
        return self.transfer.reports

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """A completion of each prompt, by the weights of this step, with the log-probabilities it was sampled with."""
        if trainer.accelerator.num_processes > 1:
            raise Unsupported(
                "rollout_func syncs from one process, and this trainer has several",
                remedy="AsyncGRPOTrainer(weight_transfer=jv.integrations.trl.Transfer(pool)) takes several",
            )
        if trainer.use_vllm:
            raise ConfigError(
                "use_vllm=True starts a vLLM of TRL's own",
                remedy="GRPOConfig(use_vllm=False): the pool generates",
            )
        held = (id(trainer), trainer.state.global_step)
        if self._held != held:
            _send(self.transfer, trainer)
            self._held = held
        samples: list[Any] = []
        for folded, n in _folded(_tokens(prompts, trainer)):
            samples += self.transfer.pool.generate(
                [list(row) for row in folded],
                n=n,
                progress=False,
                timeout=self._timeout,
                **_sampling(trainer),
            )
        return {
            "prompt_ids": [sample.prompt_token_ids.tolist() for sample in samples],
            "completion_ids": [sample.token_ids.tolist() for sample in samples],
            "logprobs": [np.asarray(s.logprobs, float).tolist() for s in samples],
        }


def rollout_func(
    pool: Any, link: Link | None = None, *, timeout: float = SECONDS, **options: Any
) -> Rollouts:
    """For `GRPOTrainer(rollout_func=..., args=GRPOConfig(use_vllm=False))`: the pool generates, synced at each step.

    link       one made before; default: connected at the first step, with the `options` of `Transfer`
    timeout    seconds for one call of the pool

    Prompts may be texts or messages. A PEFT model is merged for the sync. With `use_vllm=False` TRL does not correct
    for a difference between the sampler's log-probabilities and its own.
    """
    made = Transfer(pool if link is None else link, timeout=timeout, **options)
    return Rollouts(made, timeout)


def _send(transfer: Transfer, trainer: Any) -> None:
    """Send the weights that AsyncGRPOTrainer would."""
    try:
        from accelerate.utils import is_peft_model
        from trl.experimental.async_grpo.async_grpo_trainer import (
            _iter_vllm_named_params,
        )
    except ImportError as error:
        raise MissingDependency(
            f"TRL is not installed, or is not 1.16: {error}",
            remedy="pip install trl==1.16.0",
        ) from error
    model = trainer.accelerator.unwrap_model(trainer.model)
    with contextlib.ExitStack() as merged:
        if is_peft_model(model):
            model.merge_adapter()
            merged.callback(model.unmerge_adapter)
        named = _iter_vllm_named_params(model)
        transfer.send_weights((name, tensor.detach()) for name, tensor in named)


def _tokens(prompts: Sequence[Any], trainer: Any) -> list[tuple[int, ...]]:
    """Prompts as TRL tokenizes them for its own engines: texts as they are, messages by the chat template."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        rows = tokenizer(text=list(prompts))["input_ids"]
    else:
        contents = [m["content"] for prompt in prompts for m in prompt]
        if not all(isinstance(content, str) for content in contents):
            raise Unsupported(
                "messages whose content is not text", remedy='{"content": "text"}'
            )
        rows = tokenizer.apply_chat_template(
            conversation=list(prompts),
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )["input_ids"]
    return [tuple(map(int, row)) for row in rows]


def _sampling(trainer: Any) -> dict[str, Any]:
    """vLLM's sampling parameters for a GRPOTrainer, as for TRL's own engines."""
    return {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        **(trainer.args.generation_kwargs or {}),
    }


def _folded(
    rows: Sequence[tuple[int, ...]],
) -> Iterator[tuple[list[tuple[int, ...]], int]]:
    """Calls of the pool: TRL repeats a prompt for each sample of its group, in a row; groups of a size go together."""
    groups: list[list[Any]] = []
    for row in rows:
        if groups and groups[-1][0] == row:
            groups[-1][1] += 1
        else:
            groups.append([row, 1])
    if len({count for _, count in groups}) == 1:
        yield [row for row, _ in groups], groups[0][1]
        return
    for row, count in groups:
        yield [row], count
