"""Several iterators as one: nothing lost, errors raised where they are read."""

import threading
from collections.abc import Iterator

import pytest

from edge_eval.streams import SharedIterator, merge


def test_every_item_comes_once_whatever_thread_took_it() -> None:
    waiting = SharedIterator(range(1000))
    assert sorted(merge(map(str, waiting) for _ in range(4))) == sorted(map(str, range(1000)))


def test_one_source_is_drained_in_order_without_a_thread() -> None:
    before = threading.active_count()
    merged = merge([iter(range(5))])
    assert next(merged) == 0
    assert threading.active_count() == before
    assert list(merged) == [1, 2, 3, 4]


def test_an_error_in_one_source_is_raised_and_the_others_stop() -> None:
    before = set(threading.enumerate())

    def endless() -> Iterator[int]:
        while True:
            yield 0

    def broken() -> Iterator[int]:
        yield 0
        raise ValueError("broken source")

    with pytest.raises(ValueError, match="broken source"):
        for _ in merge([endless(), broken()]):
            pass
    assert set(threading.enumerate()) <= before


def test_a_reader_that_stops_early_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    merged = merge([iter(range(10**9)), iter(range(10**9))])
    assert next(merged) == 0
    merged.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) <= before
