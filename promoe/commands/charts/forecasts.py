"""How good the predictor was while the model ran, by distance."""

from __future__ import annotations

from promoe.commands.charts.charts import Columns, Series, stacked_columns
from promoe.stats.run import Run
from promoe.units import format_share


def accuracy_chart(run: Run, of: str = "") -> str:
    """Share of the needed experts that forecasts had named, per distance k; `of`: the run's name."""
    found = run.stats.forecasts
    columns = Columns(
        "layers ahead, k (layer visits)",
        [str(f.steps_ahead) for f in found],
        marks=[100 * f.chance for f in found],
        mark_label="by chance",
        value_labels=len(found) <= 6,
    )
    return stacked_columns(
        "Predictor accuracy, live",
        f"Share of the needed experts that its forecasts had named. {_coverage(run)}",
        columns,
        [Series("named", "named k layers before", [100 * f.accuracy for f in found])],
        "needed experts (%)",
        lambda value: f"{value:.0f}%",
        top=100,
        of=of,
    )


def _coverage(run: Run) -> str:
    """How often there was a forecast at all."""
    visits = run.stats.decode.layer_visits
    most = max(run.stats.forecasts, key=lambda f: f.visits)
    if not visits:
        return ""
    share = format_share(min(1.0, most.visits / visits))
    return f"There were forecasts for {share} of the layer visits (k = {most.steps_ahead})."
