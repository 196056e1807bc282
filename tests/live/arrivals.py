"""Does every parameter arrive? Each kind is changed alone and synced, and the engine is compared with transformers.

    python -m tests.live.arrivals [FAMILY ...] [--out FILE] [--write]    --write: tests/baselines/arrives_cpu.json

vLLM is imported once; every architecture then runs in a forked child, two at a time, with its engine in the child
process. A kind is a checkpoint name without its numbers: all tensors of it are changed together, and nothing else. A
change has arrived if the engine's log-probabilities equal transformers' with the same change, and is observable if
those moved.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).parents[1] / "baselines" / "arrives_cpu.json"
COMMAND = "python -m tests.live.arrivals --write"
# nats between the two implementations
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.04, "float16": 0.01}
# an observable change moves transformers' log-probabilities by this many tolerances
MIN_EFFECT = 4
# of a change, in standard deviations
STEP = {"float32": 0.3, "bfloat16": 1.0, "float16": 1.0}
PARALLEL = 2
MODES = ("direct", "staged")
FAULTS = {"gpt_oss": ("w13_bias", "w2_weight")}


def kind_of(name: str) -> str:
    """The name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


class Reference:
    """The architecture in transformers, with the same weights."""

    def __init__(self, family: str, config: dict[str, Any]) -> None:
        import torch
        import transformers

        self.config = transformers.AutoConfig.for_model(
            family.partition("@")[0], **config
        )
        self._auto = transformers.AutoModelForCausalLM
        torch.manual_seed(0)
        self._dtype = getattr(torch, config.get("dtype", "float32"))
        self._model = self._auto.from_config(
            self.config, dtype=self._dtype, attn_implementation="eager"
        ).eval()
        with torch.no_grad():  # norms of all 1 and biases of all 0 would hide mix-ups
            for tensor in [*self._model.parameters(), *self._model.buffers()]:
                if tensor.is_floating_point() and tensor.ndim:
                    tensor.add_(0.1 * torch.randn_like(tensor))

    def save(self, folder: str) -> dict[str, Any]:
        """Write a checkpoint; returns its tensors by name."""
        from safetensors.torch import load_file

        self._model.save_pretrained(folder)
        self._other = Path(folder) / "other"  # the checkpoint with changed tensors
        self.config.save_pretrained(self._other)
        return {
            k: v
            for path in sorted(Path(folder).glob("*.safetensors"))
            for k, v in load_file(path).items()
        }

    def logprobs(self, tree: dict[str, Any], sequences: Sequence[Sequence[int]]) -> Any:
        """Log-probabilities of every token but the first, with these tensors."""
        import numpy as np
        import torch
        from safetensors.torch import save_file

        save_file(
            {k: v.contiguous() for k, v in tree.items()},
            self._other / "model.safetensors",
            {"format": "pt"},
        )
        model = self._auto.from_pretrained(
            self._other, dtype=self._dtype, attn_implementation="eager"
        ).eval()
        rows = []
        with torch.no_grad():
            for row in sequences:
                found = (
                    model(torch.tensor([list(row)])).logits[0].float().log_softmax(-1)
                )
                rows.append(
                    found[
                        torch.arange(len(row) - 1), torch.tensor(list(row[1:]))
                    ].numpy()
                )
        return np.concatenate(rows)


