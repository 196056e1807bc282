"""`jv.certify` over tiny architectures on a CPU, each with an engine of its own.

    python -m tests.live.certified [FAMILY ...] [--write]    --write: adds to tests/baselines/certify_cpu.json

vLLM is imported once; every architecture then runs in a forked child, two at a time, with its engine in the child.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.live.arrival_families import FAMILIES
from tests.live.arrivals import Reference, run

BASELINE = Path(__file__).parents[1] / "baselines" / "certify_cpu.json"
COMMAND = "python -m tests.live.certified --write"
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
PLAIN = {name: config for name, config in FAMILIES.items() if "@" not in name}
CERTIFIED: dict[str, dict[str, Any]] = {
    **PLAIN,
    "llama@bfloat16": {**FAMILIES["llama"], "dtype": "bfloat16"},
    "qwen3@lora": FAMILIES["qwen3"],
}


def check(family: str, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The certificate of one architecture."""
    import jvlab as jv

    Reference(family, config).save(folder)
    engine = {
        "max_model_len": 64,
        "block_size": 32,
        "dtype": config.get("dtype", "float32"),
    }
    engine |= {
        "skip_tokenizer_init": True,
        **(LORA if family.endswith("@lora") else {}),
    }
    pool = jv.Pool.in_process(folder, name="certified", device="cpu", engine=engine)
    try:
        return jv.certify(pool, progress=False).to_dict()
    finally:
        pool.close()


def row(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a certificate: states, and of those that did not pass the reason."""
    if "error" in found:
        return {"error": found["error"]}
    return {
        "architecture": found["engine"]["architecture"],
        "dtype": found["engine"]["dtype"],
        "ok": found["ok"],
        "checks": {c["name"]: c["state"] for c in found["checks"]},
        "why": {
            c["name"]: " ".join([c["detail"], c["first_wrong"]]).strip()
            for c in found["checks"]
            if c["state"] != "pass"
        },
        "seconds": found["seconds"],
    }


def write(results: dict[str, dict[str, Any]]) -> None:
    """Add these results to the baseline; others stay as they are."""
    import torch
    import transformers
    import vllm

    kept = json.loads(BASELINE.read_text())["families"] if BASELINE.exists() else {}
    out = {
        "command": COMMAND,
        "what": "jv.certify on tiny random models, one in-process engine each; pass, fail, or not applicable and why",
        "machine": platform.machine(),
        "versions": {
            module.__name__: module.__version__
            for module in (vllm, transformers, torch)
        },
        "families": dict(sorted((kept | results).items())),
    }
    BASELINE.write_text(json.dumps(out, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--write", action="store_true", help=f"add to {BASELINE.name}")
    given = parser.parse_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory(prefix="jvlab-certified-") as folder:
        for family, found in run(
            {name: CERTIFIED[name] for name in given.families or CERTIFIED},
            Path(folder),
            check,
        ):
            kept = row(found)
            failed |= not kept.get("ok")
            states = kept.get("checks", {})
            print(f"{family:<16} {kept.get('error') or states}", flush=True)
            for name, why in kept.get("why", {}).items():
                if states[name] == "fail":
                    print(f"    {name}: {why}", flush=True)
            if given.write:
                write({family: kept})
            log = Path(folder) / f"{family}.log"
            if "error" in found and log.exists():
                print("\n".join(log.read_text().splitlines()[-15:]), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
