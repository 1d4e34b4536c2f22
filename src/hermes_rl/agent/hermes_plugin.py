"""The Hermes Agent plugin. Loaded by Hermes, in its process, through the entry point group
``hermes_agent.plugins`` once its configuration enables it::

    plugins:
      enabled: [hermes-rl]

Each Hermes conversation has a selection of its own. A conversation that goes on under a new id, as Hermes
does when it compresses the history, and a sub-agent begin with their parent's selection.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import TOOLS, call

TOOLSET = "rl"
_MOST_SESSIONS = 1000

logger = logging.getLogger(__name__)


class Conversations:
    """The sessions of a Hermes process, by Hermes's session id.

    Args:
        parent_of: gives the id of the conversation that another one goes on from, or None.
    """

    def __init__(self, parent_of: Callable[[str], str | None]) -> None:
        self._parent_of = parent_of
        self._sessions: dict[str, AgentSession] = {}
        self._lock = threading.Lock()

    def session(self, session_id: str) -> AgentSession:
        """The session of a conversation; a new one begins as its parent stands."""
        with self._lock:
            found = self._sessions.pop(session_id, None)
            if found is None:
                parent = self._sessions.get(self._parent_of(session_id) or "")
                found = parent.fork() if parent else AgentSession(patience=0)
            self._sessions[session_id] = found
            while len(self._sessions) > _MOST_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            return found


def _parent_in_hermes(session_id: str) -> str | None:
    """What Hermes's own store of conversations says."""
    if not session_id:
        return None
    try:
        from hermes_state import SessionDB  # type: ignore[import-not-found]

        row = SessionDB().get_session(session_id)
    except Exception:  # another version of Hermes: the conversation begins afresh
        logger.debug("The parent of conversation %s is not known.", session_id, exc_info=True)
        return None
    return row.get("parent_session_id") if row else None


def _handler(conversations: Conversations, name: str) -> Callable[..., str]:
    def handle(arguments: dict[str, Any] | None = None, **context: Any) -> str:
        session = conversations.session(str(context.get("session_id") or ""))
        return json.dumps(call(session, name, arguments or {}), ensure_ascii=False)

    return handle


def register(context: Any) -> None:
    """Called by Hermes: register every ``rl_*`` tool.

    Args:
        context: Hermes's ``PluginContext``.
    """
    conversations = Conversations(_parent_in_hermes)
    for tool in TOOLS.values():
        context.register_tool(
            name=tool.name,
            toolset=TOOLSET,
            schema={"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            handler=_handler(conversations, tool.name),
            description=tool.description,
            emoji="🏋️",
        )
