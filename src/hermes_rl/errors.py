"""The one exception hierarchy: every error a user can act on.

Each error says what was wrong, what is allowed and what to do about it. The command line prints it
without a traceback; the ``rl_*`` functions turn it into a dict.
"""

from __future__ import annotations

from typing import Any


class HermesRLError(Exception):
    """An error with a message for a person.

    Args:
        message: what was wrong, with the offending value.
        allowed: what would have been accepted, when that can be said.
        hint: what to do next.
    """

    def __init__(self, message: str, *, allowed: Any = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.allowed = allowed
        self.hint = hint

    def as_dict(self) -> dict[str, Any]:
        """The error as the ``rl_*`` functions return it."""
        out: dict[str, Any] = {"error": self.message}
        if self.allowed is not None:
            out["allowed"] = self.allowed
        if self.hint is not None:
            out["hint"] = self.hint
        return out

    def __str__(self) -> str:
        parts = [self.message]
        if self.allowed is not None:
            shown = self.allowed
            if isinstance(shown, list | tuple | set):
                shown = ", ".join(str(item) for item in shown)
            parts.append(f"Allowed: {shown}.")
        if self.hint is not None:
            parts.append(self.hint)
        return " ".join(parts)


class ConfigError(HermesRLError):
    """A field, value or file of the configuration was refused."""


class UnknownEnvironmentError(HermesRLError):
    """No environment of that name was found, or its file cannot be used."""


class EnvironmentFailedError(HermesRLError):
    """An environment raised, hung or returned something unusable."""


class WorkspaceError(HermesRLError):
    """The workspace folder is missing, unwritable or of another version."""


class UnknownRunError(HermesRLError):
    """No run of that id in this workspace."""


class RunFailedError(HermesRLError):
    """A run ended with a reason other than success."""


class EngineError(HermesRLError):
    """The local engine could not start or does not answer."""


class ServiceError(HermesRLError):
    """A server that a process talks to is gone or answered nonsense."""


class SearchError(HermesRLError):
    """A search cannot start, go on or be found."""


class TrialRefusedError(SearchError):
    """One trial of a search cannot be started, for a reason that the others do not share."""
