"""The lines that `promoe plan --batch` prints, and what `promoe batch` says of its plan."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from promoe.commands.plan.many_prompts import BatchPlan
from promoe.commands.plan.show import entry
from promoe.commands.plan.sizes import rate_name
from promoe.commands.plan.throughput import BatchWork, Expected, Step, Wanted, memory_rows
from promoe.units import aligned, format_memory, format_number, format_seconds, format_times

# Numbers of sequences at once that are shown beside the chosen one.
SHOWN = (1, 8, 32, 128)
WHAT_HELPS = {
    "products": "a processor that multiplies faster, or fast kernels",
    "memory": "more sequences at once, or fewer bits",
    "few slots": "more memory for slots, so that more experts run together",
    "the link": "more memory for slots, fewer bits, or a faster disk",
    "attention and the rest": "shorter prompts; experts are not the limit",
}


def work_lines(work: BatchWork, memory_bytes: int | None) -> list[str]:
    """Say what there is to do, and what memory there is for it."""
    memory = "unknown: whatever is asked for is taken to fit" if memory_bytes is None else format_memory(memory_bytes)
    return [
        *entry(
            "work",
            f"{work.answers:,} answers of up to {format_number(work.new_tokens)} tokens each, prompts of "
            f"{format_number(work.prompt_tokens)} tokens on average; the longest takes {work.longest:,} with its answer",
        ),
        *entry("memory", f"{memory} for slots, KV cache and the rest of the model"),
    ]


def measured_lines(plan: BatchPlan) -> list[str]:
    """Say what was measured, and where its roofs meet."""
    machine = plan.model.machine
    alone_s = machine.others(Step(1, 1, 0))
    lines = entry(
        "steps",
        f"{format_seconds(alone_s)} for a token alone without routed experts, and "
        f"{format_seconds(machine.others(Step(64, 64, 0)) - alone_s)} more for 64 sequences",
    )
    for kernels, curve in machine.experts.items():
        times = ", ".join(f"{format_seconds(seconds)} for {format_number(rows)}" for rows, seconds in curve.points)
        rows = memory_rows(curve)
        roof = "" if math.isinf(rows) else f"; reading its weights limits it up to {rows:.0f} rows"
        lines += entry(kernels, f"an expert takes, by its rows (tokens): {times}{roof}")
    return lines


def table_lines(plans: Mapping[str, BatchPlan]) -> list[str]:
    """Return a row for some numbers of sequences at once, the chosen one marked, and one for each other form.

    Args:
        plans: by the form of the experts; what was asked for is first.
    """
    rows: list[tuple[str, ...]] = [
        ("  experts", "kernels", "at once", "step", "slots", "KV cache", "tokens/s", "takes", "limit")
    ]
    first = next(iter(plans.values()))
    for form, plan in plans.items():
        some = [plan.chosen]
        if plan is first:
            some += [one for number in SHOWN if (one := _at(plan, number)) is not None]
        if plan.fast is not None and plan.chosen.setting.kernels == "exact":
            some.append(plan.fast)
        ordered = sorted(some, key=lambda one: (one.setting.kernels, one.setting.at_once))
        rows += [_row(form, one, plan, one is first.chosen) for one in ordered]
    return aligned(rows)


def _at(plan: BatchPlan, number: int) -> Expected | None:
    setting = plan.chosen.setting
    if number == setting.at_once or number > plan.model.work.answers:
        return None
    return plan.model.best(plan.memory_bytes, Wanted(at_once=number, kernels=(setting.kernels,)))


def _row(form: str, one: Expected, plan: BatchPlan, marked: bool) -> tuple[str, ...]:
    setting = one.setting
    return (
        f"{'>' if marked else ' '} {form}",
        setting.kernels,
        str(setting.at_once),
        str(setting.step_tokens),
        rate_name(setting.rate),
        format_memory(plan.model.kv_bytes(setting.kv_tokens)),
        format_number(one.tokens_per_s),
        duration(one.spent.total_s),
        one.limit,
    )


def choice_lines(plan: BatchPlan, model: str, source: str, experts: str) -> list[str]:
    """Say what to do, what limits it, and what to copy."""
    chosen, setting = plan.chosen, plan.chosen.setting
    lines = entry("choice", said(plan))
    lines += entry("limit", f"{chosen.limit}; what helps is {WHAT_HELPS[chosen.limit]}")
    if setting.rate < 1 and (number := plan.model.hidden_from(setting)) is not None:
        lines += entry("loading", f"takes no longer than computing from {number} sequences at once on")
    if plan.fast is not None and plan.fast_pays:
        lines += entry("fast", fast_advice(plan.chosen, plan.fast))
    form = "" if experts == "auto" else f" --experts {shlex.quote(experts)}"
    kernels = "" if setting.kernels == "exact" else f" --kernels {setting.kernels}"
    return [
        *lines,
        "",
        f"  promoe batch {shlex.quote(model)} {shlex.quote(source)} --out answers.jsonl{form}{kernels} \\",
        f"    --cache {rate_name(setting.rate)} --at-once {setting.at_once} --step-tokens {setting.step_tokens} "
        f"--kv-tokens {setting.kv_tokens}",
    ]


def said(plan: BatchPlan) -> str:
    """Return a plan in a sentence."""
    setting, spent = plan.chosen.setting, plan.chosen.spent
    return (
        f"{setting.at_once} sequences at once, {setting.step_tokens} tokens per step, slots for {rate_name(setting.rate)} of "
        f"the experts, a KV cache of {setting.kv_tokens:,} tokens: {format_number(plan.chosen.tokens_per_s)} tokens/s, "
        f"{duration(spent.total_s)} if all answers are as long as they may be"
    )


def fast_advice(chosen: Expected, fast: Expected) -> str:
    """Say what fast products would give."""
    return (
        f"--kernels fast would give {format_number(fast.tokens_per_s)} tokens/s, "
        f"{format_times(fast.tokens_per_s / chosen.tokens_per_s)} as many; the last bits of the output change, and the report "
        "says how far"
    )


def duration(seconds: float) -> str:
    """Return a time that may be long in words: "2.5 h"."""
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{format_number(seconds / unit)} {name}"
    return format_seconds(seconds)


def as_numbers(plans: Mapping[str, BatchPlan]) -> Sequence[dict[str, object]]:
    """Return the plans for JSON."""
    return [
        {
            "experts": form,
            "memory_bytes": plan.memory_bytes,
            "work": asdict(plan.model.work),
            "steps": asdict(plan.model.machine.others),
            "expert_s_by_rows": {name: curve.points for name, curve in plan.model.machine.experts.items()},
            "link_bytes_per_s": plan.model.machine.bytes_per_s,
            **{
                name: {
                    **asdict(one.setting),
                    "tokens_per_s": one.tokens_per_s,
                    "limit": one.limit,
                    **asdict(one.spent),
                }
                for name, one in (("chosen", plan.chosen), ("fast", plan.fast))
                if one is not None
            },
        }
        for form, plan in plans.items()
    ]
