"""Runs inside the interpreter that has Hermes Agent: its plugin manager and its registry, used directly.

Prints one JSON object: what the manager says of the plugin, and the answers of a few dispatched tools.
"""

import json
import sys

import tools
from hermes_cli.plugins import discover_plugins, get_plugin_manager
from tools.registry import registry

discover_plugins()
plugin = get_plugin_manager()._plugins["hermes-rl"]


def dispatch(name: str, session: str, **arguments: object) -> dict:
    return json.loads(registry.dispatch(name, arguments, session_id=session, task_id="t"))


answers = {
    "environments": dispatch("rl_list_environments", "a"),
    "edit": dispatch("rl_edit_config", "a", field="learning_rate", value="6e-5"),
    "locked": dispatch("rl_edit_config", "a", field="total_steps", value=1),
    "other": dispatch("rl_get_current_config", "b")["tunable"]["learning_rate"],
    "started": dispatch("rl_start_training", "a"),
}
answers["status"] = dispatch("rl_check_status", "a", run_id=answers["started"]["run_id"])
names = [name for name in registry.get_all_tool_names() if name.startswith("rl_")]
json.dump(
    {
        "enabled": plugin.enabled,
        "error": plugin.error,
        "names": names,
        "toolset": registry.get_toolset_for_tool("rl_check_status"),
        "hermes_tools": tools.__file__,
        "answers": answers,
    },
    sys.stdout,
)
