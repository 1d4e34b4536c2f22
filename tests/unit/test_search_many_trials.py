"""Looking at a search of many trials: quick, and still readable."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hermes_rl.cli.main import app
from hermes_rl.config import Workspace
from hermes_rl.search import plots
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.store import SearchStore
from hermes_rl.search.summary import summarize
from hermes_rl.search.trial import TrialRecord

TRIALS = 300


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> SearchStore:
    """A completed search in which the learning rate decides and the weight decay does not."""
    workspace = Workspace.resolve(tmp_path_factory.mktemp("many"))
    space = {"learning_rate": "log:1e-6..1e-3", "weight_decay": "0..0.5"}
    definition = SearchDefinition.model_validate(
        {"environment": "arithmetic_tinker", "strategy": "random", "trials": TRIALS, "space": space}
    )
    made = SearchStore.create(workspace, definition, {"learning_rate": 4e-5, "weight_decay": 0.0})
    drawn = random.Random(0)
    for trial in range(TRIALS):
        rate, decay = 10 ** drawn.uniform(-6, -3), drawn.uniform(0, 0.5)
        value = 0.8 - 0.1 * abs(math.log10(rate) + 4.5) + drawn.gauss(0, 0.01)
        made.append(
            TrialRecord(
                trial=trial,
                stage="search",
                seed=0,
                state="pruned" if trial % 3 == 0 else "completed",
                params={"learning_rate": rate, "weight_decay": decay},
                values=[value],
                standard_error=0.02,
                step=50,
                curves={"eval_percent_correct": [(0, 0.1, 256), (50, value, 256)]},
            )
        )
    file = made.load()
    file.state = "completed"
    made.save(file)
    return made


def test_the_field_that_decides_is_found_among_many_trials(store: SearchStore) -> None:
    shares = plots.importances(summarize(store))
    assert list(shares) == ["learning_rate", "weight_decay"]
    assert shares["learning_rate"] > 0.8


def test_many_curves_are_few_lines_of_the_legend(store: SearchStore) -> None:
    figure = plots.learning_curves(summarize(store))
    assert figure is not None
    assert figure.div.count('"completed trials"') == 1
    assert figure.div.count('"pruned trials"') == 1
    assert figure.div.count('"mode":"lines+markers"') == 3  # and the best


def test_a_map_over_two_ranges_has_cells_not_points(store: SearchStore) -> None:
    values = [float(value) for value in range(100)]
    assert len(set(plots._in_bins(values))) == 30
    assert max(abs(a - b) for a, b in zip(values, plots._in_bins(values), strict=True)) < 99 / 30
    assert plots._in_bins([1.0, 2.0, 2.0]) == [1.0, 2.0, 2.0]
    summary = summarize(store)
    assert plots.contour(summary, {"learning_rate": 0.9, "weight_decay": 0.1}) is not None


def test_the_status_shows_the_best_and_says_that_there_are_more(store: SearchStore) -> None:
    command = ["search", "status", store.search_id, "--workspace", str(store.workspace.root)]
    short = CliRunner().invoke(app, command)
    assert short.exit_code == 0, short.output
    assert "270 more trials: --limit 0 shows them." in short.output
    assert short.output.count("\n") < 60
    whole = CliRunner().invoke(app, [*command, "--limit", "0"])
    assert "more trials" not in whole.output
    assert whole.output.count("\n") > TRIALS


def test_whoever_looks_at_a_search_does_not_wait_for_its_optimizer(
    store: SearchStore, tmp_path: Path
) -> None:
    code = (
        "import sys; from hermes_rl.cli.main import app; "
        "app(sys.argv[1:], standalone_mode=False); print({'optuna', 'torch', 'plotly'} & set(sys.modules))"
    )
    for arguments in (["list"], ["status", store.search_id]):
        command = [sys.executable, "-c", code, "search", *arguments, "--workspace", str(store.workspace.root)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        assert done.stdout.splitlines()[-1] == "set()"
