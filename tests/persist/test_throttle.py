"""When unfinished work is saved."""

import pytest

from whence.persist import files
from whence.persist.files import Throttle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(files, "monotonic", clock)
    return clock


def test_at_regular_intervals(clock: Clock) -> None:
    throttle = Throttle(20.0)
    for _ in range(3):
        clock.now += 19.9
        assert not throttle.due()
        clock.now += 0.1
        assert throttle.due()
        with throttle.saving():
            clock.now += 0.5
    clock.now += 19
    throttle.restart()
    clock.now += 19
    assert not throttle.due()


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_slow_saving_takes_at_most_three_percent_of_the_time(clock: Clock, seconds: float) -> None:
    throttle, spent = Throttle(seconds), 0.0
    for _ in range(100_000):
        clock.now += 1.0
        if throttle.due():
            with throttle.saving():
                clock.now += 5.0
                spent += 5.0
    assert 0.02 < spent / clock.now < 0.03


def test_it_is_saved_often_again_once_saving_is_fast(clock: Clock) -> None:
    throttle = Throttle(20.0)
    for cost, interval in ((6.0, 200.0), (0.0, 20.0)):
        with throttle.saving():
            clock.now += cost
        clock.now += interval - 1
        assert not throttle.due()
        clock.now += 1
        assert throttle.due()


def test_saving_that_costs_nothing_is_always_due(clock: Clock) -> None:
    throttle = Throttle(0.0)
    for _ in range(3):
        assert throttle.due()
        with throttle.saving():
            clock.now += 0.005


def test_a_failed_save_is_tried_again(clock: Clock) -> None:
    throttle = Throttle(20.0)
    clock.now += 20
    with pytest.raises(OSError), throttle.saving():
        raise OSError
    assert throttle.due()
