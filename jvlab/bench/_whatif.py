"""`jvlab bench whatif`: how well `jv.whatif`, fitted on three measured settings, predicts nine others.

Every setting is a real run of `jv.grpo` on a real engine: a tiny model, completions of one length, every sync verified.
The first steps compile and do not count. A machine that is shared is noisy: the share of the cores' time that other
virtual machines (steal) and other processes took is measured with each run, and a noisy run is repeated; of the tries
the quietest counts, whatever its step time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError
from jvlab.bench._grpo import PHASES, record_of, resolve, task_of
from jvlab.bench._side import model_of

WARM = 3  # steps that do not count
QUIET = 0.06  # of the cores' time: a run with less taken by others is not repeated


@dataclass(frozen=True)
class WhatifCase:
    """One setting, and what it is for: "fit" or "predict"."""

    use: str
    prompts_per_step: int
    group_size: int
    max_tokens: int
    max_staleness: int
    replicas: int

    @property
    def name(self) -> str:
        size = f"{self.prompts_per_step}x{self.group_size}x{self.max_tokens}"
        return f"{size}-k{self.max_staleness}-r{self.replicas}"


CASES = (
    WhatifCase("fit", 4, 4, 48, 0, 1),
    WhatifCase("fit", 8, 8, 96, 0, 1),
    WhatifCase("fit", 8, 4, 64, 1, 2),
    WhatifCase("predict", 8, 4, 64, 0, 1),
    WhatifCase("predict", 4, 8, 128, 0, 1),
    WhatifCase("predict", 12, 4, 48, 0, 1),
    WhatifCase("predict", 8, 8, 64, 1, 1),
    WhatifCase("predict", 8, 4, 128, 1, 1),
    WhatifCase("predict", 4, 8, 64, 2, 1),
    WhatifCase("predict", 8, 8, 64, 0, 2),
    WhatifCase("predict", 8, 4, 128, 1, 2),
    WhatifCase("predict", 8, 8, 48, 2, 2),
)


class Noise:
    """The share of the cores' time, since it was made, that was stolen or used by processes that are not ours."""

    def __init__(self) -> None:
        self._machine = _machine_seconds()
        self._own = _own_seconds()

    def shares(self) -> dict[str, float]:
        """`steal` and `others`, each of all cores' time."""
        busy, steal, total = _machine_seconds()
        own = _own_seconds()
        passed = max(total - self._machine[2], 1e-9)
        others = busy - self._machine[0] - (own - self._own)
        return {
            "steal": (steal - self._machine[1]) / passed,
            "others": max(others, 0.0) / passed,
        }


def _machine_seconds() -> tuple[float, float, float]:
    """Seconds of all cores: busy, stolen, in all. Where a system does not say what was stolen, 0."""
    import psutil

    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    steal = getattr(times, "steal", 0.0)
    total = (
        sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    )
    return total - idle - steal, steal, total


def _own_seconds() -> float:
    """CPU seconds of this process, of the session's gateway and engines."""
    import psutil

    total = 0.0
    mine = psutil.Process()
    for process in (mine, *mine.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # ended just now
            continue
        total += times.user + times.system
    return total


def run_bench_whatif(
    steps: int = 12,
    model: str | None = None,
    device: str = "auto",
    tries: int = 3,
    only: Sequence[str] = (),
    folder: str | None = None,
) -> dict[str, Any]:
    """Measure every setting, fit, predict; prints a line for each, returns facts and what the records showed."""
    chosen = [case for case in CASES if not only or case.name in only]
    if steps < 2 or tries < 1 or not chosen:
        raise ConfigError(
            f"{steps} steps, {tries} tries, {len(chosen)} settings",
            remedy="at least 2, 1 and 1",
        )
    device = resolve(device)
    path = model_of(model, vocab_size=288)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="jvlab-bench-") as scratch:
        for replicas in sorted({case.replicas for case in chosen}):
            cases = [case for case in chosen if case.replicas == replicas]
            where = Path(folder or scratch)
            for row in _measure(path, device, cases, steps, tries, where):
                print(_line(row), flush=True)
                rows.append(row)
    order = {case.name: at for at, case in enumerate(CASES)}
    rows.sort(key=lambda row: order[row["name"]])
    facts = {
        "model": Path(path).name,
        "device": device,
        "steps": steps,
        "runs": rows,
    }
    return facts | errors_of(facts)


