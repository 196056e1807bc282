"""`jvlab bench topology`: the same requests to the same model in this process, over gRPC and over HTTP, in one run.

    in_process       jv.Pool.in_process: no socket
    grpc             lab.launch, pool.generate: this process ─gRPC─▶ gateway ─gRPC─▶ replica
    http_keep_alive  the same replica by the gateway's OpenAI route: ─HTTP─▶ gateway ─HTTP─▶ replica, one connection
    http             the same, with a new connection for every request

Both engines run for the whole benchmark and only one is busy at a time; the ways alternate in rotating order. All must
give the same greedy tokens, or nothing is reported. Then the gateway alone, with simulated replicas.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jvlab._errors import ControlError
from jvlab._files import Plain
from jvlab.bench._side import median_ms, model_of, prompts_of, timed, vllm_build

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.sync._link import Link

REQUESTS = 20  # of one token each, per round
FRESH_SECONDS = 60.0
SAME = {"temperature": 0.0, "ignore_eos": True}
Tokens = list[list[int]]


class PoolWay:
    """A pool's own API. `ask` returns greedy tokens of each prompt, and the weights' version."""

    def __init__(self, name: str, pool: Pool) -> None:
        self.name = name
        self._pool = pool
        # the engine's own time for each single-prompt request
        self.engine_seconds: list[float] = []

    def ask(self, prompts: Tokens, tokens: int) -> tuple[Tokens, int]:
        batch = self._pool.generate(prompts, max_tokens=tokens, progress=False, **SAME)
        if len(prompts) == 1:
            self.engine_seconds.append(batch[0].seconds["total"])
        return [sample.token_ids.tolist() for sample in batch], int(
            batch[0].versions[0]
        )


class HttpWay:
    """OpenAI completions over HTTP, as from any client."""

    def __init__(
        self, name: str, url: str, token: str, model: str, keep_alive: bool
    ) -> None:
        self.name = name
        self._model = model
        self._keep = keep_alive
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=120
        )
        self._path = f"{parts.path}/completions"
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
        }
        if not keep_alive:
            self._headers["Connection"] = "close"

    def ask(self, prompts: Tokens, tokens: int) -> tuple[Tokens, int]:
        body = {
            "model": self._model,
            "prompt": prompts,
            "max_tokens": tokens,
            "return_token_ids": True,
            **SAME,
        }
        self._connection.request("POST", self._path, json.dumps(body), self._headers)
        reply = self._connection.getresponse()
        text = reply.read()
        if not self._keep:
            self._connection.close()
        if reply.status != 200:
            raise ControlError(
                f"{self.name}: HTTP {reply.status}: {text[:300].decode(errors='replace')}"
            )
        choices = sorted(
            json.loads(text)["choices"], key=lambda choice: choice["index"]
        )
        return [choice["token_ids"] for choice in choices], int(
            reply.headers["x-jvlab-version"]
        )

    def close(self) -> None:
        self._connection.close()


Way = PoolWay | HttpWay


def run_bench_topology(
    rounds: int = 5,
    model: str | None = None,
    device: str = "auto",
    requests: int = 10_000,
) -> Plain:
    """Measure the ways, then the gateway alone; prints a table as it goes, returns the facts.

    grpc_vs_inprocess_ratio, http_vs_inprocess_ratio   a one-token request, against the same in process
    overhead_ms, request_ms                            per way; overhead: the request minus the engine's own time
    freshness_ms                                       per way: from the start of a sync to a token of its version
    routes_per_s, route_p99_ms, gateway                the gateway alone; see `run_bench_gateway`
    """
    import jvlab as jv
    from jvlab.bench._topology_gateway import LAST, run_bench_gateway
    from jvlab.lab._launch_settings import resolve_device

    device = resolve_device(device)
    path = model_of(model)
    engine: Plain = {"max_model_len": 512}
    if device == "cuda":
        # two engines and a trainer share the GPU
        engine["gpu_memory_utilization"] = 0.3
    print(f"bench topology on {device}: {path}, {rounds} rounds", flush=True)
    with ExitStack() as ends:
        lab = ends.enter_context(jv.Lab())
        remote = lab.launch(path, engine=engine, device=device, http=True)
        local = ends.enter_context(
            jv.Pool.in_process(path, engine=engine, device=device)
        )
        remote.wait(progress=False)  # no deadline: `Pool.wait` has a default
        ways = _ways(local, remote, ends)
        params = jv.Policy.from_pretrained(path).params
        links = {
            # no deadline: `Pool.connect` has a default
            "in_process": local.connect(params),
            "grpc": lab.connect(params, remote),
        }
        for link in links.values():
            # both engines now hold the same bits, by the same route
            link.sync(params, progress=False)
        _check_alike(ways)
        result = {
            "device": device,
            "model": path,
            "rounds": rounds,
            "vllm": vllm_build(),
        }
        result |= _requests(ways, rounds)
        result["freshness_ms"] = _freshness(ways, links, params, rounds)
    _show(result)
    print(f"gateway alone, {requests} requests:", flush=True)
    gateway = run_bench_gateway(requests=requests)
    return {**result, **{key: gateway[key] for key in LAST}, "gateway": gateway}


def _ways(local: Pool, remote: Pool, ends: ExitStack) -> list[Way]:
    url = remote.http_url
    token = remote.http_token
    over = [
        HttpWay(n, url, token, remote.model, n == "http_keep_alive")
        for n in ("http_keep_alive", "http")
    ]
    for way in over:
        ends.callback(way.close)
    return [PoolWay("in_process", local), PoolWay("grpc", remote), *over]


def _check_alike(ways: Sequence[Way]) -> None:
    """Warm up every way, and check that all give the same tokens."""
    wanted, _ = ways[0].ask(prompts_of(4), 16)
    for way in ways[1:]:
        found, _ = way.ask(prompts_of(4), 16)
        if found != wanted:
            raise ControlError(
                f"{way.name} gave different greedy tokens than {ways[0].name}: {found} and {wanted}"
            )


def _turns(ways: Sequence[Way], rounds: int) -> list[Way]:
    """Every way once per round, starting with a different one each time."""
    return [
        ways[(turn + k) % len(ways)] for turn in range(rounds) for k in range(len(ways))
    ]


def _requests(ways: Sequence[Way], rounds: int) -> Plain:
    """Sequential one-token requests, each with its own prompt, so that no prefix is cached."""
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    prompts = prompts_of(REQUESTS)
    for way in _turns(ways, 1):  # warm up
        way.ask(prompts[:1], 1)
    own = {way.name: way.engine_seconds for way in ways if isinstance(way, PoolWay)}
    for times in own.values():
        times.clear()
    for way in _turns(ways, rounds):
        seconds[way.name] += [timed(way.ask, [p], 1)[0] for p in prompts]
    ms = {name: median_ms(times) for name, times in seconds.items()}
    engine = {name: median_ms(times) for name, times in own.items()}
    return {
        "grpc_vs_inprocess_ratio": ms["grpc"] / ms["in_process"],
        "http_vs_inprocess_ratio": ms["http_keep_alive"] / ms["in_process"],
        "http_without_keep_alive_vs_inprocess_ratio": ms["http"] / ms["in_process"],
        "request_ms": ms,
        "engine_ms": engine,
        # gRPC and HTTP go to the same replica
        "overhead_ms": {
            name: value - engine.get(name, engine["grpc"]) for name, value in ms.items()
        },
    }


def _freshness(
    ways: Sequence[Way], links: dict[str, Link], params: Any, rounds: int
) -> dict[str, float]:
    """Time from the start of a sync until a request returns a token of the new version, polling with requests."""
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for way in _turns(ways, rounds):
        link = links.get(way.name, links["grpc"])
        start = time.perf_counter()
        version = link.version + 1
        handle = link.sync_async(params, version)
        while way.ask(prompts_of(1), 1)[1] < version:
            if time.perf_counter() - start > FRESH_SECONDS:
                raise ControlError(
                    f"{way.name} did not serve version {version} within {FRESH_SECONDS:g} s"
                )
        found[way.name].append(time.perf_counter() - start)
        if not handle.result(FRESH_SECONDS).verified:
            raise ControlError(f"{way.name}: version {version} was not verified")
    return {name: median_ms(times) for name, times in found.items()}


def _show(result: Plain) -> None:
    print(f"{'':16} {'1 token':>10} {'overhead':>10} {'fresh after':>12}")
    for name, ms in result["request_ms"].items():
        print(
            f"{name:16} {ms:7.1f} ms {result['overhead_ms'][name]:7.1f} ms "
            f"{result['freshness_ms'][name]:9.0f} ms",
            flush=True,
        )
