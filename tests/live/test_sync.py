"""Weight syncs from JAX into real vLLM: bit-exact for any mesh, rank count and transport, and proven so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.transport._nixl import installed

pytestmark = pytest.mark.engine

MESHES = [{"fsdp": 1}, {"fsdp": 2}, {"fsdp": 3}, {"fsdp": 2, "tp": 2}, {"fsdp": 6}]
TRANSPORTS = ["shm", "tcp", "disk", *(["nixl"] if installed() else [])]
PROMPT = [5, 6, 7, 8, 9]
# family, tensor parallel, dtype; live weights, so that every parameter can be read back and compared
ENGINES = [
    ("llama", 1, "float32"),
    ("llama", 2, "half"),
    ("qwen3", 1, "half"),
    ("qwen3", 2, "float32"),
]


def greedy(pool: jv.Pool, prompt: list[int] = PROMPT) -> list[int]:
    return list(
        pool.generate([prompt], max_tokens=24, temperature=0.0, ignore_eos=True)[
            0
        ].token_ids
    )


def memory(pool: jv.Pool, link: Any) -> dict[tuple[str, int], bytes]:
    """Every live parameter of every rank, as raw bytes: nothing shared with digests."""
    plan = link.plan
    pairs = {
        (plan.parameters[p].name, int(r))
        for p, r in zip(plan.target_parameter, plan.target_rank, strict=True)
    }
    return {(name, rank): pool.peek(name, rank) for name, rank in sorted(pairs)}


def coming(request: pytest.FixtureRequest) -> list[tuple[str, int, str]]:
    """The engine that is asked for, and the one after it that a test of this run will ask for."""
    tests = [
        item
        for item in request.session.items
        if getattr(item, "module", None) is request.module
    ]
    asked = [
        item.callspec.params.get("engine")  # type: ignore
        for item in tests
        if hasattr(item, "callspec")
    ]
    wanted = [engine for engine in ENGINES if engine in asked]
    at = wanted.index(request.param)
    return wanted[at : at + 2]


@pytest.fixture(scope="module")
def launched() -> dict[tuple[str, int, str], jv.Pool]:
    """Engines that are coming up, by what they are."""
    return {}


# ranks and dtypes are in the others
SOAKING = [pytest.param(e, marks=pytest.mark.soak) for e in ENGINES[2:]]


@pytest.fixture(
    scope="module",
    params=[*ENGINES[:2], *SOAKING],
    ids=lambda e: f"{e[0]}-tp{e[1]}-{e[2]}",
)
def engine(
    request: pytest.FixtureRequest,
    lab: jv.Lab,
    launched: dict[tuple[str, int, str], jv.Pool],
    half: str,
) -> Iterator[tuple[jv.Pool, str, str]]:
    """An engine that loaded a checkpoint by itself, and another checkpoint of the same shapes to sync."""
    dtypes = {"float32": "float32", "half": half}
    family, dtype = request.param[0], dtypes[request.param[2]]
    # the next one starts meanwhile: that takes most of a minute, and one core
    for ahead in coming(request):
        if ahead not in launched:
            model = jv.models.tiny(ahead[0], seed=0, dtype=dtypes[ahead[2]])
            launched[ahead] = lab.launch(
                model, tensor_parallel=ahead[1], env={"JVLAB_LIVE_WEIGHTS": "1"}
            )
    pool = launched.pop(request.param).wait()
    one, two = (jv.models.tiny(family, seed=seed, dtype=dtype) for seed in (0, 1))
    yield pool, one, two
    pool.close()


def covering(at: int) -> list[tuple[str, dict[str, int]]]:
    """Of the product with engines: every engine with every transport, and two engines see every mesh."""
    pairs = [
        (TRANSPORTS[(at + m) % len(TRANSPORTS)], axes) for m, axes in enumerate(MESHES)
    ]
    count = len(TRANSPORTS)
    return pairs[-count:] if at else pairs[:count]


@pytest.mark.parametrize(
    "product", ["pairs", pytest.param("all", marks=pytest.mark.soak)]
)
def test_bit_exact_for_every_mesh_and_transport(
    engine: tuple[jv.Pool, str, str],
    lab: jv.Lab,
    request: pytest.FixtureRequest,
    product: str,
):
    pool, one, two = engine
    at = ENGINES.index(request.node.callspec.params["engine"])
    chosen = (
        covering(at)
        if product == "pairs"
        else [(t, axes) for t in TRANSPORTS for axes in MESHES]
    )
    policy = jv.Policy.from_pretrained(one)
    link = lab.connect(policy.params, pool, rules="policy")
    own, own_tokens = memory(pool, link), greedy(pool)
    assert link.verify(policy.params), "vLLM's own load holds the trainer's bits"
    assert not link.verify(jv.Policy.from_pretrained(two).params), (
        "and not another checkpoint's"
    )
    other: dict[tuple[str, int], bytes] = {}
    for transport, axes in chosen:
        mesh = jv.mesh(**axes)
        first, second = (jv.Policy.from_pretrained(m, mesh=mesh) for m in (one, two))
        link = lab.connect(
            first.params, pool, rules="policy", transport=transport, bucket_mib=0.5
        )
        there = link.sync(second.params)
        assert there.verified
        assert there.transport == transport
        assert there.buckets > 1
        now = memory(pool, link)
        other = other or now
        assert now == other, "the same memory from every mesh over every transport"
        assert now != own
        tokens = pool.generate(
            [PROMPT], max_tokens=8, temperature=0.0, ignore_eos=True
        )[0]
        assert tokens.versions.tolist() == [there.version] * 8
        back = link.sync(first.params)
        assert back.version == there.version + 1
        assert memory(pool, link) == own, "bit for bit what vLLM itself loaded"
    assert greedy(pool) == own_tokens
    link.close()


def test_staged_mode_is_as_exact(engine: tuple[jv.Pool, str, str], lab: jv.Lab):
    pool, one, two = engine
    mesh = jv.mesh(fsdp=2)
    first, second = (jv.Policy.from_pretrained(m, mesh=mesh) for m in (one, two))
    link = lab.connect(
        first.params, pool, rules="policy", mode="staged", bucket_mib=0.5
    )
    own = memory(pool, link)
    for params in (second.params, first.params, second.params, first.params):
        report = link.sync(params)
        assert report.mode == "staged"
        assert link.verify(params)
    assert memory(pool, link) == own
    link.close()


def test_fp32_masters_are_cast_on_the_device(
    engine: tuple[jv.Pool, str, str], lab: jv.Lab
):
    pool, one, _ = engine
    masters = jv.Policy.from_pretrained(one, mesh=jv.mesh(fsdp=2), dtype="float32")
    link = lab.connect(masters.params, pool, rules="policy")
    own = memory(pool, link)
    report = link.sync(masters.params)
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[pool.status()["dtype"]]
    assert (
        report.bytes == sum(len(v) for v in own.values()) or report.bytes % width == 0
    )
    assert report.bytes <= sum(len(v) for v in own.values()), (
        "the engine's dtype crosses, not the masters'"
    )
    assert memory(pool, link) == own
    link.close()


def test_what_differs_is_refused_before_a_byte_moves(
    engine: tuple[jv.Pool, str, str], lab: jv.Lab
):
    pool, one, _ = engine
    policy = jv.Policy.from_pretrained(one)
    link = lab.connect(policy.params, pool, rules="policy")
    version = link.version
    sharded = jv.Policy.from_pretrained(one, mesh=jv.mesh(fsdp=2))
    with pytest.raises(errors.LayoutError, match="another sharding"):
        link.sync(sharded.params)
    with pytest.raises(errors.ConfigError, match="larger than"):
        link.sync(policy.params, version=version)
    for bad in (
        {"verify": "perhaps"},
        {"require": "most"},
        {"pause": "now"},
        {"kv": "burn"},
        {"mode": "fast"},
    ):
        with pytest.raises(errors.ConfigError, match="must be one of"):
            link.sync(policy.params, **bad)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="transport"):
        lab.connect(policy.params, pool, transport="pigeon")
    short = dict(policy.params)
    short.pop("final_norm")
    with pytest.raises(errors.LayoutError, match="norm"):
        lab.connect(short, pool, rules="policy")
    with pytest.raises(errors.LayoutError, match="bogus"):
        lab.connect(
            {**policy.params, "bogus": {"kernel": policy.params["embed"]["embedding"]}},
            pool,
            rules="policy",
        )
    assert len(greedy(pool)) == 24, "a wrong tree harms no engine"
    link = lab.connect(policy.params, pool, rules="policy")
    assert link.version == version
    assert link.sync(policy.params).verified
    again = lab.connect(policy.params, pool, rules="policy")
    assert again is link, "the same shapes share plan, channels and link"
    link.close()
    with pytest.raises(errors.SyncError, match="closed"):
        link.sync(policy.params)


def test_faces(engine: tuple[jv.Pool, str, str], lab: jv.Lab):
    pool, one, _ = engine
    policy = jv.Policy.from_pretrained(one)
    link = lab.connect(policy.params, pool, rules="policy")
    report = link.sync(policy.params)
    assert repr(report).startswith(f"SyncReport(version {report.version}, ")
    assert repr(report).endswith("arrived; meaning checked by value)")
    assert "ms" in report._repr_html_()
    assert {"pack", "move", "scatter", "digest", "pause", "total"} <= set(
        report.seconds
    )
    assert report.gbps > 0
    assert {o.state for o in report.outcomes} == {"committed"}
    assert len(report.digests) == len(link.plan.target_rank)
    assert "over shm" in repr(link)
    assert "one host" in link.reason
    handle = link.sync_async(policy.params)
    assert handle.result(120).version == report.version + 1
    assert handle.progress == 1.0
    sampled = link.sync(policy.params, verify="sampled")
    assert not sampled.verified
    assert link.sync(policy.params, verify="off").seconds["digest"] == 0
    assert np.isfinite(report.seconds["total"])
    link.close()


def test_a_mixture_of_experts_in_many_pieces(lab: jv.Lab):
    """Packed experts, many buckets, a tree named like the checkpoint: nothing is lost between chunks."""
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    one, two = (jv.models.tiny("mixtral", seed=seed) for seed in (0, 1))
    trees = [
        {
            name: jnp.asarray(value)
            for file in Path(m).glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        for m in (one, two)
    ]
    with lab.launch(one).wait() as pool:
        link = lab.connect(trees[0], pool, rules="checkpoint", bucket_mib=0.125)
        own = greedy(pool)
        report = link.sync(trees[1])
        assert report.verified
        assert report.buckets > 20
        other = greedy(pool)
        for mode in ("staged", "direct"):
            link.sync(trees[0], mode=mode)
            assert greedy(pool) == own != other
            link.sync(trees[1], mode=mode)
            assert greedy(pool) == other
        link.close()


# What a rule means -----------------------------------------------------------------------------------------------

# rule by rule, over those of the Policy: everything is covered, and nothing means the same
WRONG = {
    "transposed q": (
        "layers.attn.q.kernel -> model.layers.{i}.self_attn.q_proj.weight : i d n h -> d (n h)",
        ["layers.attn.q.kernel"],
    ),
    "gate and up swapped": (
        "layers.mlp.[gate|up|down].kernel -> model.layers.{i}.mlp.[up|gate|down]_proj.weight : i a b -> b a",
        ["layers.mlp.gate.kernel", "layers.mlp.up.kernel"],
    ),
    "k and v swapped": (
        "layers.attn.[k|v].kernel -> model.layers.{i}.self_attn.[v|k]_proj.weight : i d k h -> (k h) d",
        ["layers.attn.k.kernel", "layers.attn.v.kernel"],
    ),
    "rotary order": (
        "layers.attn.q.kernel -> model.layers.{i}.self_attn.q_proj.weight : i d n (a b) -> (n b a) d where a=2",
        ["layers.attn.q.kernel"],
    ),
    "1 + w": (
        "layers.[attn|mlp]_norm.scale -> model.layers.{i}.[input|post_attention]_layernorm.weight : i d -> d + 1",
        ["layers.attn_norm.scale", "layers.mlp_norm.scale"],
    ),
}
one_engine = pytest.mark.parametrize(
    "engine", ENGINES[:1], indirect=True, ids=lambda e: f"{e[0]}-tp{e[1]}-{e[2]}"
)


def edited(link: Any, rule: str) -> Any:
    """The link's rules with one exchanged, as the inspector does it."""
    coverage = link.mapping.edit(rule)
    assert coverage.complete, "everything is covered: no other check sees it"
    return coverage.rules


