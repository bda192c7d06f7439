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
        try:
            if error is not None and not isinstance(error, Cancelled):
                raise error
        finally:
            del error  # its traceback has this frame, and with it all that led here: memory that may have to go
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
        while self._paused:
            self._cancelled = True
            try:
                self.resume()
            except Exception:  # what its cleaning up raises is nobody's answer any more
                pass
            finally:
                self._cancelled = False

    def close(self) -> None:
        """The thread ends."""
        self.cancel()
        self._work = None
        self._go.release()
        self._thread.join()

    def _live(self) -> None:
        try:
            with self._setting():
                while self._called():
                    try:
                        assert self._work is not None
                        self._work()
                    except BaseException as error:
                        self._error = error
                    self._back.release()
        except BaseException as error:  # no such setting: whoever begins something here is told so
            while self._called():
                self._error = error
                self._back.release()

    def _called(self) -> bool:
        self._go.acquire()
        return self._work is not None
