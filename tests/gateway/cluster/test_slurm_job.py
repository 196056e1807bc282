"""A SLURM job on one machine: the script of `jvlab slurm`, with SLURM's variables and an srun that only runs."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.cli._cli import main, parser
from jvlab.gateway.cluster._slurm import FIRST_PORT, PORTS, script
from tests.conftest import wait_for_exit
from tests.fuzzing import soak_but
from tests.gateway.cluster import fake_rollout
from tests.gateway.cluster.test_join import own_address

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SRUN = """#!/bin/bash
tasks=1
while [[ "$1" == --* ]]; do [[ "$1" == --ntasks=* ]] && tasks="${1#--ntasks=}"; shift; done
[[ "$tasks" == 1 ]] && exec "$@"
for ((i = 0; i < tasks; i++)); do "$@" & done
wait
"""
# as `scontrol show hostnames 'gpu[08-09],n1'` prints them: one name on a line
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] && tr , '\\n' <<< "$3"
"""
TRAINER = """
import json, sys
import jvlab as jv
lab = jv.Lab.from_slurm(patience=60)
pool = lab.launch(sys.argv[1], replicas=lab.slurm.replicas, name="p").wait(120)
batch = pool.generate([[i + 1] for i in range(8)], n=2)
facts = {"samples": len(batch), "replicas": sorted({s.replica for s in batch}), "trainers": lab.slurm.trainers}
print("FACTS " + json.dumps(facts), flush=True)
"""


def arguments(*words: str) -> argparse.Namespace:
    return parser().parse_args(["slurm", *words])


def test_from_slurm_outside_a_job(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(errors.ConfigError, match="not part of a SLURM job") as caught:
        jv.Lab.from_slurm()
    assert "sbatch" in caught.value.remedy


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--nodes", "1"),
        (
            "--nodes",
            "9",
            "--trainers",
            "2",
            "--gpus-per-node",
            "8",
            "--rollouts-per-node",
            "4",
        ),
        (
            "--partition",
            "gpu",
            "--account",
            "a-b",
            "--trainer",
            "python train.py --lr 1e-5 'two words'",
        ),
    ],
)
def test_scripts_are_bash(words: tuple[str, ...], tmp_path: Path):
    file = tmp_path / "job.sbatch"
    file.write_text(script(arguments(*words)))
    subprocess.run(["bash", "-n", str(file)], check=True)
    directives = [
        line for line in file.read_text().splitlines() if line.startswith("#SBATCH")
    ]
    assert any(line.startswith("#SBATCH --nodes=") for line in directives)
    assert ("#SBATCH --gpus-per-node=8" in directives) == ("--gpus-per-node" in words)
    assert ("--gpus-per-task=2" in file.read_text()) == ("--rollouts-per-node" in words)


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (("--nodes", "2", "--trainers", "2"), "leaving none"),
        (("--time", "1; rm x"), "a script can't hold"),
        (("--shared", "/a b"), "not a plain path"),
        (("--rollouts-per-node", "0"), "at least 1"),
    ],
)
def test_arguments_that_make_no_script(words: tuple[str, ...], word: str):
    with pytest.raises(errors.ConfigError, match=word):
        script(arguments(*words))


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "job.sbatch"
    assert main(["slurm", "--output", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["output"] == str(file)
    assert file.read_text().startswith("#!/bin/bash")


def free_job() -> int:
    """A job number whose port nobody has."""
    for job in range(500 + os.getpid() % 500, 5000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", FIRST_PORT + job % PORTS)):
                return job
    raise AssertionError("every port is taken")


@pytest.mark.parametrize("nodes", soak_but([2], [1, 2]))
def test_a_whole_job(tmp_path: Path, llama: str, nodes: int):
    """One node and loopback; or two, whose names here are both this machine's address, and TLS."""
    names = ["node-7"] if nodes == 1 else [own_address()] * 2
    tools, job = tmp_path / "bin", free_job()
    tools.mkdir()
    for tool, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / tool).write_text(text)
        (tools / tool).chmod(0o755)
    # In this job the replicas are simulated: what stands under an agent is replaced in every process.
    (tools / "sitecustomize.py").write_text(
        f"import jvlab.wire.processes._supervisor as s\ns.__file__ = {fake_rollout.__file__!r}\n"
    )
    (tmp_path / "train.py").write_text(TRAINER)
    file = tmp_path / "job.sbatch"
    trainer = f"{sys.executable} {tmp_path}/train.py {llama}"
    words = (
        "--nodes",
        str(nodes),
        "--rollouts-per-node",
        "2",
        "--python",
        sys.executable,
        "--trainer",
        trainer,
    )
    file.write_text(script(arguments(*words)))
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "JVLAB_SLURM_FOLDER": str(tmp_path / "shared"),
        "PYTHONPATH": f"{tools}{os.pathsep}{ROOT}",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": ",".join(names),
        "SLURM_JOB_NUM_NODES": str(nodes),
    }
    done = subprocess.run(
        ["bash", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("FACTS "))[6:]
    )
    assert facts == {"samples": 16, "replicas": ["p/0", "p/1"], "trainers": names[:1]}
    assert not (tmp_path / "shared" / f"job-{job}").exists(), (
        "token and logs went with the job"
    )
    marks = {
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    }
    assert not wait_for_exit(marks, 30), "nothing of the job runs on"
