"""Numbers recorded from other implementations, reproduced through the public Python door."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden.replay import replay

from fedbench.engines.choice import EngineName

HERE = Path(__file__).parent
SHIPPED = sorted(path.parent for path in (HERE / "golden").glob("*/case.json"))
ALL = Path(os.environ.get("FEDBENCH_GOLDEN", HERE.parents[1] / "shared" / "golden"))
FURTHER = sorted(p.parent for p in ALL.glob("*/case.json") if not (HERE / "golden" / p.parent.name).exists())


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
@pytest.mark.parametrize("folder", [*SHIPPED, *FURTHER], ids=lambda folder: folder.name)
def test_recorded_numbers_come_out(folder: Path, engine: EngineName) -> None:
    comparison = replay(folder, engine)
    assert comparison.mismatches == []
    assert comparison.compared > 0


@pytest.mark.skipif(not FURTHER, reason=f"the large cases are not here; set FEDBENCH_GOLDEN to their folder ({ALL})")
def test_large_cases_are_replayed_too() -> None:
    assert {"fedproto_cnn_taskheter", "fedproto_cnn_modelheter"} <= {folder.name for folder in FURTHER}


def test_replay_reports_a_wrong_number(tmp_path: Path) -> None:
    source = HERE / "golden" / "local_mlp"
    (tmp_path / "case.json").write_bytes((source / "case.json").read_bytes())
    with np.load(source / "arrays.npz") as stored:
        arrays = dict(stored)
    arrays["r2/local_1/fc1.weight"] = arrays["r2/local_1/fc1.weight"] + 2e-9
    np.savez(tmp_path / "arrays.npz", allow_pickle=False, **arrays)
    done = subprocess.run(
        [sys.executable, HERE / "golden" / "replay.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "r2/local_1/fc1.weight: off by 2e-09" in done.stdout
