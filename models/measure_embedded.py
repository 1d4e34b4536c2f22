"""Measure the embedded model on the built-in environments: ``python models/measure_embedded.py [FOLDER]``.

One process on the CPU; talks to nothing. Each environment chooses its own held-out questions and scores the
answers; only the sampling is done here, directly with transformers, at temperature 1 and greedily.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
COUNT = 256


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, temperature: float, longest: int, seed: int = 0
) -> list[tuple[str, bool]]:
    """Answer every prompt once.

    Args:
        temperature: Sampling temperature; 0 is greedy.
        longest: Longest answer, in tokens.

    Returns:
        For each prompt the answer's text, and whether it ended by itself.
    """
    generator = torch.Generator().manual_seed(seed)
    tokenizer.padding_side = "left"
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False)
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    width = tokens.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    fed, cache = tokens, None
    for _ in range(longest):
        output = model(
            input_ids=fed, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits, cache = output.logits[:, -1].float(), output.past_key_values
        if temperature:
            fed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            fed = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, fed], 1)
        mask = torch.cat([mask, torch.ones_like(fed)], 1)
        positions = positions[:, -1:] + 1
        if (tokens[:, width:] == tokenizer.eos_token_id).any(1).all():
            break
    texts = []
    for row in tokens[:, width:].tolist():
        ended = tokenizer.eos_token_id in row
        kept = row[: row.index(tokenizer.eos_token_id)] if ended else row
        texts.append((tokenizer.decode(kept, skip_special_tokens=True), ended))
    return texts


async def measure(folder: Path) -> list[tuple[str, int, float, float]]:
    """Return for each task its name, number of questions, and accuracy at temperature 1 and greedy."""
    sys.path.insert(0, str(ROOT / "tinker-atropos" / "tinker_atropos" / "environments"))
    from arithmetic_tinker import ArithmeticTinkerEnv  # pyright: ignore[reportMissingImports]
    from gsm8k_tinker import Gsm8kTinkerEnv  # pyright: ignore[reportMissingImports]
    from reasoning_gym_tinker import ReasoningGymTinkerEnv  # pyright: ignore[reportMissingImports]
    from single_turn import Rollout, conversation  # pyright: ignore[reportMissingImports]

    problems = str(ROOT / "tests" / "data" / "word_problems.jsonl")
    tasks: list[tuple[str, Any, dict[str, Any]]] = [
        ("arithmetic_tinker (default)", ArithmeticTinkerEnv, {}),
        ("arithmetic_tinker, operations '+'", ArithmeticTinkerEnv, {"operations": "+"}),
        ("arithmetic_tinker, operations '-'", ArithmeticTinkerEnv, {"operations": "-"}),
        ("arithmetic_tinker, digits 3", ArithmeticTinkerEnv, {"digits": 3}),
        ("reasoning_gym_tinker, chain_sum (default)", ReasoningGymTinkerEnv, {}),
        ("reasoning_gym_tinker, spell_backward", ReasoningGymTinkerEnv, {"dataset": "spell_backward"}),
        ("gsm8k_tinker, our small file", Gsm8kTinkerEnv, {"data_path": problems, "max_token_length": 32}),
    ]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for label, cls, settings in tasks:
        config, (server,) = cls.config_init()
        values = {**config.model_dump(), "use_wandb": False, "tokenizer_name": str(folder), **settings}
        server = server.model_copy(update={"model_name": str(folder), "num_requests_for_eval": COUNT})
        environment = cls(type(config)(**values), [server])
        await environment.setup()
        system = getattr(environment, "system_prompt", getattr(environment.config, "system_prompt", ""))
        items = environment.evaluated
        questions = [item["question"] if isinstance(item, dict) else item[0] for item in items]
        prompts = [
            tokenizer.apply_chat_template(
                conversation(system, question), tokenize=False, add_generation_prompt=True
            )
            for question in questions
        ]
        shares = []
        for temperature in (1.0, 0.0):
            given = answers(
                model,
                tokenizer,
                prompts,
                temperature=temperature,
                longest=environment.config.max_token_length,
            )
            scores = [
                environment.score(Rollout(text, ended, [], [], None), item)
                for (text, ended), item in zip(given, items, strict=True)
            ]
            shares.append(sum(score >= 0.999 for score in scores) / len(scores))
        rows.append((label, len(items), shares[0], shares[1]))
    return rows


def main() -> None:
    """Print the table that docs/embedded-model.md shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "embedded")
    folder = parser.parse_args().folder.resolve()
    torch.set_num_threads(1)
    print("| Task | Questions | Temperature 1 | Greedy |\n| --- | --- | --- | --- |")
    for label, count, sampled, greedy in asyncio.run(measure(folder)):
        print(f"| {label} | {count} | {sampled:.1%} | {greedy:.1%} |")


if __name__ == "__main__":
    main()
