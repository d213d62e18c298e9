"""The terminal: tables and lines in which a name is only ever a name."""

from __future__ import annotations

import logging
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mopd.base.text import visible


class Terminal(Console):
    """rich's console for dynamic text: no markup (``math[/hard]``), no emoji codes, no colours of its own, no control
    characters.

    Every text that rich lays out (cells, headings, titles, lines) passes ``render_str``. Styles go with ``Text``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects; text that does not fit a table's cell goes on in its next line, where rich would cut it."""
        for table in objects:
            if isinstance(table, Table):
                for column in table.columns:
                    column.overflow = "fold"
        super().print(*objects, **options)


def make_table(*headings: str | Text, **options: Any) -> Table:
    """Make a table whose first column holds names and whose others hold numbers, right-aligned and on one line."""
    table = Table(**options)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


class LogFormatter(logging.Formatter):
    """Formatter that removes control characters; tracebacks keep their lines."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), keep="\n\t")


def log_to_terminal() -> None:
    """Send mopd's messages to standard error; other libraries' only from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("mopd").setLevel(logging.INFO)
