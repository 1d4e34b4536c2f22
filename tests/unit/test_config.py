"""What a user loses if these fail: settings that are checked when they are set, with a way out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_rl.config import (
    FIELDS,
    PROFILES,
    CatalogueField,
    RunConfig,
    Workspace,
    build_run_config,
    check_value,
    checked_name,
    find_field,
    read_overrides,
)
from hermes_rl.errors import ConfigError, HermesRLError

ENVIRONMENT = SimpleNamespace(name="sums", file_path=Path("/somewhere/sums.py"), class_name="Sums")


def build(overrides: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    return build_run_config(ENVIRONMENT, overrides=overrides or {}, **options)


@pytest.mark.parametrize("profile", ["qwen3-8b", "qwen3-8b-local"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.00004),
        ("total_steps", 2500),
        ("steps_per_eval", 25),
        ("max_batches_offpolicy", 3),
        ("num_requests_for_eval", 256),
        ("inference_weight", 1.0),
        ("max_num_workers", 2048),
        ("lora_rank", 32),
        ("max_token_trainer_length", 9000),
    ],
)
def test_the_published_default_is_the_default_of_the_qwen_profiles(
    profile: str, name: str, value: float
) -> None:
    assert build(profile=profile).value(name) == value


def test_the_embedded_profile_changes_only_what_a_small_model_must_change() -> None:
    changed = set(PROFILES["embedded"].values)
    assert changed == {
        "base_model",
        "base_url",
        "tokenizer_name",
        "model_name",
        "total_steps",
        "max_token_length",
        "max_token_trainer_length",
        "lora_alpha",
    }


def test_nothing_that_costs_money_runs_by_default() -> None:
    assert build().tinker.base_url == "local"
    assert not PROFILES["embedded"].costs_money


def test_a_run_is_named_after_its_environment_and_the_time() -> None:
    name = build().env.wandb_name
    assert name is not None
    assert name.startswith("sums-20")
    assert build({"wandb_name": "mine"}).env.wandb_name == "mine"


@pytest.mark.parametrize(
    "name",
    ["total_steps", "max_token_trainer_length", "base_model", "tokenizer_name", "base_url", "server_type"],
)
def test_infrastructure_is_locked(name: str) -> None:
    assert FIELDS[name].locked


@pytest.mark.parametrize(
    "name",
    [
        "learning_rate",
        "batch_size",
        "lora_rank",
        "group_size",
        "steps_per_eval",
        "max_batches_offpolicy",
        "num_requests_for_eval",
        "inference_weight",
        "max_num_workers",
        "wandb_name",
        "wandb_project",
    ],
)
def test_hyperparameters_are_tunable(name: str) -> None:
    assert not FIELDS[name].locked


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("learning_rate", "6e-5", 6e-5),
        ("learning_rate", "0.00006", 0.00006),
        ("batch_size", "32", 32),
        ("batch_size", 32.0, 32),
        ("use_wandb", "true", True),
        ("loss_fn_config", '{"clip_low_threshold": 0.9}', {"clip_low_threshold": 0.9}),
        ("wandb_project", None, None),
        ("lora_rank", " 16 ", 16),
    ],
)
def test_unambiguous_spellings_are_understood(name: str, given_value: Any, value: Any) -> None:
    assert check_value(FIELDS[name], given_value) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "fast"),
        ("learning_rate", float("nan")),
        ("learning_rate", -1e-5),
        ("learning_rate", 2),
        ("learning_rate", True),
        ("batch_size", 16.5),
        ("batch_size", "1e400"),
        ("batch_size", 10**30),
        ("batch_size", [16]),
        ("batch_size", None),
        ("group_size", 1),
        ("use_wandb", 1),
        ("loss_fn", "pp0"),
        ("wandb_name", "a\x00b"),
        ("wandb_name", "x" * 1000),
        ("loss_fn_config", "{"),
        ("loss_fn_config", {"clip_low_threshold": None}),
        ("loss_fn_config", {"clip_low_threshold": "high"}),
        ("loss_fn_config", {"clip_low_threshold": [0.9]}),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_value(FIELDS[name], value)
    assert caught.value.allowed
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        (CatalogueField("operations", "env", "str", False, "+", "", pattern=r"^[+-]+$"), "+-", ""),
        (CatalogueField("name", "env", "str", False, "ab", "", min_length=2), "abc", "a"),
        (CatalogueField("width", "env", "int", False, 8, "", multiple_of=8), 24, 12),
    ],
)
def test_an_environments_own_rules_are_checked_when_its_field_is_set(
    field: CatalogueField, good: Any, bad: Any
) -> None:
    assert check_value(field, good) == good
    with pytest.raises(ConfigError):
        check_value(field, bad)


def test_a_typo_in_a_field_name_is_answered_with_the_closest_field() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        build({"learning_rat": 1e-5})


def test_a_field_in_the_wrong_section_says_which_is_right() -> None:
    with pytest.raises(ConfigError, match=r"tinker\.learning_rate"):
        build({"env.learning_rate": 1e-5})
    assert find_field("tinker.learning_rate").name == "learning_rate"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"group_size": 32}, "batch_size"),
        ({"batch_size": 20}, "multiple"),
        ({"max_token_length": 4096}, "max_token_trainer_length"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_together(
    overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        build(overrides)


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        build(profile="gpt")
    assert caught.value.allowed == sorted(PROFILES)


def test_the_run_file_gives_back_what_was_written(tmp_path: Path) -> None:
    config = build({"learning_rate": 6e-5, "batch_size": 32}, seed=3)
    path = tmp_path / "run.yaml"
    config.to_yaml(path)
    assert RunConfig.from_yaml(path) == config
    assert path.stat().st_mode & 0o077 == 0
    assert {"env", "openai", "tinker"} <= set(yaml.safe_load(path.read_text()))


def test_a_damaged_run_file_says_where(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("tinker: {learning_rate: fast}\n")
    with pytest.raises(ConfigError, match=r"tinker\.learning_rate"):
        RunConfig.from_yaml(path)
    path.write_text(": :")
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        RunConfig.from_yaml(path)


def test_overrides_are_read_flat_or_by_section(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    path.write_text("learning_rate: 6.0e-05\nenv: {batch_size: 32}\nopenai: [{num_requests_for_eval: 64}]\n")
    assert read_overrides(path) == {"learning_rate": 6e-5, "batch_size": 32, "num_requests_for_eval": 64}


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a\x00", "é", "x" * 200])
def test_no_name_leaves_the_workspace(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        checked_name(name)
    with pytest.raises(ConfigError):
        Workspace(tmp_path).run_dir(name)


def test_the_workspace_is_made_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_RL_WORKSPACE", str(tmp_path / "a b" / "ws"))
    workspace = Workspace.resolve()
    assert workspace.logs.is_dir()
    assert workspace.log_path("trainer", "r1").name == "trainer_r1.log"


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(FIELDS)) | st.text(max_size=30), value=_ANYTHING)
def test_any_edit_is_taken_or_refused_and_never_crashes(name: str, value: Any) -> None:
    config = None
    with suppress(HermesRLError):
        config = build({name: value})
    if config is not None:
        assert RunConfig.model_validate(config.model_dump(mode="json")) == config
