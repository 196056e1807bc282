"""Writes tests/baselines/README.md, the page of everything that was measured, from the JSON files beside it.

python .ci/measured.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "baselines"
PAGE = FOLDER / "README.md"
# the entry in the JSON file, what was measured, what it was
Row = tuple[str, str, str]
HEAD = """\
# Measured

Written by `.ci/measured.py` from the JSON files beside it: change those, not this page. Each row is one run of its
command, named as in the file. Unless it says otherwise, a ratio above 1 means that jvlab is faster.
"""


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The whole page."""
    h200 = _read("h200.json")
    cpu = _read("cpu.json")
    hosts = _read("hosts.json")
    gpu = f"One {h200['card']}; vLLM {h200['vllm']}, JAX {h200['jax']}, torch {h200['torch']}, driver {h200['driver']}"
    results = {name: part["result"] for name, part in h200.items() if "result" in part}
    parts = [
        HEAD,
        _section(gpu, "h200.json", h200, gpu_rows(results, h200)),
        _section(
            f"{cpu['machine']}; vLLM {cpu['vllm']}", "cpu.json", cpu, cpu_rows(cpu)
        ),
        _section(hosts["machine"], "hosts.json", hosts, host_rows(hosts)),
    ]
    return "\n".join(parts)


def _read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text())


def _section(
    machine: str, file: str, parts: dict[str, Any], rows: Iterable[Row]
) -> str:
    lines = [
        f"## {machine}",
        "",
        f"[{file}]({file}), {parts['date']} unless dated.",
        "",
    ]
    lines += ["| what | result | command |", "| --- | --- | --- |"]
    before = ""
    for name, what, result in rows:
        part = parts[name]
        ran = f"`{part['command']}`, `{name}`"
        if part.get("date", parts["date"]) != parts["date"]:
            ran += f", {part['date']}"
        lines.append(
            f"| {what} | {result} | {'(same run)' if name == before else ran} |"
        )
        before = name
    return "\n".join([*lines, ""])


def _list(values: Iterable[float], form: str = ".1f") -> str:
    return ", ".join(f"{value:{form}}" for value in values)


