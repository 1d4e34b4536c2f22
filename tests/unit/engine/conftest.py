"""Small random models of every supported family, in the form `transformers` saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from hermes_rl.engine.adapter import Adapter, AdapterSpec
from hermes_rl.engine.base_model import BaseModel, load_base_model

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _rotary(theta: float, scaling: dict) -> dict:
    """Rotary settings as this version of transformers takes them."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _save(folder: Path, model) -> Path:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.1)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.08)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory) -> dict[str, Path]:
    """Folders by family."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    qwen3 = transformers.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)
    llama = transformers.LlamaConfig(
        **SHAPE, num_key_value_heads=4, attention_bias=True, mlp_bias=True, **_rotary(1000.0, LLAMA3)
    )
    qwen2 = transformers.Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=False)
    return {
        "qwen3": _save(root / "qwen3", transformers.Qwen3ForCausalLM(qwen3)),
        "llama": _save(root / "llama", transformers.LlamaForCausalLM(llama)),
        "qwen2": _save(root / "qwen2", transformers.Qwen2ForCausalLM(qwen2)),
    }


@pytest.fixture(scope="session")
def base(model_folders) -> BaseModel:
    return load_base_model(str(model_folders["qwen3"]), CPU, torch.float32)


@pytest.fixture(scope="session")
def base_bfloat16(model_folders) -> BaseModel:
    return load_base_model(str(model_folders["qwen3"]), CPU, torch.bfloat16)


@pytest.fixture
def make_adapter(base):
    """A function from seed and rank to an adapter whose B matrices are not zero."""

    def make(seed: int, rank: int = 8, model: BaseModel | None = None, **targets: bool) -> Adapter:
        spec = AdapterSpec(rank, 16.0, **targets)
        adapter = Adapter.create((model or base).architecture, spec, seed, CPU)
        generator = torch.Generator().manual_seed(seed)
        for matrices in adapter.matrices.values():
            for b in matrices.b:
                b.normal_(0.0, 0.05, generator=generator)
        return adapter

    return make
