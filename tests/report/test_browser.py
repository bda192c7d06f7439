"""The page in a real browser: it draws, asks nobody, obeys clicks, and follows a run."""

import json
import shutil
from pathlib import Path
from time import monotonic

import pytest
from written import a_client, evaluated, write_run

import fedloom
from fedloom.report.live import Live
from fedloom.report.page.figure import Cell, Column, Page, PageSection, Table
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
        self.page.wait_for_selector(".plot")

    def draw_all(self) -> None:
        """Scroll through the page, since figures are drawn when they come near the screen."""
        for plot in self.page.locator(".plot:visible").all():
            plot.scroll_into_view_if_needed()
            plot.locator(".main-svg").first.wait_for(state="attached")
        self.page.evaluate("scrollTo(0, 0)")

    def shows(self, plot: str, count: int) -> None:
        """Wait until a figure shows this many series."""
        self.page.locator(f"#plot-{plot}").scroll_into_view_if_needed()
        self.until(f"byId('plot-{plot}').data?.filter((trace) => trace.visible !== false).length === {count}")

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
    tab.draw_all()
    assert page.locator(".plot").count() == page.locator(".plot .main-svg:first-child").count() > 12
    sections = "results curves clients classes holdings representations layers costs failures recipes"
    names = sections.split()
    assert [section.get_attribute("id") for section in page.locator("section").all()] == names
    assert [link.get_attribute("href") for link in page.locator("#sections a").all()] == [f"#{name}" for name in names]
    assert page.locator(".missing").count() == 0

    tab.shows("curve-clients", 6)  # two lines, with the two edges of their bands over clients
    page.uncheck("#methods [data-group='method:local']")
    tab.shows("curve-clients", 3)
    assert tab.column(1) == ["fedavg"]
    assert page.inner_text("#methods .count") == "1 of 2 shown"
    page.check("#methods [data-group='method:local']")
    page.select_option("#curves .choice select", "none")
    tab.shows("curve-clients", 2)

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

    page.locator("#plot-clients-spread").scroll_into_view_if_needed()
    page.hover("#plot-clients-spread .scatterlayer .point >> nth=0", force=True)
    page.wait_for_selector(".hoverlayer .hovertext")
    assert "client" in page.locator(".hoverlayer .hovertext").text_content()
    assert tab.complaints == []
    assert [url for url in tab.asked if not url.startswith(("data:", "blob:"))] == [report.as_uri()]
    page.close()


