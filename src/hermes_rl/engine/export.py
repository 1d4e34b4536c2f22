"""Writing a checkpoint out for others: as it is, or merged into its base model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hermes_rl.engine.adapter import spec_from_peft_config
from hermes_rl.engine.base_model import resolve_model
from hermes_rl.errors import EngineError

_KEPT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def export_adapter(checkpoint: Path, target: Path) -> None:
    """Copy a checkpoint's PEFT adapter to ``target``.

    Raises:
        EngineError: ``checkpoint`` holds no adapter, or ``target`` exists.
    """
    _check(checkpoint, target)
    target.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy2(checkpoint / name, target / name)


def export_merged(checkpoint: Path, target: Path, *, base_model: str | None = None) -> None:
    """Write the base model with a checkpoint's adapter added to its weights.

    The result is a model folder that plain ``transformers`` loads: each adapted matrix becomes
    ``W + alpha / rank * B A``.

    Args:
        checkpoint: a checkpoint folder.
        target: folder to make.
        base_model: where the base model lies now, when not where it was trained.

    Raises:
        EngineError: no adapter there, no base model, weights that do not fit, or ``target`` exists.
    """
    _check(checkpoint, target)
    spec = spec_from_peft_config(checkpoint)
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    _, folder = resolve_model(base_model or config["base_model_name_or_path"])
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    model_config = json.loads((folder / "config.json").read_text())
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in _KEPT_FILES:
        for file in folder.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy2(file, partial / file.name)
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state.update(load_file(file))
    if spec.train_unembed and "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        model_config["tie_word_embeddings"] = False
        (partial / "config.json").write_text(json.dumps(model_config, indent=2))
    for name, a in adapter.items():
        if not name.endswith(".lora_A.weight"):
            continue
        path = name.removesuffix(".lora_A.weight")
        key = f"{path.removeprefix('base_model.model.')}.weight"
        weight = state.get(key)
        b = adapter[f"{path}.lora_B.weight"]
        if weight is None or weight.shape != (b.shape[0], a.shape[1]):
            shutil.rmtree(partial)
            raise EngineError(f"The adapter's {key} does not fit the base model in {folder}.")
        state[key] = (weight.float() + spec.scaling * (b @ a)).to(weight.dtype)
    save_file(state, partial / "model.safetensors", {"format": "pt"})
    partial.rename(target)


def _check(checkpoint: Path, target: Path) -> None:
    if not (checkpoint / "adapter_config.json").exists():
        raise EngineError(f"{checkpoint} holds no adapter.", hint="See `hermes-rl engine checkpoints`.")
    if target.exists():
        raise EngineError(f"{target} exists already.", hint="Give a folder that does not exist.")
