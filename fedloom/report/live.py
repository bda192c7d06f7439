"""Live report page: an HTTP server on loopback that notifies the page when run folders change."""

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
from fedloom.experiment.run_folder import RECIPE, run_state
from fedloom.report.page.figure import Page
from fedloom.report.page.insight import Insights
from fedloom.report.page.page import as_json, html, page_of
from fedloom.report.page.runs import entries_of, read_runs

HOST = "127.0.0.1"
EVERY = 0.5
"""Seconds between two checks of the run folders."""
CLOSING = 10.0
"""Maximum number of seconds that closing waits for a page that is being built."""
SILENCE = 10.0
"""Seconds without changes after which the server sends a keep-alive comment."""
FILES = (RECIPE, "metrics.jsonl", "clients.jsonl", "summary.json", "log.txt")


class Live:
    """HTTP server of the live page of some run folders; use it as a context manager.

    The server listens on 127.0.0.1 only. A background thread checks the folders every half second and rebuilds the
    page when a file has changed.

    Args:
        paths: Folders of runs, comparisons or sweeps. They may be empty or missing when the server starts.
        port: The port to listen on; 0 chooses a free port.
        insights: Reads data and models for the page; by default all sections are computed.

    Raises:
        UserError: If the port cannot be used.
    """

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
            raise UserError(f"--port {port}: cannot be used: {reason}; leave it out to use any free port") from None
        self.port = int(self._server.server_address[1])
        self.url = f"http://{HOST}:{self.port}/"

    def __enter__(self) -> Self:
        self._threads = [Thread(target=work, daemon=True) for work in (self._server.serve_forever, self._look)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.closed.set()
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:  # a thread that computes while the interpreter exits can abort the process
            thread.join(CLOSING)

    def differs(self, version: int) -> bool:
        """Whether a page that has this version must be notified: the data changed, or the server is closing."""
        return self.version != version or self.closed.is_set()

    def stay(self, announce: Callable[[], None]) -> None:
        """Keep serving until Ctrl-C.

        Args:
            announce: Called first, for example to print the address; Ctrl-C during this call also ends the method.
        """
        try:
            announce()
            self.closed.wait()
        except KeyboardInterrupt:
            return

    def _look(self) -> None:
        """Rebuild the page whenever a file has changed: first from the records, then with the slow insights."""
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
                except Exception as error:  # the page shows any error; the next change of a file tries again
                    if now:  # otherwise no run has started yet
                        self._show(replace(self._last, state=str(error), running=True))
            self.closed.wait(EVERY)

    def _stamp(self) -> list[tuple[str, int, int]]:
        """Return a value that changes whenever a file of a run changes."""
        found = []
        for path in self.paths:
            for recipe in sorted(path.glob(f"**/{RECIPE}")):
                for name in FILES:
                    try:
                        status = (recipe.parent / name).stat()
                    except OSError:
                        continue
                    found.append((str(recipe.parent / name), status.st_mtime_ns, status.st_size))
                found.append((run_state(recipe.parent), 0, 0))  # a process that is killed changes no file
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
            # DNS rebinding: the host name of another site that resolves to this machine
            self.send_error(HTTPStatus.FORBIDDEN, "this page is only available on this machine")
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
        """Send an event for each change; the page then fetches the data."""
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
        """Log nothing: the terminal shows the run's progress."""
