"""Run the benchmarks named, or all: ``python -m benchmarks [NAME…]``.

All but ``gpu`` together take some 40 minutes on two free cores (estimated): engine 4 (and more, once, for
installing its peers), grid 6, learning 8, reliability 10, search 10, startup 2. Each prints a line a figure,
``name value goal reached|missed``, and exits 1 when a goal is missed; so does this.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_BENCHMARKS = ("engine", "grid", "learning", "reliability", "search", "startup")


def main() -> int:
    asked = sys.argv[1:] or list(_BENCHMARKS)
    unknown = sorted(set(asked) - {*_BENCHMARKS, "gpu"})
    if unknown:
        print(
            f"There is no benchmark {', '.join(unknown)}. Known: {', '.join(_BENCHMARKS)}, gpu.",
            file=sys.stderr,
        )
        return 2
    failed = []
    for name in asked:
        print(f"# {name}", flush=True)
        if subprocess.call([sys.executable, "-m", f"benchmarks.{name}"], cwd=Path(__file__).parents[1]):
            failed.append(name)
    if failed:
        print(f"A goal was missed in: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
