"""The command `promoe`. Parsing imports neither torch nor transformers, so help and mistakes are answered at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import promoe
from promoe import command_line as commands

EXIT_DIFFERENT_TOKENS = 1

DESCRIPTION = "Run Mixture-of-Experts models whose experts do not fit in memory, with identical output."


def run(
    model: str,
    prompt: str,
    *,
    cache: str = "50%",
    predictor: str = "gate",
    store: Literal["auto", "disk", "host"] = "auto",
    device: str = "cpu",
    packed: str = "auto",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    trace: str | None = None,
    report: str | None = None,
    live: bool = False,
) -> int:
    """Open a checkpoint with its experts left on disk, and let it answer one prompt.

    The answer streams to stdout; progress, a live status line and the final report go to stderr.

    Example: `promoe run MODEL "What is a lighthouse?" --cache 25% --report report.html`

    Args:
        model: folder of a safetensors checkpoint, or a hub id
        prompt: what to say to it; a chat template is applied where the tokenizer has one
        cache: RAM (with --device cuda, GPU memory) for experts: a size ("6GiB"), a share of the routed experts ("25%"), bytes,
            or "auto" (what is free, less 2 GiB)
        predictor: what prefetch goes by: "gate", "previous", "popularity", "random", the folder or hub id of a trained one,
            or "none" for no prefetch
        store: where experts stay: "disk" (the checkpoint's files), "host" (all of them in RAM, the stock model), or "auto"
            (disk)
        device: "cuda" puts the slots and everything but the experts on the GPU
        packed: experts that `promoe pack MODEL` packed: "auto" (beside the checkpoint, if they are there), the folder of
            --out, or "none" to read the checkpoint's own
        max_new_tokens: longest answer, in tokens
        temperature: of sampling; 0 takes the most likely token each time
        seed: of sampling
        trace: file for a timeline (Chrome-trace JSON, for ui.perfetto.dev)
        report: file for a report (one self-contained HTML page); beside it, its numbers as JSON for `promoe report`
        live: show how it goes below the answer: hit rate, ready rate, link use, stall, bytes; now and so far. Where stderr is
            no terminal, as a line a second. With rich installed (the extra "live") it is drawn
    """
    from promoe.commands.run import Request, answer

    answer(
        Request(
            model=model,
            prompt=prompt,
            cache=_cache_size(cache),
            predictor=_unless_none(predictor),
            store=store,
            device=device,
            packed=_unless_none(packed),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            trace=trace,
            report=report,
            live=live,
        )
    )
    return 0


def report(runs: list[str], *, out: str, baseline: str | None = None) -> int:
    """Make a page from saved runs: one, two set side by side, or more.

    With --report a.html, the command run saves its run as a.json beside that page. The comparison is printed as text too.

    Example: `promoe report a.json b.json --out compare.html`

    Args:
        runs: JSON files of runs of one model
        out: file for the page
        baseline: name of the run that others are compared with (a file's name without its ending); by default the first
            whose experts do not all fit its cache
    """
    from promoe.commands import report as reporting

    reporting.report(reporting.Request(runs=runs, out=out, baseline=baseline), sys.stdout)
    return 0


def serve(
    model: str,
    *,
    cache: str = "50%",
    predictor: str = "gate",
    device: str = "cpu",
    packed: str = "auto",
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key: str | None = None,
    max_prompt_tokens: int = 8192,
    max_new_tokens: int = 1024,
    max_body: str = "1MiB",
    max_waiting: int = 32,
    warm: str | None = None,
) -> int:
    """Open a checkpoint with its experts left on disk, and answer OpenAI's clients over HTTP until Ctrl-C.

    Chat completions and completions, whole or streamed, by Transformers' own server (the extra "serve"). Requests are answered
    one after the other; who disconnects is not answered any more. Statistics at /promoe/report and /promoe/stats.

    Example: `promoe serve MODEL --cache 25% --port 8000`

    Args:
        model: folder of a safetensors checkpoint, or a hub id
        cache: RAM (with --device cuda, GPU memory) for experts: a size ("6GiB"), a share of the routed experts ("25%"), bytes,
            or "auto" (what is free, less 2 GiB)
        predictor: what prefetch goes by, as for run
        device: "cuda" puts the slots and everything but the experts on the GPU
        packed: experts that `promoe pack MODEL` packed, as for run
        host: address to listen at; others than this machine's own can be reached by others
        port: to listen at; 0 takes one that is free, and says which
        name: by which clients call the model; by default MODEL as it was given
        api_key: that clients must show; better in the environment, PROMOE_API_KEY, which other users cannot see
        max_prompt_tokens: longest prompt
        max_new_tokens: longest answer, and how long one may get that does not ask for a length
        max_body: longest request
        max_waiting: requests at once: the one that is answered, and those that wait
        warm: JSON file beside the page of a run's report: the experts used most there are fetched before requests are taken
    """
    import os

    from promoe.commands.serve.command import API_KEY_VARIABLE, Options, run_serve

    options = Options(
        model=model,
        cache=_cache_size(cache),
        predictor=_unless_none(predictor),
        device=device,
        packed=_unless_none(packed),
        host=host,
        port=port,
        name=name,
        api_key=os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_body=max_body,
        max_waiting=max_waiting,
        warm=warm,
    )
    run_serve(options, sys.stdout)
    return 0


def _unless_none(text: str) -> str | None:
    return None if text.lower() == "none" else text


def _cache_size(cache: str) -> int | str:
    return int(cache) if re.fullmatch("[0-9]{1,18}", cache) else cache


def demo(
    *,
    model: str | None = None,
    cache: str = "20%",
    prompts: int = 3,
    max_new_tokens: int = 16,
    repeat: int = 128,
    out: str = "promoe-out",
    skip_widened: bool = False,
    steps: bool = False,
) -> int:
    """Show what promoe buys over fetching experts on demand, on a small trained model. Takes two to four minutes.

    First one answer. Then on-demand LRU and promoe side by side: with experts behind an emulated link that is as slow, for
    this model, as PCIe is for a real one; then with experts of real size, read from this machine's disk. Every system's tokens
    are compared with the unmodified model's. Writes reports and timelines.

    Example: `promoe demo --prompts 2 --skip-widened`

    Args:
        model: folder of the demo model; by default examples/sharegpt_moe/checkpoint
        cache: slots, as a share of the routed experts ("20%") or a size
        prompts: held-out ShareGPT prompts that are measured, after one to warm up
        max_new_tokens: tokens generated for each
        repeat: how many times wider the experts of the second part are (128: about 10 MB each)
        out: folder for reports, timelines and the widened model (several GB, written once)
        skip_widened: leave out the second part
        steps: show what caching, preemption, reordering, eviction and prefetch each buy, one after the other (twice as long)
    """
    from promoe.commands.demo.command import run_demo
    from promoe.commands.demo.options import Options

    options = Options(
        model=model,
        cache=cache,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        repeat=repeat,
        out=out,
        skip_widened=skip_widened,
        steps=steps,
    )
    return 0 if run_demo(options) else EXIT_DIFFERENT_TOKENS


def simulate(
    *,
    trace: str,
    cache: str = "50%",
    policy: Literal["default", "next_use", "lru", "lfu", "lfru", "static", "belady"] = "default",
    max_tokens: int | None = None,
    predictor: str | None = None,
    lookahead: int = 1,
    batch: int = 1,
    hardware: str = "rtx-4090",
    model: str = "auto",
    bits: float | None = None,
    fit: str | None = None,
    json: str | None = None,
) -> int:
    """Say what a cache, a policy and a predictor would do on a machine, from recorded routing alone.

    The real scheduler runs under a virtual clock; the same input gives the same output to the byte. The cache is empty at
    first. Tokens that the trace does not know to be a prompt's are generated.

    Example: `promoe simulate --trace trace --cache 25% --hardware rtx-4090`

    Args:
        trace: routing: an .npz of expert ids, or a folder of `promoe-train collect`
        cache: slots as a share of the routed experts, rounded down per layer, such as 25%
        policy: which expert makes room. default shares all slots between the layers, as does next_use, which does not stream
            prompts; lru, lfu, lfru, static (most popular) and belady (knows the future, the least possible) give each layer its
            own
        max_tokens: simulate the first so many tokens of the trace only, those of prompts counted
        predictor: what is prefetched: token, previous, popularity, correlation, or oracle; none by default
        lookahead: layers ahead that are predicted, 1 to this
        batch: sequences that are generated together; one that ends makes room for the trace's next
        hardware: rtx-4090, rtx-3090, h100-pcie5 or laptop-ssd
        model: sizes of the model: a preset such as deepseek-v2-lite or gpt-oss-20b, the folder of a checkpoint or of a
            config.json, or a hub id; auto: the folder that a recorded trace names, if it is there, else the preset that has the
            trace's layers and experts
        bits: per weight of an expert, scales included, such as 4.25; as many as the model has by default
        fit: another trace of the model, to fit the predictor, the static popularity or the default's reuse prior on
        json: file to write the figures to
    """
    import os
    from pathlib import Path

    from promoe.commands.plan.geometry import read_geometry
    from promoe.commands.simulate.command import Task, run_simulation

    if model == "auto" and os.path.isdir(trace):
        from promoe.training.trace_folder import model_folder

        model = model_folder(Path(trace)) or model
    run_simulation(
        Task(
            trace=trace,
            cache=cache,
            policy=policy,
            max_tokens=max_tokens,
            predictor=None if predictor in (None, "none") else predictor,
            lookahead=lookahead,
            batch=batch,
            hardware=hardware,
            model=read_geometry(model) if os.path.isdir(model) or "/" in model else model,
            bits=bits,
            fit=fit,
            json=None if json is None else Path(json),
        ),
        sys.stdout,
    )
    return 0


def bench(
    model: str | None = None,
    *,
    cache: list[str] = ["12.5%", "25%", "50%"],  # noqa: B006 - only read
    systems: list[str] = ["resident", "on-demand", "lru", "next-use", "gate", "page-cache", "disk-offload"],  # noqa: B006
    pairs: int = 5,
    max_new_tokens: int = 20,
    prompt_tokens: list[int] = [],  # noqa: B006 - only read
    prompts: str | None = None,
    link: str = "disk",
    workspace: str = "128MiB",
    seconds_per_answer: float = 30.0,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    out: str = "promoe-out/bench",
    json: str | None = None,
) -> int:
    """Measure this library beside the unmodified model and what people use today, at equal memory, on this machine.

    Each system runs in a process of its own, whose memory, page cache included, a control group limits where the system
    lets us (root, or a group of one's own). They take turns at the same prompts, and all tokens are compared with the
    unmodified model's. Writes a table (Markdown), plots and JSON.

    Example: `promoe bench --cache 25% --systems resident lru gate disk-offload --pairs 3`

    Args:
        model: folder of a safetensors checkpoint that fits into RAM once; by default the demo model with experts of real size
            (4 GB, written once, beside the folder that --out names)
        cache: slots, as shares of the routed experts or sizes
        systems: resident, on-demand, lru, lfru, static, next-use, gate (the default configuration), paper-prefetch,
            paper-preempt, paper (ProMoE as published, step by step), random, oracle, page-cache, disk-offload, airllm,
            folders of trained predictors, or NAME@FOLDER
        pairs: prompts that every system answers, after one to warm up
        max_new_tokens: tokens generated for each
        prompt_tokens: also read prompts of so many tokens
        prompts: JSON list of texts; by default held-out ShareGPT prompts of the repository
        link: disk, emulated:R for one over which all of a token's experts take R times as long as computing the token, or
            emulated:1.5GB/s
        workspace: memory that each system gets beside the slots and the model's other weights
        seconds_per_answer: cut an answer short after so long
        dtype: of the weights
        out: folder for tables, plots and the other systems' files
        json: file to write the figures to; by default bench.json in that folder
    """
    from promoe.commands.bench.command import run_bench
    from promoe.commands.bench.options import Options

    options = Options(
        model=model,
        cache=cache,
        pairs=pairs,
        max_new_tokens=max_new_tokens,
        prompt_tokens=prompt_tokens,
        prompts=prompts,
        link=link,
        workspace=workspace,
        seconds_per_answer=seconds_per_answer,
        dtype=dtype,
        out=out,
        json=json,
        systems=systems,
    )
    run_bench(options, sys.stdout)
    return 0


def doctor(folder: str = ".", *, chaos: bool = False, json: str | None = None) -> int:
    """Say what this machine is and can do, what would be slow on it and why. The first part is for bug reports, too.

    Measures the disk with a file of 256 MiB, which it deletes, and RAM. Takes some seconds.

    Example: `promoe doctor MODEL --chaos`

    Args:
        folder: where models are: its disk is measured
        chaos: also ask a tiny model while its reads fail in eight ways, and compare its answers bit by bit
        json: file for all that was found
    """
    from pathlib import Path

    from promoe.commands.doctor.command import run_doctor

    right = run_doctor(Path(folder), chaos, None if json is None else Path(json), sys.stdout)
    return 0 if right else EXIT_DIFFERENT_TOKENS


def plan(
    model: str,
    *,
    cache: list[str] = [],  # noqa: B006 - only read
    device: str = "cpu",
    context: int = 4096,
    prompt_tokens: int = 256,
    new_tokens: int = 32,
    tokens_per_second: float | None = None,
    trace: str | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    read_mode: Literal["auto", "direct", "page_cache"] = "auto",
    verify: bool = False,
    json: str | None = None,
) -> int:
    """Say whether a model runs on this machine, how fast with which cache, what limits it, and what to type.

    Goes by a checkpoint's headers (or, where there are none, its config.json); no weights are loaded. Measures the machine
    with blocks of the model's shapes and, where its files are here, by reading them; half a minute, on busy cores two.
    Prefetch is not counted.

    Example: `promoe plan MODEL --cache 10% 25%`

    Args:
        model: folder of a safetensors checkpoint, or of a config.json alone; or a hub id
        cache: cache sizes to look at, as shares of the routed experts, sizes or "auto"; by default 12.5% to 100%
        device: where the slots are to be: cpu, or cuda (sizes only: no speeds)
        context: tokens that the KV cache is to hold
        prompt_tokens: of the prompts that TTFT is for
        new_tokens: of the answers that TPOT is for
        tokens_per_second: find the smallest cache that is as fast as this
        trace: routing of this model, an .npz of expert ids or a folder of `promoe-train collect`, in place of assumptions
        dtype: of the weights; the checkpoint's by default
        read_mode: how files are read: auto (the page cache where all experts fit into free RAM), direct, or page_cache
        verify: then run the model with these caches, and print what was predicted beside what is measured
        json: file to write everything to
    """
    from pathlib import Path

    from promoe.commands.plan.command import Task, run_plan

    run_plan(
        Task(
            model=model,
            cache=cache,
            device=device,
            context=context,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            tokens_per_second=tokens_per_second,
            trace=trace,
            dtype=dtype,
            read_mode=read_mode,
            verify=verify,
            json=None if json is None else Path(json),
        ),
        sys.stdout,
    )
    return 0


def pack(model: str, *, out: str | None = None, dtype: str | None = None) -> int:
    """Write a copy of a checkpoint's experts in the layout in which this processor multiplies, so that tokens take less time.

    For models that run on the CPU. Takes as much disk as the experts. The copy is for this processor, number of threads
    and version of torch; where it fits, it is used in place of the checkpoint's own experts, and elsewhere those are.
    Output stays identical.

    Example: `promoe pack MODEL`

    Args:
        model: folder of a safetensors checkpoint, or a hub id
        out: folder for the copy; by default promoe-packed beside the checkpoint's files, where it is found
        dtype: of the weights as they will be opened, "bfloat16"; the checkpoint's by default
    """
    from pathlib import Path

    from promoe.commands.pack import run_pack

    run_pack(model, None if out is None else Path(out), dtype, sys.stdout)
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "plan": plan,
    "pack": pack,
    "demo": demo,
    "run": run,
    "report": report,
    "serve": serve,
    "bench": bench,
    "simulate": simulate,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (tokens differ), 2 (the user can mend it), 130 (interrupted)."""
    return commands.run_command("promoe", DESCRIPTION, promoe.__version__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
