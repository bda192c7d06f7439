"""The page of runs as they go: an HTTP server for this machine alone, which tells the page when there is more."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Event, Thread
from types import TracebackType
from typing import Self

from fedloom.core.errors import UserError
from fedloom.experiment.run_folder import RECIPE
from fedloom.report.page.figure import Page
from fedloom.report.page.insight import Insights
from fedloom.report.page.page import as_json, html, page_of
from fedloom.report.page.runs import entries_of, read_runs

HOST = "127.0.0.1"
EVERY = 0.5
"""Seconds between two looks at the folders."""
SILENCE = 10.0
"""Seconds after which a page is told that the server is still there."""
FILES = (RECIPE, "metrics.jsonl", "clients.jsonl", "summary.json", "log.txt")


class Live:
    """Serves the page of these folders until it is closed; a folder may be empty at first."""

    def __init__(self, paths: Sequence[Path], *, port: int = 0, insights: Insights | None = None):
        self.paths, self.insights = paths, insights or Insights()
        self.version = 0
        self.page = html(None, title="fedloom watch").encode()
        self._last = Page("Waiting for the first round", [], "waiting", True, [], [])
        self.data = as_json(self._last).encode()
        self.changed, self.closed = Condition(), Event()
        try:
            self._server = _Server((HOST, port), self)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--port {port}: cannot be used: {reason}; leave it out to get a free one") from None
        self.port = int(self._server.server_address[1])
        self.url = f"http://{HOST}:{self.port}/"

    def __enter__(self) -> Self:
        for work in (self._server.serve_forever, self._look):
            Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.closed.set()
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def differs(self, version: int) -> bool:
        """Whether there is something to tell a page that knows this version."""
        return self.version != version or self.closed.is_set()

    def stay(self, tell: Callable[[], None]) -> None:
        """Until Ctrl-C, from the moment that somebody is told of it."""
        try:
            tell()
            self.closed.wait()
        except KeyboardInterrupt:
            return

    def _look(self) -> None:
        """Whenever a file has changed: first what is written there, then what takes longer to find out."""
        seen: object = None
        while not self.closed.is_set():
            now = self._stamp()
            if now != seen:
                seen = now
                try:
                    entries = entries_of(read_runs(self.paths))
                    self._show(page_of(entries, self.insights.known(entries)))
                    if self.insights.missing(entries):
                        self._show(page_of(entries, self.insights.of(entries)))
                except Exception as error:  # whatever it is, the page tells it, and goes on when files change
                    if now:  # else nothing has begun yet
                        self._show(replace(self._last, state=str(error), running=True))
            self.closed.wait(EVERY)

    def _stamp(self) -> list[tuple[str, int, int]]:
        """Changes when a file of a run does."""
        found = []
        for path in self.paths:
            for recipe in sorted(path.glob(f"**/{RECIPE}")):
                for name in FILES:
                    try:
                        status = (recipe.parent / name).stat()
                    except OSError:
                        continue
                    found.append((str(recipe.parent / name), status.st_mtime_ns, status.st_size))
        return found

    def _show(self, page: Page) -> None:
        with self.changed:
            self._last, self.data = page, as_json(page).encode()
            self.version += 1
            self.changed.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], live: Live):
        self.live = live
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        live = self.server.live
        if self.headers.get("Host") not in (f"{HOST}:{live.port}", f"localhost:{live.port}"):
            # another site's name that was made to point here
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine")
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", live.page)
        elif self.path == "/data.json":
            self._answer("application/json", live.data)
        elif self.path == "/events":
            self._events(live)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _events(self, live: Live) -> None:
        """One line per change, from now on: the page asks for the data itself."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        sent = -1
        try:
            self.wfile.write(b"retry: 1000\n\n")
            while not live.closed.is_set():
                with live.changed:
                    live.changed.wait_for(partial(live.differs, sent), SILENCE)
                    version = live.version
                self.wfile.write(b": here\n\n" if version == sent else f"data: {version}\n\n".encode())
                sent = version
        except OSError:  # the page was closed
            return

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the terminal is the run's."""
