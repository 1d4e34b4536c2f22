"""Model profiles: the defaults that go with a base model.

``qwen3-8b`` and ``qwen3-8b-local`` carry the published defaults for Qwen3-8B unchanged. ``embedded``,
the default, differs only where the small embedded model must differ: model, tokenizer, lengths,
number of steps, and a ``lora_alpha`` with which the same learning rates are the right order of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.errors import ConfigError


def packaged_data_dir(*parts: str) -> Path:
    """A folder that ships with the package: from the checkout when there is one, else from the wheel.

    Args:
        parts: ``("models", "embedded")`` or ``("environments",)``.
    """
    package = Path(__file__).resolve().parents[1]
    in_wheel = package / "_data" / Path(*parts)
    if in_wheel.exists():
        return in_wheel
    checkout = package.parents[1]
    if parts[0] == "environments":
        return checkout / "tinker-atropos" / "tinker_atropos" / "environments"
    return checkout / Path(*parts)


def embedded_model_dir() -> Path:
    """Folder of the base model that ships with hermes-rl (Hugging Face format)."""
    return packaged_data_dir("models", "embedded")


@dataclass(frozen=True)
class Profile:
    """Defaults that go with one base model.

    Attributes:
        name: what ``--profile`` takes.
        description: one line for listings.
        values: field name → default that replaces the catalogue's.
        costs_money: whether a run under this profile is billed by a service.
    """

    name: str
    description: str
    values: dict[str, Any] = field(default_factory=dict)
    costs_money: bool = False


EMBEDDED_LORA_ALPHA = 128.0
EMBEDDED_TOTAL_STEPS = 50


def _embedded() -> Profile:
    folder = str(embedded_model_dir())
    return Profile(
        name="embedded",
        description="The small model that ships with hermes-rl, on this machine: no GPU, account or network.",
        values={
            "base_model": folder,
            "base_url": "local",
            "tokenizer_name": folder,
            "model_name": folder,
            "total_steps": EMBEDDED_TOTAL_STEPS,
            "max_token_length": 512,
            "max_token_trainer_length": 512,
            "lora_alpha": EMBEDDED_LORA_ALPHA,
        },
    )


_QWEN3_8B: dict[str, Any] = {
    "base_model": "Qwen/Qwen3-8B",
    "tokenizer_name": "Qwen/Qwen3-8B",
    "model_name": "Qwen/Qwen3-8B",
}

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        _embedded(),
        Profile(
            name="qwen3-8b",
            description="Qwen3-8B on the Tinker cloud service (needs TINKER_API_KEY; billed by Tinker).",
            values={**_QWEN3_8B, "base_url": None},
            costs_money=True,
        ),
        Profile(
            name="qwen3-8b-local",
            description="Qwen3-8B on this machine's engine (needs a GPU with about 24 GB).",
            values={**_QWEN3_8B, "base_url": "local"},
        ),
    )
}
DEFAULT_PROFILE = "embedded"
DEFAULT_ENVIRONMENT = "arithmetic_tinker"
"""Trained on when nobody chooses an environment; the embedded model can improve at it."""


def find_profile(name: str) -> Profile:
    """The profile called ``name``.

    Raises:
        ConfigError: there is none of that name.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise ConfigError(
            f"There is no profile called {name!r}.",
            allowed=sorted(PROFILES),
            hint="Choose one of these with --profile.",
        ) from None
