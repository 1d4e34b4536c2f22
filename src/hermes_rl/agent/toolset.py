"""The ``rl_*`` tools: name, arguments, work. Hermes, MCP and the Python functions all go through here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_rl.agent import arguments, configuring, inference_check, searching, training
from hermes_rl.agent.answers import answer
from hermes_rl.agent.arguments import Request, description_of, parameters_schema, parse
from hermes_rl.agent.session import AgentSession
from hermes_rl.errors import HermesRLError


@dataclass(frozen=True)
class Tool:
    """One function that an agent can call.

    Attributes:
        name: as the agent calls it.
        request: model of its arguments; its docstring describes the tool.
        work: does it.
        read_only: whether it changes nothing.
    """

    name: str
    request: type[Request]
    work: Callable[[AgentSession, Any], Mapping[str, Any]]
    read_only: bool = False

    @property
    def description(self) -> str:
        """What a language model reads."""
        return description_of(self.request)

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return parameters_schema(self.request)


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("rl_list_environments", arguments.ListEnvironments, configuring.list_environments, True),
        Tool("rl_select_environment", arguments.SelectEnvironment, configuring.select_environment),
        Tool("rl_get_current_config", arguments.GetCurrentConfig, configuring.get_current_config, True),
        Tool("rl_edit_config", arguments.EditConfig, configuring.edit_config),
        Tool("rl_test_inference", arguments.TestInference, inference_check.check_inference),
        Tool("rl_start_training", arguments.StartTraining, training.start_training),
        Tool("rl_check_status", arguments.CheckStatus, training.check_status, True),
        Tool("rl_stop_training", arguments.StopTraining, training.stop_training),
        Tool("rl_get_results", arguments.GetResults, training.get_results, True),
        Tool("rl_list_runs", arguments.ListRuns, training.list_runs, True),
        Tool("rl_start_search", arguments.StartSearch, searching.start_search),
        Tool("rl_check_search", arguments.CheckSearch, searching.check_search, True),
        Tool("rl_stop_search", arguments.StopSearch, searching.stop_search),
        Tool("rl_get_search_results", arguments.GetSearchResults, searching.get_search_results),
    )
}
"""Name → tool, in the order in which an agent uses them."""


def call(session: AgentSession, name: str, given: Any = None) -> dict[str, Any]:
    """Call a tool.

    Args:
        session: whose selection and edits it works on.
        name: the tool.
        given: its arguments by name; None for none.

    Returns:
        Its answer, or ``{"error", "allowed"?, "hint"?}``. Nothing is raised.
    """

    def work() -> Mapping[str, Any]:
        tool = TOOLS.get(name)
        if tool is None:
            raise HermesRLError(f"There is no tool {name!r}.", allowed=list(TOOLS))
        return tool.work(session, parse(tool.request, {} if given is None else given))

    return answer(work, name, session.secret_variables)
