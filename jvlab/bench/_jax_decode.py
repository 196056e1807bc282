"""Rollouts of a Llama decoded in JAX, without an inference engine: the peer of `jvlab bench grpo`.

One jitted program generates a batch: prefill into a KV cache, then a while loop that samples a token for every row,
writes its key and value into the cache in place, and ends early when all rows have stopped. It runs on the trainer's
own arrays, so it needs no weight sync. Prompts are padded on the left to a fixed length: it compiles once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jvlab.record._batch import RolloutBatch
from jvlab.record._sample import Sample
from jvlab.sync._transaction import Outcome, SyncReport
from jvlab.trainer._policy import Policy
from jvlab.trainer.decoder import _model, _rope


def _forward(
    decoder: _model.Decoder,
    tokens: jax.Array,
    positions: jax.Array,
    visible: jax.Array,
    caches: Any,
    at: Any,
) -> tuple[jax.Array, Any]:
    """Logits after the last of `tokens`; keys and values are written into the caches from place `at` on."""
    config = decoder.config
    x = jnp.take(decoder.runtime.weight(decoder.embed.embedding), tokens, axis=0)
    rope = _rope.tables(config.ropes[0], positions)
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=at, axis=1)
    graph, stacked = nnx.split(decoder.layers)
    written = []
    for number, (keys, values) in enumerate(caches):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, n=number: leaf[n], stacked))
        normed = layer.attn_norm(x)
        keys = write(keys, _rope.rotate(layer.attn.k(normed), rope))
        values = write(values, layer.attn.v(normed))
        mixed = jax.nn.dot_product_attention(
            _rope.rotate(layer.attn.q(normed), rope),
            keys,
            values,
            mask=visible[:, None],
            scale=config.attention_scale,
        )
        x = x + layer.attn.o(mixed)
        x = x + layer.mlp(layer.mlp_norm(x))
        written.append((keys, values))
    last = decoder.final_norm(x)[:, -1:]
    return decoder.unembed(decoder.head(), last)[:, 0], written


def generate(
    params: Any,
    tokens: jax.Array,
    mask: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    policy: Policy,
    length: int,
    stop: int,
) -> tuple[jax.Array, jax.Array]:
    """`length` tokens after left-padded prompts [B, P], and their log-probabilities; a row is padded with `stop`."""
    config = policy.config
    decoder = _model.build(params, config, policy.runtime)
    rows, width = tokens.shape
    places = jnp.arange(width + length)
    # of the tokens themselves, without the padding before them
    positions = jnp.maximum(places - (width - mask.sum(axis=1))[:, None], 0)
    exists = jnp.concatenate([mask, jnp.ones((rows, length), bool)], axis=1)
    visible = (places[:, None] >= places) & exists[:, None]
    shape = (rows, width + length, config.kv_heads, config.head_dim)
    empty = jnp.zeros(shape, policy.runtime.dtype)
    caches: Any = [(empty, empty) for _ in range(config.layers)]
    logits, caches = _forward(
        decoder, tokens, positions[:, :width], visible[:, :width], caches, 0
    )

    def step(state: Any) -> Any:
        t, key, logits, caches, done, out, logprobs = state
        key, draw = jax.random.split(key)
        scores = jax.nn.log_softmax(logits / temperature)
        token = jnp.where(done, stop, jax.random.categorical(draw, scores))
        chosen = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
        out = out.at[:, t].set(token)
        logprobs = logprobs.at[:, t].set(jnp.where(done, 0.0, chosen))
        done = done | (token == stop)
        now = partial(jax.lax.dynamic_slice_in_dim, slice_size=1, axis=1)
        at = width + t
        logits, caches = _forward(
            decoder, token[:, None], now(positions, at), now(visible, at), caches, at
        )
        return t + 1, key, logits, caches, done, out, logprobs

    none = jnp.zeros((rows, length), jnp.float32)
    out = jnp.full((rows, length), stop)
    start = (0, key, logits, caches, jnp.zeros(rows, bool), out, none)
    state = jax.lax.while_loop(lambda s: (s[0] < length) & ~s[4].all(), step, start)
    return state[5], state[6]


class JaxPool:
    """The peer's pool: has the `agenerate` of `jv.Pool`, so that the same loop runs on it.

    The groups of a step are decoded in one batch, once `together` of them have been requested.
    """

    def __init__(
        self,
        policy: Policy,
        together: int,
        encode: Callable[[Any], Sequence[int]],
        decode: Callable[[np.ndarray], str],
        stop: int,
        width: int,
    ) -> None:
        self.name = "jax"
        self.model = str(policy.source)
        self.params: Any = policy.params
        self.version = 0
        self._together = together
        self._encode = encode
        self._decode = decode
        self._stop = stop
        self._width = width
        self._waiting: list[tuple[list[int], int, int, asyncio.Future[Any]]] = []
        self._program = jax.jit(
            partial(generate, policy=policy, stop=stop), static_argnames=("length",)
        )

    def status(self) -> dict[str, Any]:
        """One replica, which cannot die."""
        replica = {"replica": "jax/0", "state": "ready", "ready": True, "cause": None}
        return {"healthy": 1, "replicas": [replica], "dtype": "float32"}

    async def agenerate(
        self,
        prompts: Any,
        n: int = 1,
        *,
        seed: int = 0,
        max_tokens: int = 16,
        temperature: float = 1.0,
        on_sample: Any = None,
    ) -> RolloutBatch:
        """Wait for the batch that this prompt is part of. Its samples end all at once, so `on_sample` is not called."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((list(self._encode(prompts[0])), n, seed, future))
        if len(self._waiting) == self._together:
            batch = self._waiting
            self._waiting = []
            made = await asyncio.to_thread(self._batch, batch, max_tokens, temperature)
            for ids, count, _, waiter in batch:
                waiter.set_result(
                    [self._sample(ids, k, *next(made)) for k in range(count)]
                )
        return RolloutBatch(await future)

    def _batch(self, batch: Sequence[Any], length: int, temperature: float) -> Any:
        """Tokens and log-probabilities of every sample, in the order of the batch."""
        rows = [ids for ids, n, _, _ in batch for _ in range(n)]
        padding = [self._width - len(ids) for ids in rows]
        tokens = np.array(
            [[0] * pad + ids for pad, ids in zip(padding, rows, strict=True)], np.int32
        )
        mask = np.arange(self._width) >= np.array(padding)[:, None]
        key = jax.random.key(batch[0][2])
        found = self._program(
            self.params, tokens, mask, key, temperature, length=length
        )
        return zip(*map(np.asarray, found), strict=True)

    def _sample(
        self, prompt: list[int], index: int, tokens: np.ndarray, logprobs: np.ndarray
    ) -> Sample:
        ends = np.flatnonzero(tokens == self._stop)
        count = int(ends[0]) + 1 if len(ends) else len(tokens)
        kept = tokens[:count]
        return Sample(
            prompt_index=0,
            sample_index=index,
            prompt_token_ids=np.array(prompt, np.int32),
            token_ids=kept,
            logprobs=logprobs[:count],
            versions=((self.version, 0, count),),
            text=self._decode(kept[:-1] if len(ends) else kept),
            finish_reason="stop" if len(ends) else "length",
            replica="jax/0",
        )


class JaxLink:
    """The peer's link: decoding reads the trainer's own arrays, so a sync costs nothing."""

    def __init__(self, pool: JaxPool) -> None:
        self.pool = pool
        self.version = 0

    def lend_scores(self, policy: Any) -> None:
        """Nothing is mapped, so nothing can be mapped wrongly."""

    def sync(self, params: Any, version: int, **_: Any) -> SyncReport:
        """Let the decoder use these arrays."""
        self.pool.params = params
        self.pool.version = version
        self.version = version
        outcomes = (Outcome("jax/0", "committed", version),)
        return SyncReport(
            version, 0, {"total": 0.0}, outcomes, verify="off", transport="none"
        )
