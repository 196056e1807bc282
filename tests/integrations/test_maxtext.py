"""Trees that MaxText itself made (maxtext_trees.py), with a checkpoint's values in them, mapped without a rule."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import jvlab as jv
from jvlab.layout._checkpoint import CheckpointValues, checkpoint_tensors, read_config
from jvlab.layout._tree import flatten
from jvlab.sync._compile_tree import bind_rules
from jvlab.sync._value_samples import sample
from tests.integrations.maxtext_trees import FACTS, SIZES, checksum

KINDS = ("scanned", "unscanned", "base")


def maxtext_tree(kind: str, folder: str) -> tuple[dict[str, Any], list[float]]:
    """A nested tree with a checkpoint's values where MaxText's converter puts them, and MaxText's log-probabilities.

    Its convention: kernels transposed, then reshaped; layers stacked along axis 1.
    """
    facts = json.loads(FACTS.read_text())["trees"][kind]
    files = CheckpointValues.of(folder)
    assert files is not None
    tree: dict[str, Any] = {}
    for path, leaf in facts["leaves"].items():
        stacked = isinstance(leaf["of"], list)
        names = leaf["of"] if stacked else [leaf["of"]]
        shape = leaf["shape"][:1] + leaf["shape"][2:] if stacked else leaf["shape"]
        turned = path.endswith(".kernel")
        tensors = [np.asarray(files[name]) for name in names]
        parts = [(t.T if turned else t).reshape(shape) for t in tensors]
        values = np.stack(parts, 1) if stacked else parts[0]
        assert checksum(values) == pytest.approx(leaf["checksum"], abs=1e-6), path
        node = tree
        *folders, last = path.split(".")
        for name in folders:
            node = node.setdefault(name, {})
        node[last] = values
    return tree, facts["logprobs"]


@pytest.fixture(scope="module")
def folder() -> str:
    return jv.models.tiny("qwen3", **SIZES)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_goes_where_the_checkpoint_has_it(kind: str, folder: str):
    tree, _ = maxtext_tree(kind, folder)
    flat = flatten(tree)
    tensors = checkpoint_tensors(folder)
    bindings = list(bind_rules("auto", flat.shapes, tensors, read_config(folder))[1])
    assert {b.tensor for b in bindings} == {t.name for t in tensors}
    files = CheckpointValues.of(folder)
    assert files is not None
    seen = sample(bindings, flat.arrays, files).seen
    assert len(seen) == len(tensors)
    assert all(s.fits for s in seen.values()), {
        name: s.text for name, s in seen.items() if not s.fits
    }


def test_its_rl_takes_our_rollout(folder: str):
    """What MaxText's own adapter gave to a `Rollout` made with `maxtext_config=`, and what it computed in it."""
    facts = json.loads(FACTS.read_text())
    base, seen = facts["trees"]["base"], facts["rollout"]
    assert seen["syncs"] == 2
    assert seen["samples"] == 3
    wanted = {path: leaf["checksum"] for path, leaf in base["leaves"].items()}
    assert seen["checksums"] == pytest.approx(wanted, abs=1e-6)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokens = torch.tensor([facts["tokens"]])
    with torch.no_grad():
        steps = model(tokens).logits[0, :-1].log_softmax(-1)
    theirs = steps.gather(1, tokens[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(seen["logprobs"], theirs, atol=1e-4)
    for tree in facts["trees"].values():
        np.testing.assert_allclose(tree["logprobs"], theirs, atol=1e-4)
