from __future__ import annotations

from pathlib import Path

import pytest

from promoe.commands import bench
from promoe.commands.bench import systems
from promoe.commands.bench.options import Options
from promoe.commands.bench.systems import KNOWN, find_systems
from promoe.config import PromoeConfig
from promoe.errors import ConfigError


def test_the_defaults_of_the_command_exist() -> None:
    names = Options().systems
    assert [system.name for system in find_systems(names)] == names


def test_the_gate_system_is_the_default_configuration() -> None:
    fields = {name: getattr(KNOWN["gate"].config, name) for name in PromoeConfig.__slots__}
    assert fields | {"bypass": True} == {name: getattr(PromoeConfig(), name) for name in PromoeConfig.__slots__}
    assert KNOWN["gate"].predictor == "gate"


def test_a_trained_predictor_is_a_system(tmp_path: Path) -> None:
    for name in ("predictor", "mlp-k8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    learned, other, paper = find_systems(
        [str(tmp_path / "predictor"), str(tmp_path / "mlp-k8"), f"paper@{tmp_path / 'predictor'}"]
    )
    assert (paper.name, paper.predictor) == ("paper, learned", str(tmp_path / "predictor"))
    assert paper.config == KNOWN["paper"].config
    assert (learned.name, learned.predictor) == ("learned", str(tmp_path / "predictor"))
    assert other.name == "mlp-k8"


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="There is no system 'lfu'"):
        find_systems(["lfu"])
    with pytest.raises(ConfigError, match="names gate twice"):
        find_systems(["gate", "lru", "gate"])
    with pytest.raises(ConfigError, match="at least one of this library's: on-demand"):
        find_systems(["resident", "page-cache"])
    monkeypatch.setattr(systems, "find_spec", lambda name: None)
    for name, package in (("airllm", "airllm"), ("disk-offload", "accelerate")):
        with pytest.raises(ConfigError, match=rf"needs the package {package}: pip install 'promoe\[bench\]'"):
            find_systems([name, "gate"])
    assert bench.__doc__
