"""Screenshots of the report for README and documentation, in docs/images.

    python -m benchmarks.screenshots [--to docs/images] [--runs FOLDER]

`report-light`, `report-dark`, `report-phone`, `report-clients` and `report-print` show a comparison of eight methods on
digits with three seeds, which is run first (about two minutes), unless --runs names its folder. `report-large` shows 26
methods and 100 clients with made-up results (`benchmarks.report`).
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

import fedloom
from benchmarks.report import chromium, made_up_insights, write_runs
from fedloom.report.page.page import page_of, write
from fedloom.report.page.report import write_report
from fedloom.report.page.runs import entries_of, read_runs

METHODS = ("local", "fedavg", "fedavg+ft", "fedprox", "fedper", "fedrep", "ditto", "fedrod")
DESKTOP, PHONE, PAPER = (1280, 1000), (390, 844), (794, 1123)
SETTLED = 1000
"""Milliseconds for figures to be drawn after scrolling."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("docs/images"))
    parser.add_argument("--runs", type=Path, help="Folder of a comparison to show instead of running one.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = options.runs or compared(Path(folder, "compared"))
        small, large = Path(folder, "small.html"), Path(folder, "large.html")
        write_report([runs], small)
        write_runs(Path(folder, "made-up"), methods=26, clients=100, seeds=3)
        entries = entries_of(read_runs([Path(folder, "made-up")]))
        write(page_of(entries, made_up_insights(entries, 100)), large)
        with chromium() as browser:
            shoot(browser, small, options.to / "report-light.png", DESKTOP)
            shoot(browser, small, options.to / "report-dark.png", DESKTOP, section="curves", color_scheme="dark")
            shoot(browser, small, options.to / "report-clients.png", DESKTOP, section="clients")
            shoot(browser, small, options.to / "report-phone.png", PHONE, device_scale_factor=2)
            shoot(browser, small, options.to / "report-print.png", PAPER, printed=True)
            shoot(browser, large, options.to / "report-large.png", DESKTOP, section="clients")


def compared(folder: Path) -> Path:
    """Run the comparison that is shown, and return its folder."""
    fedloom.compare(
        methods=list(METHODS), seeds=[0, 1, 2], data="digits", clients=20, rounds=20, epochs=2, batch_size=16,
        partition="dirichlet:0.3", out=str(folder), **{"evaluation.every": 2},
    )  # fmt: skip
    return folder


def shoot(
    browser: Any, report: Path, to: Path, size: tuple[int, int], *, section: str = "", printed: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    """Write a picture of what a screen or sheet of this size shows of a report."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, **{"color_scheme": "light"} | options)
    page.goto(f"{report.as_uri()}#{section}" if section else report.as_uri())
    page.wait_for_timeout(SETTLED)
    if printed:  # what the browser does before it prints, and the margins of the sheet
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.add_style_tag(content="html { background: white } body { margin: 45px 38px !important }")
    if section:
        page.evaluate(f"document.getElementById('{section}').scrollIntoView()")
    page.wait_for_timeout(2 * SETTLED)
    page.screenshot(path=to)
    page.close()
    Image.open(to).convert("RGB").save(to, optimize=True)
    print(f"{to}: {to.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
