"""A function that runs one stretch at a time: a coroutine for code that knows nothing of coroutines."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Lock, Thread


class Cancelled(BaseException):
    """Ends what a strand is doing."""


class Strand:
    """A thread of which whoever resumes it waits for the next pause: of both, one runs at a time."""

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]):
        self._setting = setting
        self._go, self._back = Lock(), Lock()
        self._go.acquire()
        self._back.acquire()
        self._work: Callable[[], None] | None = None
        self._cancelled = False
        self._paused = False
        self._error: BaseException | None = None
        self._thread = Thread(target=self._live, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], None]) -> bool:
        """Runs this until it pauses (true) or ends (false); what it raises is raised here."""
        self._work = work
        return self.resume()

    def resume(self) -> bool:
        """Goes on until the next pause (true) or the end (false)."""
        self._go.release()
        self._back.acquire()
        error, self._error = self._error, None
        if error is not None and not isinstance(error, Cancelled):
            raise error
        return self._paused

    def pause(self) -> None:
        """Called by the work itself: back to whoever resumed it, until it does so again."""
        self._paused = True
        self._back.release()
        self._go.acquire()
        self._paused = False
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """If it is in a pause, it does not go on from there."""
        if self._paused:
            self._cancelled = True
            self.resume()
            self._cancelled = False

    def close(self) -> None:
        """The thread ends."""
        self.cancel()
        self._work = None
        self._go.release()
        self._thread.join()

    def _live(self) -> None:
        with self._setting():
            while True:
                self._go.acquire()
                if self._work is None:
                    return
                try:
                    self._work()
                except BaseException as error:
                    self._error = error
                self._back.release()
