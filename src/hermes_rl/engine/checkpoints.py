"""Checkpoints on disk: PEFT adapter folders, with optimizer state where training goes on from them.

``ROOT/RUN/KIND/NAME/`` holds ``adapter_config.json``, ``adapter_model.safetensors``, ``checkpoint.json`` and,
for training checkpoints, ``optimizer.safetensors``. A checkpoint is written beside its place and renamed
into it once it is on the disk, so that one that can be seen is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hermes_rl.engine.adapter import Adapter, AdapterSpec, spec_from_peft_config
from hermes_rl.engine.architecture import Architecture

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The middle part of a checkpoint's path, and the type that the protocol calls it."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_META = "checkpoint.json"


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or written; the message says why."""


@dataclass
class CheckpointMeta:
    """What ``checkpoint.json`` says."""

    run: str
    kind: str
    name: str
    base_model: str
    created: float
    rank: int
    has_optimizer: bool
    user_metadata: dict[str, str] | None = None
    expires: float | None = None
    public: bool = False

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass
class Loaded:
    """What a checkpoint holds."""

    meta: CheckpointMeta
    spec: AdapterSpec
    adapter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor] | None

    def build(self, architecture: Architecture, device: torch.device) -> Adapter:
        """The adapter itself.

        Raises:
            CheckpointError: it was trained on a model of another shape.
        """
        adapter = Adapter.create(architecture, self.spec, 0, device)
        try:
            adapter.load_peft_state(self.adapter)
        except ValueError as error:
            raise CheckpointError(f"{self.meta.path} does not fit this base model: {error}") from error
        return adapter


def parse_path(path: str) -> tuple[str, str, str]:
    """Run, kind and name of a ``tinker://RUN/KIND/NAME`` path.

    Raises:
        CheckpointError: it is not such a path.
    """
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
        raise CheckpointError(
            f"path {path!r} is not a checkpoint path; expected tinker://RUN/{'|'.join(KINDS)}/NAME"
        )
    return parts[0], parts[1], check_name(parts[2])


