"""Tables in README.md, each between two markers."""

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

README = Path(__file__).with_name("README.md")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table whose first `words` columns are text and whose others are numbers."""
    lines = [head, ["---" if column < words else "---:" for column in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """Return the machine and the versions in one line."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    cpu = names[0].partition(":")[2].strip() if names else platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cpu}, {len(names) or '?'} cores{gpu}; Python {platform.python_version()}, torch {torch.__version__}"


def write(name: str, text: str) -> None:
    """Replace what stands in README.md between <!-- name --> and <!-- /name -->; raises ValueError without these."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = README.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{README} has no place for '{name}'")
    README.write_text(f"{before}{begin}{text.strip()}\n{end}{after}", encoding="utf-8")
