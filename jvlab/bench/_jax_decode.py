"""Rollouts decoded in JAX, without an inference engine: the peer of `jvlab bench grpo`.

One jitted program generates a batch: prefill into a KV cache, then a while loop that samples a token for every row,
writes its key and value into the cache in place, and ends early when all rows have stopped. It runs on the trainer's
own arrays, so it needs no weight sync. Prompts are padded on the left to a fixed length: it compiles once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jvlab.record._batch import RolloutBatch
from jvlab.record._sample import Sample
from jvlab.sync._sync_report import Outcome, SyncReport
from jvlab.trainer._policy import Policy
from jvlab.trainer.decoder import _model, _rope
from jvlab.trainer.decoder._attention import MASKED_SCORE, softcap
from jvlab.trainer.decoder._model import Attention, Decoder, Layer

Cache = tuple[jax.Array, jax.Array]


def _attend(
    self: Attention, x: jax.Array, rope: Any, visible: jax.Array, cache: Cache, at: Any
) -> tuple[jax.Array, Cache]:
    """`Attention.__call__` with a KV cache: new keys and values are written from position `at` on."""
    config = self.config
    q = self.q(x)
    k = self.k(x)
    v = self.v(x)
    if config.head_norms:
        q = self.q_norm(q)
        k = self.k_norm(k)
    elif config.whole_norms:
        q = self.q_norm(q.reshape(*x.shape[:2], -1)).reshape(q.shape)
        k = self.k_norm(k.reshape(*x.shape[:2], -1)).reshape(k.shape)
    q = _rope.rotate(q, rope)
    k = _rope.rotate(k, rope)
    keys = jax.lax.dynamic_update_slice_in_dim(cache[0], k, at, axis=1)
    values = jax.lax.dynamic_update_slice_in_dim(cache[1], v, at, axis=1)
    q = q.reshape(*q.shape[:2], config.kv_heads, -1, config.head_dim)
    einsum = partial(jnp.einsum, precision=self.runtime.precision)
    scores = (
        einsum("btkgh,bskh->bkgts", q, keys, preferred_element_type=jnp.float32)
        * config.attention_scale
    )
    scores = softcap(scores, config.attention_softcap)
    weights = jax.nn.softmax(
        jnp.where(visible[:, None, None], scores, MASKED_SCORE), axis=-1
    )
    mixed = einsum("bkgts,bskh->btkgh", weights.astype(x.dtype), values)
    return self.o(mixed.reshape(*x.shape[:2], config.heads, config.head_dim)), (
        keys,
        values,
    )


def _layer(
    self: Layer, x: jax.Array, rope: Any, visible: jax.Array, cache: Cache, at: Any
) -> tuple[jax.Array, Cache]:
    before = self.config.pre_norms
    after = self.config.post_norms
    y, cache = _attend(
        self.attn, self.attn_norm(x) if before else x, rope, visible, cache, at
    )
    x = x + (self.post_attn_norm(y) if after else y)
    y = self.mlp(self.mlp_norm(x) if before else x)
    return x + (self.post_mlp_norm(y) if after else y), cache


def _forward(
    decoder: Decoder,
    tokens: jax.Array,
    positions: jax.Array,
    every: jax.Array,
    seen: jax.Array,
    caches: Any,
    at: Any,
) -> tuple[jax.Array, Any]:
    """Logits after the last of `tokens`; `every` [B, S] are the positions of the whole cache, `seen` is its mask."""
    config = decoder.config
    runtime = decoder.runtime
    x = jnp.take(runtime.weight(decoder.embed.embedding), tokens, axis=0)
    x = x * jnp.asarray(config.embedding_scale, x.dtype)
    ropes = [_rope.tables(rope, positions) for rope in config.ropes]
    distance = positions[:, :, None] - every[:, None, :]
    order = (at + jnp.arange(tokens.shape[1]))[None, :, None] >= jnp.arange(
        every.shape[1]
    )[None, None, :]
    graph, stacked = nnx.split(decoder.layers)
    out = []
    for number, (rope, window, cache) in enumerate(
        zip(config.layer_ropes, config.windows, caches, strict=True)
    ):
        layer = nnx.merge(
            graph, jax.tree.map(lambda leaf, number=number: leaf[number], stacked)
        )
        visible = (
            order & seen[:, None, :] & (True if window is None else distance < window)
        )
        x, cache = _layer(layer, x, ropes[rope], visible, cache, at)
        out.append(cache)
    return decoder.unembed(decoder.head(), decoder.final_norm(x)[:, -1:])[:, 0], out


def generate(
    params: Any,
    tokens: jax.Array,
    mask: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    config: Any,
    runtime: Any,
    length: int,
    stop: int,
) -> dict[str, jax.Array]:
    """`length` tokens after left-padded prompts [B, P]; rows that reached `stop` are padded with it."""
    decoder = _model.build(params, config, runtime)
    rows, width = tokens.shape
    total = width + length
    lengths = mask.sum(axis=1)
    every = jnp.maximum(jnp.arange(total)[None, :] - (width - lengths)[:, None], 0)
    exists = jnp.concatenate([mask, jnp.ones((rows, length), bool)], axis=1)
    empty = jnp.zeros((rows, total, config.kv_heads, config.head_dim), runtime.dtype)
    caches: Any = [(empty, empty) for _ in range(config.layers)]
    logits, caches = _forward(
        decoder, tokens, every[:, :width], every, exists, caches, 0
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
        position = jax.lax.dynamic_slice_in_dim(every, width + t, 1, axis=1)
        logits, caches = _forward(
            decoder, token[:, None], position, every, exists, caches, width + t
        )
        return t + 1, key, logits, caches, done, out, logprobs

    shape = (rows, length)
    start = (
        0,
        key,
        logits,
        caches,
        jnp.zeros(rows, bool),
        jnp.full(shape, stop),
        jnp.zeros(shape, jnp.float32),
    )
    state = jax.lax.while_loop(lambda s: (s[0] < length) & ~s[4].all(), step, start)
    return {"tokens": state[5], "logprobs": state[6]}


class JaxPool:
    """The peer's pool: has the `agenerate` of `jv.Pool`, so that the same loop runs on it.

    The groups of a step are decoded in one batch, once `together` of them have been requested.
    """

    def __init__(
        self,
        policy: Policy,
        together: int,
        encode: Any,
        decode: Any,
        stop: int,
        width: int,
    ) -> None:
        self.name = "jax"
        self.model = str(policy.source)
        self.params: Any = policy.params
        self.version = 0
        self._policy = policy
        self._together = together
        self._encode = encode
        self._decode = decode
        self._stop = stop
        self._width = width
        self._waiting: list[
            tuple[np.ndarray, int, int, asyncio.Future[list[Sample]]]
        ] = []
        self._program = jax.jit(
            partial(generate, config=policy.config, runtime=policy.runtime, stop=stop),
            static_argnames=("length",),
        )

    def status(self) -> dict[str, Any]:
        """One replica, which cannot die."""
        return {
            "healthy": 1,
            "replicas": [{"replica": "jax/0", "state": "ready", "cause": None}],
            "dtype": "float32",
        }

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
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Sample]] = loop.create_future()
        ids = np.array(self._encode(prompts[0], True), np.int32)
        self._waiting.append((ids, n, seed, future))
        if len(self._waiting) == self._together:
            batch = self._waiting
            self._waiting = []
            made = await asyncio.to_thread(self._batch, batch, max_tokens, temperature)
            for (_, _, _, waiter), samples in zip(batch, made, strict=True):
                waiter.set_result(samples)
        return RolloutBatch(await future)

    def _batch(
        self, batch: Sequence[Any], length: int, temperature: float
    ) -> list[list[Sample]]:
        rows = [ids for ids, n, _, _ in batch for _ in range(n)]
        tokens = np.zeros((len(rows), self._width), np.int32)
        mask = np.zeros((len(rows), self._width), bool)
        for row, ids in enumerate(rows):
            tokens[row, self._width - len(ids) :] = ids
            mask[row, self._width - len(ids) :] = True
        key = jax.random.key(batch[0][2])
        found = self._program(
            self.params, tokens, mask, key, temperature, length=length
        )
        made = np.asarray(found["tokens"])
        logprobs = np.asarray(found["logprobs"])
        out = []
        at = 0
        for ids, n, _, _ in batch:
            out.append(
                [self._sample(ids, k, made[at + k], logprobs[at + k]) for k in range(n)]
            )
            at += n
        return out

    def _sample(
        self, prompt: np.ndarray, index: int, tokens: np.ndarray, logprobs: np.ndarray
    ) -> Sample:
        ends = np.flatnonzero(tokens == self._stop)
        count = int(ends[0]) + 1 if len(ends) else len(tokens)
        kept = tokens[:count]
        return Sample(
            prompt_index=0,
            sample_index=index,
            prompt_token_ids=prompt,
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

    def sync(self, params: Any, version: int, **_: Any) -> SyncReport:
        """Let the decoder use these arrays."""
        start = time.perf_counter()
        self.pool.params = params
        self.pool.version = version
        self.version = version
        seconds = {"total": time.perf_counter() - start}
        return SyncReport(
            version,
            0,
            seconds,
            (Outcome("jax/0", "committed", version),),
            verify="off",
            transport="none",
        )
