"""What a reader loses if this fails: tables that say what the code does now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hermes_rl.config import Policy

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_tables_are_those_of_the_code() -> None:
    answer = subprocess.run(
        [sys.executable, str(DOCS / "write_tables.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert answer.returncode == 0, f"{answer.stdout}{answer.stderr}run: python docs/write_tables.py"


def test_the_example_of_a_policy_is_a_policy() -> None:
    import tomllib

    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert example is not None
    Policy.model_validate(tomllib.loads(example[1]))
