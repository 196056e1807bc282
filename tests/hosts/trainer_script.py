"""A trainer on a host of its own: attaches, launches, syncs twice, generates. Facts as one line of JSON."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

import jvlab as jv


def main(address: str, token: str, certificate: str, model: str) -> None:
    lab = jv.Lab.attach(address, token, tls_ca=certificate)
    pool = lab.launch(model, name="far").wait(400)
    policy = jv.Policy.from_pretrained(model)
    link = lab.connect(policy, pool)
    reports = [link.sync(policy.params)]
    before = pool.generate(["Once"], max_tokens=8, temperature=0.0)[0]
    doubled = jax.tree.map(lambda leaf: leaf * 2, policy.params)
    reports.append(link.sync(doubled))
    after = pool.generate(["Once"], max_tokens=8, temperature=0.0)[0]
    found = link.verify()
    facts = {
        "transport": link.transport,
        "reason": link.reason,
        "verified": [report.verified for report in reports],
        "versions": [np.unique(s.versions).tolist() for s in (before, after)],
        "moved": bool((before.logprobs != after.logprobs).any()),
        "still": bool(found),
        "replicas": [r.facts.host for r in pool.snapshot.replicas],
    }
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()  # the test ends the replica
    print(json.dumps(pool.status()["replicas"][0]["state"]), flush=True)
    pool.close()
    lab.detach()


if __name__ == "__main__":
    main(*sys.argv[1:])