def changed(tree: dict[str, Any], kind: str, seed: int, size: float) -> dict[str, Any]:
    """The tree with every tensor of this kind changed by `size` standard deviations."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    out = dict(tree)
    for name, tensor in tree.items():
        if kind_of(name) == kind and tensor.is_floating_point():
            step = size * max(
                0.3, float(tensor.float().std()) if tensor.numel() > 1 else 0.3
            )
            out[name] = tensor + step * torch.randn(
                tensor.shape, generator=generator
            ).to(tensor.dtype)
    return out


def check(family: str, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Every kind of this architecture, direct and staged: its effect, and the engine's distance from transformers."""
    import numpy as np

    import jvlab as jv

    dtype = config.get("dtype", "float32")
    reference = Reference(family, config)
    tree = reference.save(folder)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, config["vocab_size"], 24).tolist() for _ in range(3)]
    # All reference results first: where vLLM runs transformers' own classes, it modifies them permanently.
    plain = reference.logprobs(tree, sequences)
    steps = []
    for number, kind in enumerate(sorted({kind_of(name) for name in tree})):
        for index, mode in enumerate(MODES):
            new = changed(tree, kind, 2 * number + index, STEP[dtype])
            steps.append((kind, mode, new, reference.logprobs(new, sequences)))
    engine = {"max_model_len": 64, "dtype": dtype, "skip_tokenizer_init": True}
    pool = jv.Pool.in_process(folder, name="arrivals", device="cpu", engine=engine)

    def gap(expected: Any) -> float:
        rows = pool.score(sequences).logprobs
        return float(np.abs(np.concatenate([row[1:] for row in rows]) - expected).max())

    try:
        out: dict[str, Any] = {"loaded": gap(plain), "kinds": {}}
        link = pool.connect(tree, rules="checkpoint")
        assert link.sync(tree, progress=False).verified
        for kind, mode, new, expected in steps:
            report = link.sync(new, mode=mode, progress=False)
            out["kinds"].setdefault(kind, {})[mode] = {
                "moved": float(np.abs(expected - plain).max()),
                "gap": gap(expected),
                "verified": report.verified,
                "holds": bool(link.verify(new)),
                "old_refused": not link.verify(tree),
                "evidence": report.evidence,
            }
        if family in FAULTS:
            faults = [(name, mode) for name in FAULTS[family] for mode in MODES]
            # new values each time: the engine may hold earlier ones
            for number, (name, mode) in enumerate(faults, 1):
                new = {n: tensor + number / 8 for n, tensor in tree.items()}
                out.setdefault("faults", []).append(
                    drop_parameter(link, new, name, mode)
                )
        return out
    finally:
        pool.close()


def drop_parameter(
    link: Any, new: dict[str, Any], dropped: str, mode: str
) -> dict[str, Any]:
    """Packing drops a parameter on purpose: the error of that sync, and whether the next one recovers."""
    from jvlab import errors
    from jvlab.engine.worker import _weights

    original = _weights.pack

    def dropping(*args: Any) -> Any:
        packed = original(*args)
        packed.tensors.pop(dropped, None)
        return packed

    _weights.pack = dropping
    try:
        link.sync(new, mode=mode, progress=False)
        message = ""
    except errors.VerifyError as error:
        message = str(error)
    finally:
        _weights.pack = original
    found = {
        "dropped": dropped,
        "mode": mode,
        "error": message,
        "differing": dropped in message,
    }
    link.sync(new, mode=mode, progress=False)
    return {**found, "recovered": bool(link.verify(new))}


# Many architectures, one import of vLLM -------------------------------------------------------------------------

# family, config, folder for its checkpoint
Check = Callable[[str, dict[str, Any], str], dict[str, Any]]


