from __future__ import annotations

from pathlib import Path

import promoe.processor as module


def test_what_a_processor_says_of_itself(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor : 0\nmodel name : Some CPU\nflags : fpu amx_bf16\n\nprocessor : 1\nmodel name : Some CPU\nflags : fpu\n"
    )
    assert module.processor_name(tmp_path) == "Some CPU"
    assert module.multiplies_bfloat16(tmp_path)
    (tmp_path / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd bf16\n")
    assert module.multiplies_bfloat16(tmp_path)
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : avx512_bf16x\n")
    assert not module.multiplies_bfloat16(tmp_path)
    assert not module.multiplies_bfloat16(tmp_path / "missing")
