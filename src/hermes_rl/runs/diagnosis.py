"""What this machine has and what is missing for which feature. Runs in the process of whoever asks.

Nothing heavy is imported: versions are read from the packages' metadata, and torch itself is asked only in
a child process, on request.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil

from hermes_rl.config import FIELDS, Workspace, embedded_model_dir
from hermes_rl.errors import HermesRLError

State = Literal["ok", "note", "wrong"]

HUB = "https://huggingface.co"
HUB_SECONDS = 3.0
LEAST_MEMORY = 2 * 2**30
"""Bytes that a run on the embedded model and what the system itself needs take up."""
_OLDEST_PYTHON, _FIRST_TOO_NEW_PYTHON = (3, 11), (3, 14)
_TORCH_QUESTION = (
    "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_name(0) or 'no CUDA device')"
)


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        name: what was looked at.
        state: ``ok``; ``note``: something is missing for the features in ``needed_for``; ``wrong``: the
            default path (a run on the embedded model) cannot work.
        found: what is there.
        needed_for: what does not work without it.
        remedy: how to get it.
    """

    name: str
    state: State
    found: str
    needed_for: str | None = None
    remedy: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The finding for JSON."""
        return asdict(self)


DEFAULT_PATH = "every run, the embedded model's included"


def diagnose(root: str | Path | None = None, *, thorough: bool = False) -> Iterator[Finding]:
    """Look at this machine, one finding after the other.

    Args:
        root: the workspace's folder; by default the one that commands use.
        thorough: also import torch in a child process and ask it for devices, which takes seconds.
    """
    yield _python()
    yield _cores()
    yield _memory()
    yield from _packages()
    yield _torch_build(thorough)
    yield _gpu()
    yield _embedded_model()
    yield _wandb()
    yield _tinker_key()
    yield _hub()
    try:
        workspace = Workspace.resolve(root)
    except HermesRLError as error:
        yield Finding("workspace", "wrong", error.message, DEFAULT_PATH, error.hint)
        return
    yield _writable(workspace)
    yield _disk(workspace)
    yield from _state(workspace)
    yield _engines(workspace)
    yield _leftovers(workspace)
    yield _fork_servers()


# The machine


def _python() -> Finding:
    version = sys.version_info[:2]
    found = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    if _OLDEST_PYTHON <= version < _FIRST_TOO_NEW_PYTHON:
        return Finding("Python", "ok", found)
    return Finding("Python", "wrong", found, DEFAULT_PATH, "Use Python 3.11, 3.12 or 3.13.")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return Finding("cores", "ok", f"{usable} usable{load}")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} GB free of {memory.total / 2**30:.1f} GB"
    if memory.available >= LEAST_MEMORY:
        return Finding("memory", "ok", found)
    return Finding(
        "memory", "note", found, "runs side by side (one takes about 1.5 GB)", "End other programs, or wait."
    )


def _gpu() -> Finding:
    program = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,memory.total", "--format=csv,noheader"]
    names = _output([program, *query], 5.0) if program else None
    if names:
        return Finding("GPU", "ok", "; ".join(names.splitlines()))
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return Finding("GPU", "note", "Apple silicon; the local engine uses the processor", "qwen3-8b-local")
    return Finding(
        "GPU",
        "note",
        "none",
        "the profile qwen3-8b-local",
        "A CUDA GPU with about 24 GB; or the profile qwen3-8b with TINKER_API_KEY. embedded needs none.",
    )


def _output(command: list[str], timeout: float) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# Packages


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("hermes-rl") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "packages", "wrong", "hermes-rl is not installed", DEFAULT_PATH, "pip install hermes-rl"
        )
        return
    good = 0
    for requirement in map(Requirement, declared):
        extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if requirement.marker is not None and "dev" in str(requirement.marker):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            good += 1
            continue
        found = f"{version or 'not installed'}; needed: {requirement.specifier or 'any version'}"
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        if extra:
            yield Finding(requirement.name, "note", found, _feature_of(requirement.name), remedy)
        else:
            yield Finding(requirement.name, "wrong", found, DEFAULT_PATH, remedy)
    yield Finding("packages", "ok", f"{good} of the declared packages are there in a version that fits")


def _feature_of(package: str) -> str:
    return {"mcp": "`hermes-rl mcp`", "ray": "searches on several machines"}.get(package, "an optional part")


def _torch_build(thorough: bool) -> Finding:
    try:
        version = importlib.metadata.version("torch")
        spec = importlib.util.find_spec("torch")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        version, spec = None, None
    if version is None or spec is None or spec.origin is None:
        return Finding("torch", "wrong", "not installed", DEFAULT_PATH, "pip install torch==2.13.0")
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
    found = f"{version}, built for {'CUDA ' + cuda[1] if cuda else 'the processor'}"
    if thorough:
        answer = _output([sys.executable, "-c", _TORCH_QUESTION], 120.0)
        if answer is None:
            remedy = f"Run {Path(sys.executable).name} -c 'import torch' to see why."
            return Finding("torch", "wrong", f"{found}; cannot be imported", DEFAULT_PATH, remedy)
        found += f"; sees {answer}"
    if cuda is None and shutil.which("nvidia-smi"):
        remedy = "Install the CUDA build of the same version from pytorch.org."
        return Finding("torch", "note", found, "the GPU of this machine", remedy)
    return Finding("torch", "ok", found)


def _embedded_model() -> Finding:
    folder = embedded_model_dir()
    problem = broken_model(folder)
    if problem is None:
        return Finding("embedded model", "ok", str(folder))
    return Finding(
        "embedded model", "wrong", f"{folder}: {problem}", "the default profile", "Install hermes-rl anew."
    )


def broken_model(folder: Path) -> str | None:
    """What is wrong with a model's folder; None when its files are there and whole."""
    try:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            json.loads((folder / name).read_text(encoding="utf-8"))
        path = folder / "model.safetensors"
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                return "model.safetensors is no safetensors file"
            header = json.loads(file.read(length))
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be read: {error}"
    if size != 8 + length + end:
        return f"model.safetensors has {size} bytes instead of {8 + length + end}"
    return None