def gpu_rows(results: dict[str, Any], parts: dict[str, Any]) -> Iterator[Row]:
    r = results["sync"]
    direct = r["ways"]["direct"]
    verified = r["ways"]["direct_verified"]
    elsewhere = parts["sync"]["elsewhere"]
    least, most = elsewhere["vllm_best_ms"]
    yield (
        "sync",
        f"{r['bytes'] / 1e9:.2f} GB of bfloat16 from JAX (Flax layout, layers stacked) into vLLM by ipc, "
        "eager engines; pause and resume not counted",
        f"{direct['sync_ms']:.1f} ms, {direct['vs_vllm_ratio']:.0f}× vLLM's own ipc engine in the same run "
        f"({r['vllm_best_ms']:.0f} ms); verified {verified['sync_ms']:.1f} ms "
        f"({verified['vs_vllm_ratio']:.0f}×); the move itself at "
        f"{direct['move_vs_ceiling']:.2f} of the GPU's copy rate. On {elsewhere['hosts']} other hosts "
        "vLLM's took "
        f"{least} to {most} ms; where {most}, jvlab's took {elsewhere['direct_ms_where_160']} ms",
    )
    yield (
        "sync",
        "the same, staged; staged and verified",
        "; ".join(
            f"{way['sync_ms']:.1f} ms ({way['vs_vllm_ratio']:.0f}×), with a pause of "
            f"{way['pause_ms']:.1f}"
            for way in (r["ways"]["staged"], r["ways"]["staged_verified"])
        ),
    )
    r = results["sync_unstacked"]
    ways = r["ways"]
    yield (
        "sync_unstacked",
        "the same model with its layers one by one (311 leaves instead of 14), direct; verified",
        f"{ways['direct']['sync_ms']:.1f} ms ({ways['direct']['vs_vllm_ratio']:.0f}×); "
        f"{ways['direct_verified']['sync_ms']:.1f} ms "
        f"({ways['direct_verified']['vs_vllm_ratio']:.0f}×; vLLM's own {r['vllm_best_ms']:.0f} ms)",
    )
    sizes = results["sync_sizes"]
    times = lambda way: _list(size["ways"][way]["sync_ms"] for size in sizes.values())
    yield (
        "sync_sizes",
        f"{', '.join(sizes)} GB by ipc, direct; verified",
        f"{times('direct')} ms; {times('direct_verified')} ms; no extra GPU memory (staged: one more copy "
        "of the weights)",
    )
    r = results["experts"]["of_size"]
    direct, verified, staged = (
        r["ways"][way] for way in ("direct", "direct_verified", "staged_verified")
    )
    yield (
        "experts",
        f"{r['bytes'] / 1e9:.1f} GB of bfloat16 of a mixture of experts (12 layers of Qwen3-30B-A3B) by "
        "ipc, eager engines: direct; "
        "verified; staged and verified",
        f"{direct['sync_ms']:.1f} ms ({direct['vs_vllm_ratio']:.0f}× vLLM's own, "
        f"{r['vllm_best_ms']:.0f} ms); "
        f"{verified['sync_ms']:.1f} ms ({verified['vs_vllm_ratio']:.0f}×); {staged['sync_ms']:.1f} ms "
        f"({staged['vs_vllm_ratio']:.0f}×), with a pause of {staged['pause_ms']:.1f}",
    )
    r = results["fp8"]["milliseconds"]
    yield (
        "fp8",
        f"{r['sixteen_bytes'] / 1e9:.2f} GB of bfloat16 into an FP8 engine by ipc, quantised on the way, "
        "verified, CUDA graphs: direct; "
        "staged; against a bfloat16 engine",
        f"{r['direct']['eight']:.1f} ms ({r['direct']['ratio']:.2f}× its time); {r['staged']['eight']:.1f} "
        "ms "
        f"({r['staged']['ratio']:.2f}×); {r['trainer_kept_mib']:.0f} MiB more afterwards, at most "
        f"{r['trainer_peak_mib'] / 1024:.1f} GiB more in the trainer meanwhile",
    )
    r = results["lora"]
    yield (
        "lora",
        f"an adapter of rank {r['rank']} on every linear map of Qwen3-1.7B's shape ({r['bytes'] / 1e6:.0f} "
        "MB) into vLLM's slot by ipc, "
        "verified, CUDA graphs: direct; staged; its pause. Against PEFT files and vLLM's own load",
        f"{r['sync_ms']:.1f} ms ({r['vs_files_ratio']:.0f}×); {r['staged_ms']:.1f} ms "
        f"({r['staged_vs_files_ratio']:.0f}×); "
        f"{r['staged_pause_ms']:.1f} ms. Files: {r['files_ms']:.0f} ms",
    )
    r = results["nccl"]
    yield (
        "nccl",
        f"{r['bytes'] / 1e9:.1f} GB by nccl between two processes on one GPU, against bare NCCL with the "
        "same buckets; a receiver killed midway",
        f"{r['gb_per_s']['jvlab'] / r['gb_per_s']['nccl']:.2f} of bare NCCL's GB/s; both trainers knew after "
        f"{r['killed_receiver_told_s']:.1f} s, and a fresh connect worked",
    )
    r = results["syncs_under_load"]
    yield (
        "syncs_under_load",
        f"{r['syncs']} verified syncs under load, CUDA graphs; file descriptors, threads and MiB of the GPU "
        "before, and after",
        ", ".join(f"{r['before'][k]:g}" for k in ("fds", "threads", "device_mib"))
        + "; "
        + ", ".join(f"{r['after'][k]:g}" for k in ("fds", "threads", "device_mib")),
    )
    r = results["sleep"]
    yield (
        "sleep",
        "sleep of a tiny engine with 4 GiB of KV cache, at level 1; at level 2",
        "; ".join(
            f"{level['freed_mib']:.0f} MiB freed in {1e3 * level['sleep_s']:.0f} ms"
            for level in (r["level 1"], r["level 2"])
        ),
    )
    r = results["colocate"]
    gib = lambda key: " and ".join(
        f"{r[level][key] / 2**30:.1f}" for level in ("level_1", "level_2")
    )
    yield (
        "colocate",
        f"`launch(colocate=True)`, {r['weights_bytes'] / 1e9:.2f} GB model, half of the GPU each: what "
        "sleep lends to JAX at level 1 and 2",
        f"{gib('freed_bytes')} GiB freed in {r['level_1']['sleep_s']:.1f} and {r['level_2']['sleep_s']:.2f} "
        "s; JAX took and "
        f"returned {gib('jax_returned_bytes')} GiB; a sync between the two wakes took "
        f"{1e3 * r['level_2']['sync_between_wakes_call_s']:.0f} ms",
    )
    r = results["rollout"]
    yield (
        "rollout",
        "64 prompts × n=8 × 32 tokens; one prompt × 64 tokens: tokens/s through jvlab over plain "
        "`vllm.LLM`; Qwen3-1.7B's shape, CUDA graphs",
        f"{r['batch_ratio']:.2f}; {r['single_ratio']:.2f}",
    )
    rates = results["determinism"]["tokens_per_s"]
    off = rates["large-off"]
    yield (
        "determinism",
        "`launch(deterministic=True)`: tokens/s of a 1.7B shape with CUDA graphs, over the same without it",
        f"{statistics.median(rates['large-graphs']) / statistics.median(off):.2f} (medians of {len(off)} "
        "turns; "
        f"{min(off) / 1e3:.1f} to {max(off) / 1e3:.1f} thousand tokens/s without it)",
    )
    slowest = max(k["looking_ms"] / k["ms"] - 1 for k in results["poison"]["kernels"])
    yield (
        "poison",
        "the copy kernels while they look for NaN and Inf, against without",
        f"at most {slowest:.1%} longer",
    )
    r = results["launch"]
    yield (
        "launch",
        "launch → ready with a tiny model, eager: the second launch of a lab; the first, with cold file "
        "caches. Against `vllm.LLM(...)`, run last: without its imports; with them",
        f"{r['warm_s']:.1f} s ({r['vs_vllm_ratio']:.1f}×); {r['cold_s']:.1f} s "
        f"({r['cold_vs_vllm_ratio']:.1f}×). vLLM: {r['vllm_s']:.1f} s; "
        f"{r['vllm_s'] + r['vllm_import_s']:.1f} s",
    )
    r = results["train"]
    shapes = ", ".join(f"{s['rows']} × {s['tokens']:,}" for s in r["shapes"])
    yield (
        "train",
        f"forward and backward pass of Qwen3-1.7B's shape over {shapes} tokens: share of the GPU's peak; "
        "against transformers with SDPA, "
        "with or without checkpointing, the faster one",
        f"{_list((s['mfu'] for s in r['shapes']), '.2f')}; "
        f"{_list((s['torch_ms'] / s['ms'] for s in r['shapes']), '.2f')}× (with "
        f"checkpointing: {r['vs_torch_checkpointing_ratio']:.2f}× or more); programs compile in at most "
        f"{r['compile_s']:.1f} s; "
        f"{r['padding']:.1%} padding in packed rows of drawn lengths",
    )
    rows = results["train_beside_engine"]["rows"]
    yield (
        "train_beside_engine",
        "one row of the same shape, trained beside an engine that holds 0.35 of the GPU",
        "; ".join(
            f"{row['tokens']:,} tokens in {max(row['steps_s']):.1f} s" for row in rows
        ),
    )
    yield _grpo_size(results["grpo_size"])
    r = results["grpo_drawn"]
    yield (
        "grpo_drawn",
        "the same with completions of drawn lengths, log-normal up to 3,000 tokens, the same ones on both sides",
        f"on-policy {r['step_s_3000']:.1f} s ({r['vs_trl_ratio_3000']:.2f}×); staleness 1: "
        f"{r['step_s_3000_k1']:.1f} s ({r['vs_trl_ratio_3000_k1']:.2f}×); TRL {r['trl_step_s_3000']:.1f} s",
    )
    rows = results["grpo_floors"]["rows"]
    seconds = lambda key: ", ".join(f"{row[key]:.2f}" for row in rows)
    yield (
        "grpo_floors",
        "generating the completions of that step, 512 and 3,000 tokens in 16 bits, then in eight (weights and KV): "
        "what reading weights and KV takes at the card's copy rate; plain vLLM; a pool",
        f"{seconds('floor_s')} s; {seconds('plain_s')}; {seconds('pool_s')}",
    )
    r = results["grpo_fp8"]
    yield (
        "grpo_fp8",
        "a step of it at 3,000 tokens with rollouts in eight bits, on-policy; staleness up to 1; TRL's in 16 bits",
        f"{r['step_s']:.2f} s ({r['vs_trl_ratio']:.2f}×); {r['step_s_k1']:.2f} s "
        f"({r['vs_trl_ratio_k1']:.2f}×); {r['trl_step_s']:.1f} s",
    )
    r = results["first_step"]
    yield (
        "first_step",
        "from the start of a process to its first step at 512 tokens: cold; warm; TRL, cold",
        f"{r['cold']['step']:.0f} s ({r['vs_trl_ratio_cold']:.2f}×); {r['warm']['step']:.0f} s; "
        f"{r['trl_cold']['step']:.0f} s",
    )
    whole = {
        (row["transport"], row["mode"]): row["full_total_ms"]
        for row in results["transports"]["rows"]
    }
    times = "; ".join(
        f"{name} {whole[name, 'direct']:.1f} and {whole[name, 'staged']:.1f} ms"
        for name in ("ipc", "nccl", "nixl")
    )
    yield (
        "transports",
        "4.06 GB between two processes of one GPU, verified, direct and staged, by transport",
        times,
    )
    r = results["grpo"]
    yield (
        "grpo",
        "GRPO with trainer and engine on one GPU, a tiny model, eager: steps/s with staleness up to 1 and "
        "up to 2 over on-policy; on-policy "
        "over the same loop decoding in JAX",
        f"{r['k1_vs_k0_ratio']:.2f}, {r['k2_vs_k0_ratio']:.2f}; {r['vs_jax_decode_ratio']:.2f}",
    )
    r = results["server"]
    ways = r["ways"]
    yield (
        "server",
        f"{r['bytes'] / 1e9:.2f} GB from torch into plain `vllm serve` by its own four calls: backend `jvlab`, "
        "verified; staged; vLLM's `ipc`; `nccl`",
        f"{ways['jvlab_direct']['send_ms']:.1f} ms ({r['vs_vllm_ipc_ratio']:.1f}×; "
        f"{ways['jvlab_direct']['parts_ms']['control']:.0f} of them vLLM's calls); "
        f"{ways['jvlab_staged']['send_ms']:.1f}; "
        f"{min(ways['ipc']['send_ms'], ways['ipc_packed']['send_ms']):.0f}; {ways['nccl']['send_ms']:.0f}",
    )
    for key in ("tunix", "tunix_1024"):
        r = results[key]
        ours, theirs = r["runs"]
        yield (
            key,
            f"Tunix' GRPO, {r['samples_per_step']} completions of {r['tokens']} tokens, Qwen3-1.7B's shape: tokens/s "
            "of a pool over its own sampler's",
            f"{r['vs_vanilla_tokens_ratio']:.1f}× ({ours['tokens_per_s']:,.0f} and {theirs['tokens_per_s']:,.0f})",
        )
    r = results["trl"]
    theirs, ours = r["runs"]
    yield (
        "trl",
        f"TRL 1.16's GRPOTrainer, the same shape, {r['samples_per_step']} completions of {r['tokens']} tokens: a step "
        "and a sync with vLLM in its process; on a pool",
        f"{theirs['step_s']:.2f} s and {1e3 * theirs['sync_s']:.0f} ms; {ours['step_s']:.2f} s "
        f"({r['vs_colocate_step_ratio']:.2f}×) and {1e3 * ours['sync_s']:.0f} ms, verified",
    )
    yield _delta(results["delta"])
    r = results["delta_adam"]
    steps = {
        rate: [row for row in r["rows"] if row["rate"] == rate] for rate in (1e-6, 3e-6)
    }
    yield (
        "delta_adam",
        "the same after each of 5 real steps of Adam at 1e-6; at 3e-6: share of the values that changed, first and "
        "last; everything staged over what changed, medians",
        "; ".join(
            f"{100 * rows[0]['changed']:.1f} to {100 * rows[-1]['changed']:.1f} %, "
            f"{statistics.median(row['full_ms'] / row['delta_ms'] for row in rows):.1f}×"
            for rows in steps.values()
        ),
    )


