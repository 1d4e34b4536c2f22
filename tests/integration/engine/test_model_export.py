"""A trained run's model leaves the workspace in the forms that others load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import find

TINY = {"group_size": 4, "batch_size": 8, "num_requests_for_eval": 16, "steps_per_eval": 0, "total_steps": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[tuple[Workspace, str, str]]:
    """A workspace, a run of two steps in it, and the run's base model."""
    workspace = Workspace.resolve(tmp_path_factory.mktemp("export"))
    config = build_run_config(find(workspace.environments_dirs, "arithmetic_tinker"), overrides=TINY)
    run_id = runs.start(workspace, config)
    assert runs.wait(workspace, run_id, timeout=240).status == "completed"
    yield workspace, run_id, config.tinker.base_model
    for engine in list_engines(workspace):
        stop_engine(workspace, engine.key)


def export(workspace: Workspace, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hermes_rl", "model", "export", *map(str, arguments)]
    command += ["--workspace", str(workspace.root)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(3, 40)[None]).logits


def test_a_run_becomes_an_adapter_and_a_whole_model(trained, tmp_path: Path) -> None:
    workspace, _, base_model = trained
    for target, option in (("adapter", []), ("merged", ["--merge"])):
        done = export(workspace, "latest", *option, "--out", tmp_path / target)
        assert done.returncode == 0, done.stderr
    base = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    before = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not torch.allclose(before, adapted)
    torch.testing.assert_close(logits(merged), adapted, atol=2e-4, rtol=2e-4)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) > 0


def test_what_cannot_be_exported_is_said(trained, tmp_path: Path) -> None:
    workspace, run_id, _ = trained
    unknown = export(workspace, f"{run_id}@7", "--out", tmp_path / "there")
    assert unknown.returncode == 2
    assert f"{run_id}@2" in unknown.stderr
    (tmp_path / "taken").mkdir()
    taken = export(workspace, run_id, "--out", tmp_path / "taken")
    assert taken.returncode == 2
    assert "exists already" in taken.stderr
