"""The engine's work done plainly, by transformers, PEFT and autograd, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file

from hermes_rl.engine.adapter import HEAD_LAYER, Adapter
from hermes_rl.engine.base_model import BaseModel


def peft_model(base: BaseModel, adapter: Adapter, folder: Path) -> peft.PeftModel:
    """The adapter saved as the engine saves it and loaded by PEFT, in float64."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter.peft_config(base.name)))
    save_file(adapter.peft_state(), folder / "adapter_model.safetensors")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(plain, str(folder), is_trainable=True).double()


def logprobs(model, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Logprobs of ``targets [length]`` or ``[length, k]`` after each of ``tokens [length]``."""
    table = model(tokens[None]).logits[0].log_softmax(-1)
    wanted = targets if targets.ndim == 2 else targets[:, None]
    return table.gather(1, wanted).reshape(targets.shape)


def adapter_gradient(model: peft.PeftModel, adapter: Adapter) -> torch.Tensor:
    """PEFT's gradients in the order of the adapter's flat vector, float64."""
    flat = torch.zeros_like(adapter.flat, dtype=torch.float64)
    named = dict(model.named_parameters())
    rank = adapter.spec.rank
    groups = {group.name: group for group in adapter.architecture.layer_groups}
    for (layer, name), matrices in adapter.views(flat).items():
        paths = (
            ["lm_head"]
            if layer == HEAD_LAYER
            else [f"model.layers.{layer}.{path}" for path, _ in groups[name].parts]
        )
        for index, path in enumerate(paths):
            prefix = f"base_model.model.{path}"
            a, b = named[f"{prefix}.lora_A.default.weight"], named[f"{prefix}.lora_B.default.weight"]
            if a.grad is not None:
                matrices.a[index * rank : (index + 1) * rank].copy_(a.grad)
            if b.grad is not None:
                matrices.b[index].copy_(b.grad)
    return flat