def _forked(
    family: str, config: dict[str, Any], result_file: Path, check: Check
) -> int:
    """The pid of a child that checks one architecture and writes the result to a file."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        with tempfile.TemporaryDirectory(prefix="jvlab-arrivals-") as folder:
            start = time.perf_counter()
            log = os.open(
                result_file.with_suffix(".log"),
                os.O_CREAT | os.O_WRONLY | os.O_TRUNC,
                0o600,
            )
            os.dup2(log, 1)
            os.dup2(log, 2)
            result: dict[str, Any]
            try:
                result = check(family, config, folder)
            except BaseException as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"[:2000]}
            result["seconds"] = round(time.perf_counter() - start, 1)
            result_file.write_text(json.dumps(result))
    finally:
        os._exit(0)  # without the parent's exit handlers


def run(
    chosen: dict[str, dict[str, Any]], folder: Path, check: Check = check
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each architecture with its result, as they finish."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core each
    _import_all()
    waiting, running = list(chosen.items()), {}
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            family, config = waiting.pop(0)
            running[_forked(family, config, folder / f"{family}.json", check)] = family
        pid, status = os.wait()
        family = running.pop(pid)
        file = folder / f"{family}.json"
        yield (
            family,
            json.loads(file.read_text())
            if file.exists()
            else {"error": f"ended with status {status}"},
        )


def _import_all() -> None:
    """Import and compile what each child needs, without starting threads, which a fork would lose."""
    import importlib

    import torch
    import vllm.model_executor.models.registry as registry

    for name in _IMPORTED:
        importlib.import_module(name)
    importlib.import_module("jvlab.layout._digest").compiled_loop()
    # vLLM would import a model's class in a separate process first, to keep CUDA uninitialised: there is no CUDA here
    registry._run_in_subprocess = lambda question: question()
    torch.set_num_threads(1)


_IMPORTED = (
    "transformers", "safetensors.torch", "transformers.models.auto.modeling_auto", "transformers.conversion_mapping",
    "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama",
    "vllm.model_executor.models.mixtral", "vllm.model_executor.model_loader.default_loader",
    "jvlab", "jvlab.lab._in_process", "jvlab.sync._link", "jvlab.sync._connections", "jvlab.engine._in_process",
    "jvlab.engine.worker._rank_sync", "jvlab.engine.tracing._trace", "jvlab.layout._plan",
)  # fmt: skip


def table(family: str, found: dict[str, Any]) -> dict[str, str]:
    """By kind: "moved", or why no effect can be observed; "MISSING" if it did not arrive."""
    from tests.live.arrival_families import FAMILIES, why_unobservable

    dtype = FAMILIES[family].get("dtype", "float32")
    tolerance = max(TOLERANCE[dtype], 2 * found["loaded"])
    # rounding to 16 bits grows with the change
    relative = 0.0 if dtype == "float32" else 0.005
    out = {}
    for kind, modes in found["kinds"].items():
        lost = [
            mode
            for mode, m in modes.items()
            if not m["gap"] <= max(tolerance, relative * m["moved"])
        ]
        if lost:
            worst = max(modes.values(), key=lambda m: m["gap"])
            out[kind] = (
                f"MISSING ({', '.join(lost)}: {worst['gap']:.2g} of {worst['moved']:.2g} nats)"
            )
        elif all(m["moved"] > MIN_EFFECT * tolerance for m in modes.values()):
            out[kind] = "moved"
        else:
            out[kind] = (
                why_unobservable(family, kind)
                or f"UNSEEN ({min(m['moved'] for m in modes.values()):.2g} nats)"
            )
    return out


def main(arguments: list[str]) -> int:
    """Run, print the table, and write it."""
    import argparse

    from tests.live.arrival_families import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--out", type=Path, help="write all results as JSON")
    parser.add_argument("--write", action="store_true", help=f"write {BASELINE.name}")
    given = parser.parse_args(arguments)
    # those with experts take longest and start first, so that none of them runs alone at the end
    names = given.families or sorted(
        FAMILIES, key=lambda name: "num_experts_per_tok" not in FAMILIES[name]
    )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="jvlab-arrivals-out-") as folder:
        for family, found in run(
            {name: FAMILIES[name] for name in names}, Path(folder)
        ):
            results[family] = found
            if given.out:
                given.out.write_text(json.dumps(results))
            print(_summary(family, found), flush=True)
            log = Path(folder) / f"{family}.log"
            if "error" in found and log.exists():
                print("\n".join(log.read_text().splitlines()[-40:]), flush=True)
    if given.write:
        _write(results)
    return 0


def _summary(family: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{family:<18} {found['error'][:300]}"
    rows = table(family, found)
    others = [
        f"    {kind}: {result}" for kind, result in rows.items() if result != "moved"
    ]
    gap = max(m["gap"] for modes in found["kinds"].values() for m in modes.values())
    return "\n".join(
        [
            f"{family:<18} {len(rows)} kinds, {len(rows) - len(others)} moved, {gap:.1e} nats, {found['seconds']} s",
            *others,
        ]
    )


def _write(results: dict[str, Any]) -> None:
    import torch
    import transformers
    import vllm

    results = {
        family: found for family, found in results.items() if "error" not in found
    }
    out = {
        "command": COMMAND,
        "what": "each kind of parameter changed alone and synced, direct and staged: the engine's log-probabilities "
        "are transformers' with the same change (moved), or why no output can show it",
        "versions": {
            module.__name__: module.__version__
            for module in (vllm, transformers, torch)
        },
        "families": {
            family: table(family, results[family]) for family in sorted(results)
        },
        "nats": {
            family: round(
                max(m["gap"] for k in found["kinds"].values() for m in k.values()), 7
            )
            for family, found in sorted(results.items())
        },
    }
    BASELINE.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
