"""A checkpoint that can be seen is whole, loads in PEFT, and goes away when told."""

from __future__ import annotations

import json
import time

import peft
import pytest
import torch
import transformers

from hermes_rl.engine.checkpoints import CheckpointError, CheckpointMeta, CheckpointStore, parse_path
from hermes_rl.engine.export import export_merged
from hermes_rl.engine.linears import adapter_linears
from hermes_rl.engine.optimizer import Adam
from hermes_rl.engine.packing import pack_prompts
from hermes_rl.engine.pointwise import rms_norm
from hermes_rl.engine.transformer import hidden_states
from hermes_rl.errors import EngineError

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
