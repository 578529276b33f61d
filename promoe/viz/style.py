"""Style sheet and script of the HTML report.

Colours are Okabe and Ito's, which colour-blind people can tell apart; in dark mode the same hues, lighter. Paper always
gets the light ones, and all tabs.
"""

from __future__ import annotations

_LIGHT = """
--paper:#f5f6f8;--card:#fff;--ink:#1a2027;--soft:#57616e;--grid:#e4e8ed;--axis:#8b95a1;--edge:#dfe4ea;--accent:#0072b2;
--compute:#0072b2;--stall:#d55e00;--hit:#009e73;--arrived:#56b4e9;--demand:#e69f00;--wasted:#cc79a7;--pending:#aab3bd;
--stripe:#ffffffb0;--tint:#eef5fa;
--h0:#f3f5f8;--h1:#dbe9f4;--h2:#bad6eb;--h3:#94c1df;--h4:#68a8d1;--h5:#418bbf;--h6:#206ca8;--h7:#0d4d87;--h8:#06305c;
"""

_DARK = """
--paper:#0e1217;--card:#171c23;--ink:#e7ebf0;--soft:#9ba7b5;--grid:#262d36;--axis:#66717e;--edge:#2a323c;--accent:#63b3e6;
--compute:#3d93d0;--stall:#ee7a30;--hit:#22b48a;--arrived:#84cbf3;--demand:#eeb23c;--wasted:#d98fb9;--pending:#66717e;
--stripe:#00000070;--tint:#1b2632;
--h0:#1d232b;--h1:#1b3147;--h2:#1c4263;--h3:#1f5682;--h4:#286ea3;--h5:#3f8bc2;--h6:#69a9d8;--h7:#9cc9ea;--h8:#dbeefb;
"""

CSS = (
    f":root{{color-scheme:light;{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{_DARK}}}}}"
    f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1260px;margin:0 auto;padding:36px 24px 56px}
header{display:flex;gap:24px;align-items:flex-start;justify-content:space-between}
h1{font-size:29px;line-height:1.2;margin:0 0 4px;letter-spacing:-.015em;text-wrap:balance}
h2{font-size:19px;margin:40px 0 12px;letter-spacing:-.01em}
h3{font-size:15px;margin:0;font-weight:650}
p{margin:0}
.lede{color:var(--soft)}
button{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--edge);border-radius:8px;
 padding:6px 12px;cursor:pointer}
button:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
#theme{white-space:nowrap;font-size:13px;color:var(--soft)}
figure.chart{display:flex;flex-direction:column}
figure.chart>svg{margin-top:auto;padding-top:10px}
.card,figure.chart{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:18px 20px;margin:0}
.conditions{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:14px 32px;
 margin:22px 0 0}
