"""``make search``: the article's grid of 27 trials on the embedded model, the replicates and the verdict."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.measuring import fresh_workspace
from benchmarks.reporting import Report
from hermes_rl.search.store import SearchStore


def main() -> None:
    report = Report()
    with fresh_workspace() as workspace:
        started = time.monotonic()
        command = [sys.executable, "-m", "hermes_rl", "search", "start", "--preset", "article-grid"]
        subprocess.run([*command, "--workspace", str(workspace.root)], check=True)
        report.at_most("article_grid/minutes", (time.monotonic() - started) / 60.0, 12.0)
        records = [r for r in SearchStore.open(workspace, "last").records() if r.state == "completed"]
        replicates = [record for record in records if record.stage == "replicate"]
        report.at_least("article_grid/trials", float(len(records) - len(replicates)), 27.0)
        report.at_least("article_grid/replicates", float(len(replicates)), 6.0)
    report.close()


if __name__ == "__main__":
    main()
