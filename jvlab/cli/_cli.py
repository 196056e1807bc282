"""The `jvlab` command: one parser, one function per subcommand."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError, JvlabError
from jvlab._version import __version__
from jvlab.analysis.certification._certificate import CHECKS
from jvlab.engine._agent import add_join_arguments
from jvlab.gateway.cluster._sbatch import add_slurm_arguments
from jvlab.sync._plan import add_plan_arguments
from jvlab.wire.processes._labs import list_labs, stop_lab

# `jvlab ps` and `jvlab stop`.


def run_ps(arguments: Any) -> dict[str, Any]:
    """The body of `jvlab ps`."""
    labs = list_labs()
    width = max((len(info.name) for info in labs), default=0)
    if not arguments.json:
        for info in labs:
            print(f"{info.name.ljust(width)}  {info.state.ljust(8)}  {info.words}")
        if not labs:
            print("no lab is running")
    return {"labs": [info.plain() for info in labs]}


def run_stop(arguments: Any) -> dict[str, Any]:
    """The body of `jvlab stop`."""
    done = stop_lab(arguments.name, arguments.timeout)
    if not arguments.json:
        how = f", {len(done['killed'])} of them killed" if done["killed"] else ""
        print(
            f"{done['stopped']} ended in {done['seconds']:.1f} s: {done['processes']} processes{how}, none is left"
        )
    return done


# `jvlab certify`: launch a model as asked, certify the engine, print the table.


def add_certify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help="a model directory, or tiny:FAMILY"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument(
        "--engine",
        default="{}",
        metavar="JSON",
        help='vLLM\'s arguments: {"enable_lora": true}',
    )
    parser.add_argument(
        "--check",
        action="append",
        choices=list(CHECKS),
        help="only this one; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0)


def run_certify(arguments: argparse.Namespace) -> dict[str, Any]:
    """The certificate as plain values; its table is printed unless JSON was asked for."""
    import jvlab as jv

    try:
        engine = json.loads(arguments.engine)
    except ValueError as error:
        raise ConfigError(
            f"--engine is no JSON: {error}",
            remedy="""--engine '{"enforce_eager": true}'""",
        ) from error
    if not isinstance(engine, dict):
        raise ConfigError(
            "--engine is no JSON object",
            remedy="""--engine '{"enforce_eager": true}'""",
        )
    with jv.Lab() as lab:
        options = {
            "device": arguments.device,
            "tensor_parallel": arguments.tensor_parallel,
            "engine": engine,
        }
        pool = lab.launch(
            arguments.model, name="certified", replicas=arguments.replicas, **options
        ).wait()
        found = jv.certify(pool, arguments.check, seed=arguments.seed)
        if not arguments.json:
            print(found)
        return found.to_dict()


# ----------------------------------------------------------------------------------------------------

# below sys.prefix, where a wheel's data files go (pyproject.toml)
SHIPPED = "share/jvlab/notebooks"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jvlab",
        description="JAX training coupled with vLLM rollouts. Start with: jvlab doctor, then jvlab demo.",
    )
    parser.add_argument("--version", action="version", version=f"jvlab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--json", action="store_true", help="end with one line of JSON"
        )
        return command

    add(
        "doctor",
        "what this machine can run; for what it cannot, why not and what to install",
    )
    demo = add(
        "demo",
        "a complete run on a tiny model: GRPO on real vLLM rollouts, every weight sync verified by digests",
    )
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--steps", type=int, default=20)
    demo.add_argument(
        "--max-staleness",
        type=int,
        default=0,
        help="0: on-policy; above: rollouts and training overlap",
    )
    gateway = add(
        "gateway", "run a lab's gateway in the foreground (jv.Lab() does this for you)"
    )
    _gateway_arguments(gateway)
    rollout = add(
        "rollout",
        "run one rollout process; with --gateway: offer it to a running gateway",
    )
    add_join_arguments(rollout)
    rollout.add_argument(
        "--supervised", action="store_true", help="end when standard input closes"
    )
    rollout.add_argument(
        "--warm",
        action="store_true",
        help="import vLLM, then fork rollout processes on request",
    )
    rollout.add_argument(
        "--http",
        action="store_true",
        help="serve vLLM's OpenAI-compatible app too, on loopback",
    )
    warm = add(
        "warm",
        "keep vLLM imported until interrupted: every lab on this machine then launches in seconds",
    )
    warm.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    bench = add(
        "bench", "measure, each as a ratio against a peer or a floor in the same run"
    )
    bench.add_argument(
        "what",
        choices=[
            "rollout",
            "launch",
            "plan",
            "sync",
            "lora",
            "grpo",
            "train",
            "topology",
            "gateway",
            "gap",
            "whatif",
        ],
    )
    bench.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="rollout, launch, sync, lora, topology: number of rounds",
    )
    bench.add_argument(
        "--requests",
        type=int,
        default=10_000,
        help="topology, gateway: requests to the gateway alone",
    )
    bench.add_argument(
        "--replicas",
        type=_numbers,
        help="gateway: numbers of simulated replicas, e.g. 1,10",
    )
    bench.add_argument(
        "--steps",
        type=int,
        help="grpo: steps of each run that count; default 15, of a given model 4",
    )
    bench.add_argument(
        "--model", help="another model; grpo: one of size, with these options"
    )
    bench.add_argument(
        "--shape",
        help="grpo, and on a GPU sync and lora: instead of --model, random weights of a known shape: qwen3-1.7b; "
        "sync: or qwen3-moe",
    )
    bench.add_argument(
        "--tokens",
        type=_numbers,
        help="grpo: tokens of every completion, e.g. 512,3000",
    )
    bench.add_argument(
        "--staleness",
        type=_numbers,
        help="grpo: bounds of a model of size, e.g. 0,1,2; default 0,1",
    )
    bench.add_argument(
        "--peer",
        choices=["trl"],
        help="grpo: the same work by another trainer, if it is installed",
    )
    bench.add_argument(
        "--lengths", type=_numbers, help="train: tokens of a row, e.g. 1024,4096"
    )
    bench.add_argument(
        "--load",
        default="auto",
        choices=["auto", "dummy"],
        help="rollout: how its weights are loaded",
    )
    bench.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    bench.add_argument(
        "--eager",
        action="store_true",
        help="launch, grpo, gap: no CUDA graphs; engines start sooner",
    )
    add_certify_arguments(
        add(
            "certify",
            "can an engine configuration be trusted? checks on a running engine; exit status 1 if one fails",
        )
    )
    add_plan_arguments(
        add(
            "plan", "where every byte would go: a dry run, without GPU, pool or weights"
        )
    )
    add_slurm_arguments(
        add(
            "slurm",
            "write an sbatch script: gateway, rollouts and your trainer in one job",
        )
    )
    add("ps", "your running labs: pools, replicas, holders")
    stop = add("stop", "end a lab and wait until none of its processes is left")
    stop.add_argument("name", metavar="NAME", help="as `jvlab ps` shows it")
    stop.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        help="seconds in all; what has not ended by then is killed",
    )
    lab = add("lab", "open JupyterLab on the tutorials")
    lab.add_argument("--port", type=int, default=8888)
    return parser


def _gateway_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="anything but loopback needs --tls-cert and --tls-key",
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument(
        "--lease",
        type=float,
        default=600.0,
        help="seconds to keep running when no process holds the lab",
    )
    parser.add_argument(
        "--beat", type=float, default=1.0, help="seconds between a replica's heartbeats"
    )
    parser.add_argument(
        "--missed-beats",
        type=int,
        default=10,
        help="missed heartbeats after which a replica is lost",
    )
    parser.add_argument("--tls-cert", help="PEM certificate chain")
    parser.add_argument("--tls-key", help="PEM private key")
    parser.add_argument(
        "--tls-dir",
        help="instead: a private folder; a certificate is created there if missing",
    )
    parser.add_argument("--token-file", help="the lab's token; created if missing")
    parser.add_argument(
        "--token-stdin",
        action="store_true",
        help="the token is the first line of standard input",
    )
    parser.add_argument(
        "--place",
        default="local",
        choices=["local", "join"],
        help="who starts replicas: this gateway, or hosts that run `jvlab rollout --gateway`",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        help="serve Prometheus metrics on this loopback port; 0: a free one",
    )
    parser.add_argument(
        "--lab", help="name of the lab; default: made from the process id"
    )
    parser.add_argument("--folder", help="where its state and logs go")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a JvlabError is printed with its remedy, not as a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        result = COMMANDS[arguments.command](arguments)
    except JvlabError as error:
        print(f"jvlab {arguments.command}: {error}", file=sys.stderr)
        if arguments.json:
            print(json.dumps({"error": error.message, "remedy": error.remedy}))
        return 1
    except KeyboardInterrupt:
        print(f"jvlab {arguments.command}: interrupted", file=sys.stderr)
        return 130
    if arguments.json:
        print(json.dumps(result))
    return int(arguments.command == "certify" and not result["ok"])


def _doctor(arguments: argparse.Namespace) -> dict[str, Any]:
    from jvlab.cli._doctor import diagnose, render

    found = diagnose()
    if not arguments.json:
        print(render(found))
    return found


def _demo(arguments: argparse.Namespace) -> dict[str, Any]:
    from jvlab.cli._demo import run_demo

    return run_demo(arguments.seed, arguments.max_staleness, arguments.steps)


def _gateway(arguments: argparse.Namespace) -> dict[str, Any]:
    from jvlab.gateway._launcher import run_gateway

    return run_gateway(arguments)


def _rollout(arguments: argparse.Namespace) -> dict[str, Any]:
    from jvlab.engine import _agent, _process

    if arguments.gateway:
        return _agent.run_join(arguments)
    if arguments.warm:
        from jvlab.engine._warm import run_warm

        return {"exit": run_warm()}
    order, token = _process.order_and_token()
    order = replace(order, http=order.http or arguments.http)
    return {"exit": _process.run(order, token, arguments.supervised)}


def _warm(arguments: argparse.Namespace) -> dict[str, Any]:
    from jvlab.engine._warm_host import run_host
    from jvlab.lab._launch_settings import resolve_device

    run_host(resolve_device(arguments.device))


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    # argparse reports a ValueError as a wrong argument
    return tuple(int(word) for word in text.split(","))


def _bench(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.what == "plan":
        from jvlab.bench._plan import run_bench_plan

        return run_bench_plan()
    if arguments.what == "sync":
        if arguments.device == "cuda":
            from jvlab.bench._shapes import size_of
            from jvlab.bench._sync_gpu import run_bench_sync_gpu

            return run_bench_sync_gpu(arguments.rounds, size_of(arguments.shape))
        from jvlab.bench._sync import run_bench_sync

        return run_bench_sync(arguments.rounds, arguments.model)
    if arguments.what == "grpo":
        return _bench_grpo(arguments)
    if arguments.what == "whatif":
        from jvlab.bench._whatif import run_bench_whatif

        return run_bench_whatif(
            12 if arguments.steps is None else arguments.steps,
            arguments.model,
            arguments.device,
        )
    if arguments.what == "train":
        from jvlab.bench._train import run_bench_train

        return run_bench_train(arguments.model, arguments.lengths, arguments.device)
    if arguments.what == "lora":
        from jvlab.bench._lora import run_bench_lora

        return run_bench_lora(
            arguments.rounds, arguments.model, arguments.device, arguments.shape
        )
    if arguments.what == "gap":
        from jvlab.bench._gap import run_bench_gap

        return run_bench_gap(arguments.model, arguments.device, arguments.eager)
    if arguments.what == "launch":
        from jvlab.bench._launch import run_bench_launch

        return run_bench_launch(
            arguments.rounds, arguments.model, arguments.device, arguments.eager
        )
    if arguments.what == "gateway":
        from jvlab.bench._topology_gateway import run_bench_gateway

        return run_bench_gateway(arguments.replicas, arguments.requests)
    if arguments.what == "topology":
        from jvlab.bench._topology import run_bench_topology

        return run_bench_topology(
            arguments.rounds, arguments.model, arguments.device, arguments.requests
        )
    from jvlab.bench._rollout import run_bench_rollout

    return run_bench_rollout(
        arguments.rounds, arguments.model, arguments.load, arguments.device
    )


def _bench_grpo(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.model or arguments.shape:
        from jvlab.bench._grpo import BOUNDS, STEPS, run_bench_grpo_size

        return run_bench_grpo_size(
            arguments.model,
            arguments.tokens,
            arguments.device,
            STEPS if arguments.steps is None else arguments.steps,
            arguments.shape,
            arguments.peer,
            arguments.eager,
            arguments.staleness or BOUNDS,
        )
    if arguments.tokens or arguments.peer or arguments.staleness:
        raise ConfigError(
            "--tokens, --staleness and --peer are for a model of size",
            remedy="--model DIR, or --shape qwen3-1.7b",
        )
    from jvlab.bench._grpo import run_bench_grpo

    return run_bench_grpo(
        15 if arguments.steps is None else arguments.steps,
        arguments.device,
        eager=arguments.eager,
    )


def _plan(arguments: argparse.Namespace) -> dict[str, Any]:
    from jvlab.sync._plan import run_plan

    return run_plan(arguments)


def _certify(arguments: argparse.Namespace) -> dict[str, Any]:

    return run_certify(arguments)


def _slurm(arguments: argparse.Namespace) -> dict[str, Any]:
    from jvlab.gateway.cluster._sbatch import run_slurm

    return run_slurm(arguments)


def _ps(arguments: argparse.Namespace) -> dict[str, Any]:

    return run_ps(arguments)


def _stop(arguments: argparse.Namespace) -> dict[str, Any]:

    return run_stop(arguments)


def _lab(arguments: argparse.Namespace) -> dict[str, Any]:
    import subprocess

    root = _tutorials()
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--port={arguments.port}",
        f"--notebook-dir={root}",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # containers often have no other user
    # no deadline: JupyterLab runs until its user ends it
    return {"exit": subprocess.call(command)}


def _tutorials() -> Path:
    """The folder of the tutorials: a checkout's own; of an installed jvlab a copy that its user may write to."""
    checkout = Path(__file__).parents[2] / "notebooks"
    if checkout.is_dir():
        return checkout
    shipped = Path(sys.prefix) / SHIPPED
    if not shipped.is_dir():
        raise ConfigError(
            f"this installation brought no tutorials: {shipped} is not there",
            remedy="run `jvlab lab` from a checkout, or install the wheel again without --user or --target",
        )
    copy = Path.cwd() / "jvlab-tutorials"
    if not copy.exists():
        shutil.copytree(shipped, copy)
        print(f"tutorials copied to {copy}: yours to change", flush=True)
    return copy


COMMANDS = {
    "doctor": _doctor,
    "demo": _demo,
    "certify": _certify,
    "plan": _plan,
    "bench": _bench,
    "gateway": _gateway,
    "rollout": _rollout,
    "warm": _warm,
    "lab": _lab,
    "slurm": _slurm,
    "ps": _ps,
    "stop": _stop,
}
