"""A measured run: its name, its statistics, and timings that were measured more precisely than by summing passes."""

from __future__ import annotations

from dataclasses import dataclass

from promoe.stats.counts import PhaseStats
from promoe.stats.lanes import Lanes
from promoe.stats.totals import Stats
from promoe.units import is_number, ratio


@dataclass(frozen=True)
class Run:
    """What reports show of a run. A timing that is not given is taken from the statistics, or shown as a dash."""

    name: str
    """A short name, unique within a report."""
    stats: Stats
    """`model.promoe.stats()` after the run."""
    tpot_s: float | None = None
    """Seconds per output token (median); default: the mean over decode passes."""
    tpot_interval_s: tuple[float, float] | None = None
    """Confidence interval of `tpot_s`, seconds."""
    ttft_s: float | None = None
    """Seconds to the first token (median); default: the mean over prefill passes."""
    bound_s: float | None = None
    """Least TPOT that compute and link allow, max(compute, missed bytes / bandwidth), seconds."""
    note: str = ""
    """A sentence about the run."""
    token: Lanes | None = None
    """The timeline of an ordinary decode pass (`lanes.median_token`)."""

    @property
    def phase(self) -> PhaseStats:
        """The phase that reports speak of: decode, or prefill where nothing was decoded."""
        return self.of_phase(self.phase_name)

    @property
    def phase_name(self) -> str:
        """The name of that phase."""
        decode = self.stats.decode
        return "decode" if decode.passes or decode.layer_visits else "prefill"

    def of_phase(self, name: str) -> PhaseStats:
        """Return the statistics of "prefill" or "decode"."""
        return self.stats.decode if name == "decode" else self.stats.prefill

    @property
    def time_per_token_s(self) -> float:
        """TPOT in seconds: measured, else the mean; nan without either."""
        return self.stats.tpot_s if self.tpot_s is None else self.tpot_s

    @property
    def time_to_first_s(self) -> float:
        """TTFT in seconds: measured, else the mean; nan without either."""
        return self.stats.ttft_s if self.ttft_s is None else self.ttft_s

    @property
    def bound_ratio(self) -> float:
        """TPOT / bound: 1 is the physical limit; nan without a bound."""
        return ratio(self.time_per_token_s, self.bound_s) if self.bound_s else float("nan")

    def split(self, phase: str) -> tuple[float, float]:
        """Return (compute, stall) in seconds per pass of "prefill" or "decode"; they add up to TTFT or TPOT.

        The share of stall comes from the statistics, which may cover other passes than a measured time.
        """
        stats = self.of_phase(phase)
        whole_s = self.time_to_first_s if phase == "prefill" else self.time_per_token_s
        share = min(1.0, stats.stall_share) if is_number(stats.stall_share) else 0.0
        return whole_s * (1 - share), whole_s * share
