"""Everything that a change must pass: formatting, lint, types and tests.

python tests/check.py [ARGUMENT OF PYTEST ...]
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKS = (["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"], ["pytest", *sys.argv[1:]])


def main() -> None:
    """Run all checks, also after one that fails; exit with 1 if any did."""
    failed = []
    for check in CHECKS:
        print("$", *check, flush=True)
        # -P: what is tested is the installed package, not whatever the working directory holds.
        if subprocess.run([sys.executable, "-P", "-m", *check], cwd=ROOT).returncode:
            failed.append(check[0])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
