"""Several iterators, each drained by a thread of its own -> one iterator, items as they come."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedIterator(Generic[T]):
    """One iterator that several threads take from; each item goes to one of them."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)


def merge(sources: Iterable[Iterator[T]], *, wait: bool = True) -> Iterator[T]:
    """The items of all sources; an error in one is raised here, and the others stop soon after.

    wait: until they have stopped; not for sources that a network may hold for minutes.
    """
    sources = list(sources)
    if len(sources) == 1:
        yield from sources[0]
        return
    items: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()
    stop = threading.Event()

    def drain(source: Iterator[T]) -> None:
        try:
            for item in source:
                items.put((item, None))
                if stop.is_set():
                    return
            items.put((None, StopIteration()))
        except BaseException as error:  # noqa: BLE001 - it is raised in the reader's thread
            items.put((None, error))

    threads = [threading.Thread(target=drain, args=(source,), daemon=True) for source in sources]
    for thread in threads:
        thread.start()
    try:
        running = len(threads)
        while running:
            item, error = items.get()
            if isinstance(error, StopIteration):
                running -= 1
            elif error is not None:
                raise error
            else:
                yield item  # type: ignore[misc]  # an item comes without an error
    finally:
        stop.set()
        for thread in threads if wait else ():
            thread.join()