.conditions.few{grid-template-columns:repeat(auto-fit,minmax(min(100%,230px),1fr))}
.conditions dt{color:var(--soft);font-size:12.5px}
.conditions dd{margin:0;font-weight:550;overflow-wrap:anywhere}
.short{background:var(--tint)}
.short ul,.words-card ul{margin:0;padding-left:18px}
.short li+li,.words-card li+li{margin-top:5px}
.words-card h3{margin-bottom:6px}.words-card ul+h3{margin-top:16px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,500px),1fr));gap:16px;margin-top:16px}
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
.heat{margin-top:10px}
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
        for name in ("compute", "hit", "arrived", "demand", "pending")
    )
    + "".join(
        f".key.{name}{{background:repeating-linear-gradient({angle}deg,var(--stripe) 0 2px,"
        f"transparent 2px 5px),var(--{name})}}svg .{name}{{fill:url(#p-{name})}}"
        for name, angle in (("stall", 135), ("wasted", 45))
    )
    + "".join(f"svg .h{i}{{fill:var(--h{i})}}span.h{i}{{background:var(--h{i})}}" for i in range(9))
    + """
.defs{position:absolute;width:0;height:0}
figure.wide{margin-top:16px}
.scale{display:flex;align-items:center;gap:8px;color:var(--soft);font-size:12.5px;margin-top:10px}
.scale i{display:flex;border:1px solid var(--edge);border-radius:3px;overflow:hidden}
.scale span{width:22px;height:11px}
.heat{cursor:crosshair}
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
.foot{margin-top:14px}
.rule{color:var(--soft);font-size:13px}
.card.numbers{padding:18px 20px}
.numbers table{margin-top:8px}
.numbers td,.numbers th{padding:4.5px 8px;font-size:13px}
.numbers th:first-child{padding-left:0}.numbers td:last-child,.numbers th:last-child{padding-right:0}
.numbers tbody th.sub{padding-left:16px;font-weight:400;color:var(--soft)}
.words{columns:2 420px;column-gap:40px;margin:0;font-size:14px}
.words div{break-inside:avoid;margin-bottom:8px}
.words dt{font-weight:600;display:inline}
.words dd{display:inline;margin:0;color:var(--soft)}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--card);font-size:12.5px;line-height:1.4;
 border-radius:7px;padding:6px 10px;white-space:pre-line;max-width:340px;box-shadow:0 3px 14px #0004}
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

# Without this script the page is whole: all runs below each other, the browser's own hover titles.
SCRIPT = """
(function () {
  var root = document.documentElement, tip = document.createElement('div');
  root.classList.add('js');
  tip.id = 'tip'; tip.hidden = true; document.body.appendChild(tip);
  function show(text, event) {
    tip.textContent = text; tip.hidden = false;
    var box = tip.getBoundingClientRect();
    var x = Math.min(event.clientX + 14, innerWidth - box.width - 8), y = event.clientY + 16;
    if (y + box.height > innerHeight - 8) y = event.clientY - box.height - 12;
    tip.style.left = Math.max(8, x) + 'px'; tip.style.top = y + 'px';
  }
  function hide() { tip.hidden = true; }
  document.querySelectorAll('figure svg title').forEach(function (title) {
    var mark = title.parentNode;
    mark.setAttribute('aria-label', title.textContent);
    if (!mark.closest('.heat')) {
      var text = title.textContent;
      mark.addEventListener('mousemove', function (event) { show(text, event); });
      mark.addEventListener('mouseleave', hide);
    }
    title.remove();
  });
  document.querySelectorAll('[data-heat]').forEach(function (box) {
    var heat = JSON.parse(box.dataset.heat), svg = box.querySelector('svg');
    box.addEventListener('mousemove', function (event) {
      var rect = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / rect.width;
      var expert = Math.floor(((event.clientX - rect.left) * scale - heat.left) / heat.w);
      var layer = Math.floor(((event.clientY - rect.top) * scale - heat.top) / heat.h);
      var row = heat.counts[layer];
      if (!row || row[expert] === undefined) return hide();
      var visits = heat.visits[layer], percent = (100 * row[expert] / visits).toFixed(1);
      var needed = '\\nneeded in ' + row[expert] + ' of ' + visits + ' visits (' + percent + '%)';
      show('layer ' + layer + ', expert ' + expert + needed, event);
    });
    box.addEventListener('mouseleave', hide);
  });
  var tabs = Array.from(document.querySelectorAll('.tabs button')), panels = document.querySelectorAll('.run');
  function select(n) {
    tabs.forEach(function (tab, i) {
      tab.setAttribute('aria-selected', String(i === n)); tab.tabIndex = i === n ? 0 : -1; panels[i].hidden = i !== n;
    });
  }
  tabs.forEach(function (tab, i) {
    tab.addEventListener('click', function () { select(i); });
    tab.addEventListener('keydown', function (event) {
      var step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (step) { var n = (i + step + tabs.length) % tabs.length; select(n); tabs[n].focus(); }
    });
  });
  if (tabs.length) select(tabs.length - 1);
  var button = document.getElementById('theme');
  button.hidden = false;
  button.addEventListener('click', function () {
    var dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
    root.dataset.theme = dark ? 'light' : 'dark';
  });
})();
"""