def _delta(r: dict[str, Any]) -> Row:
    modes = {
        mode: [row for row in r["rows"] if row["mode"] == mode]
        for mode in ("direct", "staged")
    }
    ratios = "; ".join(
        ", ".join(f"{row['full_total_ms'] / row['delta_total_ms']:.1f}" for row in rows)
        for rows in modes.values()
    )
    one = modes["staged"][1]
    return (
        "delta",
        "4.1 GB of which 0.1, 1, 10 and 50 % of the values changed, over nccl through the loopback interface, "
        "verified: everything over what changed, direct; staged",
        f"{ratios}×. 1 %, staged: {one['delta_total_ms']:.0f} of {one['full_total_ms']:.0f} ms, "
        f"{one['delta_bytes'] / 1e6:.0f} MB, a pause of {one['delta_pause_ms']:.0f} ms "
        f"({one['full_pause_ms']:.0f} for everything)",
    )


def _grpo_size(r: dict[str, Any]) -> Row:
    ours = lambda bound: (
        f"{r[f'step_s_512{bound}']:.2f} and {r[f'step_s_3000{bound}']:.1f} s "
        f"({r[f'vs_trl_ratio_512{bound}']:.2f} and {r[f'vs_trl_ratio_3000{bound}']:.2f}×)"
    )
    on_policy = [run for run in r["runs"] if run["who"] == "jvlab"][::2]
    share = lambda phase: " and ".join(
        f"{run['seconds'][phase]:.2f}" for run in on_policy
    )
    return (
        "grpo_size",
        f"one GRPO step of the same shape, {r['samples_per_step']} completions of 512 and of 3,000 tokens, "
        "vLLM on the same GPU, against TRL "
        f"{r['trl']}",
        f"on-policy {ours('')}; staleness 1: {ours('_k1')}; TRL {r['trl_step_s_512']:.1f} and "
        f"{r['trl_step_s_3000']:.1f} s. "
        f"On-policy, generation takes {share('generate')} s, training {share('train')}, the verified sync "
        f"{share('sync')}, idle "
        f"{share('idle')}",
    )


