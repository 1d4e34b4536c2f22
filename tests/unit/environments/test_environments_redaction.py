"""What is lost if these fail: a secret, to a log; or a line of the log, to the filter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hermes_rl.environments import log_filter, redaction

SECRETS = ["sk-recognisable-longer", "sk-recognisable", "r-0123\n4567", "péché-mortel"]


def filtered(*chunks: bytes) -> bytes:
    """What the filter writes when it reads these chunks one after the other."""
    read_end, write_end = os.pipe()
    out_read, out_write = os.pipe()
    copying = threading.Thread(target=log_filter.copy, args=(read_end, out_write))
    copying.start()
    for chunk in (json.dumps(SECRETS).encode() + b"\n", *chunks):
        os.write(write_end, chunk)
    os.close(write_end)
    copying.join()
    os.close(out_write)
    with open(out_read, "rb") as out:
        written = out.read()
    os.close(read_end)
    return written


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_secret_is_hidden_however_it_is_cut(secret: str, whole: bool) -> None:
    line = f"a {secret} b\n{secret}{secret}".encode()
    chunks = [line] if whole else [bytes([byte]) for byte in line]
    assert SECRETS[1].encode() not in filtered(*chunks)
    if whole:
        assert filtered(*chunks) == b"a <secret> b\n<secret><secret>"


def test_everything_else_is_kept() -> None:
    begun = b"no newline \xff\x00 and the beginning of a secret: sk-recog"
    assert filtered(b"line\n" * 10_000, begun) == b"line\n" * 10_000 + begun
    assert filtered() == b""


PROGRAM = """
import os, subprocess, sys
from hermes_rl.environments.redaction import own_secrets, redact_output
redact_output(own_secrets())
print("printed", os.environ["A_KEY"])
subprocess.run(["sh", "-c", 'echo from a process $A_KEY; echo to the other $A_KEY >&2'])
subprocess.run(["sh", "-c", "echo through the stream $A_KEY"], stdout=sys.stdout)
sys.stdout.buffer.write(b"bytes\\n")
os.write(2, b"from C: " + os.environb[b"A_KEY"])
os.kill(os.getpid(), int(sys.argv[1]))
raise RuntimeError(os.environ["A_KEY"])
"""


@pytest.mark.parametrize("signal", [0, 9, 11])
@pytest.mark.parametrize("together", [True, False])
def test_nothing_of_a_process_is_lost_and_no_secret_kept(signal: int, together: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(signal)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        env={**os.environ, "A_KEY": "recognisable-key"},
        text=True,
    )
    out, err = process.communicate()  # ends when the filters have
    assert process.returncode == (-signal or 1)
    text = out + (err or "")
    assert "recognisable-key" not in text
    said = ["printed", "from a process", "to the other", "through the stream", "from C:"]
    for line in [f"{words} <secret>" for words in said] + ["bytes\n"]:
        assert text.count(line) == 1, (line, text)
    assert ("RuntimeError: <secret>" in text) == (signal == 0)


def test_the_filter_is_let_go_of_with_what_it_filters() -> None:
    """A run that has ended leaves no process, so the filter must not wait for more than its input's end."""
    command = [sys.executable, "-I", "-S", str(Path(redaction.__file__).with_name("log_filter.py"))]
    for begun in (b"", b"[]", b"[]\nhalf a line"):
        done = subprocess.run(command, input=begun, capture_output=True, timeout=60, check=True)
        assert done.stderr == b""
