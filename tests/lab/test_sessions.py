"""Sessions, adapters and the determinism check over a real gateway with replicas that count instead of computing."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.gateway import _registry as reg
from jvlab.gateway._routing import Board, RouteRequest, keep_home, least_in_flight
from jvlab.lab import _determinism
from jvlab.lab._adapters import write
from jvlab.lab._session import turn_seed
from jvlab.wire import jvlab_pb2 as pb
from tests.gateway import fake_lab as fakes
from tests.waiting import until


def ids_of(prompt: pb.Prompt, first: bool = True) -> list[int]:
    """A tokenizer of one token a letter, with token 1 at the beginning of a text."""
    match prompt.WhichOneof("kind"):
        case "tokens":
            return list(prompt.tokens.ids)
        case "text":
            return [1] * first + [ord(letter) % 100 for letter in prompt.text]
        case _:
            parts = prompt.parts.parts
            return [i for n, part in enumerate(parts) for i in ids_of(part, n == 0)]


class CountingReplica(fakes.FakeReplica):
    """Goes on from the last token of the prompt by one: 7, 8, 9, ...; each at version 0 or as synced."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.orders: list[str] = []
        self.seen: list[tuple[str, str]] = []  # (sampling, adapter)
        self.adapters: dict[tuple[str, int], str] = {}
        self.bad_adapter = self.down = False
        self.gate = asyncio.Event()  # clear: answers wait
        self.gate.set()

    async def Generate(
        self, request: pb.RolloutRequest, context: Any
    ) -> AsyncIterator[pb.SampleBatch]:
        if request.epoch != self.epoch:
            await context.abort(
                grpc.StatusCode.ABORTED, f"epoch {request.epoch} is not {self.epoch}"
            )
        if self.down:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine died")
        adapter = request.adapter
        self.seen.append(
            (
                request.sampling_json,
                f"{adapter.name}@{adapter.version}" if adapter.name else "",
            )
        )
        await self.gate.wait()
        for work in request.work:
            ids = ids_of(work.prompt)
            made = [(ids[-1] + 1 + k) % 100 for k in range(2)]
            spans = [pb.VersionSpan(version=self.memory.version, start=0, stop=2)]
            for sample in work.sample_indexes:
                yield pb.SampleBatch(
                    samples=[
                        pb.Sample(
                            prompt_index=work.prompt_index,
                            sample_index=sample,
                            text="ab",
                            token_ids=made,
                            logprobs=[-1.0, -2.0],
                            finish_reason="length",
                            versions=spans,
                            replica=self.name,
                            prompt_token_ids=ids,
                            cached_tokens=len(ids) // 2,
                            adapter=adapter if adapter.name else None,
                            first_token_seconds=0.5,
                            total_seconds=0.75,
                            queued_seconds=0.1,
                        )
                    ]
                )

    async def SetAdapter(
        self, request: pb.RolloutAdapterRequest, context: Any
    ) -> pb.Empty:
        key = (request.adapter.name, request.adapter.version)
        self.orders.append(f"{'drop' if request.unload else 'load'} {key[0]}@{key[1]}")
        if request.unload:
            self.adapters.pop(key, None)
        elif self.bad_adapter:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "vLLM cannot load it")
        else:
            self.adapters[key] = request.adapter.path
        return pb.Empty()

    def stats(self) -> pb.ReplicaStats:
        stats = super().stats()
        stats.adapters.extend(
            pb.Adapter(name=name, version=version) for name, version in self.adapters
        )
        return stats


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = pb.EngineFacts()
    facts.CopyFrom(fakes.FACTS)
    facts.max_adapters, facts.max_model_len = 4, 4096
    facts.sampling_names.append("ignore_eos")
    monkeypatch.setattr(fakes, "FakeReplica", CountingReplica)
    monkeypatch.setattr(fakes, "FACTS", facts)


