"""Checks against what jvlab did not make: transformers' own computation, and the values that were loaded or committed.

The other checks compare an engine with itself. One that computes wrongly with the right weights (a reversed rotary
table, another epsilon) passes all of them: only a second implementation of the model tells.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import JvlabError
from jvlab._units import human_bytes
from jvlab.analysis.certification._certificate import Finding
from jvlab.analysis.certification._known_values import Memory, as_loaded, differences
from jvlab.analysis.certification._sync_checks import loader_only

if TYPE_CHECKING:
    from jvlab.analysis.certification._subject import Subject

LARGEST_BYTES = 8e9  # of float32: transformers computes on the CPU, in memory that the trainer may need
PROMPTS = (3, 9, 20, 40)  # their lengths: a rotary table that is wrong shows with distance


def reference(subject: Subject) -> Finding:
    """Sample, and let transformers compute the same tokens' log-probabilities with the values that the engine holds."""
    if subject.refused:
        return Finding.skipped(subject.refused)
    if subject.facts.quantization:
        return Finding.skipped(f"transformers computes without {subject.facts.quantization} activations")
    values = subject.values("original")
    size = 4 * sum(array.size for array in values.values())
    if size > LARGEST_BYTES:
        return Finding.skipped(f"{human_bytes(size)} in float32 is more than the reference may take")
    try:
        model = transformers_model(subject.pool.model, values)
    except Exception as error:  # whatever transformers raises: it does not know this model, or its weights do not fit
        return Finding.skipped(
            f"transformers could not load it: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        )
    subject.hold("original")
    samples = [subject.say(subject.prompt(n, n), r, 12) for r in subject.replicas for n in PROMPTS]
    worst = 0.0
    for sample, row in zip(samples, subject.score(samples), strict=True):
        ours = logprobs_of(model, sample)
        gap = subject.gap(ours, row)
        worst = max(worst, gap)
        if not gap <= subject.tolerance:
            at = int(np.argmax(np.nan_to_num(np.abs(ours - row), nan=np.inf)))
            return Finding.failed(
                f"engine and transformers are {gap:.2g} nats apart with the same weights ({sample.replica}): one of "
                "them, or the engine's configuration, computes another model",
                f"token {at} after a prompt of {len(sample.prompt_token_ids)}: engine {row[at]:.5g}, "
                f"transformers {ours[at]:.5g}",
            )
    tokens = sum(len(s.token_ids) for s in samples)
    measure = "mean" if subject.half else "largest difference"
    return Finding.passed(
        f"{tokens} tokens computed by transformers in float32 with the engine's values: {measure} {worst:.1e} nats, at "
        f"most {subject.tolerance:g}"
    )


def transformers_model(folder: str, values: Any) -> Any:
    """Transformers' model of this config with these values, in float32 on the CPU; raises if one is missing."""
    import torch
    import transformers
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory(prefix="jvlab-") as made:
        for file in Path(folder).glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, made)
        # as a checkpoint, so that transformers' own conversions apply (fused and stacked tensors)
        wide = {name: np.ascontiguousarray(array, np.float32) for name, array in values.items()}
        save_file(wide, f"{made}/model.safetensors", metadata={"format": "pt"})
        with _without_a_bar():
            model, told = transformers.AutoModelForCausalLM.from_pretrained(
                made, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
            )
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(set(told["missing_keys"]) - tied)
    if missing or told["mismatched_keys"]:
        raise ValueError(f"no value for {', '.join(missing[:3]) or told['mismatched_keys']}")
    return model.eval()


@contextlib.contextmanager
def _without_a_bar() -> Iterator[None]:
    """Inside, transformers shows no progress of its own beside ours."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def logprobs_of(model: Any, sample: Any) -> np.ndarray:
    """Log-probabilities of a sample's tokens, in one pass over the whole sequence."""
    import torch

    prompt = len(sample.prompt_token_ids)
    tokens = torch.tensor([[*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]])
    with torch.inference_mode():
        logits = model(tokens).logits[0, prompt - 1 : -1].double()
    chosen = torch.log_softmax(logits, -1).gather(1, tokens[0, prompt:, None])
    return chosen[:, 0].numpy()


def unchanged(subject: Subject) -> Finding:
    """Compare what the engines held at the beginning with what was last committed, or loaded."""
    if subject.refused:
        return Finding.skipped(subject.refused)
    if subject.verified is not None:
        wrong = subject.verified.differing
        if wrong or not subject.verified.ok:
            return Finding.failed("the engine does not hold what was last committed", wrong[0] if wrong else "")
        return Finding.passed(f"digests of live memory are those of version {subject.verified.version}")
    if subject.given is None and subject.began_with:
        return Finding.skipped(
            f"version {subject.began_with} was synced by another process: pass params={{checkpoint name: array}}"
        )
    try:
        source = subject.given if subject.given is not None else subject.checkpoint()
    except JvlabError as error:
        return Finding.skipped(error.message.splitlines()[0])
    wanted = loaded_from(subject, source)
    wrong = differences(wanted, {key: subject.loaded[key] for key in wanted})
    what = "the params given" if subject.given is not None else "the checkpoint's files"
    if len(wrong) > len(wanted) / 2:
        return Finding.skipped(
            f"the engine was not loaded from {what}: {len(wrong)} of {len(wanted)} parameters differ"
        )
    if wrong:
        return Finding.failed(f"{len(wrong)} of {len(wanted)} parameters are not as in {what}", str(wrong[0]))
    return Finding.passed(f"{len(wanted)} parameters, every bit as in {what}")


def loaded_from(subject: Subject, values: Any) -> Memory:
    """The engine's memory as its loader leaves it with these values, but for what the model's own code computes."""
    apart = loader_only(subject)
    named = {layout.tensors[int(t)].name for layout in subject.layouts for t in layout.tensor}
    found = {name: np.asarray(values[name]) for name in named if name in values}
    memory = as_loaded(subject.layouts, found, subject.loaded)
    return {key: flat for key, flat in memory.items() if key[1] not in apart}