def host_rows(parts: dict[str, Any]) -> Iterator[Row]:
    for name, what in (
        ("loopback", "bytes by `tcp` between two processes"),
        ("unshaped", "the same between two namespaces"),
        ("gigabit", "the same over a link of 1 Gbit/s (0.125 GB/s)"),
    ):
        r = parts[name]["result"]
        rates = r["gb_per_s"]
        yield (
            name,
            f"{what}; with TLS; against a bare socket, and against gloo",
            f"{rates['tcp']:.3g} GB/s; {rates['tcp with TLS']:.2g}; {r['vs_socket_ratio']:.2f}×, "
            f"{r['vs_gloo_ratio']:.2f}×",
        )
    for name, what in (
        ("changes", "two Xeon cores"),
        (
            "changes_live",
            "the same machine, the engine's weights not packed, as on a GPU",
        ),
    ):
        r = parts[name]["result"]
        packing = r["delta_repack_ms"] / 1e3
        yield (
            name,
            f"{100 * r['changed']:.0f} % of {r['full_bytes'] / 1e9:.1f} GB changed, over such a link, staged, "
            f"verified, on {what}; all of it",
            f"{r['delta_total_ms'] / 1e3:.1f} s"
            + (
                f", {packing:.1f} of them vLLM's packing of CPU weights"
                if packing
                else ""
            )
            + f", a pause of {r['delta_pause_ms']:.0f} ms; {r['full_total_ms'] / 1e3:.1f} s, "
            f"{r['full_pause_ms']:.0f} ms",
        )