def in_another_order(params: Any) -> Any:
    """The tree with the queries of its first two layers exchanged, inside the leaf that stacks them."""
    import jax

    swap = lambda path, a: (
        a.at[:2].set(a[:2][::-1])
        if "['attn']['q']" in jax.tree_util.keystr(path)
        else a
    )
    return jax.tree_util.tree_map_with_path(swap, params)


@one_engine
def test_meaning_a_wrong_rule_is_refused_before_a_byte_moves(
    engine: tuple[jv.Pool, str, str], lab: jv.Lab
):
    pool, one, _ = engine
    policy = jv.Policy.from_pretrained(one)
    link = lab.connect(policy.params, pool, rules="policy")
    report = link.sync(policy.params)
    assert (link.meaning.state, link.meaning.how) == ("checked", "value")
    assert report.meaning == "checked by value"
    assert repr(report).endswith("arrived; meaning checked by value)")
    assert not link.meaning.ambiguous
    assert not link.mapping.ambiguous
    own, tokens, version = memory(pool, link), greedy(pool), link.version
    for rule, leaves in WRONG.values():
        with pytest.raises(errors.MeaningError) as caught:
            lab.connect(policy.params, pool, rules=edited(link, rule))
        assert set(leaves) <= set(caught.value.leaves)
        assert all(
            "norm" in leaf or "attn" in leaf or "mlp" in leaf
            for leaf in caught.value.leaves
        )
    with pytest.raises(
        errors.MeaningError, match=r"\[0\] holds the values of layer \[1\]"
    ) as caught:
        lab.connect(
            in_another_order(policy.params), pool, rules="policy", bucket_mib=7.0
        )
    assert {name.partition("[")[0] for name in caught.value.leaves} == {
        "layers.attn.q.kernel"
    }
    assert lab.connect(policy.params, pool, rules="policy") is link, (
        "a refused connect leaves the old link as it was"
    )
    assert (memory(pool, link), greedy(pool), link.version) == (own, tokens, version)
    blind = lab.connect(
        policy.params, pool, rules=edited(link, WRONG["transposed q"][0]), meaning="off"
    )
    assert blind.sync(policy.params).verified, "bits arrive"
    assert blind.last is not None
    assert blind.last.meaning == 'unchecked: turned off by meaning="off"'
    assert "layers.attn.q.kernel" in blind.mapping.ambiguous
    assert greedy(pool) != tokens, "and the model is another one"
    link = lab.connect(policy.params, pool, rules="policy")
    link.sync(policy.params)
    assert greedy(pool) == tokens
    link.close()