def lose(lab: fakes.FakeLab, name: str) -> None:
    lab.do(
        lambda: lab.gateway.handle(reg.ProcessExited(name, "killed by the test", ""))
    )


def test_keep_home():
    choose = keep_home("p/1", least_in_flight)
    assert choose(Board({"p/0": 0, "p/1": 99}), RouteRequest()) == "p/1", "however busy"
    assert (
        choose(Board({"p/0": 0, "p/1": 0}), RouteRequest(avoid=frozenset({"p/1"})))
        == "p/0"
    )
    assert choose(Board({"p/0": 0}), RouteRequest()) == "p/0", "it is gone"
    assert choose(Board({}), RouteRequest()) is None
    assert keep_home("", least_in_flight) is least_in_flight


def test_turns_are_one_sequence(pool: jv.Pool):
    s = pool.session("AB", max_tokens=2, temperature=0.0)
    first = s.generate()
    assert first.prompt_token_ids.tolist() == [1, 65, 66]
    s.append("C").append([50, 51])
    second = s.generate()
    assert second.prompt_token_ids.tolist() == [1, 65, 66, 67, 68, 67, 50, 51], (
        "no second beginning, nothing lost"
    )
    third = s.generate()
    assert third.prompt_token_ids.tolist() == s.tokens[:-2].tolist()
    assert s.tokens.tolist() == [1, 65, 66, 67, 68, 67, 50, 51, 52, 53, 54, 55]
    assert s.token_ids.tolist() == s.tokens.tolist()
    assert s.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 4
    assert s.versions.tolist() == [0] * 6
    assert s.logprobs.tolist() == [-1.0, -2.0] * 3
    assert s.text == "abCabab"
    assert {t.replica for t in s.turns} == {s.replica}
    stats = s.stats
    assert (stats.turns, stats.generated_tokens, stats.given_tokens) == (3, 6, 6)
    assert (stats.prompt_tokens, stats.cached_tokens) == (3 + 8 + 10, 1 + 4 + 5)
    assert stats.seconds_saved == pytest.approx(10 * 3 * (0.4 - 0.25) / 11)
    assert repr(s) == (
        "Session(3 turns, 6 tokens generated, 6 given, version 0, 10 of 21 prompt tokens from the KV cache)"
    )
    assert "10 of 21 prompt tokens not computed again (48%)" in s._repr_html_()


