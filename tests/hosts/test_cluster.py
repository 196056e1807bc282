"""A gateway, an engine and a trainer on three hosts, over TLS: launch, sync by tcp, generate, a replica that goes."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from tests.hosts.conftest import Host
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.soak]
PORT = 7711


def served(host: Host, folder: Path, *options: str) -> tuple[str, Path, Path]:
    """A gateway on a host: its address, its token's file, its certificate."""
    address = f"{host.address}:{PORT}"
    token = folder / "token"
    certificate = folder / "tls" / "cert.pem"
    words = ["-m", "jvlab", "gateway", "--host", host.address, "--port", str(PORT)]
    words += ["--tls-dir", str(folder / "tls"), "--token-file", str(token)]
    host.python(*words, "--folder", str(folder / "gateway"), *options)
    started = lambda: token.exists() and certificate.exists()
    until(started, "the gateway's start", 300, 0.1)
    return address, token, certificate


def joined(
    host: Host, folder: Path, address: str, token: Path, certificate: Path
) -> subprocess.Popen[str]:
    """A host that offers the gateway a replica."""
    words = ["-m", "jvlab", "rollout", "--gateway", address]
    words += ["--token-file", str(token), "--tls-dir", str(certificate.parent)]
    return host.python(*words, "--folder", str(folder / "replica"))


