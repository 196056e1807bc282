"""Bisection checks that compare engine and trainer: a wrong rule, rounding, or a different model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import JvlabError
from jvlab.analysis.diagnose._bisect_base import Base, Found
from jvlab.analysis.diagnose._bisection import Check, largest

if TYPE_CHECKING:
    from jvlab.analysis.diagnose._rule_search import ByFunction

SEARCH_SHARE = 0.8  # fraction of the remaining time for the rule search; the checks after it need some too
ROUNDING_FACTOR = 4.0  # two programs round in different orders: up to this multiple of one's error is still rounding


class Models(Base):
    """Why the two compute different numbers from the same weights. Each check returns evidence or raises `Found`."""

    _tried = ""  # result of the rule search, for the verdict on the model

    def rule(self) -> Check:
        """Does an alternative rule explain the gap? The bits arrived, but may be in the wrong place."""
        gap = self._gap()
        if gap is not None and gap <= self.tolerance and self.link.version:
            return Check("rule", "ok", f"{gap:.2g} nats apart: there is nothing to explain")
        if (wrong := self._by_value()) is not None:
            left = self._by_function().gap(wrong.alternative) if gap is not None and gap > self.tolerance else None
            raise self._wrong_rule(replace(wrong, gap=left), gap)
        if gap is None:
            return Check("rule", "skipped", f"no jv.Policy to compute with; by value: {self._seen}")
        if gap <= self._rounding_gap():
            return Check("rule", "ok", f"{gap:.2g} nats apart, which rounding explains; by value: {self._seen}")
        if not self._suspects:
            return Check("rule", "ok", "the shapes allow no alternative, or the link has no rules")
        search = self._by_function()
        if not search.replaceable:
            return Check("rule", "skipped", "the leaves of these parameters can't be replaced: not a JAX pytree")
        wrong = search.search(self._suspects)
        if wrong is not None:
            raise self._wrong_rule(wrong, gap)
        some = " (all there was time for)" if search.out_of_time else ""
        self._tried = f", and none of {search.tried} alternative rules{some} helps"
        text = f"{search.tried} alternative rules tried{some}: under none do trainer and engine agree"
        return Check("rule", "ok", f"{text}; by value: {self._seen}", {"tried": search.tried})

    def _by_function(self) -> ByFunction:
        from jvlab.analysis.diagnose._rule_search import ByFunction

        assert self.engine is not None
        return ByFunction(
            self.policy,
            self.params,
            self.tokens,
            self.engine,
            self._rounding_gap(),
            SEARCH_SHARE * self.timeout.left(),
            self._states,
        )

    def _gap(self) -> float | None:
        """The gap between engine and trainer; None without a policy."""
        if self.policy is None:
            return None
        assert self.engine is not None  # set by the check before
        if self.trainer is None:
            self.trainer = self._by_trainer(self.policy, self.params)
        return largest(self.engine, self.trainer)

    def _rounding_gap(self) -> float:
        """The gap that the two dtypes can explain; the tolerance if they are equal."""
        engine = str(self.status["dtype"])
        if engine == self.policy.compute_dtype:
            return self.tolerance
        if self._rounding is None:
            assert self.trainer is not None
            self._rounding = largest(self.trainer, self._by_trainer(*_rounded(self.policy, self.params, engine)))
        return ROUNDING_FACTOR * self._rounding + self.tolerance

    def dtype(self) -> Check:
        """Does rounding explain the gap?"""
        gap = self._gap()
        if gap is None:
            return Check("dtype", "skipped", "no jv.Policy to compute with: pass link.bisect(prompt, policy)")
        engine, trainer = str(self.status["dtype"]), self.policy.compute_dtype
        facts: dict[str, Any] = {"gap": gap, "engine": engine, "trainer": trainer}
        text = f"{gap:.2g} nats between the engine in {engine} and the trainer in {trainer}"
        if gap <= self.tolerance:
            return Check("dtype", "ok", text, facts)
        if engine == trainer:
            return Check("dtype", "ok", f"{text}: not a matter of dtype", facts)
        explained = self._rounding_gap()
        facts["rounding"] = self._rounding
        text += f"; the trainer itself computing in {engine} moves by {self._rounding:.2g}"
        if gap > explained:
            return Check("dtype", "ok", f"{text}: too little to explain it", facts)
        raise Found(
            Check("dtype", "cause", text, facts),
            f"dtype: the engine computes in {engine}, the trainer in {trainer}, and rounding explains the gap",
            f'launch with engine={{"dtype": "{trainer}"}}, or correct for it (importance ratios) in the loss',
        )

    def model(self) -> Check:
        """Neither weights, rules nor dtype explain the gap: the two models compute differently."""
        if self.engine is None or self.trainer is None:
            return Check("model", "skipped", "the engine's numbers were not compared with a trainer's")
        gap = largest(self.engine, self.trainer)
        if gap <= self.tolerance:
            return Check("model", "ok", f"the two compute the same, to {gap:.2g} nats")
        apart = np.abs(self.engine - self.trainer)
        first = int(np.argmax(np.nan_to_num(apart) > self.tolerance))
        where = (
            "from the first prediction on, which depends on one token: embeddings, norms or the MLP, not positions"
            if first == 1
            else f"from position {first} on, not before: attention or positions (RoPE), or the context"
        )
        layers, facts = self._layers()
        part = f"starting in layer {facts['layer']}" if facts else where.partition(":")[0]
        verdict = f"what was sent has arrived{self._tried}: engine and trainer compute differently, {part}"
        raise Found(
            Check("model", "cause", f"{gap:.2g} nats, {where}; {layers}", {"first": first, **facts}),
            verdict,
            "compare config.json of both sides: rope_theta, rms_norm_eps, sliding_window, tied embeddings",
        )

    def _layers(self) -> tuple[str, dict[str, Any]]:
        """The first layer that differs, if hidden states are available."""
        from jvlab.lab._hidden import compare_layers

        states = self._states()
        if states is None:
            return f"no layer is named: {self._no_states}", {}
        found = compare_layers(states, np.asarray(self.policy.hidden(self.params, self.tokens[None, :]))[:, 0])
        return f"layer by layer: {found}", {"layer": found.layer, "apart": list(found.apart)}

    _no_states = ""

    def _states(self) -> np.ndarray | None:
        """The engine's hidden states; None if they are unavailable (`_no_states` says why)."""
        try:
            return self.pool.hidden(self.tokens.tolist(), timeout=self.timeout)
        except JvlabError as error:
            self._no_states = error.message
            return None


def _rounded(policy: Any, params: Any, dtype: str) -> tuple[Any, Any]:
    """The same policy and parameters in another dtype."""
    import dataclasses

    import jax

    runtime = dataclasses.replace(policy.runtime, dtype=dtype)
    other = type(policy)(
        policy.config, params, policy.mesh, runtime, policy.source, policy.hf_config, policy._tensors, policy._bindings
    )
    return other, jax.tree.map(lambda leaf: leaf.astype(dtype), params)
