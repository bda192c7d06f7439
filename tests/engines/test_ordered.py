from dataclasses import dataclass

import pytest

from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.engines.ordered import ordered


@dataclass
class Recorder:
    """Jobs that were taken, submitted and read, in this order."""

    def __post_init__(self):
        self.events = []
        self.unread = self.most_unread = 0

    def jobs(self, count):
        for client in range(count):
            self.events.append(("take", client))
            yield Job("update", 1, Message({}), client=client)

    def submit(self, job):
        self.events.append(("submit", job.client))
        self.unread += 1
        self.most_unread = max(self.most_unread, self.unread)
        return Submitted(self, job.client)


@dataclass
class Submitted:
    recorder: Recorder
    client: int

    def result(self):
        self.recorder.events.append(("read", self.client))
        self.recorder.unread -= 1
        return Result(self.client)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.mark.parametrize("count", [0, 1, 3, 10])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_results_come_in_the_order_of_the_jobs(recorder, count, window):
    assert [r.client for r in ordered(recorder.jobs(count), recorder.submit, window)] == list(range(count))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_no_more_jobs_than_the_window_are_unread(recorder, window):
    assert len(list(ordered(recorder.jobs(10), recorder.submit, window))) == 10
    assert recorder.most_unread == window


def test_a_job_is_taken_just_before_it_is_submitted(recorder):
    list(ordered(recorder.jobs(3), recorder.submit, window=2))
    assert recorder.events == [
        ("take", 0), ("submit", 0), ("take", 1), ("submit", 1), ("read", 0),
        ("take", 2), ("submit", 2), ("read", 1), ("read", 2),
    ]  # fmt: skip


def test_nothing_is_taken_before_the_first_result_is_asked_for(recorder):
    ordered(recorder.jobs(3), recorder.submit, window=2)
    assert recorder.events == []


def test_who_stops_early_submits_no_more_jobs(recorder):
    results = ordered(recorder.jobs(10), recorder.submit, window=2)
    next(results)
    results.close()
    assert [client for what, client in recorder.events if what == "submit"] == [0, 1]


def test_an_error_of_a_job_is_raised_in_its_place(recorder):
    def submit(job):
        pending = recorder.submit(job)
        if job.client == 2:
            pending.result = lambda: 1 / 0
        return pending

    results = ordered(recorder.jobs(10), submit, window=4)
    assert [next(results).client, next(results).client] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
