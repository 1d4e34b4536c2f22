"""A search from outside its loop: driven here, left to a process of its own, stopped, extended."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

from hermes_rl import runs
from hermes_rl.config import Workspace
from hermes_rl.errors import SearchError
from hermes_rl.search.definition import SearchDefinition, checked_definition
from hermes_rl.search.orchestrator import Observer, Orchestrator
from hermes_rl.search.report import write_report
from hermes_rl.search.run_trials import RunTrials
from hermes_rl.search.store import SearchStore

_STOP_SECONDS = 90.0


def drive(workspace: Workspace, search_id: str, observer: Observer | None = None) -> SearchStore:
    """Run a search to its end in this process, and write its report however it ends."""
    store = SearchStore.open(workspace, search_id)
    definition = store.load().definition
    runner = RunTrials(
        workspace, store.search_id, definition.environment, definition.profile, definition.overrides
    )
    try:
        Orchestrator(store, runner, observer).run()
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk must not hide why the search ended
            _report(store)
        raise
    _report(store)
    return store


def _report(store: SearchStore) -> None:
    if store.records():
        write_report(store)


def detach(workspace: Workspace, search_id: str) -> int:
    """Leave a search to a process of its own that survives this one; returns its process id."""
    store = SearchStore.open(workspace, search_id)
    command = [sys.executable, "-P", "-m", "hermes_rl.search.process"]
    command += ["--workspace", str(workspace.root), "--search", store.search_id]
    with open(store.folder / "search.log", "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + 60
    while not store.is_driven():
        if process.poll() is not None and not store.is_driven():
            if process.returncode == 0:
                break
            tail = (store.folder / "search.log").read_text(encoding="utf-8", errors="replace")[-1000:]
            raise SearchError(f"The search could not be started: {tail.strip()}")
        if time.monotonic() > deadline:
            raise SearchError(
                "The search did not start within 60 s.", hint=f"See {store.folder / 'search.log'}."
            )
        time.sleep(0.05)
    return process.pid


def stop_search(store: SearchStore) -> str:
    """Stop a search and its running trials; returns its state.

    Raises:
        SearchError: it did not stop in time.
    """
    if store.is_driven():
        deadline = time.monotonic() + _STOP_SECONDS
        while store.is_driven():
            store.stop_file.touch()  # again and again: a driver that just begins removes an earlier one's
            if time.monotonic() > deadline:
                raise SearchError(f"The search {store.search_id} did not stop within {_STOP_SECONDS:g} s.")
            time.sleep(0.05)
        return store.state()
    # Its driver died: what it left running is stopped here.
    for run in runs.list_runs(store.workspace, store.search_id):
        if not run.is_final:
            runs.stop(store.workspace, run.run_id)
    file = store.load()
    if file.state == "running":
        file.state, file.reason = "stopped", "stopped on request"
        store.save(file)
    return store.state()


def extend(
    store: SearchStore,
    *,
    trials: str | None = None,
    replicate: str | None = None,
    parallel: int | None = None,
    max_steps: str | None = None,
    max_tokens: str | None = None,
    max_minutes: str | None = None,
) -> SearchDefinition:
    """Change how far a search goes; takes effect when it is resumed.

    Args:
        trials, replicate: a new number, or ``+N`` for N more.
        parallel: trials at the same time.
        max_steps, max_tokens, max_minutes: a new budget over all sittings, or ``+N`` on top of its own.

    Raises:
        SearchError: not a number, not allowed, or the search is running.
    """
    file = store.load()
    if not any((trials, replicate, parallel is not None, max_steps, max_tokens, max_minutes)):
        return file.definition
    fields = file.definition.model_dump()
    if trials is not None and file.definition.strategy == "pbt":
        raise SearchError(
            "A population does not grow on the way.", hint="Start another search with more --trials."
        )
    if trials is not None:
        refined = file.definition.refine * file.definition.refine_rounds
        fields["trials"] = _changed("--trials", trials, file.definition.planned_trials() - refined)
    if replicate is not None:
        fields["replicate"] = _changed("--replicate", replicate, file.definition.fresh_seeds())
    if parallel is not None:
        fields["parallel"] = parallel
    for name, text in (("steps", max_steps), ("tokens", max_tokens), ("minutes", max_minutes)):
        if text is not None:
            fields["budget"][name] = _changed_budget(name, text, fields["budget"][name])
    definition = checked_definition(fields)
    if definition != file.definition:
        if store.is_driven():
            raise SearchError(
                "A running search cannot be changed.", hint=f"hermes-rl search stop {store.search_id}"
            )
        file.definition = definition
        store.save(file)
    return definition


def _changed_budget(name: str, text: str, before: float | None) -> float:
    """A new budget, or more of the one before."""
    option = f"--max-{name}"
    if before is None and text.startswith("+"):
        raise SearchError(f"{option} {text}: the search has no budget of {name} to add to.", allowed="N")
    try:
        number = float(text) if name == "minutes" else int(text)
    except ValueError as error:
        raise SearchError(f"{option} {text} is not a number.", allowed="N or +N") from error
    return (before or 0) + number if text.startswith("+") else number


def _changed(option: str, text: str, before: int) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise SearchError(f"{option} {text} is not a number.", allowed="N or +N") from error
    return before + number if text.startswith("+") else number
