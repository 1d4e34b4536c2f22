"""What an operator loses if these fail: the say over what an agent may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_rl.config import (
    FIELDS,
    CatalogueField,
    Policy,
    Workspace,
    fields_in_force,
    load_policy,
    read_policy,
)
from hermes_rl.errors import ConfigError

OWN = CatalogueField("digits", "env", "int", False, 2, "Digits.", minimum=1, maximum=6, own=True)


def policy(**fields: dict[str, Any]) -> Policy:
    return Policy.model_validate({"fields": fields})


def test_without_a_policy_the_catalogue_holds() -> None:
    fields = fields_in_force("embedded", Policy())
    assert {name for name, item in fields.items() if item.field.locked} == {
        name for name, field in FIELDS.items() if field.locked and (field.section != "run" or name == "seed")
    }
    assert fields["learning_rate"].source == "default"
    assert fields["total_steps"].source == "profile"


def test_a_value_is_fixed_and_locked_unless_it_is_unlocked() -> None:
    fields = fields_in_force("embedded", policy(lora_rank={"value": 16}))
    assert (fields["lora_rank"].value, fields["lora_rank"].source) == (16, "policy")
    assert fields["lora_rank"].field.locked
    fields = fields_in_force("embedded", policy(lora_rank={"value": 16, "locked": False}))
    assert not fields["lora_rank"].field.locked


def test_a_range_is_narrowed_and_never_widened() -> None:
    narrowed = policy(learning_rate={"minimum": 1e-5, "maximum": 1e-4}).field(FIELDS["learning_rate"])
    assert (narrowed.minimum, narrowed.maximum) == (1e-5, 1e-4)
    with pytest.raises(ConfigError, match="learning_rate"):
        policy(learning_rate={"maximum": 5.0})
    with pytest.raises(ConfigError, match="batch_size"):
        policy(batch_size={"minimum": 0})


def test_a_locked_field_can_be_unlocked_within_bounds() -> None:
    field = policy(total_steps={"locked": False, "maximum": 200}).field(FIELDS["total_steps"])
    assert not field.locked
    assert field.maximum == 200


def test_the_edit_wins_over_the_policy_and_the_policy_over_the_profile() -> None:
    rules = policy(max_token_length={"value": 128}, batch_size={"value": 32, "locked": False})
    fields = fields_in_force("embedded", rules, edits={"batch_size": 64})
    assert (fields["max_token_length"].value, fields["max_token_length"].source) == (128, "policy")
    assert (fields["batch_size"].value, fields["batch_size"].default) == (64, 32)
    assert fields["batch_size"].source == "edit"


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rat": {"locked": True}},
        {"learning_rate": {"value": "fast"}},
        {"learning_rate": {"value": 1e-3, "maximum": 1e-4}},
        {"learning_rate": {"minimum": 1e-3, "maximum": 1e-4}},
        {"learning_rate": {"maximum": float("nan")}},
        {"learning_rate": {"lockd": True}},
        {"wandb_name": {"minimum": 1}},
        {"batch_size": {"choices": []}},
        {"batch_size": {"choices": [16, "many"]}},
        {"run_id": {"value": "mine"}},
    ],
)
def test_a_policy_that_means_nothing_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError)):
        Policy.model_validate({"fields": fields})


def test_bounds_that_leave_out_the_default_need_a_value() -> None:
    with pytest.raises(ConfigError, match="leave out its default"):
        fields_in_force("embedded", policy(learning_rate={"minimum": 1e-4}))
    fields_in_force("embedded", policy(learning_rate={"minimum": 1e-4, "value": 2e-4}))


def test_the_environments_own_fields_have_rules_of_their_own() -> None:
    rules = Policy.model_validate({"own_fields": {"sums": {"digits": {"value": 3}}}})
    fields = fields_in_force("embedded", rules, environment="sums", own_fields=[OWN])
    assert (fields["digits"].value, fields["digits"].field.locked) == (3, True)
    with pytest.raises(ConfigError, match="does not have: digits"):
        fields_in_force("embedded", rules, environment="sums", own_fields=[])
    other = fields_in_force("embedded", rules, environment="other", own_fields=[OWN])
    assert other["digits"].source == "default"
    wrong = Policy.model_validate({"own_fields": {"sums": {"digit": {"value": 3}}}})
    with pytest.raises(ConfigError, match="does not have"):
        fields_in_force("embedded", wrong, environment="sums", own_fields=[OWN])


def test_only_the_profiles_the_operator_names_can_be_chosen() -> None:
    assert Policy().allowed_profiles == ["embedded"]
    rules = Policy.model_validate({"profile": "qwen3-8b-local", "profiles": ["embedded"]})
    assert rules.allowed_profiles == ["qwen3-8b-local", "embedded"]
    with pytest.raises(ConfigError, match="gpt"):
        Policy.model_validate({"profiles": ["gpt"]})


def test_a_damaged_policy_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path)
    assert load_policy(workspace) == Policy()
    path = tmp_path / "policy.toml"
    path.write_text("[fields.learning_rate\n")
    with pytest.raises(ConfigError, match=r"policy\.toml"):
        load_policy(workspace)
    path.write_text("[fields.learning_rate]\nmaximum = 9.0\n")
    with pytest.raises(ConfigError, match=r"policy\.toml.*learning_rate"):
        load_policy(workspace)
    path.write_text("colour = 'red'\n")
    with pytest.raises(ConfigError, match="colour"):
        read_policy(path)
    monkeypatch.setenv("HERMES_RL_POLICY", str(tmp_path / "elsewhere.toml"))
    with pytest.raises(ConfigError, match="elsewhere"):
        load_policy(workspace)


@pytest.mark.parametrize(
    "name", ["judge_api_key", "hf_token", "db_password", "data_path", "judge_url", "key"]
)
def test_an_environments_secrets_and_places_are_the_operators(name: str) -> None:
    field = CatalogueField(name, "env", "str", False, "x", "", own=True)
    assert Policy().field(field).locked
    unlocked = Policy.model_validate({"own_fields": {"sums": {name: {"locked": False}}}})
    assert not unlocked.field(field, "sums").locked


@pytest.mark.parametrize("name", ["digits", "max_tokens", "keyword", "profile_weight", "monkey"])
def test_an_environments_other_fields_may_be_changed(name: str) -> None:
    assert not Policy().field(CatalogueField(name, "env", "str", False, "x", "", own=True)).locked