def check_name(name: str) -> str:
    """``name`` if it can name a checkpoint.

    Raises:
        CheckpointError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"checkpoint name {name!r} is not allowed; use up to 128 letters, digits, '.', '_' and '-'"
        )
    return name


class CheckpointStore:
    """The checkpoints under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, run: str, kind: str, name: str) -> Path:
        return self.root / _run_folder(run) / kind / name

    def save(
        self,
        meta: CheckpointMeta,
        adapter: Adapter,
        optimizer: dict[str, torch.Tensor] | None,
        *,
        overwrite: bool,
    ) -> CheckpointMeta:
        """Write a checkpoint.

        Raises:
            CheckpointError: the name is taken and ``overwrite`` is false, or the disk refuses.
        """
        final = self.folder(meta.run, meta.kind, check_name(meta.name))
        if final.exists() and not overwrite:
            raise CheckpointError(f"{meta.path} exists already; pass overwrite=True or another name")
        partial = final.parent / f".partial-{uuid.uuid4().hex}"
        try:
            partial.mkdir(parents=True)
            save_file(adapter.peft_state(), partial / "adapter_model.safetensors", {"format": "pt"})
            config = adapter.peft_config(meta.base_model)
            (partial / "adapter_config.json").write_text(json.dumps(config, indent=2))
            if optimizer is not None:
                save_file(optimizer, partial / "optimizer.safetensors")
            (partial / _META).write_text(json.dumps(asdict(meta), indent=2))
            for file in partial.iterdir():
                _sync(file)
            if final.exists():
                old = final.parent / f".partial-{uuid.uuid4().hex}"
                os.replace(final, old)
                os.replace(partial, final)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(partial, final)
            _sync(final.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"{meta.path} cannot be written: {error.strerror or error}") from error
        return meta

    def load(self, path: str, *, optimizer: bool = False) -> Loaded:
        """Read a checkpoint.

        Raises:
            CheckpointError: there is none, it is damaged, or it has no optimizer state and some is wanted.
        """
        run, kind, name = parse_path(path)
        meta = self.meta(run, kind, name)
        folder = self.folder(run, kind, name)
        if optimizer and not meta.has_optimizer:
            raise CheckpointError(f"{path} holds no optimizer state; it is a {KINDS[kind]} checkpoint")
        try:
            return Loaded(
                meta,
                spec_from_peft_config(folder),
                load_file(folder / "adapter_model.safetensors"),
                load_file(folder / "optimizer.safetensors") if optimizer else None,
            )
        except Exception as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def meta(self, run: str, kind: str, name: str) -> CheckpointMeta:
        """What is known of one checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        try:
            return CheckpointMeta(**json.loads((self.folder(run, kind, name) / _META).read_text()))
        except OSError as error:
            raise CheckpointError(f"no checkpoint tinker://{run}/{kind}/{name}") from error
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"tinker://{run}/{kind}/{name} is damaged: {error}") from error

    def update(self, meta: CheckpointMeta) -> None:
        """Rewrite what is known of one checkpoint."""
        folder = self.folder(meta.run, meta.kind, meta.name)
        partial = folder / f".partial-{uuid.uuid4().hex}"
        partial.write_text(json.dumps(asdict(meta), indent=2))
        os.replace(partial, folder / _META)

    def copy(self, path: str, run: str, expires: float | None) -> CheckpointMeta:
        """The same checkpoint under another run. The files are shared, not doubled.

        Args:
            path: the checkpoint.
            run: id of the run that the copy belongs to.
            expires: when the copy goes away, in seconds since the epoch.

        Raises:
            CheckpointError: there is none, that run has one of the name, or the disk refuses.
        """
        source = self.meta(*parse_path(path))
        meta = replace(source, run=run, created=time.time(), expires=expires, public=False)
        final = self.folder(run, meta.kind, meta.name)
        if final.exists():
            raise CheckpointError(f"{meta.path} exists already")
        partial = final.parent / f".partial-{uuid.uuid4().hex}"
        try:
            partial.mkdir(parents=True)
            for file in self.folder(source.run, source.kind, source.name).iterdir():
                if file.name != _META:
                    os.link(file, partial / file.name)
            (partial / _META).write_text(json.dumps(asdict(meta), indent=2))
            _sync(partial / _META)
            os.replace(partial, final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"{meta.path} cannot be written: {error.strerror or error}") from error
        return meta

    def delete(self, run: str, kind: str, name: str) -> None:
        """Remove a checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        self.meta(run, kind, name)
        folder = self.folder(run, kind, name)
        gone = folder.parent / f".partial-{uuid.uuid4().hex}"
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def all(self, run: str | None = None) -> list[CheckpointMeta]:
        """Every checkpoint, or one run's, the newest first. Expired ones are removed on the way."""
        found = []
        for file in self._meta_files(run):
            try:
                meta = CheckpointMeta(**json.loads(file.read_text()))
            except (OSError, ValueError, TypeError):
                continue
            if meta.expires is not None and meta.expires < time.time():
                shutil.rmtree(file.parent, ignore_errors=True)
            else:
                found.append(meta)
        return sorted(found, key=lambda meta: meta.created, reverse=True)

    def prune(self, keep: int, kind: str = "weights") -> list[CheckpointMeta]:
        """Delete all but the newest ``keep`` checkpoints of every run. Returns what was deleted."""
        seen: dict[str, int] = {}
        gone = []
        for meta in self.all():
            if meta.kind != kind:
                continue
            seen[meta.run] = seen.get(meta.run, 0) + 1
            if seen[meta.run] > keep:
                self.delete(meta.run, meta.kind, meta.name)
                gone.append(meta)
        return gone

    def size(self, meta: CheckpointMeta) -> int:
        """Bytes on disk."""
        folder = self.folder(meta.run, meta.kind, meta.name)
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())

    def remove_partial(self) -> None:
        """Remove what an interrupted write left behind."""
        for folder in self.root.glob("*/*/.partial-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _meta_files(self, run: str | None) -> Iterator[Path]:
        top = "*" if run is None else _run_folder(run)
        for kind in KINDS:
            for file in self.root.glob(f"{top}/{kind}/*/{_META}"):
                if not file.parent.name.startswith("."):
                    yield file


def _run_folder(run: str) -> str:
    """A run's id as a file name. Anything but letters, digits and a few marks is refused.

    Raises:
        CheckpointError: the id cannot be one of ours.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}", run):
        raise CheckpointError(f"training run id {run!r} is not valid")
    return run.replace(":", "~")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
