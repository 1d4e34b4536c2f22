"""atroposlib's own API tests, from the installed package, against our API server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parent / "environment_stand_ins"


@pytest.mark.parametrize(
    ("module", "tests"),
    [("test_api_legacy", 3), ("test_api_compression", 7), ("test_api_messages_handling", 20)],
)
def test_an_atropos_client_finds_what_atropos_promises(module: str, tests: int, tmp_path: Path) -> None:
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "atropos_api_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "--pyargs", f"atroposlib.tests.{module}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed.group(1)) >= tests
