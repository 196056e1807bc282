"""What jvlab changes of vLLM: each row's target is in the installed vLLM, and what each change of the CPU's does."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jvlab.engine import _patches, _vllm_versions


@pytest.mark.vllm
@pytest.mark.parametrize(
    "patch", _patches.PATCHES, ids=lambda patch: patch.install.__name__
)
def test_what_a_row_replaces_is_in_vllm(patch: _patches.Patch):
    assert not _vllm_versions.missing(patch.replaces)


def test_every_row_says_why_and_when_it_can_go():
    for patch in _patches.PATCHES:
        assert "Until " in (patch.install.__doc__ or ""), patch.install


def test_the_table_needs_no_vllm():
    code = """
import sys
from jvlab.engine import _patches, _vllm_versions
assert _patches.PATCHES and _vllm_versions.NEEDED
assert not {"vllm", "torch"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_replaced_for_a_while_comes_back_as_it_was():
    class Theirs:
        @staticmethod
        def main() -> int:
            return 1

    before = vars(Theirs)["main"]
    with _patches.replacing((Theirs, "main", staticmethod(lambda: 2))):
        assert Theirs.main() == 2
    assert vars(Theirs)["main"] is before
    with pytest.raises(AttributeError), _patches.replacing((Theirs, "gone", 1)):
        pass


def test_the_first_cosines_of_a_process_are_as_good_as_later_ones():
    """Without the patch four of a hundred forks fail on x86: with two threads, at the first call only."""
    code = """
import os, torch
from jvlab.engine._patches import settle_vector_math
bad = 0
for _ in range(400):
    if (child := os.fork()) == 0:
        torch.set_num_threads(2)
        settle_vector_math()
        angles = torch.arange(1 << 15, dtype=torch.float) / 1000  # starts the threads
        gap = (angles.cos().double() - angles.double().cos()).abs().max()
        os._exit(int(gap > 1e-6))
    bad += os.waitpid(child, 0)[1] != 0
print(bad)
"""
    # its threads begin at the same moment if they spin while they wait
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "GOMP_SPINCOUNT": "infinity"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["0"], done.stderr


# vLLM's CPU kernels for experts: a rank that holds some of them computes the share of those, and no other memory.


def apply(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """As vLLM's: indexes this rank's experts with whatever numbers it is given."""
    each = torch.einsum("td,tkdf->tkf", hidden_states, w1[topk_ids.long()])
    output.copy_((each * topk_weights[..., None]).sum(1))


def test_ranks_add_up_to_all_experts():
    random = torch.Generator().manual_seed(0)
    x, experts = (
        torch.randn(6, 4, generator=random),
        torch.randn(4, 4, 4, generator=random),
    )
    ids = torch.stack([torch.randperm(4, generator=random)[:2] for _ in range(6)]).to(
        torch.int32
    )
    weights, whole = torch.rand(6, 2, generator=random), torch.empty(6, 4)
    patched: Any = partial(_patches.own_experts_only, apply)
    given = {"hidden_states": x, "topk_weights": weights, "topk_ids": ids}
    patched(output=whole, w1=experts, expert_map=None, **given)
    parts = []
    for rank in range(2):
        mine = torch.full((4,), -1, dtype=torch.int32)
        mine[2 * rank : 2 * rank + 2] = torch.arange(2, dtype=torch.int32)
        part = torch.empty(6, 4)
        own = experts[2 * rank : 2 * rank + 2]
        patched(output=part, w1=own, expert_map=mine, **given)
        parts.append(part)
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert not torch.allclose(parts[0], whole)
    assert ids.max() == 3, (
        "numbers that are no places on a rank of two; the caller's own are kept"
    )


# vLLM's CPU kernels for LoRA: a request without an adapter gets none, whatever the last slot holds.


def product(shrink, expand, slots: torch.Tensor) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(2, 1, 3, 4, generator=random),
        torch.randn(2, 1, 5, 3, generator=random),
    )
    x, low, out = (
        torch.randn(len(slots), 4, generator=random),
        torch.zeros(len(slots), 3),
        torch.zeros(len(slots), 5),
    )
    shrink(x, a, low, slots, 1.0)
    expand(low, b, out, slots, add_inputs=True)
    return out


@pytest.mark.slow
def test_slot_minus_one_is_no_slot():
    from vllm.lora.ops.torch_ops import lora_ops

    slots = torch.tensor([0, -1, 1, -1])
    plain = getattr(lora_ops.bgmv_shrink, "__wrapped__", lora_ops.bgmv_shrink)
    theirs = product(plain, lora_ops.bgmv_expand, slots)
    zeroing = partial(_patches.no_adapter_is_zero, plain)
    ours = product(zeroing, lora_ops.bgmv_expand, slots)
    assert theirs[1].any(), "the bug that this works around is still there"
    assert not ours[[1, 3]].any()
    assert torch.equal(ours[[0, 2]], theirs[[0, 2]])


# Seeded requests whose prompt is read in parts: nothing breaks, and the seed gives what it gives in one go.


def runner_class() -> Any:
    """A class that samples and winds back just as vLLM's runner does."""

    class Runner:
        def __init__(self, seeds: dict[int, int], rows: int) -> None:
            generators = {
                row: torch.Generator("cpu").manual_seed(seed)
                for row, seed in seeds.items()
            }
            self.input_batch = SimpleNamespace(generators=generators, num_reqs=rows)
            self.discard_request_mask = SimpleNamespace(np=np.zeros(8, bool))

        def _sample(self) -> dict[int, float]:
            return {
                row: float(torch.rand(1, generator=g))
                for row, g in self.input_batch.generators.items()
            }

        def _bookkeeping_sync(self) -> list[int]:
            for row in np.nonzero(
                self.discard_request_mask.np[: self.input_batch.num_reqs]
            )[0]:
                generator = self.input_batch.generators.get(int(row))
                if generator is not None:
                    generator.set_offset(generator.get_offset() - 4)
            return sorted(self.input_batch.generators)

        def step(self, thrown: list[int]) -> dict[int, float]:
            self.discard_request_mask.np[:] = False
            self.discard_request_mask.np[thrown] = True
            out = self._sample()
            self._bookkeeping_sync()
            return out

    return Runner


def test_unmended_it_raises():
    with pytest.raises(RuntimeError, match="offset"):
        runner_class()({0: 5}, 1).step([0])


def test_a_token_that_does_not_count_leaves_no_trace():
    cls = runner_class()
    _patches.patch_runner(cls)
    whole, parts = cls({0: 5, 1: 6}, 3), cls({0: 5, 1: 6}, 3)
    wanted = [whole.step([]) for _ in range(3)]
    first = parts.step([0, 2])  # row 2 has no seed
    assert first[1] == wanted[0][1], "the row that counts goes on"
    assert sorted(parts.input_batch.generators) == [0, 1]
    assert parts.step([0])[1] == wanted[1][1]
    assert parts.step([])[0] == wanted[0][0], (
        "the row whose prompt was cut begins where it would have begun"
    )


# vLLM's kernel that gives each drafted token its request's temperature, on a CPU; and what is sampled with it.


@pytest.fixture
def rejection(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's rejection sampler with the kernels that it has on a CPU, for this test."""
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils as cpu
    from vllm.v1.sample import rejection_sampler as sampler

    current_platform.import_kernels()
    monkeypatch.setattr(sampler, "_expand", cpu._expand_kernel_impl)
    monkeypatch.setattr(
        sampler,
        "_rejection_random_sample",
        lambda *args: cpu._rejection_random_sample_kernel_impl(
            *args[:10], vocab_size=WORDS, NO_DRAFT_PROBS=args[3] is None
        ),
    )
    monkeypatch.setattr(
        sampler,
        "_sample_recovered_tokens",
        lambda *args, max_spec_len: cpu._sample_recovered_tokens_kernel_impl(
            *args, vocab_size=WORDS, NO_DRAFT_PROBS=args[3] is None
        ),
    )
    return sampler


WORDS = 6
REQUESTS = 20_000
TEMPERATURE = 0.7


def first_tokens(sampler: Any, by_chance: bool) -> tuple[np.ndarray, np.ndarray]:
    """The share of each word among first tokens with two drafted ones for each request, and what it should be."""
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 0.2])
    wanted = torch.softmax(logits / TEMPERATURE, 0)
    drafts = torch.full((2 * REQUESTS,), 5, dtype=torch.int32)
    chances = None
    if by_chance:
        chances = torch.tensor([0.1, 0.2, 0.1, 0.3, 0.1, 0.2]).repeat(2 * REQUESTS, 1)
        drafts = torch.multinomial(chances, 1)[:, 0].int()
    asked = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.full((REQUESTS,), TEMPERATURE),
        generators={},
        top_k=None,
        top_p=None,
    )
    ends = torch.arange(1, REQUESTS + 1, dtype=torch.int32) * 2
    processed = sampler.apply_sampling_constraints(
        logits.repeat(2 * REQUESTS, 1), ends, asked
    )
    bonus = torch.multinomial(wanted.repeat(REQUESTS, 1), 1).int()
    numbers = [2] * REQUESTS
    found = sampler.rejection_sample(
        drafts, numbers, 2, ends, chances, processed, bonus, asked
    )
    share = torch.bincount(found[:, 0].long(), minlength=WORDS) / REQUESTS
    return share.numpy(), wanted.numpy()


