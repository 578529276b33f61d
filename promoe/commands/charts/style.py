"""The style sheet of the HTML report: the colours here, everything else in `report.css`.

Colours are Okabe and Ito's, which colour-blind people can tell apart; dark mode has the same hues, lighter. Paper always gets
the light ones, and all tabs.
"""

from __future__ import annotations

from importlib.resources import files

_LIGHT = """
--paper:#f5f6f8;--card:#fff;--ink:#1a2027;--soft:#57616e;--grid:#e4e8ed;--axis:#8b95a1;--edge:#dfe4ea;--accent:#0072b2;--better:#00775a;--worse:#b34700;
--compute:#0072b2;--stall:#d55e00;--hit:#009e73;--arrived:#56b4e9;--demand:#e69f00;--wasted:#cc79a7;--pending:#aab3bd;--rest:#bad6eb;--predict:#57616e;--named:#8f7cc3;
--stripe:#ffffffb0;--tint:#eef5fa;
--h0:#f3f5f8;--h1:#dbe9f4;--h2:#bad6eb;--h3:#94c1df;--h4:#68a8d1;--h5:#418bbf;--h6:#206ca8;--h7:#0d4d87;--h8:#06305c;
"""

_DARK = """
--paper:#0e1217;--card:#171c23;--ink:#e7ebf0;--soft:#9ba7b5;--grid:#262d36;--axis:#66717e;--edge:#2a323c;--accent:#63b3e6;--better:#35c79c;--worse:#f08a45;
--compute:#3d93d0;--stall:#ee7a30;--hit:#22b48a;--arrived:#84cbf3;--demand:#eeb23c;--wasted:#d98fb9;--pending:#66717e;--rest:#24506f;--predict:#9ba7b5;--named:#a996dd;
--stripe:#00000070;--tint:#1b2632;
--h0:#1d232b;--h1:#1b3147;--h2:#1c4263;--h3:#1f5682;--h4:#286ea3;--h5:#3f8bc2;--h6:#69a9d8;--h7:#9cc9ea;--h8:#dbeefb;
"""

_PLAIN = ("compute", "hit", "arrived", "demand", "pending", "rest", "predict", "named")
_HATCHED = {"stall": 135, "wasted": 45}
"""What compute waited for, and what was moved in vain: the angle of its stripes in a legend, in degrees."""
LEVELS = 9
"""Shades of a map, from 0."""


def _rules() -> str:
    """Return the rules that give each meaning its colour, in legends and in drawings."""
    plain = (f".key.{name}{{background-color:var(--{name})}}svg .{name}{{fill:var(--{name})}}" for name in _PLAIN)
    hatched = (
        f".key.{name}{{background:repeating-linear-gradient({angle}deg,var(--stripe) 0 2px,transparent 2px 5px),"
        f"var(--{name})}}svg .{name}{{fill:url(#p-{name})}}"
        for name, angle in _HATCHED.items()
    )
    shades = (f".map .h{i}{{stroke:var(--h{i})}}span.h{i}{{background:var(--h{i})}}" for i in range(LEVELS))
    return "".join([*plain, *hatched, *shades])


def _pattern(name: str, angle: int) -> str:
    return (
        f'<pattern id="p-{name}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate({angle})">'
        f'<rect width="7" height="7" style="fill:var(--{name})"/>'
        '<rect width="2" height="7" style="fill:var(--stripe)"/></pattern>'
    )


def own_file(name: str) -> str:
    """Return the text of a file of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


CSS = (
    f":root{{color-scheme:light;{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{_DARK}}}}}"
    f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}}}\n{own_file('report.css')}{_rules()}"
)
PATTERNS = f'<svg class="defs" aria-hidden="true"><defs>{_pattern("stall", 45)}{_pattern("wasted", -45)}</defs></svg>'