# Accounts and networks


def _wandb() -> Finding:
    from hermes_rl.config.tracking_mode import wandb_mode

    asked = os.environ.get("WANDB_MODE")
    mode = wandb_mode("a project")
    if asked:
        why = f"WANDB_MODE is {asked}"
    elif mode == "disabled":
        why = "no WANDB_API_KEY and no login"
    else:
        why = "there is a key, for runs with a wandb_project"
    state: State = "ok" if mode != "disabled" else "note"
    return Finding(
        "W&B",
        state,
        f"{mode}: {why}",
        None if state == "ok" else "metrics in Weights & Biases (they are in metrics.jsonl in any case)",
        None if state == "ok" else "WANDB_API_KEY and wandb_project; or WANDB_MODE=offline and `wandb sync`",
    )


def _tinker_key() -> Finding:
    if os.environ.get("TINKER_API_KEY"):
        return Finding("TINKER_API_KEY", "ok", "is set; used only by profiles that name the service")
    return Finding(
        "TINKER_API_KEY",
        "note",
        "is not set",
        "the profile qwen3-8b",
        "A key of the Tinker service, as environment variable. embedded needs none.",
    )


def _hub() -> Finding:
    what = "models, tokenizers and data sets that are not on this machine yet"
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "0").upper() in ("1", "TRUE", "YES", "ON"):
            return Finding("hub", "note", f"not asked: {variable} is set", what, f"Unset {variable}.")
    endpoint = os.environ.get("HF_ENDPOINT", HUB)
    shown = urlsplit(endpoint).hostname or "HF_ENDPOINT"
    if _within(HUB_SECONDS, lambda: _answers(endpoint)):
        return Finding("hub", "ok", f"{shown} answers")
    remedy = "A network; or HF_ENDPOINT for a mirror. embedded needs none."
    return Finding("hub", "note", f"{shown} does not answer", what, remedy)