@pytest.mark.vllm
@pytest.mark.parametrize("by_chance", [False, True], ids=["greedy", "probabilistic"])
def test_drafts_do_not_change_what_is_sampled(
    rejection: Any, monkeypatch: pytest.MonkeyPatch, by_chance: bool
):
    monkeypatch.setattr(rejection, "expand_batch_to_tokens", _patches.expanded)
    share, wanted = first_tokens(rejection, by_chance)
    # four standard deviations of the most uncertain share
    assert np.abs(share - wanted).max() < 4 * np.sqrt(0.25 / REQUESTS)


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_drafted_token_has_its_requests_own_numbers(
    rejection: Any, dtype: torch.dtype
):
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    values = torch.tensor([3, 9, 0], dtype=dtype)
    ours = _patches.expanded(values, ends, 5, replace_from=0, replace_to=1)
    assert ours.dtype == dtype
    assert ours.tolist() == [3, 3, 1, 1, 1]
    half = _patches.expanded(torch.tensor([0.5, 0.9, 0.0]), ends, 5)
    assert half.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0], "fractions are kept"
    theirs = torch.full((5,), 77, dtype=dtype)
    rejection._expand(theirs, values, ends, 0, 1)
    if dtype is not torch.int64:
        assert theirs.tolist() == [77] * 5, (
            "the bug that this works around is still there: nothing was written"
        )


