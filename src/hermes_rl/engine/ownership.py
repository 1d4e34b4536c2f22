"""Files of a folder that several engines share: whose one is lies in its name.

A file or folder that an engine needs only while it lives is called
``PREFIX HOST-PID-MARK-NUMBER``. An engine that starts removes those whose owner is no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from pathlib import Path

from hermes_rl.process_identity import process_mark

OTHER_HOST_S = 86_400.0
"""How long what belongs to a process of another machine, which cannot be asked for, is left alone."""

_SCRATCH = "hermes-rl-engine-"

_OWNER = re.compile(r"([0-9a-f]{8})-([0-9]+)-([0-9a-f]{12})-[0-9a-f]{32}(?![0-9a-f])")


def owned_name(prefix: str) -> str:
    """A new file name that says that it is this process's."""
    pid = os.getpid()
    host, mark = _short(socket.gethostname(), 8), _short(process_mark(pid) or "", 12)
    return f"{prefix}{host}-{pid}-{mark}-{uuid.uuid4().hex}"


def is_abandoned(path: Path, prefix: str) -> bool:
    """Whether nobody is at work on a file or folder with such a name any more.

    A name that does not say whose it is belongs to nobody.
    """
    owner = _OWNER.match(path.name.removeprefix(prefix))
    if owner is None:
        return True
    host, pid, mark = owner[1], int(owner[2]), owner[3]
    if host != _short(socket.gethostname(), 8):
        try:
            return time.time() - path.stat().st_mtime > OTHER_HOST_S
        except OSError:
            return False
    alive = process_mark(pid)
    return alive is None or _short(alive, 12) != mark


def scratch_folder() -> Path:
    """A new folder, under the system's for temporary files, for what this process keeps until it ends.

    Those of processes that were killed are removed.

    Raises:
        OSError: the disk refuses.
    """
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another engine that starts may be removing it
            if left.stat().st_uid == os.getuid() and is_abandoned(left, _SCRATCH):
                shutil.rmtree(left, ignore_errors=True)
    folder = parent / owned_name(_SCRATCH)
    folder.mkdir(mode=0o700)
    return folder


def _short(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
