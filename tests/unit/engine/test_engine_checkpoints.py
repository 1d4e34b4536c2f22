"""A checkpoint that can be seen is whole, loads in PEFT, and goes away when told."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from hermes_rl.engine import checkpoints, ownership
from hermes_rl.engine.checkpoints import CheckpointError, CheckpointMeta, CheckpointStore, parse_path
from hermes_rl.engine.export import export_merged
from hermes_rl.engine.linears import adapter_linears
from hermes_rl.engine.optimizer import Adam
from hermes_rl.engine.packing import pack_prompts
from hermes_rl.engine.pointwise import rms_norm
from hermes_rl.engine.transformer import hidden_states
from hermes_rl.errors import EngineError
from hermes_rl.process_identity import process_mark

CPU = torch.device("cpu")
RUN = "abc:train:0"


def meta(base, adapter, name="one", kind="weights") -> CheckpointMeta:
    return CheckpointMeta(
        run=RUN,
        kind=kind,
        name=name,
        base_model=base.name,
        created=time.time(),
        rank=adapter.spec.rank,
        has_optimizer=kind == "weights",
    )


def engine_logits(base, adapter, tokens: torch.Tensor) -> torch.Tensor:
    prompts = pack_prompts([tokens.numpy()], base.device)
    linear = adapter_linears(base, adapter, trainable=False)
    hidden = hidden_states(base, linear, prompts.tokens, prompts.positions, prompts.attend)
    return linear(-1, "head", rms_norm(hidden, base.final_norm, base.architecture.norm_eps))


@pytest.mark.parametrize("unembed", [False, True])
def test_peft_loads_a_saved_adapter_with_the_same_logits(base, make_adapter, tmp_path, unembed):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3, train_unembed=unembed)
    store.save(meta(base, adapter), adapter, Adam(adapter.flat).state(), overwrite=False)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, str(store.folder(RUN, "weights", "one")))
    tokens = torch.arange(5, 40)
    torch.testing.assert_close(
        engine_logits(base, adapter, tokens), model(tokens[None]).logits[0], atol=1e-4, rtol=1e-4
    )


def test_what_is_saved_is_loaded(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    adam = Adam(adapter.flat)
    adam.first.normal_()
    adam.steps = 4
    saved = store.save(meta(base, adapter), adapter, adam.state(), overwrite=False)
    loaded = store.load(saved.path, optimizer=True)
    assert torch.equal(loaded.build(base.architecture, base.device).flat, adapter.flat)
    fresh = Adam(adapter.flat)
    fresh.load_state(loaded.optimizer)
    assert torch.equal(fresh.first, adam.first)
    assert fresh.steps == 4


def test_names_are_taken_once_unless_overwritten(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    store.save(meta(base, adapter), adapter, None, overwrite=False)
    with pytest.raises(CheckpointError, match="exists already"):
        store.save(meta(base, adapter), adapter, None, overwrite=False)
    other = make_adapter(4)
    store.save(meta(base, other), other, None, overwrite=True)
    loaded = store.load(f"tinker://{RUN}/weights/one").build(base.architecture, base.device)
    assert torch.equal(loaded.flat, other.flat)


def test_a_half_written_checkpoint_is_not_offered(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    store.save(meta(base, adapter), adapter, None, overwrite=False)
    whole = store.folder(RUN, "weights", "one")
    partial = whole.parent / ".partial-123"
    partial.mkdir()
    (partial / "checkpoint.json").write_text((whole / "checkpoint.json").read_text())
    assert [found.name for found in store.all()] == ["one"]
    store.remove_partial()
    assert not partial.exists()
    assert whole.exists()


def test_a_damaged_checkpoint_says_so(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    store.save(meta(base, adapter), adapter, None, overwrite=False)
    file = store.folder(RUN, "weights", "one") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        store.load(f"tinker://{RUN}/weights/one")


def test_expired_checkpoints_disappear(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    saved = store.save(meta(base, adapter), adapter, None, overwrite=False)
    saved.expires = time.time() - 1
    store.update(saved)
    assert store.all() == []
    assert not store.folder(RUN, "weights", "one").exists()


@pytest.mark.parametrize("optimizer", [True, False])
def test_sampler_weights_have_no_optimizer_state(base, make_adapter, tmp_path, optimizer):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    saved = store.save(meta(base, adapter, kind="sampler_weights"), adapter, None, overwrite=True)
    if optimizer:
        with pytest.raises(CheckpointError, match="no optimizer state"):
            store.load(saved.path, optimizer=True)
    else:
        assert store.load(saved.path).optimizer is None


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://a/b",
        "tinker://a/weights/../x",
        "tinker://a/weights/..",
        "tinker://a/other/x",
        "a/weights/x",
    ],
)
def test_paths_that_are_none_are_refused(path):
    with pytest.raises(CheckpointError):
        parse_path(path)


def test_runs_cannot_leave_the_folder(tmp_path):
    with pytest.raises(CheckpointError):
        CheckpointStore(tmp_path).folder("../x", "weights", "one")


def test_config_is_what_peft_expects(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3, train_attn=False)
    store.save(meta(base, adapter), adapter, None, overwrite=False)
    config = json.loads((store.folder(RUN, "weights", "one") / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["down_proj", "gate_proj", "up_proj"]
    assert config["r"] == 8


@pytest.mark.parametrize("unembed", [False, True])
def test_a_merged_model_has_the_adapters_logits(base, make_adapter, tmp_path, unembed):
    store, adapter = CheckpointStore(tmp_path / "store"), make_adapter(3, train_unembed=unembed)
    store.save(meta(base, adapter), adapter, None, overwrite=False)
    target = tmp_path / "merged"
    export_merged(store.folder(RUN, "weights", "one"), target)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = torch.arange(5, 40)
    torch.testing.assert_close(
        engine_logits(base, adapter, tokens), model(tokens[None]).logits[0], atol=1e-4, rtol=1e-4
    )
    with pytest.raises(EngineError, match="exists already"):
        export_merged(store.folder(RUN, "weights", "one"), target)


def test_only_the_newest_are_kept(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    for number in range(4):
        each = meta(base, adapter, name=f"step-{number}")
        each.created += number
        store.save(each, adapter, None, overwrite=False)
    assert [found.name for found in store.prune(2)] == ["step-1", "step-0"]
    assert [found.name for found in store.all()] == ["step-3", "step-2"]


@pytest.fixture
def dead_owner():
    """A function that gives a name the pid and mark of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    mark = process_mark(ended.pid)
    ended.wait()

    def named(prefix: str, monkeypatch) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(ownership.os, "getpid", lambda: ended.pid)
            patch.setattr(ownership, "process_mark", lambda pid: mark)
            return ownership.owned_name(prefix)

    return named