@one_engine
def test_meaning_by_function_where_values_settle_nothing(
    engine: tuple[jv.Pool, str, str], lab: jv.Lab
):
    pool, one, two = engine
    link = lab.connect(jv.Policy.from_pretrained(one).params, pool, rules="policy")
    wrong = {name: edited(link, rule) for name, (rule, _) in WRONG.items()}
    # numbers that no checkpoint here has, as after long training
    other = jv.Policy.from_pretrained(two)
    for name, trainer in (
        ("transposed q", other),
        ("rotary order", other.params),
        ("1 + w", (other.params, other.logprobs_fn)),
    ):
        link = lab.connect(trainer, pool, rules=wrong[name])
        assert link.meaning.state == "pending"
        with pytest.raises(errors.MeaningError, match="dirty") as caught:
            link.sync(other.params)
        assert link.meaning.state == "failed"
        assert WRONG[name][1][0] in caught.value.leaves
        with pytest.raises(errors.EngineDirty):
            pool.generate([PROMPT], max_tokens=2)
        with pytest.raises(errors.MeaningError, match="found wrong"):
            link.sync(other.params)
    link = lab.connect(other, pool, rules="policy", bucket_mib=3.0)
    report = link.sync(other.params)
    assert report.meaning == "checked by function"
    assert not link.meaning.ambiguous, link.meaning
    assert len(greedy(pool)) == 24
    seconds = min(link.sync(other.params).seconds["total"] for _ in range(3))
    assert seconds < 60
    link.close()


