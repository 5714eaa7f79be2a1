"""What the sections told, gathered for gpu.json and laid out for gpu.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from costs import spread_text
from speed import table

from gpu.section import Json


@dataclass
class Found:
    """A section's results so far, as JSON wants them."""

    status: str = "ok"
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[Json]] = field(default_factory=dict)
    failures: list[Json] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def take(self, kind: str, content: object) -> None:
        """Add one message of a `Report`, cards apart."""
        if kind == "row":
            title, facts = content
            self.tables.setdefault(title, []).append(facts)
        else:
            {"note": self.notes, "failure": self.failures, "skipped": self.skipped}[kind].append(
                content
            )

    def end(self, seconds: float) -> None:
        """Say how it went."""
        self.seconds = round(seconds, 1)
        unmet = any(row.get("ok") is False for rows in self.tables.values() for row in rows)
        if self.failures or unmet:
            self.status = "failed"
        elif self.skipped:
            self.status = "partial"


def markdown(card: Json, found: Mapping[str, Found]) -> str:
    lines = ["# On the device", "", "Milliseconds: median (quartiles).", ""]
    states = [[name, part.status, f"{part.seconds:.0f}"] for name, part in found.items()]
    lines += table(["section", "status", "s"], states)
    for name, part in found.items():
        lines += ["", f"## {name}: {part.status}"]
        lines += [line for text in dict.fromkeys(part.notes) for line in ("", text)]
        for title, rows in part.tables.items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            body = [[cell(row.get(column, "")) for column in columns] for row in rows]
            lines += ["", f"### {title}", "", *table(columns, body)]
        if part.skipped:
            lines += ["", "Left out, for want of time: " + "; ".join(part.skipped) + "."]
        for failure in part.failures:
            lines += ["", f"Failed: {failure['case']}", "", "```"]
            lines += [str(failure["traceback"]).rstrip(), "```"]
    lines += ["", "## Card", "", *(f"- {key}: {value}" for key, value in card.items())]
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    """One cell of a table; three floats are a spread."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return spread_text(value) if isinstance(value, list | tuple) else str(value)
