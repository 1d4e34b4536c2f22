"""Checkpoints on disk: PEFT adapter folders, with optimizer state where training goes on from them.

``ROOT/RUN/KIND/NAME/`` holds ``adapter_config.json``, ``adapter_model.safetensors``, ``checkpoint.json`` and,
for training checkpoints, ``optimizer.safetensors``. A checkpoint is written beside its place and renamed
into it once it is on the disk, so that one that can be seen is whole. Engines share the root: the names of
what they are at work on say whose it is (see :mod:`hermes_rl.engine.ownership`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hermes_rl.engine.adapter import Adapter, AdapterSpec, spec_from_peft_config
from hermes_rl.engine.architecture import Architecture
from hermes_rl.engine.ownership import is_abandoned, owned_name

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The middle part of a checkpoint's path, and the type that the protocol calls it."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_META = "checkpoint.json"
_PARTIAL, _REPLACED = ".partial-", ".replaced-"
_NAME_MARK = "="
"""Between a replaced checkpoint's owner and its name; neither holds one."""


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

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires < time.time()


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
        self._remove_if_expired(final)
        if final.exists() and not overwrite:
            raise CheckpointError(f"{meta.path} exists already; pass overwrite=True or another name")
        partial = final.parent / owned_name(_PARTIAL)
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
            _put(partial, final)
            _sync(final.parent)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{meta.path} cannot be written: {reason}") from error
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

    def spec(self, path: str) -> AdapterSpec:
        """What the adapter of a checkpoint adapts.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        meta = self.meta(*parse_path(path))
        try:
            return spec_from_peft_config(self.folder(meta.run, meta.kind, meta.name))
        except Exception as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def meta(self, run: str, kind: str, name: str) -> CheckpointMeta:
        """What is known of one checkpoint.

        Raises:
            CheckpointError: there is none, or its time is over.
        """
        file = self.folder(run, kind, check_name(name)) / _META
        try:
            meta = CheckpointMeta(**json.loads(file.read_text()))
        except OSError as error:
            raise CheckpointError(f"no checkpoint tinker://{run}/{kind}/{name}") from error
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"tinker://{run}/{kind}/{name} is damaged: {error}") from error
        if meta.expired:
            raise CheckpointError(f"no checkpoint tinker://{run}/{kind}/{name}: its time to live is over")
        return meta

    def update(self, meta: CheckpointMeta) -> None:
        """Rewrite what is known of one checkpoint.

        Raises:
            CheckpointError: the disk refuses.
        """
        folder = self.folder(meta.run, meta.kind, meta.name)
        partial = folder / owned_name(_PARTIAL)
        try:
            partial.write_text(json.dumps(asdict(meta), indent=2))
            os.replace(partial, folder / _META)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise CheckpointError(f"{meta.path} cannot be written: {error.strerror or error}") from error

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
        self._remove_if_expired(final)
        if final.exists():
            raise CheckpointError(f"{meta.path} exists already")
        partial = final.parent / owned_name(_PARTIAL)
        try:
            partial.mkdir(parents=True)
            for file in self.folder(source.run, source.kind, source.name).iterdir():
                if file.name != _META and not file.name.startswith("."):
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
        gone = folder.parent / owned_name(_PARTIAL)
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _remove_if_expired(self, folder: Path) -> None:
        try:
            meta = CheckpointMeta(**json.loads((folder / _META).read_text()))
        except (OSError, ValueError, TypeError):
            return
        if meta.expired:
            gone = folder.parent / owned_name(_PARTIAL)
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
            if meta.expired:
                with contextlib.suppress(OSError):
                    self._remove_if_expired(file.parent)
            else:
                found.append(meta)
        return sorted(found, key=lambda meta: meta.created, reverse=True)

    def prune(self, keep: int, kind: str | None = None) -> list[CheckpointMeta]:
        """Delete all but the newest ``keep`` checkpoints of every run and kind, or of one kind.

        Returns:
            What was deleted.
        """
        seen: dict[tuple[str, str], int] = {}
        gone = []
        for meta in self.all():
            if kind is not None and meta.kind != kind:
                continue
            group = (meta.run, meta.kind)
            seen[group] = seen.get(group, 0) + 1
            if seen[group] > keep:
                self.delete(meta.run, meta.kind, meta.name)
                gone.append(meta)
        return gone

    def size(self, meta: CheckpointMeta) -> int:
        """Bytes on disk."""
        folder = self.folder(meta.run, meta.kind, meta.name)
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())

    def remove_partial(self) -> None:
        """Remove what writers that are no more left behind, and bring back what they were replacing."""
        for place in self.root.glob(f"*/*/{_REPLACED}*"):
            name = place.name.partition(_NAME_MARK)[2]
            if not is_abandoned(place, _REPLACED):
                continue
            with contextlib.suppress(OSError):
                if not (place.parent / name).exists():
                    os.replace(place, place.parent / name)
                    continue
                shutil.rmtree(place, ignore_errors=True)
        for pattern in (f"*/*/{_PARTIAL}*", f"*/*/*/{_PARTIAL}*"):
            for place in self.root.glob(pattern):
                if is_abandoned(place, _PARTIAL):
                    if place.is_dir():
                        shutil.rmtree(place, ignore_errors=True)
                    else:
                        place.unlink(missing_ok=True)

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


def _put(partial: Path, final: Path) -> None:
    """Move a checkpoint to its place. One that is there stays until then, and for whoever starts next if this
    process ends in between.

    Raises:
        OSError: the disk refuses; what was there is there.
    """
    if not final.exists():
        os.replace(partial, final)
        return
    old = final.parent / f"{owned_name(_REPLACED)}{_NAME_MARK}{final.name}"
    os.replace(final, old)
    try:
        os.replace(partial, final)
    except OSError:
        os.replace(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
