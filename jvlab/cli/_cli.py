"""The `jvlab` command: one parser, one function per subcommand."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError, JvlabError
from jvlab._files import Plain
from jvlab._version import __version__
from jvlab.analysis.certification._certificate import CHECKS
from jvlab.gateway.cluster import _slurm
from jvlab.sync._mapping import add_plan_arguments, run_plan
from jvlab.wire._limits import read_object
from jvlab.wire.processes._labs import list_labs, stop_lab
from jvlab.wire.processes._pool_spec import AWAY_SECONDS

# The arguments of each command: rows of (flag, default, help).
#     False        a switch
#     (a, b, …)    the choices; the first is the default
#     a type       no default
#     REQUIRED     must be given
#     otherwise    the default, whose type the argument has

Options = tuple[tuple[str, Any, str], ...]
REQUIRED = object()
DEVICES = ("auto", "cpu", "cuda")


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    # argparse reports a ValueError as a wrong argument
    return tuple(int(word) for word in text.split(","))


CERTIFY = (
    ("--model", REQUIRED, "a model directory, or tiny:FAMILY"),
    ("--device", DEVICES, "where the engine runs"),
    ("--tensor-parallel", 1, "ranks of the engine"),
    ("--replicas", 1, "engines"),
    ("--engine", "{}", 'vLLM\'s arguments as JSON: {"enable_lora": true}'),
    ("--seed", 0, "of what is random in the checks"),
)
DOCTOR = (
    (
        "--at",
        "",
        'also measure the link to another host: a command that starts a process there, e.g. "ssh far"',
    ),
    ("--host", "127.0.0.1", "with --at: this host's address for the other one"),
)
DEMO = (
    ("--seed", 0, "of weights and samples"),
    ("--steps", 20, "of GRPO"),
    ("--max-staleness", 0, "0: on-policy; above: rollouts and training overlap"),
)
GATEWAY = (
    (
        "--host",
        "127.0.0.1",
        "beyond loopback it makes a certificate and prints how to join",
    ),
    ("--port", 0, "0 takes a free one"),
    ("--lease", 600.0, "seconds to keep running when no process holds the lab"),
    ("--beat", 1.0, "seconds between a replica's heartbeats"),
    ("--missed-beats", 10, "missed heartbeats after which a replica is lost"),
    ("--tls-cert", str, "PEM certificate chain"),
    ("--tls-key", str, "PEM private key"),
    (
        "--tls-dir",
        str,
        "instead: a private folder; a certificate is created there if missing",
    ),
    ("--token-file", str, "the lab's token; created if missing"),
    ("--token-stdin", False, "the token is the first line of standard input"),
    (
        "--place",
        ("local", "join"),
        "who starts replicas: this gateway, or hosts that run `jvlab rollout --gateway`",
    ),
    (
        "--metrics-port",
        int,
        "serve Prometheus metrics on this loopback port; 0: a free one",
    ),
    ("--lab", str, "name of the lab; default: made from the process id"),
    ("--folder", str, "where its logs and its certificate go"),
    (
        "--state",
        str,
        "a file, made if missing: if this gateway dies, start it again with it, and joined replicas and clients go on",
    ),
    (
        "--away",
        AWAY_SECONDS,
        "with --state: seconds that replicas wait for a gateway that died, and it for them",
    ),
)
ROLLOUT = (
    ("--supervised", False, "end when standard input closes"),
    ("--warm", False, "import vLLM, then fork rollout processes on request"),
    ("--http", False, "serve vLLM's OpenAI-compatible app too, on loopback"),
    (
        "--follow",
        str,
        "instead: a lab of its own, whose engines serve the newest version that a trainer publishes in this folder or "
        "bucket (jv.Publisher); needs --model",
    ),
    ("--model", str, "with --follow: the model folder, or tiny:FAMILY"),
    ("--replicas", 1, "with --follow: engines"),
    ("--device", DEVICES, "with --follow: where engines run"),
    ("--gateway", str, "HOST:PORT of a running gateway: offer this host to it"),
    (
        "--fingerprint",
        "",
        "of the gateway's certificate, as the gateway printed it: instead of the files",
    ),
    (
        "--token-file",
        str,
        "with --gateway: the lab's token (lab.write_token(FILE) writes it); default: JVLAB_TOKEN, or asked for",
    ),
    ("--invited", False, "read token and certificate from standard input"),
    (
        "--name",
        "",
        "the pool, or the replica POOL/N, to run; default: any that is waiting",
    ),
    (
        "--bind",
        "",
        "the address to listen on; default: the one that reaches the gateway",
    ),
    ("--tls-ca", str, "the gateway's certificate, or its CA's, PEM"),
    ("--tls-cert", str, "this host's own certificate chain, PEM"),
    ("--tls-key", str, "its private key, PEM"),
    (
        "--tls-dir",
        str,
        "the folder that `jvlab gateway --tls-dir` filled, instead of the three",
    ),
    ("--patience", 300.0, "seconds to wait for the gateway to come up"),
    ("--folder", str, "where the replica's log goes; default: a temporary one"),
    (
        "--share-host",
        False,
        "other replicas of the pool are on this host: share its cores and GPUs",
    ),
)
BENCH = (
    ("--rounds", 5, "rollout, launch, sync, lora, topology: number of rounds"),
    ("--requests", 10_000, "topology, gateway: requests to the gateway alone"),
    ("--replicas", _numbers, "gateway: numbers of simulated replicas, e.g. 1,10"),
    (
        "--steps",
        int,
        "grpo: counted steps of each run; default 15, or 4 with a model; trl, tunix: default 4",
    ),
    ("--model", str, "another model; grpo: a large one, with the options below"),
    (
        "--shape",
        str,
        "grpo, trl, tunix, and on a GPU sync, server, lora: instead of --model, random weights of a known shape: "
        "qwen3-1.7b; sync: or qwen3-moe",
    ),
    (
        "--tokens",
        _numbers,
        "grpo, trl, tunix: tokens of every completion, e.g. 512,3000",
    ),
    (
        "--staleness",
        _numbers,
        "grpo with a model: bounds of staleness, e.g. 0,1,2; default 0,1",
    ),
    (
        "--peer",
        (None, "trl"),
        "grpo, launch --first-step: the same work by another trainer, if it is installed",
    ),
    (
        "--first-step",
        False,
        "launch: until the first step of GRPO is done, and the parts of that",
    ),
    (
        "--floors",
        False,
        "grpo: only generation: what it must cost, and what plain vLLM and a pool take",
    ),
    ("--drawn", False, "grpo with a model: completions of drawn lengths"),
    (
        "--fp8",
        False,
        "grpo, on a GPU: rollouts in eight bits; without a model what is learnt so",
    ),
    ("--tail", False, "grpo: the last samples of a step, with n-gram speculation"),
    ("--delta", False, "sync: what changed beside everything, at 0.1 to 50 %% changed"),
    ("--adam", False, "sync --delta: what real steps of Adam changed"),
    (
        "--transport",
        "auto",
        "sync: shm, tcp, nixl or disk on a CPU; nixl on a GPU, beside ipc and nccl",
    ),
    ("--lengths", _numbers, "train: tokens of a row, e.g. 1024,4096"),
    ("--load", ("auto", "dummy"), "rollout: how its weights are loaded"),
    ("--device", DEVICES, "where engines run"),
    (
        "--eager",
        False,
        "launch, grpo, gap, trl, tunix: no CUDA graphs; engines start sooner",
    ),
    ("--mib", 1024, "link: how much is sent"),
    ("--host", "127.0.0.1", "link: this process's address for the other one"),
    (
        "--at",
        "",
        'link: a command that starts the other process elsewhere, e.g. "ip netns exec far"',
    ),
)
STOP = (("--timeout", 30.0, "seconds in all; what has not ended by then is killed"),)


def _add_options(parser: argparse.ArgumentParser, table: Options) -> None:
    for flag, default, text in table:
        match default:
            case False:
                how: Plain = {"action": "store_true"}
            case (first, *_):
                how = {"choices": [c for c in default if c], "default": first}
            case _ if default is REQUIRED:
                how = {"required": True}
            case _ if callable(default):
                how = {"type": default}
            case _:
                how = {"type": type(default), "default": default}
        parser.add_argument(flag, help=text, **how)


def parser() -> argparse.ArgumentParser:
    """The parser of `jvlab` and all its commands."""
    made = argparse.ArgumentParser(
        prog="jvlab",
        description="JAX training coupled with vLLM rollouts. Start with: jvlab doctor, then jvlab demo.",
    )
    made.add_argument("--version", action="version", version=f"jvlab {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, _, options) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        json_help = "end with one line of JSON"
        command.add_argument("--json", action="store_true", help=json_help)
        _add_options(command, options)
        match name:
            case "plan":
                add_plan_arguments(command)
            case "bench":
                command.add_argument("what", choices=BENCHES)
                alone = "tunix: generate without training"
                command.add_argument(
                    "--rollouts-only", action="store_false", dest="train", help=alone
                )
            case "stop":
                seen = "as `jvlab ps` shows it"
                command.add_argument("name", metavar="NAME", help=seen)
            case "certify":
                once = "only this one; may be repeated"
                command.add_argument(
                    "--check", action="append", choices=list(CHECKS), help=once
                )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a JvlabError is printed with its remedy, not as a traceback."""
    arguments = parser().parse_args(argv)
    try:
        result = COMMANDS[arguments.command][1](arguments)
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