@one_engine
def test_meaning_of_a_trained_policy_and_of_a_plain_tree(
    engine: tuple[jv.Pool, str, str], lab: jv.Lab
):
    import jax

    pool, one, two = engine
    policy = jv.Policy.from_pretrained(one)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    step = lambda a: a + 0.1 * a.std() * jax.random.normal(next(keys), a.shape, a.dtype)
    trained = jax.tree.map(step, policy.params)
    link = lab.connect(trained, pool, rules="policy", bucket_mib=1.0)
    assert (link.meaning.state, link.meaning.how) == ("checked", "value")
    assert "correlated" in link.meaning.why
    assert link.sync(trained).meaning == "checked by value"
    link.close()
    plain = jax.tree.map(np.asarray, jv.Policy.from_pretrained(two).params)
    link = lab.connect(plain, pool, rules="policy", bucket_mib=2.0)
    report = link.sync(plain)
    assert report.verified
    assert report.meaning.startswith(
        "unchecked: no leaf holds the checkpoint's numbers"
    )
    assert "log-probabilities are not known" in report.meaning
    assert link.meaning.state == "unchecked"
    assert "layers.attn.q.kernel" in link.mapping.ambiguous
    link.sync(jv.Policy.from_pretrained(one).params)
    link.close()


def corrupted(params: Any) -> dict[str, Any]:
    """Trees of the same names and shapes that are other models."""
    import jax
    import jax.numpy as jnp

    layers, mlp, attn = (
        params["layers"],
        params["layers"]["mlp"],
        params["layers"]["attn"],
    )
    q, table = attn["q"]["kernel"], params["embed"]["embedding"]
    with_layers = lambda **changed: {**params, "layers": {**layers, **changed}}
    with_q = lambda kernel: with_layers(attn={**attn, "q": {"kernel": kernel}})
    with_table = lambda rows: {**params, "embed": {"embedding": rows}}
    return {
        "gate and up swapped": with_layers(
            mlp={**mlp, "gate": mlp["up"], "up": mlp["gate"]}
        ),
        "layers reversed": {
            **params,
            "layers": jax.tree.map(lambda a: a[::-1], layers),
        },
        "heads reversed": with_q(q[:, :, ::-1]),
        "-w": with_layers(mlp={**mlp, "down": {"kernel": -mlp["down"]["kernel"]}}),
        "q times the root of the head size": with_q(q * q.shape[-1] ** 0.5),
        "embedding rolled": with_table(jnp.roll(table, 1, axis=0)),
        "two rows of the embedding": with_table(
            table.at[jnp.array([17, 93])].set(table[jnp.array([93, 17])])
        ),
    }