def test_what_another_engine_is_writing_is_left_alone(base, make_adapter, tmp_path, monkeypatch, dead_owner):
    """A second engine starts while the first one is between its files."""
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    place = store.folder(RUN, "weights", "one").parent
    left = place / dead_owner(".partial-", monkeypatch)
    left.mkdir(parents=True)

    def write_and_start_another(tensors, file, *metadata):
        save_file(tensors, file, *metadata)
        CheckpointStore(tmp_path).remove_partial()

    monkeypatch.setattr(checkpoints, "save_file", write_and_start_another)
    saved = store.save(meta(base, adapter), adapter, Adam(adapter.flat).state(), overwrite=False)
    assert torch.equal(
        store.load(saved.path, optimizer=True).build(base.architecture, CPU).flat, adapter.flat
    )
    assert not left.exists()


def test_what_killed_engines_kept_is_removed_by_the_next(tmp_path, monkeypatch, dead_owner):
    monkeypatch.setattr(ownership.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / dead_owner("hermes-rl-engine-", monkeypatch)
    left.mkdir()
    first, second = ownership.scratch_folder(), ownership.scratch_folder()
    assert not left.exists()
    assert first != second
    assert {first, second} == set(tmp_path.iterdir())
    assert first.stat().st_mode & 0o777 == 0o700


def test_a_name_that_another_pid_once_had_protects_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "process_mark", lambda pid: "an earlier process")
        name = ownership.owned_name(".partial-")
    assert ownership.is_abandoned(tmp_path / name, ".partial-")
    assert not ownership.is_abandoned(tmp_path / ownership.owned_name(".partial-"), ".partial-")


@pytest.mark.parametrize("moment", ["old one moved", "new one moved"])
def test_killed_while_it_overwrites_one_of_the_two_is_there(
    base, make_adapter, tmp_path, monkeypatch, dead_owner, moment
):
    store, old, new = CheckpointStore(tmp_path), make_adapter(3), make_adapter(4)
    store.save(meta(base, old), old, None, overwrite=False)
    moves = []

    def killed(source, target):
        os.rename(source, target)
        moves.append(target)
        if len(moves) == ("old one moved", "new one moved").index(moment) + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "owned_name", lambda prefix: dead_owner(prefix, monkeypatch))
        patch.setattr(checkpoints.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(meta(base, new), new, None, overwrite=True)
    again = CheckpointStore(tmp_path)
    again.remove_partial()
    loaded = again.load(f"tinker://{RUN}/weights/one").build(base.architecture, CPU)
    assert torch.equal(loaded.flat, (old if moment == "old one moved" else new).flat)
    assert [file.name for file in store.folder(RUN, "weights", "one").parent.iterdir()] == ["one"]


def test_a_full_disk_is_said_and_leaves_nothing(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            store.save(meta(base, adapter), adapter, None, overwrite=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(store.folder(RUN, "weights", "one").parent.iterdir()) == []


def test_expired_checkpoints_are_neither_loaded_nor_in_the_way(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    saved = store.save(meta(base, adapter), adapter, None, overwrite=False)
    saved.expires = time.time() - 1
    store.update(saved)
    for use in (store.load, store.spec, lambda path: store.copy(path, "other", None)):
        with pytest.raises(CheckpointError, match="time to live"):
            use(saved.path)
    store.save(meta(base, adapter), adapter, None, overwrite=False)
    assert store.load(saved.path).meta.expires is None


def test_every_kind_is_pruned(base, make_adapter, tmp_path):
    store, adapter = CheckpointStore(tmp_path), make_adapter(3)
    for kind in ("weights", "sampler_weights", "external_weights"):
        for number in range(3):
            each = meta(base, adapter, name=f"step-{number}", kind=kind)
            each.created += number
            store.save(each, adapter, None, overwrite=False)
    assert len(store.prune(1)) == 6
    assert sorted(found.path.split("/", 3)[3] for found in store.all()) == [
        "external_weights/step-2", "sampler_weights/step-2", "weights/step-2",
    ]  # fmt: skip
