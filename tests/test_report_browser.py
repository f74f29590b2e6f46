"""The page in a headless Chromium: no error in its console, a slider that works, hostile strings that do nothing."""

import pytest

from browser import Browser, chromium
from report_case import HOSTILE

pytest.importorskip("vl_convert", reason="vl-convert-python, which carries the charts' JavaScript, is not installed")
pytest.importorskip("websocket", reason="websocket-client is not installed")
pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here; Debian's package is `chromium`")


@pytest.fixture(scope="module")
def tab(report_page):
    with Browser() as browser:
        browser.open(report_page)
        yield browser


def test_the_charts_are_drawn_without_errors_and_without_requests(tab):
    assert tab.problems == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
    charts = "document.querySelectorAll('.chart').length"
    drawn = "[...document.querySelectorAll('.chart svg')].filter(s => s.querySelector('path, text')).length"
    assert tab.run(charts) == tab.run(drawn) > 6


def test_hostile_strings_ran_nothing(tab):
    assert tab.run("typeof hacked") == "undefined"
    assert tab.run("document.querySelectorAll('[onerror], [onload], main script, main svg svg').length") == 0
    assert tab.run("document.querySelector('h1').innerText") == HOSTILE[0]
    assert tab.run("document.title") == HOSTILE[0]
    assert tab.run("document.body.innerText.includes('<svg/onload=hacked=1>')")
    labels = tab.run("[...document.querySelectorAll('#confusion-chart svg text')].map(t => t.textContent)")
    assert any("שלום" in label for label in labels)


def test_the_slider_moves_by_keyboard_and_all_follows(tab):
    rule = "document.querySelector('#path-scores .role-mark.mark-rule line').getAttribute('transform')"
    facts = "[...document.querySelectorAll('[data-fact]')].map(f => f.textContent)"
    cells = "[...document.querySelectorAll('#path-map svg .mark-rect path')].map(p => p.getAttribute('fill-opacity')).join()"
    settled = "new Promise(done => setTimeout(done, 100))"
    tab.run("document.getElementById('at').focus()")
    tab.press("Home")
    tab.run(settled)
    before, where, drawn = tab.run(facts), tab.run(rule), tab.run(cells)
    assert before[0] == "1"
    for _ in range(2):
        tab.press("ArrowRight")
    tab.run(settled)
    after = tab.run(facts)
    assert float(after[0]) == pytest.approx(0.1, rel=0.02)
    assert tab.run("document.getElementById('at').getAttribute('aria-valuetext')") == f"beta / beta_max {after[0]}"
    assert tab.run(rule) != where
    assert tab.run(cells) != drawn
    assert tab.problems == []


def test_keyboard_and_screen_reader_find_their_way(tab, report_page):
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    seen = [(node.get("role", {}).get("value"), node.get("name", {}).get("value", "")) for node in nodes]
    roles = [role for role, _ in seen]
    assert {"main", "navigation", "banner", "contentinfo", "slider", "table"} <= set(roles)
    images = [name for role, name in seen if role in ("image", "img")]
    assert len(images) > 10
    assert all(images)
    assert ("slider", "beta, from the largest to the smallest") in seen
    tab.open(report_page)
    tab.press("Tab")
    focused = tab.run("document.activeElement.className")
    assert focused == "skip"
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_light_dark_print_and_narrow_screens(tab, report_page, tmp_path):
    colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    found = {}
    for theme in ("light", "dark", "print"):
        tab.theme(theme)
        found[theme] = tab.run(colours)
    assert found["light"][0] == found["print"][0] == "rgb(255, 255, 255)"
    assert found["dark"][0] == "rgb(22, 24, 28)"
    stroke = "getComputedStyle(document.querySelector('#gap svg .mark-line path')).stroke"
    tab.theme("dark")
    dark = tab.run(stroke)
    tab.theme("light")
    assert tab.run(stroke) != dark  # the charts change with the page, without a second drawing
    tab.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    tab.open(report_page, width=380)
    assert tab.run("document.documentElement.scrollWidth") <= 380
    assert tab.problems == []


def test_a_script_that_got_into_the_page_would_not_run(tab, report_page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(
        report_page.read_text().replace("<main", "<script>hacked=1</script><img src=x onerror=hacked=1><main", 1)
    )
    tab.open(broken)
    assert tab.run("typeof hacked") == "undefined"
    assert any("Content Security Policy" in problem for problem in tab.problems)