def test_dark_follows_the_system_and_a_narrow_page_does_not_overflow(browser, report):
    tab = Tab(browser, report.as_uri(), viewport={"width": 390, "height": 800}, color_scheme="dark")
    assert tab.page.locator("html").get_attribute("data-theme") == "dark"
    tab.draw_all()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    cut = "[...document.querySelectorAll('.table, .table td')].filter((e) => e.scrollWidth > e.clientWidth + 1).length"
    assert tab.page.evaluate(cut) == 0
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
    tab.draw_all()
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
        assert tab.page.inner_text("#state") == "round 1 of 3, stopped"
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(evaluated(2, 0.75)) + "\n")
        tab.until("byId('plot-curve-clients').data?.at(-1).y.length === 2")
        assert tab.page.inner_text("#state") == "round 2 of 3, stopped"
        assert tab.complaints == []
        assert all(url.startswith((live.url, "data:", "blob:")) for url in tab.asked)
        port = live.port
    tab.page.wait_for_selector("#state.lost")
    assert tab.page.locator(".plot").count() > 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evaluated(3, 1.0)) + "\n")
    with Live([run], port=port, insights=Insights(unfinished=False)):
        tab.until("byId('plot-curve-clients').data?.at(-1).y.length === 3")
        assert tab.page.inner_text("#state") == "round 3 of 3, stopped"
    tab.page.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A report of 14 methods, of which each next one is better."""
    folder = tmp_path_factory.mktemp("large")
    for number in range(14):
        clients = [a_client(c, [number + c], [30], 10 + c) for c in range(8)]
        write_run(
            folder / f"m{number}", {"name": "fedprox", "mu": float(number)}, clients=clients,
            history=[evaluated(1, number / 20), evaluated(2, number / 14)],
            summary={"personal_accuracy": number / 14, "personal_std": 0.1, "personal_worst": 0.2},
        )  # fmt: skip
    write(page_of(entries_of(read_runs([folder])), {}), folder / "report.html")
    return folder / "report.html"


def test_the_best_ten_of_many_methods_are_shown_and_a_link_reproduces_a_selection(browser, large):
    tab = Tab(browser, large.as_uri())
    page = tab.page
    assert tab.column(1) == [f"fedprox mu={mu}.0" for mu in range(13, 3, -1)]
    assert page.evaluate("location.hash") == ""
    page.fill("#methods input[type=search]", "mu=1")
    assert page.locator("#methods li:visible").count() == 5  # 1, 10, 11, 12, 13
    page.get_by_role("button", name="only these").click()
    assert tab.column(1) == [f"fedprox mu={mu}.0" for mu in (13, 12, 11, 10, 1)]
    tab.shows("curve-clients", 5)
    assert page.locator("#clients .small figure:visible").count() == 5
    page.locator("#plot-clients-heat").scroll_into_view_if_needed()
    tab.until("byId('plot-clients-heat').data?.[0].z.length === 5")
    page.click("#table-results th:first-child button")
    page.click("#sections a[href='#clients']")
    tab.until("document.querySelector('#sections [aria-current]').textContent === 'Clients'")
    link = page.evaluate("location.href")
    again = Tab(browser, link)
    assert again.column(1) == [f"fedprox mu={mu}.0" for mu in (1, 10, 11, 12, 13)]
    again.until("document.querySelector('#sections [aria-current]').textContent === 'Clients'")
    again.page.click("#table-results + .more button")
    assert len(again.column(1)) == 14
    assert "methods=*" in again.page.evaluate("location.hash")
    assert tab.complaints == again.complaints == []
    page.close()
    again.page.close()


def test_paper_has_all_figures_in_light_colours_and_no_sidebar(browser, large):
    tab = Tab(browser, large.as_uri(), color_scheme="dark")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.until("Boolean(window.Plotly)")
    shown = tab.page.locator("figure:visible")
    assert shown.count() == tab.page.locator("figure:visible .plot .main-svg:first-child").count() > 12
    assert tab.page.locator("html").get_attribute("data-theme") == "light"
    assert not tab.page.locator("#side").is_visible()
    wide = "[...document.querySelectorAll('.main-svg')].filter((e) => e.getBoundingClientRect().right > 719).length"
    assert tab.page.evaluate(wide) == 0
    assert (
        tab.page.locator("#table-results + .more").inner_text().strip() == "10 of 14 rows, those of selected methods."
    )
    assert tab.page.locator(":is(.choice, .more button):visible").count() == 0
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.page.locator("html").get_attribute("data-theme") == "dark"
    assert tab.page.locator("#side").is_visible()
    tab.page.close()


def test_paper_has_the_colours_of_classes(browser, report):
    tab = Tab(browser, report.as_uri())
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.page.locator("#representations .legend .switch:visible").count() == 10
    tab.page.close()


def test_numbers_in_heat_maps_can_be_read(browser, large):
    texts = "document.querySelectorAll('#plot-clients-heat .heatmap-label text')"
    for scheme, colour in (("light", "rgb(13, 21, 27)"), ("dark", "rgb(255, 255, 255)")):
        tab = Tab(browser, large.as_uri(), color_scheme=scheme)
        tab.page.locator("#plot-clients-heat").scroll_into_view_if_needed()
        tab.until(f"{texts}.length > 0")
        assert set(tab.page.evaluate(f"[...{texts}].map((e) => e.style.fill)")) == {colour}
        tab.page.close()


def test_a_section_shows_the_measure_that_is_chosen(browser, tmp_path):
    auc = {"personal_auc": 0.7, "personal_auc_clients": 2, "personal_auc_std": 0.1}
    write_run(tmp_path / "fedavg", history=[evaluated(1, 0.4, **auc), evaluated(2, 0.5, **auc)])
    write(page_of(entries_of(read_runs([tmp_path])), {}), tmp_path / "report.html")
    tab = Tab(browser, (tmp_path / "report.html").as_uri())
    plots = "[...document.querySelectorAll('#curves .plot')].map((plot) => plot.id)"
    assert "plot-curve-clients" in tab.page.evaluate(plots)
    tab.page.select_option("#curves select", "auc")
    tab.until("Boolean(byId('plot-curve-clients-auc'))")
    assert tab.page.evaluate(plots) == ["plot-curve-clients-auc", "plot-curve-loss"]
    assert tab.page.evaluate("[...figures.keys()].includes('curve-clients')") is False
    assert tab.page.input_value("#curves select") == "auc"
    assert not tab.complaints


def test_empty_cells_are_empty_and_sorted_last(browser, tmp_path):
    rows = [
        [Cell(name, name), Cell(text, value)] for name, text, value in (("a", "", None), ("b", "2", 2), ("c", "1", 1))
    ]
    table = Table("standing", [Column("method"), Column("figure")], rows)
    page = Page("Board", [], "", running=False, legend=[], sections=[PageSection("one", "One", tables=[table])])
    write(page, tmp_path / "board.html")
    tab = browser.new_page()
    tab.goto((tmp_path / "board.html").as_uri())
    assert tab.locator("#table-standing tbody tr").all_inner_texts() == ["a\t", "b\t2", "c\t1"]
    shown = []
    for _ in range(2):
        tab.get_by_role("button", name="figure").click()
        shown.append(tab.locator("#table-standing tbody tr").all_inner_texts())
    assert sorted(shown) == [["b\t2", "c\t1", "a\t"], ["c\t1", "b\t2", "a\t"]]
    tab.close()
