"""The page in a real browser: it draws, asks nobody, obeys clicks, and follows a run."""

import json
import shutil
from pathlib import Path
from time import monotonic

import pytest
from written import evaluated, write_run

import fedloom
from fedloom.report.live import Live
from fedloom.report.page.insight import Insights
from fedloom.report.page.page import page_of, write
from fedloom.report.page.runs import entries_of, read_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
WAIT = 60_000
"""Milliseconds, on a busy machine."""


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    fedloom.compare(
        methods=["local", "fedavg"], data="digits", clients=5, rounds=2, engine="inline", out=str(folder / "runs"),
        **{"data.limit": 300, "data.partition": "dirichlet:1"},
    )  # fmt: skip
    entries = entries_of(read_runs([folder / "runs"]))
    write(page_of(entries, Insights(40).of(entries)), folder / "report.html")
    return folder / "report.html"


class Tab:
    """A page, and everything that it complains about or asks for."""

    def __init__(self, browser, url: str, **options):
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"} | options)
        self.page.set_default_timeout(WAIT)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector(".plot .main-svg")

    def shown(self, plot: str) -> int:
        """How many series a figure shows."""
        return self.page.evaluate(f"byId('plot-{plot}').data.filter((trace) => trace.visible !== false).length")

    def until(self, expression: str) -> None:
        """Waits; the page's policy forbids `wait_for_function`, which evaluates inside it."""
        end = monotonic() + WAIT / 1000
        while not self.page.evaluate(expression):
            assert monotonic() < end, expression
            self.page.wait_for_timeout(50)

    def column(self, number: int) -> list[str]:
        return self.page.locator(f"#table-results tbody td:nth-child({number})").all_inner_texts()

    def colour(self) -> str:
        return self.page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_a_report_draws_asks_nobody_and_obeys(browser, report):
    tab = Tab(browser, report.as_uri())
    page = tab.page
    drawn = page.locator(".plot")
    assert drawn.count() == page.locator(".plot .main-svg:first-child").count() > 12
    assert [section.get_attribute("id") for section in page.locator("section").all()] == [
        "results", "curves", "clients", "classes", "holdings", "representations", "costs", "failures", "recipes",
    ]  # fmt: skip
    assert page.locator(".missing").count() == 0

    before = tab.shown("curve-clients")
    page.click("nav [data-group='method:local']")
    assert tab.shown("curve-clients") == before - 3  # the line and the two edges of its band
    assert page.locator("#table-results tr.off").inner_text().startswith("local")
    page.click("nav [data-group='method:local']")
    assert tab.shown("curve-clients") == before
    page.click(".legend [data-group='band']")
    assert tab.shown("curve-clients") == 2
    page.dblclick("nav [data-group='method:fedavg']")
    assert page.locator("nav [aria-pressed='true']").all_inner_texts() == ["fedavg"]

    assert tab.column(1) == ["local", "fedavg"]
    page.click("#table-results th:first-child button")
    assert tab.column(1) == ["fedavg", "local"]
    page.click("#table-results th:nth-child(3) button")
    numbers = [float(text) for text in tab.column(3)]
    assert numbers == sorted(numbers, reverse=True)
    page.click("#table-results th:nth-child(3) button")
    assert [float(text) for text in tab.column(3)] == numbers[::-1]
    assert page.locator("#table-results th[aria-sort='ascending']").count() == 1

    light = tab.colour()
    page.click("#theme")
    assert tab.colour() != light
    assert page.locator("html").get_attribute("data-theme") == "dark"

    page.hover("#plot-clients-spread .scatterlayer .point >> nth=0", force=True)
    page.wait_for_selector(".hoverlayer .hovertext")
    assert "client" in page.locator(".hoverlayer .hovertext").text_content()
    assert tab.complaints == []
    assert [url for url in tab.asked if not url.startswith(("data:", "blob:"))] == [report.as_uri()]
    page.close()


def test_dark_follows_the_system_and_a_narrow_page_does_not_overflow(browser, report):
    tab = Tab(browser, report.as_uri(), viewport={"width": 390, "height": 800}, color_scheme="dark")
    assert tab.page.locator("html").get_attribute("data-theme") == "dark"
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    tab.page.emulate_media(color_scheme="light")
    tab.until("document.documentElement.dataset.theme === 'light'")
    assert tab.complaints == []
    tab.page.close()


COVERED = """
() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  plot.scrollIntoView({ block: "center", behavior: "instant" });
  const layer = plot.querySelector(".nsewdrag"), area = layer.getBoundingClientRect();
  const steps = [0.005, ...Array.from({ length: 19 }, (_, i) => (i + 1) / 20), 0.995];
  const above = (right, down) => {
    const all = document.elementsFromPoint(area.x + right * area.width, area.y + down * area.height);
    return all.includes(layer) ? all.slice(0, all.indexOf(layer)) : [document.documentElement];
  };
  const found = steps.flatMap((right) => steps.flatMap((down) => above(right, down)))
    .filter((element) => element.closest(".main-svg")?.closest(".plot") !== plot);
  return [...new Set(found)].map((element) => `${plot.id}: ${element.tagName} ${element.className}`);
})
"""
"""Elements over the plot area of a chart, visible or not, that are not part of its drawing."""

TOOLS = """
() => [...document.querySelectorAll(".plot .modebar")].map((bar) => ({
  buttons: [...bar.querySelectorAll(".modebar-btn")].map((button) => button.dataset.title),
  behind: [...new Set([bar, ...bar.querySelectorAll("*")].map((part) => getComputedStyle(part).backgroundColor))],
}))
"""
"""The buttons of every chart, and the colours behind them."""


@pytest.mark.parametrize(
    "screen",
    [
        {},
        pytest.param({"color_scheme": "dark"}, marks=pytest.mark.slow),
        pytest.param({"viewport": {"width": 390, "height": 800}, "has_touch": True}, marks=pytest.mark.slow),
    ],
)
def test_nothing_covers_data(browser, report, screen):
    tab = Tab(browser, report.as_uri(), **screen)
    tab.page.add_style_tag(content="* { pointer-events: auto !important }")  # elementsFromPoint skips what has none
    assert tab.page.evaluate(COVERED) == []
    tools = tab.page.evaluate(TOOLS)
    assert len(tools) == tab.page.locator(".plot").count() > 12
    for tool in tools:  # they show while the pointer is over the chart, and always on a touch screen
        assert tool == {
            "buttons": ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"],
            "behind": ["rgba(0, 0, 0, 0)"],
        }
    tab.page.close()


@pytest.mark.slow
def test_a_watched_run_grows_and_its_page_outlives_the_server(browser, tmp_path):
    run = write_run(tmp_path / "run", history=[evaluated(1, 0.5)], rounds=3)
    with Live([run], insights=Insights(unfinished=False)) as live:
        tab = Tab(browser, live.url)
        assert tab.page.inner_text("#state") == "round 1 of 3"
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(evaluated(2, 0.75)) + "\n")
        tab.until("byId('plot-curve-clients').data.at(-1).y.length === 2")
        assert tab.page.inner_text("#state") == "round 2 of 3"
        assert tab.complaints == []
        assert all(url.startswith((live.url, "data:", "blob:")) for url in tab.asked)
        port = live.port
    tab.page.wait_for_selector("#state.lost")
    assert tab.page.locator(".plot .main-svg").count() > 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evaluated(3, 1.0)) + "\n")
    with Live([run], port=port, insights=Insights(unfinished=False)):
        tab.until("byId('plot-curve-clients').data.at(-1).y.length === 3")
        assert tab.page.inner_text("#state") == "round 3 of 3"
    tab.page.close()
