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
    for task in ("latency", "throughput"):
        names = Options(task=task).named_systems
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


def test_a_form_stands_behind_the_name_and_brings_its_reference(tmp_path: Path) -> None:
    (tmp_path / "predictor").mkdir()
    (tmp_path / "predictor" / "config.json").write_text("{}")
    folder = str(tmp_path / "predictor")
    found = find_systems(["gate", "gate:int4", "lru:int8", f"paper:int4@{folder}", f"{folder}:int8"])
    assert [(system.name, system.experts) for system in found] == [
        ("gate", "auto"),
        ("resident:int4", "int4"),
        ("gate:int4", "int4"),
        ("resident:int8", "int8"),
        ("lru:int8", "int8"),
        ("paper, learned:int4", "int4"),
        ("learned:int8", "int8"),
    ]
    by_name = {system.name: system for system in found}
    assert by_name["paper, learned:int4"].predictor == folder
    assert by_name["paper, learned:int4"].in_16_bits == "paper, learned"
    assert by_name["gate:int4"].config == KNOWN["gate"].config
    assert by_name["gate:int4"].reference == "resident:int4"
    assert by_name["gate"].reference == by_name["gate"].in_16_bits.replace("gate", "resident") == "resident"
    reference = by_name["resident:int4"]
    assert (reference.kind, reference.is_ours, reference.is_peer) == ("resident", False, False)


def test_a_reference_that_was_named_stays_where_it_is() -> None:
    names = ["gate:int4", "resident:int4", "resident"]
    assert [system.name for system in find_systems(names)] == names


def test_mistakes_in_forms() -> None:
    with pytest.raises(
        ConfigError, match=r"no system 'gate:int5'.*behind the name, as in gate:int4 .*int8, int4, int3, int2"
    ):
        find_systems(["gate:int5"])
    with pytest.raises(ConfigError, match=r"'page-cache' serves experts as the checkpoint has them\. Leave :int4 out"):
        find_systems(["gate", "page-cache:int4"])
    with pytest.raises(ConfigError, match="at least one of this library's"):
        find_systems(["resident:int4"])


def test_llama_cpp_has_forms_of_its_own_and_no_reference() -> None:
    found = find_systems(["llama-cpp", "llama-cpp:q8_0", "llama-cpp-no-repack:q4_0", "gate"])
    assert [(system.name, system.experts) for system in found] == [
        ("llama-cpp", "auto"),
        ("llama-cpp:q8_0", "q8_0"),
        ("llama-cpp-no-repack:q4_0", "q4_0"),
        ("gate", "auto"),
    ]
    assert [system.is_llama_cpp for system in found] == [True, True, True, False]
    assert all(system.is_peer for system in found[:3])
    with pytest.raises(ConfigError, match=r"'llama-cpp' serves GGUF files: in 16 bits, or in q8_0, q4_0\. Got 'int4'"):
        find_systems(["llama-cpp:int4", "gate"])
    with pytest.raises(ConfigError, match=r"Leave :q8_0 out"):
        find_systems(["page-cache:q8_0", "gate"])


def test_forms_from_a_gguf_file_bring_their_reference() -> None:
    found = find_systems(["gate:q8_0", "gate:q8_0-int8", "llama-cpp", "llama-cpp:q8_0", "lru"])
    assert [(system.name, system.gguf_type) for system in found] == [
        ("resident:q8_0", "q8_0"),
        ("gate:q8_0", "q8_0"),
        ("resident:q8_0-int8", "q8_0"),
        ("gate:q8_0-int8", "q8_0"),
        ("llama-cpp", "auto"),
        ("llama-cpp:q8_0", "q8_0"),
        ("lru", None),
    ]
    assert found[1].meaning.endswith("with experts in q8_0, from a GGUF file")
    assert found[3].in_16_bits == "gate"


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
