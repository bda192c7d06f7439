"""Turns: one thread at a time, who waits steps aside, and nobody keeps a turn for ever."""

from threading import Event, Thread
from time import sleep

from fedloom.engines.cuda import graphs as module
from fedloom.engines.cuda.graphs import Turn


def beside(work):
    thread = Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_one_thread_has_the_turn_until_it_steps_aside():
    turn, order, waiting = Turn(), [], Event()

    def other():
        waiting.set()
        with turn.of("update"):
            order.append("other")

    with turn.of("update"):
        thread = beside(other)
        waiting.wait(5)
        sleep(0.02)
        order.append("first")
        with turn.aside():
            thread.join(5)
        order.append("last")
    assert order == ["first", "other", "last"]


def test_stepping_aside_without_a_turn_changes_nothing():
    turn = Turn()
    with turn.aside(), turn.of("update"):
        pass
    with turn.of("update"):
        pass


def test_work_that_waits_goes_without_turns_after_a_while(monkeypatch):
    monkeypatch.setattr(module, "LONG", 0.0)
    monkeypatch.setattr(module, "PATIENCE", 3)
    turn = Turn()
    for _ in range(3):
        with turn.of("slow"):
            sleep(0.001)
    with turn.of("quick"):

        def slow():
            with turn.of("slow"):  # does not wait for the quick one
                pass

        thread = beside(slow)
        thread.join(5)
        assert not thread.is_alive()


def test_an_abandoned_generator_does_not_keep_its_turn():
    turn = Turn()

    def results():
        with turn.of("results"):
            yield 1

    abandoned = results()
    next(abandoned)
    turn.end()
    done = Event()

    def update():
        with turn.of("update"):
            done.set()

    beside(update)
    assert done.wait(5)
    abandoned.close()  # whose turn it is not any more: nothing is given twice


def test_a_turn_of_many_jobs_may_take_as_much_longer(monkeypatch):
    monkeypatch.setattr(module, "LONG", 0.01)
    monkeypatch.setattr(module, "PATIENCE", 1)
    turn = Turn()
    with turn.of("update", 50):
        sleep(0.03)
    entered = Event()

    def other():
        with turn.of("update", 50):
            entered.set()

    with turn.of("update", 50):
        thread = beside(other)
        assert not entered.wait(0.05)  # it still takes turns
    thread.join(5)
    assert entered.is_set()