def errors_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Fitted to the runs that are for it, the errors of the others; nothing if either kind is missing."""
    import jvlab as jv

    others = [row["observation"] for row in facts["runs"] if row["use"] == "predict"]
    if not others or len(others) == len(facts["runs"]):
        return {}
    table = jv.whatif(facts).check(*others)
    print(table, flush=True)
    sizes = sorted(abs(error) for error in table.errors)
    return {
        "errors": list(table.errors),
        "median_error": statistics.median(sizes),
        "worst_error": sizes[-1],
    }


def _measure(
    path: str,
    device: str,
    cases: Sequence[WhatifCase],
    steps: int,
    tries: int,
    folder: Path,
) -> Iterator[dict[str, Any]]:
    import jvlab as jv

    engine = {} if device == "cpu" else {"gpu_memory_utilization": 0.35}
    with jv.Lab() as lab:
        pool = lab.launch(
            path, load="dummy", device=device, replicas=cases[0].replicas, engine=engine
        ).wait()
        policy = jv.Policy.from_pretrained(path)
        link = lab.connect(policy.params, pool, rules="policy")
        task = task_of("whatif")
        for case in cases:
            found = []
            for attempt in range(tries):
                place = folder / f"{case.name}-{attempt}"
                found.append(_once(case, policy, pool, link, task, steps, place))
                if sum(found[-1]["noise"].values()) <= QUIET:
                    break
            best = min(found, key=lambda row: sum(row["noise"].values()))
            yield best | {
                "tries": [{"step_s": r["step_s"], **r["noise"]} for r in found]
            }


def _once(
    case: WhatifCase,
    policy: Any,
    pool: Any,
    link: Any,
    task: Any,
    steps: int,
    folder: Path,
) -> dict[str, Any]:
    """One run of one setting."""
    noise = Noise()
    record = record_of(
        policy,
        pool,
        link,
        task,
        folder,
        steps=WARM + steps + case.max_staleness,
        max_staleness=case.max_staleness,
        group_size=case.group_size,
        prompts_per_step=case.prompts_per_step,
        max_tokens=case.max_tokens,
        learning_rate=1e-6,
        sampling={"ignore_eos": True},
    )
    return row_of(case, record, steps) | {
        "noise": noise.shares(),
        "at": time.strftime("%H:%M"),
    }


def row_of(case: WhatifCase, record: Any, steps: int) -> dict[str, Any]:
    """What counts of one run: its step time, and the record as the forecast reads it."""
    from jvlab.analysis.forecast._observe import Observation, typical_step

    table = record.steps()
    counted = slice(WARM, WARM + steps)
    window = table["window_s"][counted]
    return {
        "name": case.name,
        "observation": Observation.of(record).to_json(),
        "use": case.use,
        "setting": {k: v for k, v in asdict(case).items() if k != "use"},
        "step_s": typical_step(window.tolist(), case.max_staleness),
        "steps_s": [round(float(w), 4) for w in window],
        "seconds": {
            n: round(float(table[f"{n}_s"][counted].mean()), 4) for n in PHASES
        },
        "staleness_mean": round(float(table["staleness_mean"][counted].mean()), 3),
    }


def _line(row: dict[str, Any]) -> str:
    noise = ", ".join(f"{k} {v:.0%}" for k, v in row["noise"].items())
    parts = ", ".join(f"{k} {v:.2f}" for k, v in row["seconds"].items() if v >= 0.005)
    return f"{row['use']:8} {row['name']:16} {row['step_s']:.3f} s a step ({parts}); {noise}; {len(row['tries'])} tries"