def _answers(url: str) -> bool:
    """Whether anything comes back, through the proxy that the environment names."""
    import urllib.error
    import urllib.request

    try:
        request = urllib.request.Request(url, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _within(seconds: float, question: Callable[[], bool]) -> bool:
    """The answer to a question that may hang, as looking up a name may; False when it takes longer."""
    import threading

    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers and answers[0])


# The workspace


def _writable(workspace: Workspace) -> Finding:
    probe = workspace.root / f".doctor-{os.getpid()}"
    try:
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        return Finding(
            "workspace",
            "wrong",
            f"{workspace.root} cannot be written: {error.strerror}",
            DEFAULT_PATH,
            "Choose another folder with --workspace or $HERMES_RL_WORKSPACE.",
        )
    return Finding("workspace", "ok", str(workspace.root))


def _disk(workspace: Workspace) -> Finding:
    free = shutil.disk_usage(workspace.root).free / 1e6
    least = FIELDS["min_free_disk_mb"].default
    if free < least:
        remedy = "Free some space: `hermes-rl engine checkpoints --keep N` deletes old checkpoints."
        return Finding("disk", "wrong", f"{free:.0f} MB free; runs end below {least}", DEFAULT_PATH, remedy)
    return Finding("disk", "ok", f"{free / 1000:.1f} GB free")


def _state(workspace: Workspace) -> Iterator[Finding]:
    from hermes_rl.runs.lifecycle import list_runs

    try:
        statuses = list_runs(workspace)  # finds out runs whose supervisor is gone, and ends what they left
    except HermesRLError as error:
        yield Finding("state store", "wrong", error.message, DEFAULT_PATH, error.hint)
        return
    active = sum(not status.is_final for status in statuses)
    yield Finding("state store", "ok", f"{len(statuses)} runs, {active} of them active")


def _engines(workspace: Workspace) -> Finding:
    from hermes_rl.engine.registry import list_engines

    alive = list_engines(workspace)
    stale = {path.stem for path in workspace.engines.glob("*.json")} - {record.key for record in alive}
    shown = ", ".join(f"{record.key} (pid {record.address.pid})" for record in alive) or "none running"
    if stale:
        shown += f"; addresses of engines that are gone: {', '.join(sorted(stale))}"
        return Finding("engines", "note", shown, "nothing: the next run replaces them", None)
    return Finding("engines", "ok", shown)


def _leftovers(workspace: Workspace) -> Finding:
    from hermes_rl.process_identity import is_alive
    from hermes_rl.runs.run_status import RUN_ID_VARIABLE
    from hermes_rl.runs.states import FINAL
    from hermes_rl.runs.store import open_store

    try:
        store = open_store(workspace.state_url)
        ended = {row.run_id for row in store.all_runs() if row.status in FINAL}
        recorded = store.processes_of_ended_runs()
    except HermesRLError as error:
        return Finding("leftover processes", "note", f"not looked for: {error.message}")
    left = {row.pid: row.run_id for row in recorded if is_alive(row.pid, row.mark)}
    for process in psutil.process_iter():  # what those have started carries the run's id
        try:
            run_id = process.environ().get(RUN_ID_VARIABLE)
        except (psutil.Error, OSError):
            continue
        if run_id in ended:
            left[process.pid] = run_id
    if not left:
        return Finding("leftover processes", "ok", "none")
    shown = ", ".join(f"{pid} (run {run_id})" for pid, run_id in sorted(left.items()))
    remedy = f"kill {' '.join(str(pid) for pid in sorted(left))}"
    return Finding("leftover processes", "note", shown, "the memory they hold", remedy)


def _fork_servers() -> Finding:
    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid() or process.ppid() == os.getpid():
                continue
            if "hermes_rl.runs.forkserver" in process.cmdline()[:4]:
                found.append(process.pid)
        except psutil.Error:
            continue
    shown = f"{len(found)} processes (the server and its forks)" if found else "none running"
    return Finding("fork server", "ok", f"{shown}; it ends when nobody uses it")
