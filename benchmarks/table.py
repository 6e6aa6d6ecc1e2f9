"""Makes a Markdown table of what `pytest benchmarks --benchmark-json=FILE` wrote.

python benchmarks/table.py FILE [--write]
"""

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import readme


def tables(file: Path) -> str:
    """Return a table for each group of benchmarks."""
    found = json.loads(file.read_text(encoding="utf-8"))
    parts = [f"{found['datetime'][:10]}, {readme.machine()}, one thread; medians."]
    ones = sorted(found["benchmarks"], key=lambda one: one["group"])  # keeps the order within each
    for group, members in groupby(ones, key=lambda one: one["group"]):
        of_group = list(members)
        facts = list(of_group[0]["extra_info"])
        rows = [
            [_name(one), _short(one["stats"]["median"]), *(_short(one["extra_info"][f]) for f in facts)]
            for one in of_group
        ]
        parts.append(readme.table([group, "s", *(fact.replace("_", " ") for fact in facts)], rows))
    return "\n\n".join(parts)


def _name(one: dict[str, Any]) -> str:
    return str(one["param"] or one["name"].removeprefix("test_"))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    given = parser.parse_args()
    text = tables(given.file)
    print(text)
    if given.write:
        readme.write("speed", text)


if __name__ == "__main__":
    main()