@contextlib.contextmanager
def trained(hosts: list[Host], folder: Path, *arguments: str) -> Iterator[Any]:
    """A gateway, a replica and a trainer on hosts of their own: (the replica, the trainer's script)."""
    gateway, engine, trainer = hosts
    address, token, certificate = served(gateway, folder, "--place", "join")
    replica = joined(engine, folder, address, token, certificate)
    script = trainer.python(
        *("-m", "tests.hosts.trainer_script", address, token.read_text().strip()),
        *(str(certificate), *arguments),
        env={"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    yield replica, script
    assert script.wait(120) == 0


def test_three_hosts(hosts: Callable[[int], list[Host]], tmp_path: Path):
    names = hosts(3)
    with trained(names, tmp_path, jv.models.tiny("llama")) as (replica, script):
        facts = json.loads(script.stdout.readline())
        assert facts["transport"] == "tcp", facts
        assert "different hosts" in facts["reason"]
        assert facts["verified"] == [True, True]
        assert facts["versions"] == [[1], [2]]
        assert facts["moved"]
        assert facts["still"]
        assert facts["replicas"] == [names[1].name]
        replica.terminate()
        replica.wait(120)
        script.stdin.write("\n")
        script.stdin.flush()
        assert json.loads(script.stdout.readline()) != "ready"


@pytest.mark.parametrize(
    ("count", "staleness", "start"),
    [(2, 0, "by hand"), (2, 1, "slurm"), (3, 0, "slurm"), (3, 1, "by hand")],
)
def test_trainers_on_hosts_of_their_own(
    hosts: Callable[[int], list[Host]],
    tmp_path: Path,
    count: int,
    staleness: int,
    start: str,
):
    """GRPO of one process with so many devices, and of hosts with one each: the same losses, one record each."""
    gateway, engine, *trainers = hosts(2 + count)
    model = jv.models.tiny("llama", vocab_size=288)
    records = []
    for processes in (1, count):
        folder = tmp_path / str(processes)
        folder.mkdir()
        address, token, certificate = served(gateway, folder, "--place", "join")
        replica = joined(engine, folder, address, token, certificate)
        run = ["-m", "tests.live.grpo_script", address, token.read_text().strip(), "p"]
        run += [model, str(folder / "run"), str(processes)]
        flags = f"--xla_force_host_platform_device_count={count // processes}"
        env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        coordinator = f"{trainers[0].address}:7900" if start == "by hand" else start
        team = [
            host.python(
                *(*run, str(k), coordinator, str(staleness), str(certificate)),
                env=env
                | (under_slurm(trainers[:processes], k) if start == "slurm" else {}),
                stdout=subprocess.PIPE,
            )
            for k, host in enumerate(trainers[:processes])
        ]
        for process in team:
            said, _ = process.communicate(timeout=500)
            assert said.splitlines()[-1] == "finished after 3", said
        records.append(jv.Record.open(folder / "run"))
        gateway.processes[-1].terminate()
        gateway.processes[-1].wait(120)
        replica.wait(120)
    alone, several = records
    [began] = several.events("run_start")
    assert began.config["processes"] == count  # type: ignore[attr-defined]
    for record in records:
        assert record.summary()["syncs_verified"] == 4
        assert record.summary()["max_staleness"] <= staleness
        assert np.nanmax(record.steps()["logprob_gap"]) < 1e-3
    for name in ("loss", "grad_norm", "reward_mean"):
        there = alone.steps()[name]
        np.testing.assert_allclose(several.steps()[name], there, atol=1e-5)


def under_slurm(hosts: list[Host], number: int) -> dict[str, str]:
    """What srun tells a step's task."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": ",".join(host.name for host in hosts),
        "SLURM_NTASKS": str(len(hosts)),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": str(len(hosts)),
    }


@pytest.mark.parametrize("live", ["0", "1"])
def test_changes_over_a_gigabit(
    hosts: Callable[[int], list[Host]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    live: str,
):
    """1 % of 1.2 GB, and all of it, over a link of 1 Gbit/s, into an engine that packs its weights and one that does
    not; prints what each took."""
    names = hosts(3)
    names[1].shape("1gbit")
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 18}
    size |= {"vocab_size": 32_000, "tie_word_embeddings": False}
    model = jv.models.tiny("llama", tmp_path / "model", **size)
    with trained(names, tmp_path, model, "0.01", live) as (_, script):
        row = json.loads(script.stdout.readline())
    with capsys.disabled():
        print(json.dumps(row))
    assert row["transport"] == "tcp"
    assert row["full_bytes"] > 1.1e9
    assert not row["why_full"]
    assert 0.009 < row["changed"] < 0.011
    assert row["delta_bytes"] < 0.03 * row["full_bytes"]


def test_http_from_another_host(
    hosts: Callable[[int], list[Host]], tmp_path: Path
) -> None:
    """OpenAI's client on a host without an engine: over TLS, with the token, and refused without either."""
    serving, asking = hosts(2)
    address, token, certificate = served(serving, tmp_path)
    script = asking.python(
        *("-c", ASK, address, token.read_text().strip(), str(certificate)),
        jv.models.tiny("llama"),
        stdout=subprocess.PIPE,
    )
    assert script.stdout is not None
    facts = json.loads(script.stdout.readline())
    assert script.wait(120) == 0
    assert facts["url"].startswith(f"https://{serving.address}:")
    assert facts["tokens"] == 5
    assert facts["without a token"] == 401
    assert facts["without the certificate"] == "APIConnectionError"


ASK = """
import json, ssl, sys, httpx, openai
import jvlab as jv
address, token, certificate, model = sys.argv[1:]
lab = jv.Lab.attach(address, token, tls_ca=certificate)
pool = lab.launch(model, http=True).wait(400)
known = httpx.Client(verify=ssl.create_default_context(cafile=certificate), timeout=120)
ask = lambda **options: openai.OpenAI(base_url=pool.http_url, max_retries=0, **options).completions.create(
    model=model, prompt="Once", max_tokens=5, extra_body={"ignore_eos": True})
facts = {"url": pool.http_url}
facts["tokens"] = ask(api_key=token, http_client=known).usage.completion_tokens
try:
    ask(api_key="another", http_client=known)
except openai.APIStatusError as error:
    facts["without a token"] = error.status_code
try:
    ask(api_key=token)
except openai.OpenAIError as error:
    facts["without the certificate"] = type(error).__name__
print(json.dumps(facts), flush=True)
pool.close()
lab.close()
"""
