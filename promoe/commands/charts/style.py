"""Style sheet of the HTML report.

Colours are Okabe and Ito's, which colour-blind people can tell apart; in dark mode the same hues, lighter. Paper always
gets the light ones, and all tabs.
"""

from __future__ import annotations

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

CSS = (
    f":root{{color-scheme:light;{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{_DARK}}}}}"
    f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}}}"
    """
*{box-sizing:border-box}
[hidden]{display:none!important}
body{margin:0;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1260px;margin:0 auto;padding:36px 24px 56px}
header{display:flex;gap:24px;align-items:flex-start;justify-content:space-between}
h1{font-size:29px;line-height:1.2;margin:0 0 4px;letter-spacing:-.015em;text-wrap:balance}
h2{font-size:19px;margin:40px 0 12px;letter-spacing:-.01em}
h3{font-size:15px;margin:0;font-weight:650}
p{margin:0}
.lede{color:var(--soft);overflow-wrap:anywhere}
button{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--edge);border-radius:8px;
 padding:6px 12px;cursor:pointer}
button:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
#theme{white-space:nowrap;font-size:13px;color:var(--soft)}
figure.chart{display:flex;flex-direction:column}
figure.chart{min-width:0}
figure.chart>svg{margin-top:auto;padding-top:10px}
figure.rows>svg{margin-top:0}
figure.rows .data{margin-top:auto;padding-top:10px}
.data{margin-top:10px;font-size:13px;color:var(--soft)}
.data summary{cursor:pointer;width:fit-content}
.data[open]{color:var(--ink)}
.data .scroll{max-height:300px;overflow:auto;margin-top:6px}
.data th,.data td{padding:3px 8px;font-size:12.5px;white-space:normal}
.data th:first-child{min-width:0;padding-left:0}
.data thead th{font-size:12px;color:var(--soft);position:sticky;top:0;background:var(--card)}
h3:has(.tag){display:flex;flex-wrap:wrap;align-items:center;gap:0 8px}
h3 .tag{margin-left:0}
.card,figure.chart{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:18px 20px;margin:0}
.conditions{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:14px 32px;
 margin:22px 0 0}
.conditions.few{grid-template-columns:repeat(auto-fit,minmax(min(100%,230px),1fr))}
.conditions dt{color:var(--soft);font-size:12.5px}
.conditions dd{margin:0;white-space:pre-line;font-weight:550;overflow-wrap:anywhere}
.short{background:var(--tint)}
.short ul,.words-card ul{margin:0;padding-left:18px}
.short li+li,.words-card li+li{margin-top:5px}
.words-card h3{margin-bottom:6px}.words-card ul+h3{margin-top:16px}
.grid,.pair,.columns{display:grid;gap:16px;margin-top:16px}
.grid{grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
.grid.two,.pair{grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr))}
.pair figure.chart>svg{max-width:460px}
.columns{grid-template-rows:repeat(3,auto);grid-auto-flow:column;grid-auto-columns:minmax(0,1fr)}
.intro h3{font-size:17px}
.missing{display:flex;align-items:center;justify-content:center;min-height:90px}
.card.scroll{overflow-x:auto;padding:6px 8px 8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:8px 12px;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:170px}
thead th{font-weight:600;vertical-align:bottom;font-size:13.5px;border-bottom:1px solid var(--axis)}
thead small{display:block;color:var(--soft);font-weight:400;font-size:12px;min-height:1.5em}
tbody tr+tr td,tbody tr+tr th{border-top:1px solid var(--grid)}
tbody th{font-weight:550}
tr.best{background:var(--tint)}
tr.best th,tr.best td.lead{font-weight:700}
tr.best>:first-child{border-radius:6px 0 0 6px}tr.best>:last-child{border-radius:0 6px 6px 0}
.tag{display:inline-block;font-size:11px;font-weight:600;color:var(--soft);border:1px solid var(--edge);
 border-radius:99px;padding:0 8px;margin-left:8px;vertical-align:1px;white-space:nowrap}
td .interval-text{display:block;color:var(--soft);font-size:11.5px}
.alarm{color:var(--stall);font-weight:700}
figcaption p{color:var(--soft);font-size:13px;min-height:1.5em}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;margin:10px 0 2px;padding:0;font-size:13px}
.legend li{display:flex;align-items:center;gap:7px}
.key{width:14px;height:14px;border-radius:3px;flex:none}
svg{display:block;width:100%;height:auto;overflow:visible}
.cells{display:grid;grid-template-columns:auto auto minmax(0,1fr);margin-top:10px;color:var(--soft);font-size:11.5px;
 font-variant-numeric:tabular-nums}
.y-name{writing-mode:vertical-rl;transform:rotate(180deg);text-align:center;font-size:12px;padding-left:4px}
.y-ticks{position:relative;min-width:26px;margin-right:6px}
.y-ticks span{position:absolute;right:0;transform:translateY(-50%);line-height:1}
.x-ticks{grid-column:3;position:relative;height:20px}
.x-ticks span,.times span,.layers span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.x-ticks span{top:4px;line-height:1}
.x-name{grid-column:3;text-align:center;font-size:12px;color:var(--soft)}
.map{min-width:0;cursor:crosshair}
.map path{fill:none;stroke-width:.88}
.choice{display:flex;flex-wrap:wrap;align-items:center;gap:4px 10px;margin-top:10px;font-size:13px;color:var(--soft)}
.choice label{color:var(--ink);font-weight:600}
.choice select{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--edge);border-radius:6px;
 padding:3px 8px;margin-left:4px}
.strip{margin-top:12px;font-size:11.5px;color:var(--soft);font-variant-numeric:tabular-nums}
.lane,.layers,.times{display:grid;grid-template-columns:104px minmax(0,1fr);align-items:center}
.lane{margin-top:3px}
.lane b,.layers b{font-weight:400;font-size:12.5px;color:var(--ink)}
.layers b{color:var(--soft)}
.lane svg{height:24px;background:var(--paper);border-radius:3px;overflow:hidden}
.layers div,.times div{position:relative;height:16px}
.times div{grid-column:2;border-top:1px solid var(--axis);margin-top:4px;height:20px}
.times span{top:3px}
.lane .gap{fill:var(--card)}
.lane .waited{fill:var(--stall)}.key.waited{background:var(--stall)}
svg text{fill:var(--ink);font-size:12px}
svg .tick{fill:var(--soft);font-size:11.5px;font-variant-numeric:tabular-nums}
svg .axis-label{fill:var(--soft);font-size:12px}
svg .row-label{font-size:12.5px}
svg .total{font-weight:650;font-size:12.5px;font-variant-numeric:tabular-nums}
.mid{text-anchor:middle}.end{text-anchor:end}
.grid-line,svg .grid{stroke:var(--grid);stroke-width:1;display:inline}
svg .axis{stroke:var(--axis);stroke-width:1}
svg .mark{stroke:var(--card);stroke-width:1}
svg [data-mark]:hover{filter:brightness(1.12)}
svg .bound{stroke:var(--ink);stroke-width:2.5}
svg .bound-halo{stroke:var(--card);stroke-width:6}
svg .interval{stroke:var(--ink);stroke-width:1.5;fill:none}
svg .curve{fill:none;stroke:var(--compute);stroke-width:2.5;stroke-linejoin:round}
svg .uniform{stroke:var(--axis);stroke-width:1.5;stroke-dasharray:4 4}
svg .steps{fill:none;stroke-width:2.5;stroke-linejoin:round}
svg .steps-hit{stroke:var(--hit)}svg .steps-ready{stroke:var(--arrived)}
.k-hit-line,.k-ready-line{height:0;border-radius:0;width:18px}
.k-hit-line{border-top:3px solid var(--hit)}.k-ready-line{border-top:3px solid var(--arrived)}
.k-mark{height:0;border-top:3px solid var(--ink);border-radius:0;width:16px}
svg .dot{fill:var(--hit);stroke:var(--card);stroke-width:1.5}
svg .row-tip{fill:transparent}
.k-bound{width:0;height:16px;border-left:3px solid var(--ink);border-radius:0;margin:0 5px}
.k-interval{height:9px;border:solid var(--ink);border-width:0 1.5px;border-radius:0;
 background:linear-gradient(var(--ink),var(--ink)) center/100% 1.5px no-repeat}
.k-curve{height:0;border-top:3px solid var(--compute);border-radius:0;width:18px}
.k-uniform{height:0;border-top:2px dashed var(--axis);border-radius:0;width:18px}
.k-dot{background:var(--hit);border-radius:50%;width:11px;height:11px}
"""
    + "".join(
        f".key.{name}{{background-color:var(--{name})}}svg .{name}{{fill:var(--{name})}}"
        for name in ("compute", "hit", "arrived", "demand", "pending", "rest", "predict", "named")
    )
    + "".join(
        f".key.{name}{{background:repeating-linear-gradient({angle}deg,var(--stripe) 0 2px,"
        f"transparent 2px 5px),var(--{name})}}svg .{name}{{fill:url(#p-{name})}}"
        for name, angle in (("stall", 135), ("wasted", 45))
    )
    + "".join(f".map .h{i}{{stroke:var(--h{i})}}span.h{i}{{background:var(--h{i})}}" for i in range(9))
    + """
.defs{position:absolute;width:0;height:0}
figure.wide{margin-top:16px}
.scale{display:flex;align-items:center;gap:8px;color:var(--soft);font-size:12.5px;margin-top:10px}
.scale i{display:flex;border:1px solid var(--edge);border-radius:3px;overflow:hidden}
.scale span{width:22px;height:11px}
.tabs{display:none;flex-wrap:wrap;gap:6px;margin-bottom:16px}
.js .tabs{display:flex}
.tabs button[aria-selected=true]{background:var(--accent);border-color:var(--accent);color:var(--card);font-weight:600}
.run+.run{margin-top:36px}
.run>h3{font-size:17px;margin-bottom:2px}
.js .tabs~.run>h3{margin-top:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:14px}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:12px 16px}
.tile b{display:block;font-size:23px;line-height:1.25;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:12.5px}
.difference td small{display:block;font-size:11px;font-weight:400}
.difference .good{color:var(--better)}.difference .bad{color:var(--worse)}
.difference td:last-child{font-weight:600}
.difference th small{color:var(--soft);font-weight:400}
.difference thead th{white-space:normal;min-width:76px;overflow-wrap:anywhere}
.difference tbody th{min-width:0}
.foot{margin-top:14px}
.rule{color:var(--soft);font-size:13px}
.card.numbers{padding:18px 20px}
.numbers table{margin-top:8px}
.numbers td,.numbers th{padding:4.5px 8px;font-size:13px}
.numbers thead th,.numbers td{white-space:normal}
.numbers th:first-child{padding-left:0;min-width:110px}.numbers td:last-child,.numbers th:last-child{padding-right:0}
.numbers tbody th.sub{padding-left:16px;font-weight:400;color:var(--soft)}
.words{columns:2 420px;column-gap:40px;margin:0;font-size:14px}
.words div{break-inside:avoid;margin-bottom:8px}
.words dt{font-weight:600;display:inline}
.words dd{display:inline;margin:0;color:var(--soft)}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--card);font-size:12.5px;line-height:1.4;
 border-radius:7px;padding:6px 10px;white-space:pre-line;max-width:340px;box-shadow:0 3px 14px #0004}
@media (max-width:640px){
 main{padding:20px 12px 40px}
 header{flex-direction:column;gap:10px}
 h1{font-size:23px;overflow-wrap:anywhere}
 h2{margin-top:32px}
 .card,figure.chart,.card.numbers{padding:14px}
 .card.scroll{padding:6px}
 .card.numbers{padding:14px}
 .tiles{grid-template-columns:repeat(2,1fr);gap:8px}
 .tile:last-child:nth-child(odd){grid-column:span 2}
 .tile{padding:10px 12px}.tile b{font-size:20px}
 th,td{padding:7px 8px}
 .card.many th:first-child{position:sticky;left:0;background:var(--card);min-width:118px;max-width:150px}
 .numbers th:first-child,.difference th:first-child{min-width:0}
 .numbers td,.numbers th{padding:4.5px 4px;white-space:normal}
 .columns{grid-auto-flow:row;grid-template-rows:none;grid-template-columns:minmax(0,1fr)}
 .lane,.layers,.times{grid-template-columns:minmax(0,1fr)}
 .lane b,.layers b{font-size:12px}
 .lane{margin-top:5px}
 .times div{grid-column:1}
 .layers .minor{display:none}
 .scale span{width:14px}
 .words{columns:1}
}
@media print{
 @page{size:A4;margin:11mm}
 html{zoom:.6} /* the layout of a screen, on paper */
 body{background:#fff}
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
 main{max-width:none;padding:0}
 #theme,.js .tabs,#tip{display:none}
 .run[hidden]{display:block!important}
 .run{break-inside:avoid}
 .card,figure.chart,.tile,tr{break-inside:avoid}
 h2,h3{break-after:avoid}
 .card.scroll{overflow:visible}
 .data,.choice select{display:none}
 .choice b[hidden]{display:inline!important}
}
"""
)

PATTERNS = (
    '<svg class="defs" aria-hidden="true"><defs>'
    '<pattern id="p-stall" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" style="fill:var(--stall)"/>'
    '<rect width="2" height="7" style="fill:var(--stripe)"/></pattern>'
    '<pattern id="p-wasted" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    '<rect width="7" height="7" style="fill:var(--wasted)"/>'
    '<rect width="2" height="7" style="fill:var(--stripe)"/></pattern>'
    "</defs></svg>"
)