@one_engine
def test_meaning_is_of_the_values_not_of_the_shapes(
    engine: tuple[jv.Pool, str, str], lab: jv.Lab
):
    """After one good connect: each other tree of these shapes is compared, at connect and at the first sync."""
    import jax

    pool, one, two = engine
    policy = jv.Policy.from_pretrained(one)
    link = lab.connect(policy.params, pool, rules="policy")
    assert link.sync(policy.params).meaning == "checked by value"
    tokens, version = greedy(pool), link.version
    for name, bad in corrupted(policy.params).items():
        with pytest.raises(errors.MeaningError) as caught:
            lab.connect(bad, pool, rules="policy")
        assert caught.value.leaves, name
        assert (link.meaning.state, link.version) == ("checked", version), (
            "an open link keeps what is known of it"
        )
        assert lab.connect(policy.params, pool, rules="policy") is link
        with pytest.raises(errors.MeaningError, match="where the checkpoint has them"):
            link.sync(bad)
        assert link.version == version, name
    assert greedy(pool) == tokens
    first = link.sync(policy.params)
    assert first.meaning == "checked by value", (
        "a refused tree is no verdict about the next"
    )
    assert link.sync(policy.params).meaning == "checked by value", "the same arrays"
    moved = jax.tree.map(lambda a: a * 1.001, policy.params)
    assert link.sync(moved).meaning == f"checked by value at version {first.version}"
    link = lab.connect(moved, pool, rules="policy")
    assert link.sync(moved).meaning == "checked by value"
    assert "correlated" in link.meaning.why, "trained: compared, and not wrong"
    # nothing to compare with, nobody to score
    plain = jax.tree.map(np.asarray, jv.Policy.from_pretrained(two).params)
    assert (
        lab.connect(plain, pool, rules="policy", bucket_mib=5.0).meaning.state
        == "pending"
    )
    link = lab.connect(
        jax.tree.map(np.asarray, policy.params), pool, rules="policy", bucket_mib=5.0
    )
    assert link.meaning.state == "checked"
    assert link.sync(plain).meaning.startswith(
        "unchecked: no leaf holds the checkpoint's numbers"
    )
    link.close()


