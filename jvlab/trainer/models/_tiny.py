"""Writes tiny random models as complete Hugging Face directories, for eleven families, with no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jvlab._errors import ConfigError, ModelError
from jvlab.layout._checkpoint import encode_header
from jvlab.layout._plan_types import numpy_dtype
from jvlab.trainer._checks import check_choice, check_whole, meant
from jvlab.trainer.models._families import (
    BOS_ID,
    EOS_ID,
    FAMILIES,
    GPT2_NAMES,
    PAD_ID,
    TURN_END_ID,
    Config,
    Init,
    tensors,
)

# increment when the bytes for the same arguments change: invalidates cached directories
_FORMAT = 2
_DTYPES = ("float32", "float16", "bfloat16")
# fixed by the family
_FIXED = {"architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id"}


def cache_dir() -> Path:
    """The cache of models: $XDG_CACHE_HOME/jvlab/models, else ~/.cache/jvlab/models.

    >>> jv.models.cache_dir().name
    'models'
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jvlab" / "models"


def tiny(
    family: str = "llama",
    path: str | os.PathLike[str] | None = None,
    seed: int = 0,
    **sizes: object,
) -> str:
    """Write a random model of 1 to 2 million parameters as a Hugging Face directory, and return its path.

    `sizes` override fields of config.json, e.g. `hidden_size=256, num_hidden_layers=2, tie_word_embeddings=True,
    dtype="bfloat16"`. The same arguments give the same bytes. Without `path` the directory is in the user's cache
    and written once.

    >>> import json, pathlib
    >>> model = jv.models.tiny("qwen3", num_hidden_layers=2)
    >>> json.loads(pathlib.Path(model, "config.json").read_text())["num_hidden_layers"]
    2
    """
    config = _config(family, sizes)
    check_whole("seed", seed, least=0)
    if path is None:
        key = hashlib.sha256(
            json.dumps([_FORMAT, seed, config], sort_keys=True).encode()
        ).hexdigest()[:12]
        target = cache_dir() / f"{family}-{key}"
    else:
        target = Path(path)
    stamp = _dump({"format": _FORMAT, "seed": seed, "config": config})
    if not is_complete(target):
        with fresh_directory(target) as folder:
            _write(folder, config, seed, stamp)
    elif path is not None and _stamp(target) != stamp:
        raise ModelError(
            f"{target} already holds a different model",
            remedy="choose another path, or delete that directory first",
            path=str(target),
        )
    return str(target)


def is_complete(folder: Path) -> bool:
    """Whether a model directory is complete: directories appear by one rename, with config.json."""
    return (folder / "config.json").is_file()


