"""A trainer on a host of its own that does as it is told: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jvlab as jv


class Trainer:
    """A pool of the first of two checkpoints, and a link that sends either."""

    def __init__(
        self, address: str, token: str, certificate: str, fault: str, *models: str
    ) -> None:
        lab = jv.Lab.attach(address, token, tls_ca=certificate)
        engine = {"max_model_len": 256}
        env = {"JVLAB_FAULT": fault}
        self.pool = lab.launch(models[0], engine=engine, env=env, restarts=0).wait(400)
        self.params = [jv.Policy.from_pretrained(m).params for m in models]
        self.link = lab.connect(self.params[0], self.pool, bucket_mib=0.5)
        tokens = []
        for which in (1, 0):
            self.sync(which, "direct", 120)
            tokens.append(self.generate()["tokens"])
        self.say({"tokens": tokens[::-1]})

    def sync(self, which: int, mode: str, timeout: float) -> dict[str, Any]:
        report = self.link.sync(self.params[which], mode=mode, timeout=timeout)
        return {"version": report.version, "verified": report.verified}

    def generate(self) -> dict[str, Any]:
        made = self.pool.generate(
            [[5, 6, 7, 8]], max_tokens=16, temperature=0.0, ignore_eos=True, timeout=60
        )
        return {"tokens": made[0].token_ids.tolist()}

    def do(self, do: str, **options: Any) -> dict[str, Any]:
        """Whatever it comes to, and how long it took."""
        start = time.monotonic()
        try:
            return getattr(self, do)(**options)
        except jv.JvlabError as error:
            seconds = round(time.monotonic() - start, 1)
            name = type(error).__name__
            return {"error": name, "message": error.message, "seconds": seconds}

    def say(self, facts: dict[str, Any]) -> None:
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    trainer = Trainer(*sys.argv[1:])
    for line in sys.stdin:
        trainer.say(trainer.do(**json.loads(line)))
