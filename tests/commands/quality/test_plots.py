from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from promoe.commands.quality import plots
from promoe.commands.quality.forms import Form
from promoe.commands.quality.measuring import Result
from promoe.commands.quality.metrics import Figures


def result(experts: str, bits: float, kl: float, agreement: float) -> Result:
    return Result(Form(experts, bits, int(bits * 2**30)), Figures(3.0, kl, 0.001, kl, 0.001, agreement), 10.0)


RESULTS = [
    result("checkpoint", 16, 0, 1),
    result("int8", 8.1, 0.0001, 0.996),
    result("folder/mine", 4.5, 0.003, 0.96),
]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"quality{suffix}"
    plots.save_plot(RESULTS, "a model", "its text", path)
    assert path.stat().st_size > 5000
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("values", "scale"), [([0.1, 0.001], "log"), ([0.1, 0.0], "linear"), ([], "linear")])
def test_a_divergence_of_zero_has_no_logarithm(values: list[float], scale: str) -> None:
    axis = Figure().subplots()
    plots._scale(axis, values)
    assert axis.get_yscale() == scale
