"""The report of runs as a file: reads the run folders, builds the page and writes it."""

from collections.abc import Callable, Iterable
from html import escape
from os.path import relpath
from pathlib import Path, PosixPath

from fedloom.report.page.figure import Page
from fedloom.report.page.insight import POINTS, Insights
from fedloom.report.page.page import page_of, refuse_unwritable, write
from fedloom.report.page.runs import entries_of, read_runs


class ReportFile(PosixPath):
    """The path of a report. Notebooks show the report in a frame if the file is in the notebook's folder or below."""

    def _repr_html_(self) -> str:
        place = escape(relpath(self))
        link = f'<a href="{place}" target="_blank">{place}</a>'
        return link if place.startswith("..") else f'{link}<iframe src="{place}" width="100%" height="700"></iframe>'


def write_report(
    runs: Iterable[Path], to: Path, *, points: int = POINTS, tell: Callable[[str], None] = lambda text: None
) -> Page:
    """Write the report of runs as one HTML file.

    Args:
        runs: Folders of runs, comparisons or sweeps.
        to: The file to write; an existing file is overwritten.
        points: Number of points of a t-SNE; 0 for none.
        tell: Called with each progress message.

    Returns:
        The page that was written.

    Raises:
        UserError: A folder holds no run, or the file cannot be written.
    """
    refuse_unwritable(to)
    entries = entries_of(read_runs(runs))
    page = page_of(entries, Insights(points, tell=tell).of(entries))
    write(page, to)
    return page
