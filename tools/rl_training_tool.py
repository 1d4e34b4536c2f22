"""The ``rl_*`` functions under the name by which they are known: ``from tools.rl_training_tool import …``.

Works from the repository's root. The folder has no ``__init__.py``, so that it never hides another package
called ``tools``.

The published quick start imports ``rl_list_environments`` alone and then calls the others by name. It works
as printed: a program or a prompt that imports this module gets the names that it does not have yet.
"""

from __future__ import annotations

import sys

from hermes_rl.agent.functions import (
    rl_check_search,
    rl_check_status,
    rl_edit_config,
    rl_get_current_config,
    rl_get_results,
    rl_get_search_results,
    rl_list_environments,
    rl_list_runs,
    rl_select_environment,
    rl_start_search,
    rl_start_training,
    rl_stop_search,
    rl_stop_training,
    rl_test_inference,
)

__all__ = [
    "rl_check_search",
    "rl_check_status",
    "rl_edit_config",
    "rl_get_current_config",
    "rl_get_results",
    "rl_get_search_results",
    "rl_list_environments",
    "rl_list_runs",
    "rl_select_environment",
    "rl_start_search",
    "rl_start_training",
    "rl_stop_search",
    "rl_stop_training",
    "rl_test_inference",
]


def _complete_importer() -> None:
    """Give the functions that it did not import to the program, when it is the program that imports us."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "__main__":
        for name in __all__:
            frame.f_globals.setdefault(name, globals()[name])


_complete_importer()
