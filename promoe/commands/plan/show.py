"""The lines that `promoe plan` prints."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence

import torch

from promoe.commands.plan.choice import Choice
from promoe.commands.plan.routing import Routing
from promoe.commands.plan.sizes import ModelSizes, Room, rate_name
from promoe.commands.plan.time_model import LinkSpeed, Prediction, Speed, TimeModel
from promoe.commands.plan.verification import Verified
from promoe.stats.text_columns import NARROWEST_TEXT, WIDEST_TEXT, labelled
from promoe.transfer.cpu_contention import Taken
from promoe.transfer.links.probe import ProbeMode
from promoe.transfer.processor import num_cores, processor_name
from promoe.units import (
    aligned,
    format_bandwidth,
    format_memory,
    format_ms,
    format_number,
    format_percent,
    format_seconds,
    format_share,
    format_times,
    ratio,
)

LABEL = 10
# If computing became slower or faster by more than this while a plan was verified, that is said.
DRIFT = 0.15
# Packing is advised if a token takes at most this share of its time with it: less gain is within what times differ by.
WORTH_PACKING = 0.95
# The same for quantising, which changes the output.
WORTH_QUANTIZING = 0.8


def entry(label: str, text: str) -> list[str]:
    """Return the lines of a label and its text, wrapped beside it to the width of the terminal."""
    columns = shutil.get_terminal_size((80, 24)).columns
    return labelled(label, text, LABEL, max(NARROWEST_TEXT, min(WIDEST_TEXT, columns)))


def model_lines(sizes: ModelSizes, context: int) -> list[str]:
    """Say what the model takes."""
    per_layer = sorted({(layer.num_experts, layer.top_k) for layer in sizes.layers})
    choice = " or ".join(f"{top_k} of {count}" for count, top_k in per_layer)
    ones = sorted({layer.layout.payload_bytes for layer in sizes.layers})
    one = " or ".join(format_memory(nbytes) for nbytes in ones)
    stored = ""
    if abs(sizes.stored_share - 1) > 0.005:
        stored = f" ({format_memory(sizes.stored_bytes)} in the files, as quantised)"
    kv_bytes = sizes.kv.nbytes(context)
    kv = sizes.kv.assumed
    if kv_bytes is not None:
        kv = f"{format_memory(kv_bytes)} at {context:,} tokens of one sequence: {'; '.join(sizes.kv.kinds())} ({kv})"
    share = ratio(sizes.expert_bytes, sizes.expert_bytes + sizes.other_bytes)
    return [
        *entry("model", f"{sizes.name}: {sizes.model_type}, {sizes.dtype}; from {sizes.found_in}"),
        *entry(
            "experts",
            f"{format_memory(sizes.expert_bytes)}, {format_share(share)} of the model{stored}: "
            f"{sizes.num_experts:,} in {len(sizes.layers)} layers, {one} each; a token uses {choice} per layer",
        ),
        *entry("the rest", f"{format_memory(sizes.other_bytes)}, always in memory"),
        *entry("KV cache", kv),
    ]


def machine_lines(room: Room, largest: float) -> list[str]:
    """Say what memory there is, what of it slots may take, and whether that is enough.

    Args:
        room: fast memory.
        largest: the largest cache rate that fits; 0: none.
    """
    cores, threads = num_cores(), torch.get_num_threads()
    machine = f"{processor_name()}, {cores} {'core' if cores == 1 else 'cores'}, {threads} of them compute"
    if room.slots_bytes is None or room.free_bytes is None:
        left = "free memory unknown: whatever is asked for is taken to fit"
    else:
        left = (
            f"{format_memory(room.free_bytes)} of {room.where} are free; the rest of the model, and "
            f"{format_memory(room.reserve_bytes)} for KV cache and activations, leave "
            f"{format_memory(max(0, room.slots_bytes))} for slots"
        )
    share = "all" if largest == 1 else f"up to {rate_name(largest)}"
    verdict = f"yes, with slots for {share} of the experts" if largest else "no, there is no room for a single slot"
    return [
        *entry("machine", machine),
        *entry("memory", left),
        *entry("runs here", verdict),
    ]


def measured_lines(time_model: TimeModel, links: Mapping[ProbeMode, LinkSpeed], taken: Taken | None) -> list[str]:
    """Say what was measured.

    Args:
        time_model: with the times of computing.
        links: all that caches of different size would use.
        taken: what others took of the cores meanwhile.
    """
    compute_s, compute = time_model.compute_s, time_model.compute
    experts_s = compute_s - compute.layer(1) * len(time_model.sizes.layers)
    lines = entry(
        "computing",
        f"{format_seconds(compute_s)} per token with every expert in memory, {format_seconds(experts_s)} of it experts "
        f"({compute.how})",
    )
    for link in links.values():
        lines += entry("link", _link(link))
    if taken is not None and taken.much_by_others:
        lines += entry(
            "cores",
            f"{taken.describe()}, while this was measured: speeds are of a machine as busy as that. {taken.remedy} Then plan "
            "again.",
        )
    return lines


def routing_lines(routings: Sequence[Routing]) -> list[str]:
    """Say what was assumed of routing."""
    if len(routings) == 1:
        return entry("routing", routings[0].assumed)
    ends = "; ".join(f"{one.name}: {one.assumed}" for one in routings)
    return entry("routing", f"not known without a trace, so a range ({ends}). --trace FILE narrows it")


def link_name(link: LinkSpeed) -> str:
    """Return the name of a link for a sentence."""
    return f"{'disk' if link.name == 'O_DIRECT' else link.name} ({format_bandwidth(link.alone_bytes_per_s)})"


def _link(link: LinkSpeed) -> str:
    text = f"{link.name}, {format_bandwidth(link.alone_bytes_per_s)} ({link.how})"
    if link.slowdown > 1.005:
        beside = format_bandwidth(link.bytes_per_s)
        text += f"; beside computing {beside}, and computing takes {link.slowdown:.2f} times as long then"
    if link.convert_s:
        text += f"; {format_seconds(link.convert_s)} to dequantise an expert"
    return text


def table_lines(
    sizes: ModelSizes, predictions: Sequence[Prediction], too_large: Sequence[float], chosen: Prediction
) -> list[str]:
    """Return a row for each cache rate, the chosen one marked; then those that do not fit."""
    rows = [("  cache", "slots", "memory", "hits, %", "TTFT, s", "TPOT, ms", "tokens/s")]
    for one in predictions:
        mark = ">" if one.rate == chosen.rate else " "
        rows.append(
            (
                f"{mark} {rate_name(one.rate)}",
                f"{one.slots:,}",
                format_memory(one.slots_bytes),
                _range(one, lambda speed: speed.hit_rate, format_percent),
                _range(one, lambda speed: speed.ttft_s, format_number),
                _range(one, lambda speed: speed.tpot_s, format_ms),
                _range(one, lambda speed: speed.tokens_per_s, format_number),
            )
        )
    for rate in too_large:
        rows.append((f"  {rate_name(rate)}", *_slots(sizes, rate), "", "does not fit", "", ""))
    return aligned(rows)


def fit_lines(sizes: ModelSizes, rates: Sequence[float], room: Room) -> list[str]:
    """Return a row for each cache rate, without speeds."""
    rows = [("  cache", "slots", "memory", "")]
    for rate in rates:
        fits = "fits" if room.fits(sizes.slots(rate)) else "does not fit"
        rows.append((f"  {rate_name(rate)}", *_slots(sizes, rate), fits))
    return aligned(rows)


def _slots(sizes: ModelSizes, rate: float) -> tuple[str, str]:
    slots = sizes.slots(rate)
    return f"{slots.num_slots:,}", format_memory(slots.nbytes)


def _range(one: Prediction, of: Callable[[Speed], float], write: Callable[[float], str]) -> str:
    values = [of(speed) for speed in one.speeds if not math.isnan(of(speed))]
    ends = [write(value) for value in (min(values), max(values))] if values else [write(math.nan)]
    return "-".join(dict.fromkeys(ends))


def choice_lines(choice: Choice, advice: Mapping[str, str | None], commands: Sequence[str]) -> list[str]:
    """Say what to do, what limits it, what other forms of the experts would change (by label), and what to copy."""
    found = choice.prediction
    speed = _range(found, lambda speed: speed.tokens_per_s, format_number)
    said = f"cache {rate_name(found.rate)} ({format_memory(found.slots_bytes)}), {choice.reason}: {speed} tokens/s"
    return [
        *entry("choice" if choice.reached else "at best", said),
        *entry("limit", choice.limit),
        *(line for label, text in advice.items() if text for line in entry(label, text)),
        "",
        *(f"  {line}" for line in commands),
    ]


def packing_advice(command: str, sizes: ModelSizes, compute_s: float, packed_s: float) -> str | None:
    """Advise to pack the experts if a token takes longer as they are than packed; else return None."""
    if packed_s > WORTH_PACKING * compute_s:
        return None
    return (
        f"with its experts packed for this processor, a token takes {format_seconds(packed_s)} where it now takes "
        f"{format_seconds(compute_s)} with every expert in memory (measured). `{command}` does that once, and takes "
        f"{format_memory(sizes.expert_bytes)} of disk; output stays identical."
    )


def bits_advice(model: str, form: str, chosen: Prediction, quantized: Prediction) -> str | None:
    """Advise to quantise the experts if a token then takes clearly less time in the same memory; else return None."""
    before_s, after_s = chosen.slowest.tpot_s, quantized.slowest.tpot_s
    if not after_s <= WORTH_QUANTIZING * before_s:
        return None
    share = "all experts" if quantized.rate == 1 else f"{format_share(quantized.rate)} of the experts"
    return (
        f"in {form}, {format_memory(quantized.slots_bytes)} of slots hold {share}, and a token takes "
        f"{format_seconds(after_s)} where it now takes {format_seconds(before_s)} (predicted), "
        f"{format_times(before_s / after_s)} as fast. Output changes: write them with `promoe quantize {shlex.quote(model)} "
        f"--bits {form[3:]}`, and let `promoe quality` say by how much."
    )


def verified_lines(verified: Sequence[Verified], before_s: float, after_s: float) -> list[str]:
    """Return what was predicted beside what was measured, also with the routing that the model then had.

    Args:
        verified: cache rates that were run.
        before_s: seconds to compute a token, as measured for the prediction.
        after_s: the same, measured after the runs.
    """
    rows = [("  cache", "", "measured", "predicted", "ratio", "routing known", "ratio", "hits, %")]
    for one in verified:
        known, speeds = one.with_this_routing, one.prediction.speeds
        measured = {"TPOT, ms": (one.tpot_s, "tpot_s", format_ms), "TTFT, s": (one.ttft_s, "ttft_s", format_number)}
        for name, (seconds, field, write) in measured.items():
            first = name.startswith("TPOT")
            ends = sorted(getattr(speed, field) for speed in speeds)
            rows.append(
                (
                    f"  {rate_name(one.prediction.rate)}" if first else "",
                    name,
                    write(seconds),
                    "-".join(dict.fromkeys(map(write, ends))),
                    "-".join(dict.fromkeys(_ratio(end, seconds) for end in ends)),
                    write(getattr(known, field)),
                    _ratio(getattr(known, field), seconds),
                    format_percent(one.hit_rate) if first else "",
                )
            )
    links = "; ".join(dict.fromkeys(one.link.partition(" (")[0] for one in verified))
    said = f"run with the default predictor over {links}. Ratios are predicted / measured."
    if abs(after_s / before_s - 1) > DRIFT:
        said += (
            f" The machine changed meanwhile: computing a token took {format_seconds(before_s)} before, and "
            f"{format_seconds(after_s)} after. Something else ran; do it again when nothing does."
        )
    return [*entry("verified", said), *aligned(rows)]


def _ratio(predicted_s: float, measured_s: float) -> str:
    return format_times(ratio(predicted_s, measured_s)).removesuffix("x")
