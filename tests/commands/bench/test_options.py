from __future__ import annotations

from typing import Any

import pytest

from promoe.commands.bench.options import Emulated, Options
from promoe.errors import ConfigError


def options(**fields: Any) -> Options:
    return Options(**{"cache": ["25%"], "systems": ["gate"]} | fields)


def test_links() -> None:
    assert options().emulated() is None
    assert options(link="emulated:11.5").emulated() == Emulated(ratio=11.5)
    assert options(link="emulated:1.5GB/s").emulated() == Emulated(bytes_per_s=1.5e9)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"pairs": 0}, "--pairs must be at least 1. Got 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1"),
        ({"prompt_tokens": [512, 0]}, "--prompt-tokens must be at least 1 token each"),
        ({"seconds_per_answer": 0.0}, "--seconds-per-answer must be more than 0"),
        ({"cache": []}, "--cache needs at least one"),
        ({"cache": ["12.5%", "half"]}, "Got 'half'"),
        ({"workspace": "much"}, "--workspace: .*Got 'much'"),
        ({"workspace": "10%"}, "--workspace: A size such as .*Got '10%'"),
        ({"link": "pcie"}, "--link must be 'disk', 'emulated:R'"),
        ({"link": "emulated:fast"}, "Got 'emulated:fast'"),
        ({"link": "emulated:inf"}, "Got 'emulated:inf'"),
        ({"link": "emulated:2 furlongs/s"}, "Got 'emulated:2 furlongs/s'"),
        ({"link": "emulated:0"}, "Got 'emulated:0'"),
    ],
)
def test_mistakes(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        options(**fields)