@one_engine
@pytest.mark.soak
def test_meaning_by_function_is_asked_for_again(
    engine: tuple[jv.Pool, str, str], lab: jv.Lab
):
    pool, one, _ = engine
    policy = jv.Policy.from_pretrained(one)
    link = lab.connect(policy.params, pool, rules="policy")
    assert link.sync(policy.params).meaning == "checked by value"
    assert lab.connect(policy.params, pool, rules="policy", meaning="function") is link
    assert link.meaning.state == "pending", (
        "not the verdict by value of the connect before"
    )
    assert link.sync(policy.params).meaning == "checked by function"
    wrong = lambda params, tokens, mask: 0.5 * policy.logprobs_fn(params, tokens, mask)
    assert (
        lab.connect((policy.params, wrong), pool, rules="policy", meaning="function")
        is link
    )
    with pytest.raises(errors.MeaningError, match="nats apart"):
        link.sync(policy.params)
    assert (
        lab.connect(
            (policy.params, policy.logprobs_fn),
            pool,
            rules="policy",
            meaning="function",
        )
        is link
    )
    assert link.sync(policy.params).meaning == "checked by function"
    assert len(greedy(pool)) == 24
    link.close()


def with_norms_of_one(model: str, folder: Path) -> Path:
    """A copy of a checkpoint whose norms are all one: nothing shows which is which."""
    import shutil

    from safetensors.numpy import load_file, save_file

    made = folder / "ones"
    shutil.copytree(model, made)
    for file in made.glob("*.safetensors"):
        tensors = load_file(file)
        save_file(
            {k: np.ones_like(v) if "norm" in k else v for k, v in tensors.items()},
            file,
            {"format": "pt"},
        )
    return made


@one_engine
def test_meaning_without_power_is_counted_and_checked_once_leaves_differ(
    engine: tuple[jv.Pool, str, str], lab: jv.Lab, tmp_path: Path
):
    import jax

    pool, one, _ = engine
    ones = with_norms_of_one(one, tmp_path)
    policy = jv.Policy.from_pretrained(ones)
    asked: dict[str, Any] = {"checkpoint": ones}
    link = lab.connect(policy, pool, rules="policy", **asked)
    swapped = edited(
        link,
        "layers.[attn|mlp]_norm.scale -> model.layers.{i}.[post_attention|input]_layernorm.weight : i d -> d",
    )
    names = {"layers.attn_norm.scale", "layers.mlp_norm.scale", "final_norm.scale"}
    keys = iter(jax.random.split(jax.random.key(0), 100))
    move = lambda path, a: (
        a * jax.random.uniform(next(keys), a.shape, a.dtype, 0.5, 1.5)
    )
    moved = jax.tree_util.tree_map_with_path(
        lambda path, a: move(path, a) if "norm" in jax.tree_util.keystr(path) else a,
        policy.params,
    )
    for way, how in (("auto", "value"), ("function", "function")):
        link = lab.connect(policy, pool, rules=swapped, meaning=way, **asked)
        report = link.sync(policy.params)
        assert report.meaning == f"checked by {how}, except for 3 leaves", (
            "swapped, and nothing shows it"
        )
        assert f"checked by {how}, except for 3 leaves" in repr(report)
        assert set(link.meaning.ambiguous) == names
        with pytest.raises(errors.MeaningError, match="norm") as caught:
            link.sync(moved)
        assert set(caught.value.leaves) == names - {"final_norm.scale"}
        assert link.meaning.state == "failed"
    link = lab.connect(policy, pool, rules="policy", **asked)
    assert link.sync(policy.params).meaning == "checked by value, except for 3 leaves"
    assert link.sync(moved).meaning == "checked by value and function"
    assert not link.meaning.ambiguous
    link.close()
    back = jv.Policy.from_pretrained(one)
    lab.connect(back.params, pool, rules="policy").sync(back.params)


def test_a_small_engine_in_bfloat16(lab: jv.Lab, needs_bf16: None):
    """Its layers are too small for oneDNN where the CPU has AMX: vLLM packs them for kernels of its own, which take no
    transposed memory, and its attention uses AMX without asking the kernel for it."""
    model, other = (
        jv.models.tiny("llama", dtype="bfloat16", seed=seed) for seed in (0, 1)
    )
    params = [jv.Policy.from_pretrained(m).params for m in (model, other)]
    with lab.launch(model, name="small").wait() as pool:
        assert pool.facts().dtype == "bfloat16"
        tokens = greedy(pool)
        link = lab.connect(params[0], pool)
        for mode in ("direct", "staged"):
            assert link.sync(params[1], mode=mode).verified
            assert greedy(pool) != tokens
            assert link.verify(params[1])
            assert link.sync(params[0], mode=mode).verified
            assert greedy(pool) == tokens
