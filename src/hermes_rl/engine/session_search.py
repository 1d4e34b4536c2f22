"""The REST client's search over sessions: filters, newest first, in pages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError
from tinker.types import SessionSearchRequest

from hermes_rl.engine.service import Session
from hermes_rl.engine.wire import RequestError

OWNER = "local"
PROJECT = "local"
"""This engine has one owner and one project; the protocol wants names for them."""


def search_sessions(sessions: Iterable[Session], body: dict[str, Any]) -> tuple[list[Session], Any]:
    """A page of the sessions that a request asks for, and the cursor of the next one (or None).

    Raises:
        RequestError: the request is not a session search.
    """
    try:
        wanted = SessionSearchRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    found = sorted((session for session in sessions if _matches(session, wanted)), key=_place, reverse=True)
    if wanted.cursor is not None:
        after = (wanted.cursor.last_created_at.timestamp(), wanted.cursor.last_session_id)
        found = [session for session in found if _place(session) < after]
    page = found[: wanted.limit]
    if len(found) <= len(page):
        return page, None
    last = page[-1]
    created = datetime.fromtimestamp(last.created, UTC).isoformat()
    return page, {"last_created_at": created, "last_session_id": last.session_id}


def session_status(session: Session) -> dict[str, Any] | None:
    """The protocol's word for where a session is; None where it went silent."""
    if not session.finished:
        return {"type": "active"}
    if session.finish_reason is None:
        return None
    return {"type": "client_finished", "reason": {"type": session.finish_reason}}


def _place(session: Session) -> tuple[float, str]:
    # to the microsecond, as the cursor's text has it
    return round(session.created, 6), session.session_id


def _matches(session: Session, wanted: SessionSearchRequest) -> bool:
    if wanted.project_ids and PROJECT not in wanted.project_ids:
        return False
    if wanted.owner.type == "user" and OWNER not in wanted.owner.owner_urns:
        return False
    given = session.user_metadata or {}
    if any(given.get(key) != value for key, value in wanted.user_metadata.items()):
        return False
    if wanted.session_id is not None or wanted.display_name is not None:
        name = (session.display_name or "").lower()
        words = (wanted.display_name or "").lower().split()
        named = bool(words) and all(word in name for word in words)
        if session.session_id != wanted.session_id and not named:
            return False
    return wanted.statuses is None or any(_has_status(session, status) for status in wanted.statuses)


def _has_status(session: Session, wanted: Any) -> bool:
    status = session_status(session)
    if status is None or status["type"] != wanted.type:
        return False
    reasons = getattr(wanted, "reasons", None)
    return reasons is None or session.finish_reason in reasons
