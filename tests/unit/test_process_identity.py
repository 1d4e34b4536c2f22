from __future__ import annotations

import os
import subprocess
import sys

from hermes_rl.process_identity import end_processes, is_alive, process_mark, wait_for_end
from hermes_rl.runs.supervisor import describe_exit


def test_this_process_is_recognised_and_another_mark_is_not() -> None:
    mark = process_mark(os.getpid())
    assert mark is not None
    assert is_alive(os.getpid(), mark)
    assert not is_alive(os.getpid(), mark + "0")
    assert not is_alive(None, mark)
    assert not is_alive(os.getpid(), None)


def test_a_child_that_was_not_yet_reaped_counts_as_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    mark = process_mark(child.pid)
    assert mark is not None
    assert not wait_for_end(child.pid, mark, timeout=0)
    assert child.stdin is not None
    child.stdin.close()
    assert wait_for_end(child.pid, mark, timeout=60)
    assert not is_alive(child.pid, mark)
    child.wait()
    assert wait_for_end(child.pid, mark, timeout=0)


def test_a_process_that_ignores_sigterm_is_ended_all_the_same() -> None:
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    mark = process_mark(child.pid)
    assert mark is not None
    end_processes([(child.pid, mark)], grace=0.1)
    assert child.wait() == -9
    child.stdout.close()


def test_exits_are_described_in_words() -> None:
    assert describe_exit(1) == "exit status 1"
    assert describe_exit(-15) == "killed by SIGTERM"
    assert "out of memory" in describe_exit(-9)