@contextlib.contextmanager
def fresh_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes `target` by one rename, so that no reader sees half a model.

    An empty directory at `target` is replaced; if another process was first, its directory stays.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(
            f"{target} exists and is not a model directory",
            remedy="choose a path that does not exist yet, or an empty directory",
            path=str(target),
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        # mkdtemp uses 0700; an engine of another user may read the model
        folder.chmod(0o755)
        try:
            folder.rename(target)
        except OSError:
            if not is_complete(target):
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _config(family: str, sizes: dict[str, object]) -> Config:
    """The family's config with the caller's sizes, checked."""
    if family not in FAMILIES:
        raise ConfigError(
            f"no tiny model of family {family!r}",
            remedy=meant(family, FAMILIES),
            family=family,
        )
    config = dict(FAMILIES[family])
    if family == "gpt2":
        sizes = {GPT2_NAMES.get(name, name): value for name, value in sizes.items()}
    allowed = [name for name in config if name not in _FIXED]
    for name, value in sizes.items():
        if name not in allowed:
            raise ConfigError(
                f"{family} has no size {name!r}",
                remedy=meant(name, allowed),
                family=family,
                size=name,
            )
        config[name] = _checked(family, name, value, config[name])
    _check_heads(family, config)
    if family in ("gemma2", "gemma3"):
        period = (
            2 if family == "gemma2" else min(6, config["num_hidden_layers"])
        )  # every period-th layer is global
        layers = range(1, config["num_hidden_layers"] + 1)
        config["layer_types"] = [
            "full_attention" if i % period == 0 else "sliding_attention" for i in layers
        ]
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    return config


def _checked(family: str, name: str, value: object, default: object) -> object:
    """The value, if its type fits the default's."""
    if name == "dtype":
        check_choice(name, value, _DTYPES)
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is int and isinstance(default, float):
        value = float(value)
    if default is None or name == "sliding_window":
        good = value is None or (type(value) is int and value > 0)
    else:
        good = type(value) is type(default) and (type(value) is not int or value > 0)
    if not good:
        raise ConfigError(
            f"{name}={value!r} does not fit {family}: its default is {default!r}",
            remedy="pass a positive whole number"
            if isinstance(default, int)
            else f"pass a value like {default!r}",
            size=name,
            value=value,
        )
    return value


def _check_heads(family: str, config: Config) -> None:
    hidden = config.get("hidden_size") or config["n_embd"]
    heads = config.get("num_attention_heads") or config["n_head"]
    kv = config.get("num_key_value_heads", heads)
    experts = config.get("num_local_experts", config.get("num_experts", 0))
    chosen = config.get("num_experts_per_tok", 0)
    wrong = ""
    if "head_dim" not in config and hidden % heads:
        wrong = f"hidden size {hidden} is not a multiple of {heads} heads"
    elif heads % kv:
        wrong = f"{heads} heads are not a multiple of {kv} key-value heads"
    elif config.get("head_dim", hidden // heads) % 2:
        wrong = "heads are odd, and rotary positions need an even size"
    elif chosen > experts:
        wrong = f"{chosen} experts per token of {experts}"
    for flag in ("attention_bias", "mlp_bias"):
        if config.get(flag):
            wrong = (
                f"{flag}=True is not written for {family}: qwen2 and gpt2 have biases"
            )
    if wrong:
        raise ConfigError(wrong, remedy="change one of the sizes", family=family)


def _stamp(folder: Path) -> str:
    file = folder / "jvlab.json"
    return file.read_text() if file.is_file() else ""


def _write(folder: Path, config: Config, seed: int, stamp: str) -> None:
    length = config.get("n_positions") or config["max_position_embeddings"]
    texts = _tokenizer(config["vocab_size"], length)
    texts["generation_config.json"] = _dump(
        {
            "bos_token_id": BOS_ID,
            "eos_token_id": [EOS_ID, TURN_END_ID],
            "pad_token_id": PAD_ID,
            "do_sample": True,
            "temperature": 1.0,
        }
    )
    texts["jvlab.json"] = stamp
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    _write_weights(
        folder / "model.safetensors",
        dict(tensors(config)),
        str(config["dtype"]),
        seed,
    )
    (folder / "config.json").write_text(_dump(config), encoding="utf-8", newline="\n")


def _tokenizer(vocab_size: int, max_length: int) -> dict[str, str]:
    """The texts of a tokenizer's files, for at most `vocab_size` tokens.

    tokenizer.json beside this file is byte-level BPE: five special tokens, the 256 bytes, then the results of its
    merges in their order, so that a smaller vocabulary is the beginning of a larger one. The merges come from an
    English text without digits: each digit is a token of its own, which suits arithmetic tasks. Where a model has more
    rows than there are tokens, its last rows have none, as in padded vocabularies.
    """
    shipped = lambda name: json.loads(
        Path(__file__).with_name(name).read_text(encoding="utf-8")
    )
    tokenizer = shipped("tokenizer.json")
    model = tokenizer["model"]
    merges = vocab_size - (len(model["vocab"]) - len(model["merges"]))
    if merges < 0:
        raise ConfigError(
            f"vocab_size={vocab_size} is too small for a byte-level tokenizer",
            remedy=f"use at least {vocab_size - merges} (5 special tokens and 256 bytes)",
            vocab_size=vocab_size,
        )
    model["vocab"] = {t: i for t, i in model["vocab"].items() if i < vocab_size}
    model["merges"] = model["merges"][:merges]
    config = shipped("tokenizer_config.json")
    config["model_max_length"] = max_length
    special = ("bos_token", "eos_token", "pad_token", "additional_special_tokens")
    texts = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "special_tokens_map.json": {name: config[name] for name in special},
    }
    return {
        name: json.dumps(value, ensure_ascii=False, indent=1) + "\n"
        for name, value in texts.items()
    }


def _write_weights(file: Path, inits: dict[str, Init], dtype: str, seed: int) -> None:
    """A safetensors file, written without the library, so that its bytes do not depend on a version of it."""
    with file.open("wb") as f:
        f.write(
            encode_header(
                ((name, inits[name].shape) for name in sorted(inits)),
                dtype,
                {"format": "pt"},
            )
        )
        for name in sorted(inits):
            drawn = _draw(name, inits[name], seed)
            f.write(drawn.astype(numpy_dtype(dtype)).tobytes())


def _draw(name: str, init: Init, seed: int) -> np.ndarray:
    """Normal values from a random stream per tensor, so that tensors are independent of each other."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    stream = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    values = stream.standard_normal(
        math.prod(init.shape), dtype=np.float32
    ) * np.float32(init.std) + np.float32(init.mean)
    return values.reshape(init.shape)


def _dump(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