# vLLM's output head with LoRA: rows of prompts, which its kernels can't adapt, are computed without adapters.


class Head:
    """Adapts one row for each request, as vLLM's kernels do: it fails for any other number of rows."""

    def __init__(self, requests: int) -> None:
        self.punica_wrapper: Any = SimpleNamespace(
            sampler_indices=torch.zeros(requests, dtype=torch.long),
            add_lora_logits=self._adapt,
        )

    def _adapt(self, y: torch.Tensor, *_: Any) -> torch.Tensor:
        slots = self.punica_wrapper.sampler_indices
        return torch.einsum("bi,bi->bi", y, torch.full((len(slots), y.shape[1]), 2.0))

    def _get_logits(
        self, hidden_states: torch.Tensor, bias: float = 0.0
    ) -> torch.Tensor:
        return self.punica_wrapper.add_lora_logits(hidden_states + bias)


def test_rows_of_prompts_are_not_adapted_and_sampled_rows_are():
    head, kernels = Head(3), Head(3)
    patched = partial(_patches.adapting_sampled_rows, Head._get_logits)
    with pytest.raises(RuntimeError):
        head._get_logits(torch.ones(7, 4))
    assert torch.equal(
        patched(head, torch.ones(7, 4), bias=1.0), torch.full((7, 4), 2.0)
    )
    assert torch.equal(patched(head, torch.ones(3, 4)), torch.full((3, 4), 2.0)), (
        "adapted: twice as large"
    )
    assert type(head.punica_wrapper) is type(kernels.punica_wrapper), (
        "the kernels are back"
    )


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX"
)
def test_a_worker_may_use_amx():
    """vLLM's attention in 16 bits does, without asking."""
    code = """
import ctypes
from jvlab.engine._patches import allow_amx
ARCH_PRCTL, GET_PERMISSION, TILES = 158, 0x1022, 1 << 18
def allowed():
    found = ctypes.c_uint64()
    ctypes.CDLL(None).syscall(ARCH_PRCTL, GET_PERMISSION, ctypes.byref(found))
    return bool(found.value & TILES)
before = allowed()
allow_amx()
print(before, allowed())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["False", "True"], done.stderr
