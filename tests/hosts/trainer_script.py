"""A trainer on a host of its own: attaches, launches, syncs twice, generates. Facts as one line of JSON.

With a share: syncs what changed of so many values, and everything, in turn.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

import jvlab as jv
from jvlab.bench import _delta


def main(
    address: str,
    token: str,
    certificate: str,
    model: str,
    share: str = "",
    live: str = "0",
) -> None:
    lab = jv.Lab.attach(address, token, tls_ca=certificate)
    # "1": vLLM for CPUs packs no weights, as none are packed on a GPU
    env = {"JVLAB_LIVE_WEIGHTS": live}
    engine = {"max_model_len": 256}
    pool = lab.launch(model, name="far", engine=engine, env=env).wait(400)
    policy = jv.Policy.from_pretrained(model)
    link = lab.connect(policy, pool)
    facts = (
        measured(link, policy.params, float(share))
        if share
        else synced(link, pool, policy)
    )
    print(json.dumps(facts), flush=True)
    if not share:
        sys.stdin.readline()  # the test ends the replica
        print(json.dumps(pool.status()["replicas"][0]["state"]), flush=True)
    pool.close()
    lab.detach()


def measured(link: jv.Link, params: Any, share: float) -> dict[str, Any]:
    other = _delta.changed(params, share)
    return {
        "transport": link.transport,
        "share": share,
        **_delta._row(link, params, other, "staged", 3),
    }


def synced(link: jv.Link, pool: jv.Pool, policy: jv.Policy) -> dict[str, Any]:
    reports = [link.sync(policy.params)]
    before = pool.generate(["Once"], max_tokens=8, temperature=0.0)[0]
    doubled = jax.tree.map(lambda leaf: leaf * 2, policy.params)
    reports.append(link.sync(doubled))
    after = pool.generate(["Once"], max_tokens=8, temperature=0.0)[0]
    found = link.verify()
    return {
        "transport": link.transport,
        "reason": link.reason,
        "verified": [report.verified for report in reports],
        "versions": [np.unique(s.versions).tolist() for s in (before, after)],
        "moved": bool((before.logprobs != after.logprobs).any()),
        "still": bool(found),
        "replicas": [r.facts.host for r in pool.snapshot.replicas],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
