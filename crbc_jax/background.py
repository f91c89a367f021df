"""A thread for what waits on engine and environments, and signals as a flag."""

import asyncio
import concurrent.futures
import os
import signal
import threading
from collections.abc import Coroutine
from typing import Any

_POLL_SECONDS = 0.1


class Interrupted(Exception):
    """A signal asked the run to stop.

    Attributes:
        signal_number: SIGINT or SIGTERM.
    """

    def __init__(self, signal_number: int):
        super().__init__(f"signal {signal_number}")
        self.signal_number = signal_number


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a flag; a second one acts at once."""

    def __init__(self):
        self.number = 0  # Of the signal that came; 0 while none has.

    def __enter__(self) -> "StopSignal":
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame) -> None:
        self.number = number
        self.__exit__()
        # Straight to the terminal: what the main thread was doing may hold the streams.
        os.write(2, b"\nstopping as soon as this stage is saved; again stops at once\n")


class Background:
    """An event loop in a thread of its own, where engine and environments live.

    There a collection can run beside an update, while the main thread hears signals.
    """

    def __init__(self, stop: StopSignal):
        self._stop = stop

    def __enter__(self) -> "Background":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, work: Coroutine) -> concurrent.futures.Future:
        """Begins `work` and returns at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def finish(self, future: concurrent.futures.Future) -> Any:
        """Waits for what `start` began; cancels it if the run is asked to stop.

        Raises:
            Interrupted: after the cancelled work has cleaned up.
        """
        while not future.done():
            concurrent.futures.wait([future], timeout=_POLL_SECONDS)
            if self._stop.number and not future.done():
                self.cancel(future)
                raise Interrupted(self._stop.number)
        return future.result()

    def cancel(self, future: concurrent.futures.Future) -> None:
        """Ends what `start` began; returns when it has cleaned up."""
        future.cancel()
        self.run(_others_ended())

    def run(self, work: Coroutine) -> Any:
        """Runs `work` to its end, whatever signal comes."""
        return self.start(work).result()


async def _others_ended() -> None:
    """Returns when every other task of the loop has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
