"""`jvlab certify`: launch a model as asked, certify the engine, print the table."""

from __future__ import annotations

import argparse
import json
from typing import Any

from jvlab._errors import ConfigError
from jvlab.analysis.certification._certificate import CHECKS


def add_certify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a model directory, or tiny:FAMILY")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--engine", default="{}", metavar="JSON", help='vLLM\'s arguments: {"enable_lora": true}')
    parser.add_argument("--check", action="append", choices=list(CHECKS), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0)


def run_certify(arguments: argparse.Namespace) -> dict[str, Any]:
    """The certificate as plain values; its table is printed unless JSON was asked for."""
    import jvlab as jv

    try:
        engine = json.loads(arguments.engine)
    except ValueError as error:
        raise ConfigError(f"--engine is no JSON: {error}", remedy="""--engine '{"enforce_eager": true}'""") from error
    if not isinstance(engine, dict):
        raise ConfigError("--engine is no JSON object", remedy="""--engine '{"enforce_eager": true}'""")
    with jv.Lab() as lab:
        options = {"device": arguments.device, "tensor_parallel": arguments.tensor_parallel, "engine": engine}
        pool = lab.launch(arguments.model, name="certified", replicas=arguments.replicas, **options).wait()
        found = jv.certify(pool, arguments.check, seed=arguments.seed)
        if not arguments.json:
            print(found)
        return found.to_dict()