def cpu_rows(parts: dict[str, Any]) -> Iterator[Row]:
    r = parts["rollout"]["result"]
    for key, what in (
        (
            "batch_ratio",
            "64 prompts × n=8 × 32 tokens: tokens/s through jvlab over plain `vllm.LLM`; three runs, "
            "other work beside them",
        ),
        ("single_ratio", "one prompt × 64 tokens, the same"),
    ):
        quiet = f"{r['quiet'][key]:.2f} earlier, on a quiet machine"
        yield "rollout", what, f"{_list(r[key], '.2f')} ({quiet})"
    r = parts["sync"]["result"]
    least, most = r["staged_pause_ms"]
    yield (
        "sync",
        "0.5 GB of float32 from JAX (Flax layout) into vLLM's CPU engine by shm, weights packed again: "
        "direct; verified; staged pause. "
        "Before packed weights were read back, which costs more",
        f"{r['direct_total_ms']} ms ({r['direct_vs_vllm_ratio']}× writing a checkpoint and vLLM's reload, "
        f"{r['direct_vs_reload_ratio']}× its reload alone); {r['direct_verified_total_ms']} ms "
        f"({r['direct_verified_vs_vllm_ratio']}×); {least} to {most} ms",
    )
    r = parts["topology"]["result"]
    yield (
        "topology",
        "one token from a tiny engine: in process; by gRPC; by HTTP, connection kept; new each time",
        f"{_list(r['request_ms'].values())} ms: gRPC {r['grpc_vs_inprocess_ratio']}×, HTTP "
        f"{r['http_vs_inprocess_ratio']}× and "
        f"{r['http_without_keep_alive_vs_inprocess_ratio']}× the time in process (the engine itself: "
        f"{r['engine_ms']} ms)",
    )
    rows = parts["gateway"]["result"]["rows"]
    each = lambda name, form="": _list((row[name] for row in rows), form)
    yield (
        "gateway",
        f"64 single requests at a time, {each('replicas')} simulated replicas, on two Xeon cores that all processes "
        "share: a bare grpc.aio server's requests/s over the gateway's; the gateway's p99 over its",
        f"{each('floor_ratio')}× ({each('routes_per_s')} requests/s); {each('p99_ratio')}× "
        f"({each('route_p99_ms')} ms); in batches {each('batch_routes_per_s', ',')} prompts/s",
    )
    r = parts["plan"]["result"]
    yield (
        "plan",
        "rules, plan and its coverage, Llama-3.1-405B shapes, FSDP 256 → TP 8 × 4 replicas",
        f"{r['dense_405b_s']} s",
    )
    yield (
        "plan",
        f"the same of DeepSeek-V3 shapes (671B, {r['moe_671b_tensors']:,} tensors), FSDP 512 → TP 16",
        f"{r['moe_671b_s']} s, {r['peak_gib']} GiB",
    )
    yield (
        "plan",
        f"tracing those two with vLLM's loader, importing vLLM ({r['import_vllm_s']} s) not counted",
        f"{r['trace_s']['dense_405b']} s and {r['trace_s']['moe_671b']} s",
    )


if __name__ == "__main__":
    main()