# The body of each command: returns what --json prints.


def _doctor(arguments: argparse.Namespace) -> Plain:
    from jvlab.cli._doctor import diagnose, render

    found = diagnose()
    if arguments.at:
        from jvlab.bench._link import measure_link

        found["link"] = measure_link(arguments.host, arguments.at)
    if not arguments.json:
        print(render(found))
    return found


def _demo(arguments: argparse.Namespace) -> Plain:
    from jvlab.cli._demo import run_demo

    return run_demo(arguments.seed, arguments.max_staleness, arguments.steps)


def _gateway(arguments: argparse.Namespace) -> Plain:
    from jvlab.gateway._launcher import run_gateway

    return run_gateway(arguments)


def _rollout(arguments: argparse.Namespace) -> Plain:
    from jvlab.engine import _agent, _process

    if arguments.follow:
        return run_follow(arguments)
    if arguments.gateway:
        return _agent.run_join(arguments)
    if arguments.warm:
        from jvlab.engine._warm import run_warm

        return {"exit": run_warm()}
    order, token = _process.order_and_token()
    order = replace(order, http=order.http or arguments.http)
    return {"exit": _process.run(order, token, arguments.supervised)}


LOOK_SECONDS = 0.2  # between two looks at what a follower did


def run_follow(arguments: argparse.Namespace) -> Plain:
    """The body of `jvlab rollout --follow`: until Ctrl-C or SIGTERM, or until the pool is closed."""
    import jvlab as jv

    if arguments.gateway:
        raise ConfigError(
            "--follow starts a lab of its own, and --gateway joins one",
            remedy="in the process that holds that lab: lab.follow(pool, path)",
        )
    if not arguments.model:
        raise ConfigError(
            "--follow needs a model: config and tokenizer of what is published",
            remedy="--model DIR; a full version is such a folder too",
        )
    with jv.Lab() as lab:
        pool = lab.launch(
            arguments.model,
            name=arguments.name or "follow",
            replicas=arguments.replicas,
            device=arguments.device,
            http=arguments.http,
        ).wait()
        follower = lab.follow(pool, arguments.follow)
        print(
            f"jvlab: pool {pool.name} follows {arguments.follow}; "
            f"jv.Lab.attach({lab.name!r}).pools[{pool.name!r}] is it",
            flush=True,
        )
        if arguments.http:
            print(f"jvlab: OpenAI's API at {pool.http_url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            report_follower(follower)
        return {"version": follower.version}


def report_follower(follower: Any) -> None:
    """Print a line for each version that is served, and for each new problem, until it is closed."""
    served = None
    problem = ""
    while not follower.closed:
        last = follower.last
        if last is not None and last is not served:
            served = last
            seconds = last.seconds["total"]
            print(f"jvlab: version {last.version} served, {seconds:.1f} s", flush=True)
        error = follower.error
        text = error.message if error is not None else ""
        if text and text != problem:
            print(f"jvlab: {error}", file=sys.stderr, flush=True)
        problem = text
        time.sleep(LOOK_SECONDS)


def _warm(arguments: argparse.Namespace) -> Plain:
    from jvlab.engine._warm import run_host
    from jvlab.lab._launch_settings import resolve_device

    run_host(resolve_device(arguments.device))


def run_ps(arguments: Any) -> Plain:
    """The body of `jvlab ps`."""
    labs = list_labs()
    width = max((len(info.name) for info in labs), default=0)
    if not arguments.json:
        for info in labs:
            print(f"{info.name.ljust(width)}  {info.state.ljust(8)}  {info.words}")
        if not labs:
            print("no lab is running")
    return {"labs": [info.plain() for info in labs]}


def run_stop(arguments: Any) -> Plain:
    """The body of `jvlab stop`."""
    done = stop_lab(arguments.name, arguments.timeout)
    if not arguments.json:
        how = f", {len(done['killed'])} of them killed" if done["killed"] else ""
        print(
            f"{done['stopped']} ended in {done['seconds']:.1f} s: {done['processes']} processes{how}, none is left"
        )
    return done


def run_certify(arguments: argparse.Namespace) -> Plain:
    """The certificate as plain values; its table is printed unless JSON was asked for."""
    import jvlab as jv

    engine = read_object(arguments.engine, "--engine")
    with jv.Lab() as lab:
        pool = lab.launch(
            arguments.model,
            name="certified",
            replicas=arguments.replicas,
            tensor_parallel=arguments.tensor_parallel,
            device=arguments.device,
            engine=engine,
        ).wait()
        found = jv.certify(pool, arguments.check, seed=arguments.seed)
        if not arguments.json:
            print(found)
        return found.to_dict()


# where each is, and which options it takes: as parameters of that name, or parameter=option
BENCHED: dict[str, tuple[str, str]] = {
    "rollout": ("_beside_vllm:run_bench_rollout", "rounds model load device"),
    "launch": ("_beside_vllm:run_bench_launch", "rounds model device eager"),
    "launch --first-step": (
        "_grpo:run_bench_first_step",
        "model shape tokens device peer eager",
    ),
    "plan": ("_plan:run_bench_plan", ""),
    "sync": ("_sync:run_bench_sync", "rounds model transport"),
    "sync --device cuda": ("_sync_gpu:run_bench_sync_gpu", "rounds size=shape"),
    "sync --transport nixl": ("_delta:run_bench_beside", "rounds size=shape"),
    "sync --delta": ("_delta:run_bench_delta", "rounds model device size=shape"),
    "sync --delta --adam": ("_delta:run_bench_adam", "steps model device size=shape"),
    "lora": ("_lora:run_bench_lora", "rounds model device shape"),
    "grpo": ("_grpo:run_bench_grpo", "steps device eager"),
    "grpo --model": (
        "_grpo:run_bench_grpo_size",
        "model tokens device steps shape peer eager bounds=staleness drawn fp8",
    ),
    "grpo --floors": (
        "_floors:run_bench_floors",
        "model shape tokens device eager",
    ),
    "grpo --tail": ("_floors:run_bench_tail", "model shape device eager"),
    "grpo --fp8": ("_floors:run_bench_curves", "steps device"),
    "train": ("_train:run_bench_train", "model lengths device"),
    "topology": ("_topology:run_bench_topology", "rounds model device requests"),
    "gateway": ("_topology_gateway:run_bench_gateway", "replicas requests"),
    "gap": ("_gap:run_bench_gap", "model device eager"),
    "whatif": ("_whatif:run_bench_whatif", "steps model device"),
    "trl": ("_grpo:run_bench_trl", "model shape tokens steps device eager"),
    "tunix": (
        "_tunix:run_bench_tunix",
        "model shape tokens steps device eager train",
    ),
    "link": ("_link:run_bench_link", "mib host at"),
    "server": ("_server:run_bench_server", "rounds model shape device"),
}
BENCHES = [name for name in BENCHED if " " not in name]


def _bench(arguments: argparse.Namespace) -> Plain:
    place, options = BENCHED[_which_bench(arguments)]
    module, _, name = place.partition(":")
    run = getattr(importlib.import_module(f"jvlab.bench.{module}"), name)
    given: Plain = {}
    for word in options.split():
        parameter, _, option = word.partition("=")
        value = getattr(arguments, option or parameter)
        if parameter == "size":
            from jvlab.bench._shapes import size_of

            value = size_of(value)
        if value is not None:
            given[parameter] = value
    return run(**given)


def _which_bench(arguments: argparse.Namespace) -> str:
    what = arguments.what
    match what:
        case "launch" if arguments.first_step:
            return "launch --first-step"
        case "sync" if arguments.delta:
            return "sync --delta --adam" if arguments.adam else "sync --delta"
        case "sync" if arguments.device == "cuda":
            beside = arguments.transport == "nixl"
            return "sync --transport nixl" if beside else "sync --device cuda"
        case "grpo" if arguments.tail:
            return "grpo --tail"
        case "grpo" if arguments.floors:
            return "grpo --floors"
        case "grpo" if arguments.model or arguments.shape:
            return "grpo --model"
        case "grpo" if arguments.fp8:
            return "grpo --fp8"
    needs = ("tokens", "peer", "staleness", "drawn")
    if what == "grpo" and any(getattr(arguments, name) for name in needs):
        raise ConfigError(
            "--tokens, --staleness, --peer and --drawn need a model",
            remedy="--model DIR, or --shape qwen3-1.7b",
        )
    return what


# below sys.prefix, where a wheel's data files go (pyproject.toml)
SHIPPED = "share/jvlab/notebooks"


def _lab(arguments: argparse.Namespace) -> Plain:
    import subprocess

    root = _tutorials()
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--port={arguments.port}",
        f"--notebook-dir={root}",
    ]
    if os.geteuid() == 0:
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
            f"this installation has no tutorials: {shipped} does not exist",
            remedy="run `jvlab lab` from a checkout, or install the wheel again without --user or --target",
        )
    copy = Path.cwd() / "jvlab-tutorials"
    if not copy.exists():
        shutil.copytree(shipped, copy)
        print(f"tutorials copied to {copy}: yours to change", flush=True)
    return copy


