"""Draws quality against memory: one point for each form of the experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from promoe.commands.quality.measuring import Result
from promoe.stats.figure_style import COLOURS, DPI, INK, MARKERS, SOFT, new_figure, plain, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_plot(results: Sequence[Result], title: str, subtitle: str, path: Path) -> None:
    """Draw the results into a file.

    Args:
        results: the reference, then the others.
        title: of the picture.
        subtitle: the conditions.
        path: ends in a suffix that matplotlib knows.
    """
    figure, (divergence, agreement) = new_figure(1, 2, (11, 4.6))
    unit, divisor = _unit(results)
    for number, result in enumerate(results):
        style = _style(number)
        x = result.form.nbytes / divisor
        label = f"{result.form.name} ({result.form.bits_per_weight:.3g} bits)"
        if number > 0:
            divergence.plot([x], [result.figures.kl], label=label, markersize=8, linestyle="", **style)
        agreement.plot([x], [100 * result.figures.agreement], label=label, markersize=8, linestyle="", **style)
    _scale(divergence, [result.figures.kl for result in results[1:]])
    for axis, name, y in (
        (divergence, "How far predictions move", "KL(checkpoint || form), nats per token"),
        (agreement, "Same most likely token", "% of tokens"),
    ):
        axis.set_title(name, fontsize=10, color=INK, loc="left")
        axis.set_xlabel(f"all experts in slots, {unit}", fontsize=9)
        axis.set_ylabel(y, fontsize=9)
        axis.set_xlim(0, 1.08 * max(result.form.nbytes for result in results) / divisor)
        plain(axis)
        axis.tick_params(which="minor", length=0)
    agreement.set_ylim(top=101)
    reference_x = results[0].form.nbytes / divisor
    divergence.axvline(reference_x, color=SOFT, linestyle=":", linewidth=1)
    divergence.annotate(
        "checkpoint: 0", (reference_x, 0.03), xycoords=("data", "axes fraction"), xytext=(-5, 0), color=SOFT,
        textcoords="offset points", ha="right", fontsize=9,
    )  # fmt: skip
    set_title(figure, title, subtitle)
    handles, labels = agreement.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=DPI)


def _style(number: int) -> dict[str, Any]:
    """Return colour and marker of a result; the first one is the reference."""
    if number == 0:
        return {"color": INK, "marker": "*"}
    return {"color": COLOURS[(number - 1) % len(COLOURS)], "marker": MARKERS[(number - 1) % len(MARKERS)]}


def _unit(results: Sequence[Result]) -> tuple[str, int]:
    """Return the unit of memory in which numbers are short, and its bytes."""
    return ("GiB", 2**30) if max(result.form.nbytes for result in results) >= 2**30 else ("MiB", 2**20)


def _scale(axis: Axes, values: Sequence[float]) -> None:
    """Make the y axis logarithmic if all values allow it, else begin it at zero."""
    if values and min(values) > 0:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_ylim(min(values) / 2, max(values) * 2)
    else:
        axis.set_ylim(bottom=0)
