"""`everstep data`: look at token files, check them, write them in another format."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dataloader.convert import Report, Source, convert, usual_type
from dataloader.errors import UsageError
from dataloader.formats.token_file import size_of


def inspect(arguments: argparse.Namespace) -> int:
    source = Source(arguments.path, arguments.type, arguments.column)
    if source.mds is not None:
        print(f"mds: {source.mds.samples:,} samples, tokens in column {source.mds.column!r}")
        return 0
    file = source.file
    assert file is not None
    documents = "" if file.ends is None else f" in {file.ends.count:,} documents"
    print(f"{source.format}: {file.tokens:,} ids of type {source.type}{documents}; {size_of(file.path):,} bytes")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    source = Source(arguments.path, arguments.type, arguments.column)
    with _progress("verify", source) as report:
        found = source.verify(report)
    documents = "" if source.file is not None and source.file.ends is None else f" in {found.documents:,} documents"
    print(f"{source.format}: all is well: {found.tokens:,} ids{documents}, the largest {found.largest_id:,}")
    return 0


def convert_to(arguments: argparse.Namespace) -> int:
    source = Source(arguments.path, arguments.type, arguments.column)
    if arguments.end_of_text is not None and (source.mds is not None or (source.file and source.file.ends)):
        raise UsageError("--end-of-text: this format knows its documents; leave it out")
    dtype = arguments.to_type or usual_type(arguments.to, source.type)
    with _progress("convert", source) as report:
        written = convert(source.documents(arguments.end_of_text), arguments.to, arguments.out, dtype, report)
    documents = "" if written.ends is None else f" in {written.ends.count:,} documents"
    print(f"{written.path}: {written.format}, {written.tokens:,} ids of type {dtype}{documents}")
    return 0


@contextmanager
def _progress(what: str, source: Source) -> Iterator[Report]:
    total = None if source.file is None else source.file.tokens
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, begun = bar.add_task(what, total=total, rate=""), time.monotonic()

        def report(tokens: int) -> None:
            rate = tokens / max(1e-3, time.monotonic() - begun)
            bar.update(task, completed=tokens, rate=f"{tokens / 1e6:,.1f}M tokens, {rate / 1e6:,.1f}M/s")

        yield report
