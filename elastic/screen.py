"""Where a viewer shows a run: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

from elastic.view import RunView, event_line, event_text, record_line


class Screen(Protocol):
    def __enter__(self) -> Screen: ...
    def __exit__(self, *_: object) -> None: ...
    def record(self, record: Mapping[str, Any]) -> None: ...
    def event(self, event: Mapping[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def refresh(self) -> None: ...


class LiveScreen:
    """The live picture at the bottom of a terminal; events scroll by above it."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._live = Live(view, console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self._live.stop()

    def record(self, record: Mapping[str, Any]) -> None:
        """Shown by the picture."""

    def event(self, event: Mapping[str, Any]) -> None:
        self._live.console.print(event_text(event))

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def refresh(self) -> None:
        self._live.refresh()


class PlainScreen:
    """One line per step and per event, for pipes and files."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def record(self, record: Mapping[str, Any]) -> None:
        self.say(record_line(record, self._view.steps))

    def event(self, event: Mapping[str, Any]) -> None:
        self.say(event_line(event))

    def say(self, text: str) -> None:
        print(text, flush=True)

    def refresh(self) -> None:
        """Lines are written as they come."""


def screen_for(view: RunView) -> Screen:
    console = Console()
    return LiveScreen(view, console) if console.is_terminal else PlainScreen(view)
