"""Make the embedded base model: ``python models/make_embedded.py [FOLDER]``.

One process on the CPU; talks to nothing. Writes the model, its tokenizer and ``training.json``.

Three phases, each shorter than the one before:

1. *Facts*: the bare cores of the questions and their answers, many to a row. A jump in the position
   numbers stands for the wording and the chat markup that are left out, so that what is learnt here
   holds in a chat, at a third of the cost.
2. *Chats*: whole conversations as an environment sends them, all answers right.
3. *Habits*: the same, but nearly half of the answers end in a full stop, which the verifiers refuse,
   and a few are plausibly wrong. The model ends up knowing more than its sampled answers show. That is
   what reinforcement learning can improve within a few dozen steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from embedded_text import Item, arithmetic_items, reasoning_gym_items, unpolished
from embedded_tokenizer import VOCABULARY_SIZE, build_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

NEWLINE, END, PADDING = 10, 258, 256
OPENING = [257, *b"user\n"]
MIDDLE = [END, NEWLINE, 257, *b"assistant\n"]
PROMPT_WEIGHT = 0.02


@dataclass(frozen=True)
class Recipe:
    """Every number that decides what the model becomes.

    Attributes:
        seed: Seed of the initial weights and of the text.
        facts_steps, chats_steps, habits_steps: Optimizer steps of the three phases.
        facts_rows, row_tokens: Size of a batch of facts.
        chats: Conversations in a batch; one in eight is a reasoning-gym question.
        full_stops, slips: Shares of answers with a full stop, and of wrong ones, in the third phase.
    """

    seed: int = 0
    facts_steps: int = 1200
    chats_steps: int = 350
    habits_steps: int = 100
    facts_rows: int = 32
    row_tokens: int = 96
    chats: int = 72
    full_stops: float = 0.46
    slips: float = 0.04
    facts_learning_rate: float = 3e-3
    chats_learning_rate: float = 1.5e-3
    habits_learning_rate: float = 1e-3


def build_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.8 million parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=END,
        pad_token_id=PADDING,
    )
    return Qwen3ForCausalLM(config)


class Text:
    """Endless batches of the three phases, a function of the seed alone."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.rng = random.Random(recipe.seed)
        self.arithmetic = arithmetic_items(self.rng)
        self.chain_sum = reasoning_gym_items(
            "chain_sum", 1 << 29, min_terms=2, max_terms=2, min_digits=1, max_digits=2
        )
        self.spelling = reasoning_gym_items("spell_backward", 1 << 29, min_word_len=3, max_word_len=4)

    def item(self) -> Item:
        """Draw from the families: three quarters arithmetic, the rest from reasoning-gym."""
        kind = self.rng.random()
        if kind < 0.76:
            return next(self.arithmetic)
        return next(self.chain_sum if kind < 0.90 else self.spelling)

    def facts(self) -> dict[str, torch.Tensor]:
        """One batch of rows of bare facts: newline, core, newline, answer, end; over and over."""
        length = self.recipe.row_tokens + 1
        rows = []
        for _ in range(self.recipe.facts_rows):
            tokens: list[int] = []
            positions: list[int] = []
            weights: list[float] = []
            start = 0
            while len(tokens) < length:
                item = self.item()
                core, answer = [NEWLINE, *item.core.encode()], [NEWLINE, *item.answer.encode(), END]
                jump = start + len(core) + len(MIDDLE) - 1
                positions += [*range(start, start + len(core)), *range(jump, jump + len(answer))]
                tokens += [*core, *answer]
                weights += [PROMPT_WEIGHT] * (len(core) + 1) + [1.0] * (len(answer) - 1)
                start = jump + len(answer) + len(OPENING)
            rows.append((tokens[:length], positions[:length], weights[:length]))
        tokens_, positions_, weights_ = (torch.tensor([row[part] for row in rows]) for part in range(3))
        return {"tokens": tokens_, "positions": positions_, "weights": weights_}

    def chats(self, *, polished: bool) -> list[dict[str, torch.Tensor]]:
        """One batch of conversations, the short and the long ones apart."""
        count = self.recipe.chats
        short = [next(self.arithmetic) for _ in range(count - count // 8)]
        long = [next(self.chain_sum if self.rng.random() < 0.6 else self.spelling) for _ in range(count // 8)]
        return [self._conversations(short, polished), self._conversations(long, polished)]

    def _conversations(self, items: list[Item], polished: bool) -> dict[str, torch.Tensor]:
        rows = []
        for item in items:
            answer = item.answer
            if not polished:
                answer = unpolished(
                    self.rng, answer, full_stops=self.recipe.full_stops, slips=self.recipe.slips
                )
            prompt = [*OPENING, *item.question.encode(), *MIDDLE]
            trained = [*answer.encode(), END]
            rows.append(([*prompt, *trained], [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(trained)))
        length = max(len(tokens) for tokens, _ in rows)
        tokens_ = torch.tensor([tokens + [PADDING] * (length - len(tokens)) for tokens, _ in rows])
        weights_ = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows])
        return {"tokens": tokens_, "positions": torch.arange(length).expand_as(tokens_), "weights": weights_}


def weighted_loss(model: Qwen3ForCausalLM, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Mean next-token loss (nats) over the tokens of all batches, by weight."""
    total, weight = torch.zeros(()), torch.zeros(())
    for batch in batches:
        logits = model(input_ids=batch["tokens"][:, :-1], position_ids=batch["positions"][:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none"
        )
        weights = batch["weights"][:, 1:].flatten()
        total, weight = total + (losses * weights).sum(), weight + weights.sum()
    return total / weight


def train(
    model: Qwen3ForCausalLM,
    batches: Iterator[list[dict[str, torch.Tensor]]],
    steps: int,
    peak: float,
    name: str,
) -> None:
    """Run one phase: AdamW, short warm-up, cosine decay to a twentieth of the peak learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.05)
    started = time.monotonic()
    for step in range(steps):
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / 40) * decay
        loss = weighted_loss(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            seconds = time.monotonic() - started
            print(f"{name} step {step + 1}/{steps} loss {loss.item():.3f} {seconds:.0f} s", flush=True)


def save(model: Qwen3ForCausalLM, folder: Path, record: dict[str, object]) -> None:
    """Write weights, configuration, tokenizer, and a record of how they were made."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = model.generation_config
    generation.do_sample, generation.temperature = True, 1.0
    generation.eos_token_id, generation.pad_token_id = [END, PADDING], PADDING
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    _name_portable_tokenizer_class(folder / "tokenizer_config.json")
    (folder / "model.safetensors").chmod(0o644)
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def _name_portable_tokenizer_class(path: Path) -> None:
    """transformers 5 writes a class name that version 4 does not know; both read this one."""
    config = json.loads(path.read_text())
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train from nothing and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "embedded")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    recipe = Recipe()
    model, text = build_model(recipe.seed), Text(recipe)
    started, used = time.monotonic(), time.process_time()

    def facts() -> Iterator[list[dict[str, torch.Tensor]]]:
        while True:
            yield [text.facts()]

    def chats(*, polished: bool) -> Iterator[list[dict[str, torch.Tensor]]]:
        while True:
            yield text.chats(polished=polished)

    train(model, facts(), recipe.facts_steps, recipe.facts_learning_rate, "facts")
    train(model, chats(polished=True), recipe.chats_steps, recipe.chats_learning_rate, "chats")
    if os.environ.get("KEEP"):
        save(model, Path(os.environ["KEEP"]), {})
    train(model, chats(polished=False), recipe.habits_steps, recipe.habits_learning_rate, "habits")
    record = {
        "recipe": asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.monotonic() - started),
        "cpu_seconds": round(time.process_time() - used),
        "threads": arguments.threads,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    save(model, arguments.folder, record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
