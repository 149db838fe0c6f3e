"""What Prometheus would have seen of a run: its targets found by file, each scraped again and again."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

SCRAPE_SECONDS = 0.05
Sample: TypeAlias = tuple[str, frozenset[tuple[str, str]]]  # name, labels
Scrape: TypeAlias = dict[Sample, float]


class Scraper:
    """Scrapes while the block runs. `scrapes`: by slot, in order."""

    def __init__(self, targets: Path) -> None:
        self.scrapes: dict[str, list[Scrape]] = {}
        self.runs: set[str] = set()  # whose targets they were said to be
        self.left: list[dict[str, Any]] = []  # targets, at the last look
        self._targets = targets
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._groups()

    def _run(self) -> None:
        while not self._ended.wait(SCRAPE_SECONDS):
            for group in self._groups():
                for target in group["targets"]:
                    with contextlib.suppress(OSError):  # an agent that is gone, or at its end
                        self.scrapes.setdefault(group["labels"]["slot"], []).append(scrape(target))

    def _groups(self) -> list[dict[str, Any]]:
        try:
            groups: list[dict[str, Any]] = json.loads(self._targets.read_bytes())
        except FileNotFoundError:
            return []
        self.runs |= {group["labels"]["run"] for group in groups}
        self.left = groups
        return groups


def scrape(target: str) -> Scrape:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(scraped: Scrape, name: str, **labels: str) -> float:
    return scraped[(name, frozenset(labels.items()))]


def names(scraped: Scrape) -> set[str]:
    return {name for name, _ in scraped}
