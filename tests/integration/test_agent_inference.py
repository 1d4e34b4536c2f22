"""What an agent loses if these fail: knowing before a run whether an environment works on a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.scripted_model import ScriptedCompletions, served
from tests.integration.short_runs import end_everything

from hermes_rl.agent.environment_trial import TrialReport, verdict
from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import call
from hermes_rl.config import Workspace

KEY = "sk-a-key-of-the-operator"


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    found = Workspace.resolve(tmp_path / "workspace")
    yield found
    end_everything(found)


def test_base_model_and_another_endpoint_side_by_side(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPERATORS_KEY", KEY)
    model = ScriptedCompletions(["12", "I do not know", "100"])
    with served(model) as url:
        (workspace.root / "policy.toml").write_text(
            f'[models.other]\nbase_url = "{url}"\nmodel_name = "scripted"\napi_key_env = "OPERATORS_KEY"\n'
        )
        session = AgentSession(workspace)
        found = call(
            session,
            "rl_test_inference",
            {"models": ["base", "other"], "num_steps": 2, "group_size": 6, "wait_seconds": 240},
        )
    assert found["state"] == "completed", found
    assert found["environment"] == "arithmetic_tinker"
    for name in ("base", "other"):
        report = found["models"][name]
        assert report["works"], report
        assert (report["groups"], report["rollouts"]) == (2, 12)
        assert [len(scores) for scores in report["scores"]] == [6, 6]
        assert "of 2 groups" in report["verdict"]
        assert report["examples"][0]["prompt"]
    assert model.keys == {KEY}
    texts = {item["text"] for item in found["models"]["other"]["examples"][0]["completions"]}
    assert any("I do not know" in text for text in texts)
    for path in workspace.root.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


def test_a_missing_key_and_a_dead_endpoint_are_said(workspace: Workspace) -> None:
    assert "NOBODYS_KEY" not in os.environ
    (workspace.root / "policy.toml").write_text(
        '[models.keyless]\nbase_url = "http://127.0.0.1:9/v1"\nmodel_name = "m"\n'
        'api_key_env = "NOBODYS_KEY"\n'
    )
    session = AgentSession(workspace)
    found = call(session, "rl_test_inference", {"models": ["keyless"], "num_steps": 1, "wait_seconds": 240})
    report = found["models"]["keyless"]
    assert not report["works"]
    assert "NOBODYS_KEY" in report["hint"]


@pytest.mark.parametrize("place", ["setup", "get_next_item"])
def test_an_environment_that_raises_is_said_without_its_key(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("OPERATORS_PASS", KEY)  # a name that tells nothing
    source = workspace.environments / "fails.py"
    source.write_text(
        "from atroposlib.envs.base import BaseEnv, BaseEnvConfig\n\n\n"
        "class FailsConfig(BaseEnvConfig):\n    judge_api_key: str = ''\n\n\n"
        "class Fails(BaseEnv):\n    name = 'fails'\n    env_config_cls = FailsConfig\n\n"
        "    @classmethod\n    def config_init(cls):\n        return FailsConfig(), []\n\n"
        "    def fail(self):\n        server = self.server.servers[0]\n"
        "        keys = server.config.api_key, self.config.judge_api_key\n"
        "        raise RuntimeError(f'no data here for {keys}')\n\n"
        "    async def evaluate(self): ...\n\n"
        "    async def setup(self): ...\n\n"
        "    async def get_next_item(self): ...\n\n"
        f"    async def {place}(self):\n        self.fail()\n"
    )
    session = AgentSession(workspace)
    assert "error" not in call(session, "rl_select_environment", {"name": "fails"})
    with served(ScriptedCompletions(["1"])) as url:
        (workspace.root / "policy.toml").write_text(
            f'[models.other]\nbase_url = "{url}"\nmodel_name = "scripted"\napi_key_env = "OPERATORS_PASS"\n'
            '[own_fields.fails.judge_api_key]\nvalue = "sk-a-key-of-the-judge"\n'
        )
        found = call(session, "rl_test_inference", {"models": ["other"], "num_steps": 1, "wait_seconds": 240})
    report = found["models"]["other"]
    said = report["error"] if place == "setup" else report["problems"][0]
    assert "no data here for ('<secret>', '<secret>')" in said
    for path in Path(found["folder"]).rglob("*"):
        if path.is_file():
            assert KEY not in path.read_text(), path
            assert path.name == "run.yaml" or "sk-a-key-of-the-judge" not in path.read_text(), path


class Letters:
    """A tokenizer of letters, whose last token ends a turn."""

    eos_token_id = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(96 + token) if token else "." for token in tokens)


def test_the_verdict_names_what_is_wrong() -> None:
    def report(*scores: list[float], cut: bool = False) -> dict:
        trial = TrialReport(Letters(), 2, 64)
        for pair in scores:
            tokens = [[1, 2, 3, 5 if cut else 0]] * 2
            trial.add({"tokens": tokens, "masks": [[-100, -100, 3, 0]] * 2, "scores": pair}, 1.0)
        return trial.as_dict()

    teaching = report([0.0, 1.0], [0.0, 0.0])
    assert teaching["groups_that_teach"] == 1
    assert teaching["examples"][0] == {
        "prompt": "ab",
        "completions": [
            {"text": "c.", "score": 1.0, "truncated": False},
            {"text": "c.", "score": 0.0, "truncated": False},
        ],
    }
    assert "wrong" in report([0.0, 0.0])["verdict"]
    assert "right" in report([1.0, 1.0])["verdict"]
    assert "length limit" in report([0.0, 1.0], cut=True)["verdict"]
    nothing = report()
    assert not nothing["works"]
    assert "no usable group" in verdict(nothing)
