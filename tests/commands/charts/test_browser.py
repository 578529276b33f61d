"""The report in a real browser: drawn where it should be, readable on a phone, in light and dark, without a network."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from synthetic_runs import make_run, make_stats, make_token

from promoe.commands.charts.html_report import html_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
if CHROMIUM is None:
    pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra dev)")
matplotlib_image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed (the extra viz)")

PHONE, LAPTOP, DESKTOP = (390, 844), (1024, 768), (1280, 900)
LAYERS, EXPERTS, TOP_K, LOOKAHEAD, PASSES = 12, 32, 4, 4, 60
SMALLEST_TEXT_PX = 9.5

# What is wrong with how the page lies on the screen, in words; and what is drawn, figure by figure.
LOOK = """
() => {
  const wrong = [], figures = [];
  const box = e => e.getBoundingClientRect();
  const seen = e => { const b = box(e); return b.width > 0 && b.height > 0; };
  for (const e of document.querySelectorAll('.numbers.scroll'))
    if (e.scrollWidth > e.clientWidth) wrong.push('cut off: ' + e.innerText.slice(0, 40));
  if (document.documentElement.scrollWidth > innerWidth)
    wrong.push('the page is ' + document.documentElement.scrollWidth + ' px wide');
  for (const e of document.querySelectorAll('main *')) {
    if (seen(e) && box(e).right > innerWidth + 0.5 && !e.closest('.scroll'))
      wrong.push(e.tagName + '.' + e.className + ' ends at ' + box(e).right);
  }
  const TEXTS = 'svg text, .y-ticks span, .x-ticks span, .x-name, .times span, .layers span, .lane b';
  for (const figure of document.querySelectorAll('figure.chart')) {
    if (!seen(figure)) continue;
    const title = figure.querySelector('h3').textContent, outer = box(figure);
    const texts = [...figure.querySelectorAll(TEXTS)].filter(e => seen(e) && e.textContent);
    texts.forEach((e, i) => {
      const a = box(e), what = title + ': ' + JSON.stringify(e.textContent);
      if (a.left < outer.left || a.right > outer.right || a.top < outer.top || a.bottom > outer.bottom)
        wrong.push(what + ' lies outside of its card');
      const svg = e.closest('svg'), scale = svg ? box(svg).width / svg.viewBox.baseVal.width : 1;
      const size = parseFloat(getComputedStyle(e).fontSize) * scale;
      if (size < SMALLEST) wrong.push(what + ' is ' + size.toFixed(1) + ' px large');
      for (const other of texts.slice(i + 1)) {
        const b = box(other), x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (x > 1 && y > 3) wrong.push(what + ' overlaps ' + JSON.stringify(other.textContent));
      }
    });
    const drawings = [...figure.querySelectorAll('svg')];
    if (!drawings.length) wrong.push(title + ' has no drawing');
    for (const svg of drawings) {
      if (box(svg).width < 200 || box(svg).height < 16) wrong.push(title + ' is drawn in ' + JSON.stringify(box(svg)));
      if (!(svg.getAttribute('aria-label') || '').trim()) wrong.push(title + ' says nothing to a screen reader');
    }
    const marks = [...figure.querySelectorAll('svg rect, svg path, svg circle')];
    const drawn = marks.filter(e => box(e).width > 0 || box(e).height > 0);  // a line may be flat
    if (!drawn.length) wrong.push(title + ' has no mark that can be seen');
    for (const key of figure.querySelectorAll('.key')) {
      const style = getComputedStyle(key);
      const painted = style.backgroundColor !== 'rgba(0, 0, 0, 0)' || style.backgroundImage !== 'none'
        || parseFloat(style.borderTopWidth) || parseFloat(style.borderLeftWidth);
      if (!painted) wrong.push(title + ': the legend shows no colour for ' + key.className);
    }
    if (!figure.querySelectorAll('details.data tbody tr').length) wrong.push(title + ' has no numbers');
    const area = drawings.map(box), count = {};
    for (const mark of drawn)
      for (const css of mark.classList) count[css] = (count[css] || 0) + 1;
    const cells = {};
    for (const path of figure.querySelectorAll('.map path'))
      cells[path.getAttribute('class')] = path.getAttribute('d').split('M').length - 1;
    figures.push({
      title, count, cells, svgs: drawings.length,
      left: Math.min(...area.map(b => b.left)) + scrollX, top: Math.min(...area.map(b => b.top)) + scrollY,
      right: Math.max(...area.map(b => b.right)) + scrollX, bottom: Math.max(...area.map(b => b.bottom)) + scrollY,
    });
  }
  const style = getComputedStyle(document.documentElement);
  const colours = {};
  for (const name of ['card', 'ink', 'soft', 'better', 'worse', 'hit', 'stall', 'compute', 'named', 'demand'])
    colours[name] = style.getPropertyValue('--' + name).trim();
  return {wrong, figures, colours};
}
""".replace("SMALLEST", str(SMALLEST_TEXT_PX))


class Seen(NamedTuple):
    """A page as the browser has drawn it."""

    page: Any
    figures: dict[str, dict[str, Any]]
    colours: dict[str, tuple[int, int, int]]
    pixels: Any
    """`[height, width, 3]`, 0 to 255, of the whole page."""

    def inked(self, figure: dict[str, Any]) -> float:
        """Share of a drawing's pixels that are not the card's colour."""
        return float((np.abs(self._crop(figure) - self.colours["card"]).max(axis=2) > 24).mean())

    def count(self, figure: dict[str, Any], colour: str) -> int:
        """A drawing's pixels of a colour."""
        return int((np.abs(self._crop(figure) - self.colours[colour]).max(axis=2) <= 3).sum())

    def _crop(self, figure: dict[str, Any]) -> Any:
        left, top, right, bottom = (round(figure[side]) for side in ("left", "top", "right", "bottom"))
        return self.pixels[top:bottom, left:right].astype(np.int16)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    sizes: dict[str, Any] = {"layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "decode_passes": PASSES}
    learned = make_stats(**sizes, hits=2, ready=3, predictor="learned", lookahead=LOOKAHEAD, wasted_every=4)
    demand = make_stats(**sizes, hits=2, ready=2, policy="lru", pass_s=0.03)
    runs = [
        make_run(
            "a run with quite a long name, as file names have", stats=learned, bound_s=0.015, token=make_token(LAYERS)
        ),
        make_run(
            "on demand", stats=demand, tpot_s=0.03, tpot_interval_s=(0.028, 0.033), token=make_token(LAYERS, 8e-3)
        ),
    ]
    large = {"layers": 48, "experts": 128, "top_k": 8, "hits": 4, "ready": 6, "lookahead": 8, "predictor": "gate"}
    many = [
        make_run(f"system {i} of a large model", stats=make_stats(**large, shift=i), token=make_token(48))  # type: ignore[arg-type]
        for i in range(3)
    ]
    conditions = {"model": "tiny", "link": "emulated 12.0 GB/s, 20 µs", "a_path": "/very/long/path" * 8}
    return {
        "one": html_report(runs[:1], folder / "one.html", "One run", conditions),
        "two": html_report(runs, folder / "two.html", "Two runs", conditions),
        "many": html_report(many, folder / "many.html", "Three runs"),
    }


def opened(browser: Any, path: Path, size: tuple[int, int], scheme: str) -> Any:
    """A page on which nothing goes wrong unnoticed."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page = context.new_page()
    page.trouble = []
    page.on("console", lambda message: page.trouble.append(message.text))
    page.on("pageerror", lambda error: page.trouble.append(str(error)))
    page.on("request", lambda request: request.url == path.as_uri() or page.trouble.append(request.url))
    page.goto(path.as_uri())
    return page


def look(page: Any) -> Seen:
    """Look at the page; assert that nothing is wrong with how it lies there."""
    found = page.evaluate(LOOK)
    assert found["wrong"] == []
    assert page.trouble == []
    png = page.screenshot(full_page=True)
    pixels = np.rint(matplotlib_image.imread(io.BytesIO(png), format="png")[..., :3] * 255).astype(np.uint8)
    colours = {name: rgb(value) for name, value in found["colours"].items()}
    return Seen(page, {figure["title"]: figure for figure in found["figures"]}, colours, pixels)


def rgb(colour: str) -> tuple[int, int, int]:
    digits = colour.removeprefix("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    return int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16)


def contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    """Of two colours, 1 to 21, as WCAG 2 defines it."""

    def luminance(colour: tuple[int, int, int]) -> float:
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, LAPTOP, DESKTOP], ids=["phone", "laptop", "desktop"])
def test_a_run_is_drawn(browser: Any, reports: dict[str, Path], size: tuple[int, int], scheme: str) -> None:
    seen = look(opened(browser, reports["one"], size, scheme))
    figures = seen.figures
    assert len(figures) == 14
    for title, figure in figures.items():
        assert 0.01 < seen.inked(figure) < 0.99, title
    needs = figures["Where needed experts were, by layer"]
    assert [needs["count"][css] for css in ("hit", "arrived", "stall")] == [LAYERS] * 3
    assert seen.count(needs, "hit") > 2000
    assert figures["Stall by layer, decode"]["count"]["stall"] == LAYERS
    assert figures["Predictor accuracy, live"]["count"]["named"] == LOOKAHEAD
    assert seen.count(figures["Predictor accuracy, live"], "named") > 2000
    assert sum(figures["Experts that the text needed"]["cells"].values()) == LAYERS * EXPERTS
    assert sum(figures["Experts needed over time"]["cells"].values()) == EXPERTS * PASSES // 2
    token = figures["One token, from begin to end"]
    assert token["svgs"] == 5
    assert token["count"] == {
        **{"rest": 1, "compute": LAYERS, "gap": LAYERS // 2, "waited": LAYERS // 2, "demand": LAYERS // 2},
        **{"arrived": LAYERS // 2, "predict": LAYERS},
    }
    for colour in ("compute", "stall", "demand"):
        assert seen.count(token, colour) > 200, colour
    assert np.mean(seen.colours["card"]) < 64 if scheme == "dark" else np.mean(seen.colours["card"]) > 192
    for colour in ("ink", "soft", "better", "worse"):
        assert contrast(seen.colours[colour], seen.colours["card"]) > 4.5, colour


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")], ids=["phone", "desktop"])
def test_two_runs_stand_side_by_side(
    browser: Any, reports: dict[str, Path], size: tuple[int, int], scheme: str
) -> None:
    page = opened(browser, reports["two"], size, scheme)
    seen = look(page)
    for figure in seen.figures.values():
        assert 0.01 < seen.inked(figure) < 0.99, figure["title"]
    places = page.evaluate(
        "() => [...document.querySelectorAll('.pair')].map(p => [...p.children].map(c => {"
        " const b = c.getBoundingClientRect(); return [b.left, b.top + scrollY, b.width, b.height]; }))"
    )
    assert len(places) == 6
    for (left, top, width, height), (other_left, other_top, other_width, _) in places:
        assert width == pytest.approx(other_width, abs=1)
        if size == PHONE:
            assert (left, top + height) < (other_left + 1, other_top)
        else:
            assert top == pytest.approx(other_top, abs=1)
            assert left + width < other_left
    assert page.locator(".difference tbody tr").count() == 10


def test_large_models_and_more_runs_fit_too(browser: Any, reports: dict[str, Path]) -> None:
    page = opened(browser, reports["many"], PHONE, "light")
    assert page.evaluate(LOOK)["wrong"] == []
    page.locator(".tabs button").first.click()
    found = page.evaluate(LOOK)
    assert found["wrong"] == []
    assert page.locator("section.run:visible h3").first.inner_text() == "system 0 of a large model"
    figures = {figure["title"]: figure for figure in found["figures"]}
    assert sum(figures["Experts that the text needed"]["cells"].values()) == 48 * 128
    assert figures["Where needed experts were, by layer"]["count"]["hit"] == 48
    assert page.trouble == []


def test_it_answers_to_its_reader(browser: Any, reports: dict[str, Path]) -> None:
    page = opened(browser, reports["one"], DESKTOP, "light")
    # Another layer of the map over time.
    before = page.locator("[data-use] path.h8").get_attribute("d")
    page.locator("select[data-layers]").select_option("7")
    assert page.locator("[data-use] path.h8").get_attribute("d") != before
    assert "layer 7, 32 experts" in page.locator("[data-use] svg").get_attribute("aria-label")
    # What a bar, and a cell, is.
    page.locator("rect.named.mark").first.hover()
    assert page.locator("#tip").inner_text() == "layers ahead, k 1\nnamed k layers before: 100%"
    page.locator("[data-use] svg").hover(position={"x": 3, "y": 3})
    assert page.locator("#tip").inner_text() == "layer 7, expert 0\npasses 1 to 2: needed in 0%"
    page.locator("[data-heat] svg").hover(position={"x": 3, "y": 3})
    assert page.locator("#tip").inner_text() == "layer 0, expert 0\nneeded in 20 of 60 visits (33.3%)"
    # The numbers behind a chart, and the other colours.
    table = page.locator("figure", has_text="Predictor accuracy, live").locator("table")
    assert not table.is_visible()
    page.locator("figure", has_text="Predictor accuracy, live").locator("summary").click()
    assert table.is_visible()
    page.locator("#theme").click()
    look(page)
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    assert page.trouble == []


def test_without_scripts_everything_is_there(browser: Any, reports: dict[str, Path]) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, java_script_enabled=False)
    page = context.new_page()
    page.goto(reports["many"].as_uri())
    assert page.locator("section.run:visible").count() == 3
    assert page.locator(".choice b:visible").count() == 3
    assert page.locator("#theme:visible").count() == 0
