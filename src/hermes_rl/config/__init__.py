"""Configuration: the catalogue of fields, model profiles, the workspace and a run's YAML."""

from hermes_rl.config.catalogue import FIELDS, CatalogueField, check_value, find_field, without_secrets
from hermes_rl.config.policy import (
    FieldInForce,
    FieldRule,
    ModelEndpoint,
    Policy,
    fields_in_force,
    load_policy,
    policy_path,
    read_policy,
)
from hermes_rl.config.profiles import (
    DEFAULT_ENVIRONMENT,
    DEFAULT_PROFILE,
    PROFILES,
    Profile,
    embedded_model_dir,
    find_profile,
)
from hermes_rl.config.runfile import (
    RunConfig,
    build_run_config,
    check_together,
    new_run_id,
    read_overrides,
    write_private,
)
from hermes_rl.config.sections import EnvSection, OpenAISection, RunSection, TinkerSection
from hermes_rl.config.workspace import Role, Workspace, checked_name

__all__ = [
    "DEFAULT_ENVIRONMENT",
    "DEFAULT_PROFILE",
    "FIELDS",
    "PROFILES",
    "CatalogueField",
    "EnvSection",
    "FieldInForce",
    "FieldRule",
    "ModelEndpoint",
    "OpenAISection",
    "Policy",
    "Profile",
    "Role",
    "RunConfig",
    "RunSection",
    "TinkerSection",
    "Workspace",
    "build_run_config",
    "check_together",
    "check_value",
    "checked_name",
    "embedded_model_dir",
    "fields_in_force",
    "find_field",
    "find_profile",
    "load_policy",
    "new_run_id",
    "policy_path",
    "read_overrides",
    "read_policy",
    "without_secrets",
    "write_private",
]
