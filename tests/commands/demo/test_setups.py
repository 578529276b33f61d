from __future__ import annotations

import pytest

from promoe.commands.bench.options import Emulated
from promoe.commands.demo.setups import DEEPSEEK_ON_4090, RealSetup


def test_the_papers_setup_has_its_published_figures() -> None:
    assert DEEPSEEK_ON_4090.compute_s == pytest.approx(9.8e-3)
    assert DEEPSEEK_ON_4090.transfer_s == pytest.approx(0.12, rel=0.01)
    assert DEEPSEEK_ON_4090.ratio == pytest.approx(12.2, rel=0.01)
    # At a 50% cache half of that crosses the link: the paper measured 58.1 ms of waiting.
    assert DEEPSEEK_ON_4090.transfer_s / 2 == pytest.approx(58.1e-3, rel=0.05)


def test_the_link_takes_the_setups_multiple_of_the_compute_time() -> None:
    setup = RealSetup("test", token_bytes=100e6, bandwidth_bytes_per_s=1e9, compute_s=0.02)  # 5 to 1
    link = Emulated(ratio=setup.ratio).link(token_bytes=4_000_000, compute_s=0.01)
    assert 4_000_000 / link.bandwidth_bytes_per_s == pytest.approx(5 * 0.01)