def test_a_session_as_a_training_row(pool: jv.Pool, tmp_path: Path):
    s = pool.session([7], max_tokens=2)
    s.generate()
    s.append([30])
    s.generate()
    other = pool.session([7], max_tokens=2)
    other.generate()
    batch = jv.RolloutBatch.from_sessions([s, other], rewards=[1.0, 0.0])
    assert [(x.prompt_index, x.sample_index, x.reward) for x in batch] == [
        (0, 0, 1.0),
        (0, 1, 0.0),
    ]
    row = batch[0]
    assert row.prompt_token_ids.tolist() == [7]
    assert row.token_ids.tolist() == [8, 9, 30, 31, 32]
    assert row.own.tolist() == [True, True, False, True, True]
    assert row.version_spans == ((0, 0, 2), (-1, 2, 3), (0, 3, 5))
    assert row.mean_logprob == -1.5
    assert batch.versions == (0,)
    assert batch.tokens == 6
    assert "version 0," in repr(row)
    arrays = batch.arrays(pad_to=8)
    assert arrays["completion_mask"][0].tolist() == [
        False,
        True,
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert arrays["versions"][0].tolist() == [-1, 0, 0, -1, 0, 0, -1, -1]
    assert arrays["logprobs"][0].tolist() == [0, -1, -2, 0, -1, -2, 0, 0]
    assert jv.RolloutBatch.load(batch.save(tmp_path / "b.npz")) == batch
    from jvlab.trainer._batching import Buckets, _arrays

    trained = _arrays(list(batch), Buckets())
    assert np.array_equal(trained["loss_mask"][:, :8], arrays["completion_mask"]), (
        "the trainer sees the same mask"
    )


def test_the_replica_is_kept_and_its_loss_is_survived(
    fake_lab: fakes.FakeLab, pool: jv.Pool
):
    s = pool.session("AB", max_tokens=2)
    s.generate()
    home = s.replica
    assert home is not None
    for _ in range(3):
        assert s.generate().replica == home
    before = s.tokens.tolist()
    lose(fake_lab, home)
    turn = s.generate()
    assert turn.moved_from == home != turn.replica
    assert turn.prompt_token_ids.tolist() == before, "nothing is lost"
    assert s.generate().moved_from is None
    assert s.stats.moves == 1
    assert f"moved from {home} to {turn.replica}" in repr(turn)
    assert f"(moved from {home})" in s._repr_html_()


def test_a_failed_turn_changes_nothing(fake_lab: fakes.FakeLab, pool: jv.Pool):
    s = pool.session("AB", max_tokens=2)
    s.generate()
    s.append("X")
    for fake in fake_lab.fakes.values():
        fake.down = True  # type: ignore[attr-defined]
    before = s.tokens.tolist()
    with pytest.raises(errors.ReplicaLost, match="the turn was lost"):
        s.generate()
    assert s.tokens.tolist() == before
    for fake in fake_lab.fakes.values():
        fake.down = False  # type: ignore[attr-defined]
    # they register again with their next heartbeat
    until(lambda: pool.status()["healthy"] == 2)
    assert s.generate().prompt_token_ids.tolist() == [*before, ord("X")]


def test_many_sessions_at_once(fake_lab: fakes.FakeLab, pool: jv.Pool):
    group = pool.sessions(["AB", [5, 6]], n=3, max_tokens=2, seed=10)
    assert [(s.prompt_index, s.sample_index, s.sampling["seed"]) for s in group][
        :4
    ] == [
        (0, 0, 10),
        (0, 1, 11),
        (0, 2, 12),
        (1, 0, 10),
    ]
    turns = group.generate()
    assert [len(t.token_ids) for t in turns] == [2] * 6
    homes = [s.replica for s in group]
    assert set(homes) == {"p/0", "p/1"}, "spread over the replicas"
    group[1].append("C")
    group.generate(only=group[:2])
    assert [len(s.turns) for s in group] == [2, 2, 1, 1, 1, 1]
    assert asyncio.run(group.agenerate())[0].replica == homes[0]
    assert [s.replica for s in group] == homes
    assert repr(group.batch()).startswith(
        "RolloutBatch(6 samples, 2 prompts, 28 tokens, version 0, 6 length"
    )
    assert repr(group).startswith("Sessions(6 sessions, 14 turns, 28 tokens generated")
    assert "0.1" in group._repr_html_()


@pytest.mark.parametrize("at_once", [1, 40])
def test_sessions_are_spread_however_they_come(
    fake_lab: fakes.FakeLab, pool: jv.Pool, at_once: int
):
    """One after the other, none ever finds another one's turn in flight."""

    async def play() -> None:
        session = pool.session([7], max_tokens=2)
        for _ in range(3):
            await session.agenerate()

    async def some() -> None:
        for _ in range(40 // at_once):
            await asyncio.gather(*(play() for _ in range(at_once)))

    asyncio.run(some())
    served = [row["served"] for row in pool.status()["replicas"]]
    assert served == [60, 60]


@pytest.mark.soak
def test_a_thousand_sessions_on_ten_replicas_stay_spread(client: jv.Lab, llama: str):
    """A hundred at a time, of one to seven turns: no replica's share is off by more than 20 %."""
    pool = client.launch(llama, replicas=10, name="p").wait(60)
    homes: Counter[str] = Counter()
    waiting = iter(range(1000))

    async def play() -> None:
        for number in waiting:
            session = pool.session([7], max_tokens=2)
            for _ in range(1 + number % 7):
                await session.agenerate()
            homes[session.replica or ""] += 1

    async def some() -> None:
        await asyncio.gather(*(play() for _ in range(100)))

    asyncio.run(some())
    assert len(homes) == 10
    assert min(homes.values()) >= 80, homes
    assert max(homes.values()) <= 120, homes
    served = [row["served"] for row in pool.status()["replicas"]]
    assert max(served) <= 1.2 * sum(served) / 10, served
    assert min(served) >= 0.8 * sum(served) / 10, served


def test_each_turn_has_a_seed_of_its_own(fake_lab: fakes.FakeLab, pool: jv.Pool):
    s = pool.session([7], max_tokens=2, seed=3)
    s.generate()
    s.generate()
    seen = fake_lab.fakes[s.replica or ""].seen  # type: ignore[attr-defined]
    assert '"seed": 3' in seen[0][0]
    assert f'"seed": {turn_seed(3, 2)}' in seen[1][0]
    assert (
        len({turn_seed(seed, done) for seed in range(50) for done in range(50)}) == 2500
    )
    assert all(0 <= turn_seed(seed, 1) < 2**62 for seed in range(100))


def test_two_turns_at_once_and_what_comes_during_one(
    fake_lab: fakes.FakeLab, pool: jv.Pool
):
    s = pool.session([7], max_tokens=2)
    gates: list[asyncio.Event] = [fake.gate for fake in fake_lab.fakes.values()]  # type: ignore[attr-defined]
    fake_lab.do(lambda: [gate.clear() for gate in gates])

    async def work() -> None:
        turn = asyncio.create_task(s.agenerate())
        while not s._busy:
            await asyncio.sleep(0.01)
        s.append([40])
        with pytest.raises(errors.ConfigError, match="in the middle of a turn"):
            await s.agenerate()
        await asyncio.to_thread(fake_lab.do, lambda: [gate.set() for gate in gates])
        await turn

    asyncio.run(work())
    assert len(s.turns) == 1
    assert s.tokens.tolist() == [7, 8, 9]
    assert s.generate().prompt_token_ids.tolist() == [7, 8, 9, 40], (
        "it was kept for the next turn"
    )


def test_bad_use_is_clear(pool: jv.Pool):
    with pytest.raises(errors.SamplingError, match="empty text"):
        pool.session("")
    s = pool.session("AB")
    with pytest.raises(errors.SamplingError, match="a chat cannot be appended"):
        s.append([{"role": "user", "content": "x"}])  # type: ignore[list-item]
    with pytest.raises(errors.SamplingError, match="temprature"):
        s.generate(temprature=1.0)
    with pytest.raises(errors.ConfigError, match="without a turn"):
        s.sample()
    with pytest.raises(errors.ConfigError, match="no sessions"):
        jv.RolloutBatch.from_sessions([])
    assert s.append("") is s


# Adapters -----------------------------------------------------------------------------------------------------------

A, B = (f"model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB")
TENSORS = {A: np.ones((4, 128), np.float32), B: np.ones((128, 4), np.float32)}


def adapter_folder(fake: Any, key: tuple[str, int]) -> Path:
    return Path(fake.adapters[key])


def test_adapters_are_loaded_everywhere_and_versions_replace_each_other(
    fake_lab: fakes.FakeLab, pool: jv.Pool
):
    assert pool.load_adapter("math", TENSORS, config={"lora_alpha": 8}) == 1
    one, two = fake_lab.fakes.values()
    old = adapter_folder(one, ("math", 1))
    assert (old / "adapter_model.safetensors").is_file()
    assert pool.load_adapter("math", TENSORS, config={"lora_alpha": 8}) == 2
    for fake in (one, two):
        assert fake.orders == ["load math@1", "load math@2", "drop math@1"]  # type: ignore[attr-defined]
    assert not old.exists(), "the old version's file is gone"
    sample = pool.generate("AB", adapter="math")[0]
    assert sample.adapter == ("math", 2)
    assert pool.generate("AB")[0].adapter is None
    assert pool.session("AB", adapter="math").generate().adapter == ("math", 2)
    assert pool.status()["replicas"][0]["adapters"] == {"math": 2}
    with pytest.raises(
        errors.ConfigError, match="has no adapter 'maths'; it has: math"
    ):
        pool.generate("AB", adapter="maths")
    with pytest.raises(errors.ConfigError, match="version 2; 2 is not newer"):
        pool.load_adapter("math", TENSORS, config={"lora_alpha": 8}, version=2)
    kept = adapter_folder(one, ("math", 2))
    pool.unload_adapter("math")
    assert not kept.exists()
    assert pool.status()["replicas"][0]["adapters"] == {}


def test_an_adapter_that_fails_somewhere_is_nowhere(
    fake_lab: fakes.FakeLab, pool: jv.Pool
):
    pool.load_adapter("math", TENSORS, config={"lora_alpha": 8})
    good, bad = fake_lab.fakes.values()
    bad.bad_adapter = True  # type: ignore[attr-defined]
    with pytest.raises(errors.ConfigError, match="cannot load it"):
        pool.load_adapter("math", TENSORS, config={"lora_alpha": 8})
    assert list(good.adapters) == [("math", 1)]  # type: ignore[attr-defined]
    assert pool.generate("AB", adapter="math")[0].adapter == ("math", 1), (
        "the old version still serves"
    )
    kept = adapter_folder(good, ("math", 1))
    assert kept.is_dir()
    pool.close()
    assert not kept.exists(), "nothing is left of a pool that was closed"


@pytest.mark.parametrize(
    ("tensors", "config", "word"),
    [
        (TENSORS, None, "do not define their scale"),
        ({A: TENSORS[A]}, {"lora_alpha": 8}, "no pair"),
        ({"q_proj.weight": TENSORS[A]}, {"lora_alpha": 8}, "is not a LoRA tensor"),
        ({A: np.ones(3), B: TENSORS[B]}, {"lora_alpha": 8}, "has shape"),
        ({}, {"lora_alpha": 8}, "no pair"),
    ],
)
def test_bad_adapters_are_refused_before_anything_moves(
    tensors: Any, config: Any, word: str
):
    with pytest.raises(errors.ConfigError, match=word):
        write(tensors, config)


def test_an_adapter_must_fit_the_model(
    fake_lab: fakes.FakeLab, pool: jv.Pool, tmp_path: Path
):
    wide = {A: np.ones((4, 127), np.float32), B: np.ones((129, 4), np.float32)}
    with pytest.raises(
        errors.ConfigError,
        match=r"lora_A.weight is \(4, 127\), the module's weight \(128, 128\)",
    ) as caught:
        pool.load_adapter("math", wide, config={"lora_alpha": 8})
    assert len(caught.value.fields["problems"]) == 2  # type: ignore[arg-type]
    nowhere = {name.replace("layers.0", "layers.99"): a for name, a in TENSORS.items()}
    with pytest.raises(errors.ConfigError, match="no such module"):
        pool.load_adapter("math", nowhere, config={"lora_alpha": 8})
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        errors.ConfigError, match=r"holds no adapter_model\.safetensors"
    ):
        pool.load_adapter("math", tmp_path)
    assert not any(fake.orders for fake in fake_lab.fakes.values())  # type: ignore[attr-defined]


def test_gpt2_keeps_its_weights_the_other_way_round():
    from jvlab.lab._adapters import check_shapes
    from jvlab.layout._types import CheckpointTensor

    model = jv.models.tiny("gpt2")
    module = "base_model.model.transformer.h.0.mlp.c_fc"
    pair = lambda a, b: [
        CheckpointTensor(f"{module}.lora_A.weight", (4, a), "float32"),
        CheckpointTensor(f"{module}.lora_B.weight", (b, 4), "float32"),
    ]
    check_shapes(pair(128, 512), model)
    with pytest.raises(errors.ConfigError, match="does not fit"):
        check_shapes(pair(512, 128), model)


def test_adapters_in_16_bits_lose_no_bit():
    import ml_dtypes
    from safetensors.numpy import load_file

    half = {
        name: np.linspace(-1, 1, 512).reshape(a.shape).astype(ml_dtypes.bfloat16)
        for name, a in TENSORS.items()
    }
    folder = write(half, {"lora_alpha": 4})
    try:
        loaded = load_file(folder / "adapter_model.safetensors")
        assert np.array_equal(
            loaded[f"base_model.model.{A}"], half[A].astype(np.float32)
        )
    finally:
        shutil.rmtree(folder)


# Determinism and speculation ----------------------------------------------------------------------------------------


def test_check_determinism_compares_every_way(fake_lab: fakes.FakeLab, pool: jv.Pool):
    report = pool.check_determinism(
        [[5, 6], [7], [8]], max_tokens=2, batches=(2,), repeats=2
    )
    assert report.exact
    assert [c.name for c in report.cases] == [
        "alone again",
        "in batches of 2",
        "in batches of 2, last first",
        "alone on p/1",
    ]
    assert (
        repr(report)
        == "DeterminismReport(3 prompts × 2 tokens, 4 ways: equal to the bit; scored within 2.0e+00)"
    )
    assert "alone on p/1" in report._repr_html_()
    assert (report.exact, report.score_exact) == (True, False), (
        "these replicas score by a rule of their own"
    )
    assert report.causes
    assert report.causes[0] in report._repr_html_()
    warm = pool.check_determinism(
        [[5, 6], [7]], max_tokens=2, batches=(2,), temperature=0.5
    )
    assert (warm.scored, warm.score_exact, warm.causes) == (None, None, ()), (
        "nothing to compare a score with"
    )


def test_a_difference_is_found():
    def sample(tokens: list[int], logprobs: list[float], version: int = 0) -> jv.Sample:
        return jv.Sample(
            0,
            0,
            np.array([1]),
            np.array(tokens),
            np.array(logprobs),
            versions=((version, 0, 3),),
        )

    same = sample([1, 2, 3], [-1.0, -1.0, -1.0])
    near = sample([1, 2, 3], [-1.0, -1.5, -1.0])
    other = sample([1, 9, 3], [-1.25, -7.0, -1.0])
    case = _determinism.compare("x", [same, same, same], [same, near, other])
    assert (case.equal, case.same_bits, case.gap, case.first, case.exact) == (
        2,
        1,
        0.5,
        1,
        False,
    )
    newer = sample([1, 2, 3], [-1.0] * 3, version=1)
    with pytest.raises(errors.ConfigError, match="the weights changed"):
        _determinism.compare("x", [same], [newer])


def test_the_cause_is_named_where_bits_part():
    one = lambda name, same: _determinism.Case(
        name, 2, 2, same, 0.0 if same == 2 else 0.1, None
    )
    good, again, mixed = (
        one("alone again", 2),
        one("alone again", 1),
        one("in batches of 8", 0),
    )
    card = lambda **facts: pb.EngineFacts(
        **{"batch_invariant": True, "attention_backend": "TRITON_ATTN", **facts}
    )
    assert _determinism.causes("cuda", card(), [good], one("scored", 2)) == ()
    [off] = _determinism.causes("cuda", card(batch_invariant=False), [again])
    assert "batch-invariant kernels are off" in off
    [flash] = _determinism.causes(
        "cuda", card(attention_backend="FLASH_ATTN"), [good, mixed]
    )
    assert flash.startswith("FLASH_ATTN: its kernel changes with the longest query")
    [own] = _determinism.causes(
        "cuda", card(attention_backend=""), [good], one("scored", 1)
    )
    assert own.startswith("vLLM's own choice of attention")
    cpu = pb.EngineFacts(max_num_seqs=8, prefix_caching=True)
    assert ["batch" in c for c in _determinism.causes("cpu", cpu, [mixed])] == [True]
    assert ["prefix cache" in c for c in _determinism.causes("cpu", cpu, [again])] == [
        True
    ]
    assert [
        "one prefill" in c
        for c in _determinism.causes("cpu", cpu, [good], one("scored", 1))
    ] == [True]
    [unknown] = _determinism.causes("cuda", card(), [mixed])
    assert unknown.startswith("no known cause")
    assert not _determinism.comparable({"temperature": 1.0, "top_p": 0.9})
    assert not _determinism.comparable({"temperature": 0.5})
    assert _determinism.comparable({"temperature": 1.0, "seed": 3, "max_tokens": 4})


def test_the_switches_of_a_launch():
    settings = _determinism.launch_settings
    invariant = {"VLLM_BATCH_INVARIANT": "1"}
    assert settings("cuda", None, None, True, None) == (
        {"seed": 0, "attention_backend": "TRITON_ATTN"},
        invariant,
    )
    assert (
        settings("cuda", None, None, True, None, True)[0]["attention_backend"]
        == "TRITON_MLA"
    )
    mine = {"attention_backend": "FLASH_ATTN"}
    assert settings("cuda", mine, None, True, None) == (
        {"seed": 0, **mine},
        invariant,
    ), "what is given by name wins"
    engine, env = settings("cpu", {"seed": 5}, {"A": "b"}, True, {"method": "ngram"})
    assert engine == {
        "seed": 5,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "speculative_config": {"method": "ngram"},
    }
    assert env == {"A": "b"}
    assert settings("cpu", None, None, False, None) == ({}, {})
    with pytest.raises(errors.ConfigError, match="given twice"):
        settings("cpu", {"speculative_config": {}}, None, False, {"method": "ngram"})


def test_status_says_how_tokens_are_drafted():
    from jvlab.wire._pool_summary import pool_summary

    stats = pb.ReplicaStats(
        draft_tokens=40,
        accepted_tokens=10,
        weight_version=0,
        drafts=[pb.DraftCount(version=0, drafted=40, accepted=10)],
    )
    replica = pb.ReplicaStatus(
        replica="p/0",
        stage="ready",
        facts=pb.EngineFacts(speculative="draft_model", draft_weights=True),
        stats=stats,
    )
    snapshot = pb.PoolStatus(pool="p", replicas=[replica])
    wanted = {
        "method": "draft_model",
        "acceptance_rate": 0.25,
        "draft_tokens": 40,
        "acceptance_by_version": {0: 0.25},
        "draft_version": 0,
        "draft_stale": False,
    }
    assert pool_summary(snapshot)["speculative"] == wanted
    snapshot.replicas[0].stats.weight_version = 3
    assert pool_summary(snapshot)["speculative"]["draft_stale"]
    snapshot.replicas[0].stats.draft_version = 3
    snapshot.replicas.add().CopyFrom(snapshot.replicas[0])
    second = snapshot.replicas[1].stats
    second.drafts.add(version=3, drafted=10, accepted=9)
    found = pool_summary(snapshot)["speculative"]
    assert not found["draft_stale"]
    assert found["draft_version"] == 3
    assert found["acceptance_by_version"] == {0: 0.25, 3: 0.9}
    second.draft_version = 0  # it was restarted, and has the folder's
    assert pool_summary(snapshot)["speculative"]["draft_version"] == 0
    assert pool_summary(snapshot)["speculative"]["draft_stale"]
    del snapshot.replicas[1]
    snapshot.replicas[0].stats.draft_version = 0
    snapshot.replicas[0].facts.draft_weights = False
    assert not pool_summary(snapshot)["speculative"]["draft_stale"], (
        "n-grams come from the text"
    )
    snapshot.replicas[0].facts.speculative = ""
    assert pool_summary(snapshot)["speculative"] is None