Run = Callable[[argparse.Namespace], Plain]
COMMANDS: dict[str, tuple[str, Run, Options]] = {
    "doctor": (
        "what this machine can run; for what it cannot, why not and what to install",
        _doctor,
        DOCTOR,
    ),
    "demo": (
        "a complete run on a tiny model: GRPO on real vLLM rollouts, every weight sync verified by digests",
        _demo,
        DEMO,
    ),
    "gateway": (
        "run a lab's gateway in the foreground (jv.Lab() does this for you)",
        _gateway,
        GATEWAY,
    ),
    "rollout": (
        "run one rollout process; --gateway: offer it to a running gateway; --follow: serve what a trainer publishes",
        _rollout,
        ROLLOUT,
    ),
    "warm": (
        "keep vLLM imported until interrupted: every lab on this machine then launches in seconds",
        _warm,
        (("--device", DEVICES, "which vLLM"),),
    ),
    "bench": (
        "measure, each as a ratio against a peer or a floor in the same run",
        _bench,
        BENCH,
    ),
    "certify": (
        "can an engine configuration be trusted? checks on a running engine; exit status 1 if one fails",
        run_certify,
        CERTIFY,
    ),
    "plan": (
        "where every byte would go: a dry run, without GPU, pool or weights",
        run_plan,
        (),
    ),
    "slurm": (
        "write an sbatch script: gateway, rollouts and your trainer in one job",
        _slurm.run_slurm,
        _slurm.OPTIONS,
    ),
    "ps": ("your running labs: pools, replicas, holders", run_ps, ()),
    "stop": ("end a lab and wait until none of its processes is left", run_stop, STOP),
    "lab": (
        "open JupyterLab on the tutorials",
        _lab,
        (("--port", 8888, "of JupyterLab"),),
    ),
}
