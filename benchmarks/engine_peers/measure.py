"""Times the peers: transformers' ``generate``, transformers with PEFT, and TRL's ``GRPOTrainer``.

Runs in an environment of its own that holds ``trl``, ``peft`` and ``datasets``, started by
``benchmarks.engine``. Prints one JSON object of seconds.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

GROUPS, COPIES, PROMPT, COMPLETION, RANK = 8, 8, 40, 32, 16


def best(call: Any, repeats: int) -> float:
    """Shortest time of several, after one for warming up."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def main(folder: Path, threads: int, repeats: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of each peer on the model in ``folder``, its weights in ``dtype`` as the engine's are."""
    torch.set_num_threads(threads)
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    prompts = torch.randint(3, 250, (GROUPS, PROMPT)).repeat_interleave(COPIES, 0).to(device)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    lora = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")

    wait = torch.cuda.synchronize if device != "cpu" else lambda: None

    def generate() -> None:
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=COMPLETION,
            min_new_tokens=COMPLETION,
            pad_token_id=0,
        )
        assert out.shape[1] == PROMPT + COMPLETION
        wait()

    result = {"generate": best(generate, repeats)}
    adapted: Any = get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-5)
    tokens = torch.randint(3, 250, (GROUPS * COPIES, COMPLETION), device=device)
    tokens = torch.cat([prompts, tokens], dim=1)
    advantages = torch.randn(GROUPS * COPIES, 1, device=device)

    def train() -> None:
        logits = adapted(tokens[:, :-1], logits_to_keep=COMPLETION).logits
        logprobs = logits.float().log_softmax(-1).gather(2, tokens[:, PROMPT:, None])[:, :, 0]
        loss = -(torch.exp(logprobs - logprobs.detach()) * advantages).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()

    result["peft"] = best(train, repeats)
    result["trl"] = grpo_step(folder, lora, repeats, device, dtype)
    return result


def grpo_step(folder: Path, lora: Any, repeats: int, device: str, dtype: torch.dtype) -> float:
    """Seconds of one step of TRL's trainer: 8 prompts, 8 completions each."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = [(f"{number:02d}" * PROMPT)[:PROMPT] for number in range(64)]
    begins: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begins.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion))) for completion in completions]

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=GROUPS * COPIES,
            num_generations=COPIES,
            max_completion_length=COMPLETION,
            generation_kwargs={"min_new_tokens": COMPLETION},
            max_steps=repeats + 2,
            beta=0.0,
            learning_rate=1e-5,
            report_to=[],
            logging_steps=10**6,
            save_strategy="no",
            use_cpu=device == "cpu",
            bf16=dtype == torch.bfloat16,
            gradient_checkpointing=False,
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": text}),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[Clock()],
        )
        trainer.train()
    steps = [after - before for before, after in itertools.pairwise(begins)]
    return min(steps[1:])


if __name__ == "__main__":
    model_folder, thread_count, repeat_count, where, kind = sys.argv[1:]
    weights = getattr(torch, kind)
    print(json.dumps(main(Path(model_folder), int(thread_count), int(repeat_count), where, weights)))
