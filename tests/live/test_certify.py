"""`jv.certify` on a real engine, with LoRA: all that applies to a CPU passes; each planted fault fails and is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab.analysis.certification._certificate import CertificateRow
from jvlab.cli._cli import main
from jvlab.lab._pool import InProcessPool

pytestmark = pytest.mark.engine
ENGINE = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_model_len": 256,
    "block_size": 32,
}
ON_A_CPU = {"graphs", "sleep 1", "sleep 2"}


@pytest.fixture(scope="module")
def local() -> Iterator[InProcessPool]:
    """An engine in this process, so that tests can break it."""
    pool = jv.Pool.in_process(
        jv.models.tiny("llama", num_hidden_layers=2), name="certified", engine=ENGINE
    )
    yield pool
    pool.close()


def certified(pool: jv.Pool, *checks: str) -> jv.Certificate:
    return jv.certify(pool, checks or None, progress=False)


def failed_by(
    fault: tuple[Any, str, Any],
    pool: jv.Pool,
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> CertificateRow:
    """The row of a check that a planted fault (owner, name, what it becomes) fails; the weights are put back."""
    with monkeypatch.context() as planted:
        planted.setattr(*fault)
        found = certified(pool, check)
    assert found[check].state == "fail", str(found)
    assert found["restored"].state == "pass", (
        "the weights of the beginning were put back"
    )
    return found[check]


def test_all_checks_of_a_sound_engine_pass_and_its_weights_are_kept(
    local: InProcessPool,
):
    policy: Any = jv.Policy.from_pretrained(local.model)
    link = local.connect(policy.params)
    link.sync(policy.params, progress=False)
    names = [p.name for p in local.trace()[0].parameters]
    before, version = {name: local.peek(name) for name in names}, link.version
    found = certified(local)
    assert {
        row.name: row.state for row in found.rows if row.state != "pass"
    } == dict.fromkeys(ON_A_CPU, "not applicable"), str(found)
    assert found["restored"].state == "pass"
    assert {name: local.peek(name) for name in names} == before
    assert link.verify(policy.params), "a link that was open before is opened again"
    assert link.version == found.version > version
    assert link.sync(policy.params, progress=False).version == found.version + 1
    plain = json.loads(found.to_json())
    assert plain["engine"]["transport"] == "loopback"
    assert plain["engine"]["adapters"] > 0
    assert "bit for bit" in found["adapters"].detail, str(found)


def live_model(pool: InProcessPool) -> Any:
    """The model inside the engine of this process."""
    import gc

    from vllm.model_executor.models.llama import LlamaForCausalLM

    found = [each for each in gc.get_objects() if type(each) is LlamaForCausalLM]
    if not found:
        # vLLM has frozen it, and the collector tells nothing of such objects
        gc.unfreeze()
        found = [each for each in gc.get_objects() if type(each) is LlamaForCausalLM]
    (model,) = found
    return model


@pytest.mark.parametrize("fault", ["rotary table reversed", "epsilon of the norms 0.5"])
def test_an_engine_that_computes_another_model_is_found(
    local: InProcessPool, fault: str
):
    """It agrees with itself in every way; only a second implementation of the model tells."""
    import torch

    model = live_model(local)
    norms = [m for m in model.modules() if hasattr(m, "variance_epsilon")]
    tables = {id(m): m for m in model.modules() if hasattr(m, "cos_sin_cache")}
    (rotary,) = tables.values()
    usual, epsilon = rotary.cos_sin_cache.clone(), norms[0].variance_epsilon
    with torch.inference_mode():
        try:
            if fault.startswith("rotary"):
                rotary.cos_sin_cache.copy_(usual.flip(0))
            else:
                for norm in norms:
                    norm.variance_epsilon = 0.5
            found = certified(local, "scored", "reference")
        finally:
            rotary.cos_sin_cache.copy_(usual)
            for norm in norms:
                norm.variance_epsilon = epsilon
    assert found["scored"].state == "pass", "sampled and scored by the same engine"
    assert found["reference"].state == "fail", str(found)
    assert "nats apart with the same weights" in found["reference"].detail
    assert found["reference"].first_wrong.startswith("token ")
    assert "no independent reference" in repr(found)
    sound = certified(local, "reference")
    assert sound.ok
    assert repr(sound).endswith("; computes as transformers does)")


def test_a_value_that_changed_after_its_last_commit_is_found(local: InProcessPool):
    import torch

    policy: Any = jv.Policy.from_pretrained(local.model)
    link = local.connect(policy.params)
    link.sync(policy.params, progress=False)
    assert certified(local, "unchanged")["unchanged"].state == "pass"
    link.sync(policy.params, progress=False)
    live = dict(live_model(local).named_parameters())["model.norm.weight"].data
    with torch.inference_mode():
        live.view(-1)[3:4].view(dtype=torch.int32)[0] ^= 1
        try:
            row = certified(local, "unchanged")["unchanged"]
        finally:
            link.sync(policy.params, progress=False)
    assert row.state == "fail", row
    assert "model.norm.weight" in row.first_wrong
    link.close()
    assert link.closed, "held here, and not asked any more"
    assert certified(local, "scored")["scored"].state == "pass"


def test_without_a_link_what_was_loaded_is_compared_with_the_files(
    local: InProcessPool,
):
    from jvlab._deadline import Deadline
    from jvlab.analysis.certification import _checks
    from jvlab.analysis.certification._subject import Subject

    policy: Any = jv.Policy.from_pretrained(local.model)
    local.connect(policy.params).sync(policy.params, progress=False)
    subject = Subject(local, Deadline(120))
    subject.open()
    try:
        subject.verified = None
        assert "pass params" in _checks.unchanged(subject).detail
        subject.began_with = 0
        assert _checks.unchanged(subject).state == "pass"
        subject.loaded[0, "model.norm.weight"] = (
            subject.loaded[0, "model.norm.weight"] + 1
        )
        found = _checks.unchanged(subject)
        assert found.state == "fail"
        assert found.first_wrong.startswith("model.norm.weight (rank 0): 128 of 128")
        subject.loaded = {key: flat + 1 for key, flat in subject.loaded.items()}
        found = _checks.unchanged(subject)
        assert (found.state, "was not loaded from" in found.detail) == (
            "not applicable",
            True,
        ), "load='dummy'"
    finally:
        subject.close()


def test_a_bit_that_changes_after_the_digest_is_found(
    local: InProcessPool, monkeypatch: pytest.MonkeyPatch
):
    import torch

    from jvlab.engine.worker import _rank_sync

    commit = _rank_sync.BucketRank.commit

    def flipping(self: Any) -> Any:
        answer = commit(self)
        name = next(
            (
                n
                for n, t in self.weights.model.named_parameters()
                if n.startswith("adapter.")
            ),
            "model.norm.weight",
        )
        live = dict(self.weights.model.named_parameters())[name].data
        live.view(-1)[3:4].view(dtype=torch.int32)[0] ^= 1
        return answer

    with monkeypatch.context() as planted:
        planted.setattr(_rank_sync.BucketRank, "commit", flipping)
        found = certified(local, "arrives direct", "arrives staged", "adapters")
    for name in ("arrives direct", "arrives staged", "restored"):
        row = found[name]
        assert row.state == "fail", str(found)
        assert row.first_wrong.startswith(
            "model.norm.weight (rank 0): 1 of 128 elements, from element 3: "
        )
    assert found["adapters"].state == "fail"
    assert found["adapters"].first_wrong.startswith("adapter.")
    assert not found
    assert certified(local, "arrives direct"), "without the fault it passes again"


def test_a_prefix_cache_that_outlives_a_sync_is_found(
    local: InProcessPool, monkeypatch: pytest.MonkeyPatch
):
    from jvlab.engine.worker import _scheduler

    with monkeypatch.context() as planted:
        planted.setattr(
            _scheduler, "remove_prefix_hashes", lambda scheduler, salt: None
        )
        row = certified(local, "prefix cache")["prefix cache"]
    assert row.state == "fail", row
    assert "96 of 97 tokens came from the cache of the old weights" in row.detail
    assert row.first_wrong == "KV of prompt token 0, up to token 95"
    # empties the cache
    link = local.connect(jv.Policy.from_pretrained(local.model).params)
    link.sync(jv.Policy.from_pretrained(local.model).params, progress=False)


def test_scores_that_are_not_the_samplers_are_found(
    local: InProcessPool, monkeypatch: pytest.MonkeyPatch
):
    score = local.score

    def shifted(sequences: Any, **options: Any) -> jv.Scores:
        found = score(sequences, **options)
        rows = [np.array(row) for row in found.logprobs]
        rows[1][-2] += 0.01
        return jv.Scores(rows, found.versions)

    with monkeypatch.context() as planted:
        planted.setattr(local, "score", shifted)
        row = certified(local, "scored")["scored"]
    assert row.state == "fail"
    assert "0.01 nats apart" in row.detail
    assert row.first_wrong.startswith("token 10 after a prompt of 9: sampled with -")


def test_a_failed_sync_that_leaves_traces_is_found(
    local: InProcessPool, monkeypatch: pytest.MonkeyPatch
):
    from jvlab.engine.worker import _rank_sync

    abandon = _rank_sync.BucketRank.abandon

    def writing(self: Any) -> Any:
        dict(self.weights.model.named_parameters())["model.norm.weight"].data[5] = 0.0
        return abandon(self)

    row = failed_by(
        (_rank_sync.BucketRank, "abandon", writing), local, "failed staged", monkeypatch
    )
    assert row.first_wrong.startswith(
        "model.norm.weight (rank 0): 1 of 128 elements, from element 5: 0 instead of "
    )


def test_a_sync_that_hides_its_failure_is_found(
    local: InProcessPool, monkeypatch: pytest.MonkeyPatch
):
    from jvlab.transport import _faults

    # a flipped bit of which the digest knows nothing: here, none is
    unflipped = _faults, "_flipped", lambda fill: fill
    row = failed_by(unflipped, local, "failed staged", monkeypatch)
    assert row.detail == "a staged sync with a fault (flip) reported success"


def test_tokens_labelled_with_a_version_that_failed_are_found(
    local: InProcessPool, monkeypatch: pytest.MonkeyPatch
):
    from jvlab.engine import _engine_sync

    abandon = _engine_sync.EngineSync._abandon

    async def labelling(self: Any) -> None:
        if self.state.terms is not None:
            await self.llm.update_weight_version(str(self.state.terms.version))
        await abandon(self)

    row = failed_by(
        (_engine_sync.EngineSync, "_abandon", labelling),
        local,
        "failed staged",
        monkeypatch,
    )
    assert "made its tokens, not" in row.detail


def test_a_mixture_that_is_served_after_a_failed_direct_sync_is_found(
    local: InProcessPool, monkeypatch: pytest.MonkeyPatch
):
    from jvlab.engine import _engine_sync

    enter = _engine_sync.SyncState.enter

    def forgetting(self: Any, phase: str) -> None:
        enter(self, phase)
        self.dirty = False

    row = failed_by(
        (_engine_sync.SyncState, "enter", forgetting),
        local,
        "failed direct",
        monkeypatch,
    )
    assert (
        "generates after a failed direct sync, with parts of two versions" in row.detail
    )
    assert " (rank 0): " in row.first_wrong, "the first tensor of the new version"
    assert certified(local, "failed direct"), "without the fault it passes again"


def test_the_command_line_fails_and_names_the_first_wrong_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    fault = tmp_path / "fault.json"
    fault.write_text(
        json.dumps(
            {
                "who": "worker",
                "phase": "committed",
                "do": "flip",
                "parameter": "model.norm.weight",
            }
        )
    )
    # once, in the worker: the first sync is spoilt after its digest
    monkeypatch.setenv("JVLAB_FAULT", str(fault))
    words = [
        "--model",
        "tiny:llama",
        "--device",
        "cpu",
        "--check",
        "arrives direct",
        "--check",
        "arrives staged",
    ]
    assert main(["certify", *words, "--json"]) == 1
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    assert [(row["name"], row["state"]) for row in found["checks"]] == [
        ("arrives direct", "fail"),
        ("arrives staged", "pass"),
        ("restored", "pass"),
    ]
    assert found["ok"] is False
    assert found["checks"][0]["first_wrong"].startswith(
        "model.norm.weight (rank 0): 1 of 128 elements, from element 0"
    )
    assert not fault.exists()


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_command_line_on_a_sound_engine(family: str):
    words = ["certify", "--model", jv.models.tiny(family), "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "jvlab", *words],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, _, *rows = done.stdout.splitlines()
    assert first.endswith(
        ": 9 pass, 0 fail, 4 not applicable; computes as transformers does)"
    )
    for name in (
        "scored",
        "arrives direct",
        "arrives staged",
        "prefix cache",
        "failed direct",
        "restored",
    ):
        assert any(
            row.split("  ")[1:2] == [name] and " pass " in row for row in rows
        ), name
