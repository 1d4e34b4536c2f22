"""The peer of a search: Optuna's grid over TRL's ``GRPOTrainer``, in one process, one trial after another.

Runs in an environment of its own that holds ``optuna``, ``trl``, ``peft`` and ``datasets``, started by
``benchmarks.search_against_peers`` with a JSON object on its standard input (the fields of :class:`Work`).
Written as the documentation of both suggests: an objective that trains and returns the last evaluation, a
sampler, a pruner that is told of each evaluation. Prints a JSON object a trial.

What makes it faster than TRL's defaults on a processor is set: float32 (bfloat16 is slower here), no gradient
checkpointing, all completions of a step and all evaluated items in one batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

BEGUN = time.perf_counter()

import optuna  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


@dataclass(frozen=True)
class Work:
    """What to do.

    Attributes:
        model: folder of the base model.
        grid: field → its values; ``learning_rate``, ``batch_size`` (sequences of a step) and ``lora_rank``.
        train, evaluated: questions and answers, as ``[text, answer]``.
        steps: optimizer steps of a trial.
        steps_per_eval: steps between two evaluations; there is one before the first step too.
        group_size: completions of one question.
        max_tokens: longest completion.
        lora_alpha: scale of the adapter.
        threads: of torch.
        pruner: ``none``, or ``asha`` for Optuna's.
    """

    model: str
    grid: dict[str, list[Any]]
    train: list[list[str]]
    evaluated: list[list[str]]
    steps: int
    steps_per_eval: int
    group_size: int
    max_tokens: int
    lora_alpha: float
    threads: int
    pruner: str


class Report(TrainerCallback):
    """Tells Optuna of each evaluation."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial
        self.last = float("nan")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self.last = metrics["eval_reward"]
        self.trial.report(self.last, state.global_step)
        if state.global_step and self.trial.should_prune():
            raise optuna.TrialPruned


def questions(items: list[list[str]]) -> Dataset:
    """A dataset of conversations."""
    prompts = [[{"role": "user", "content": text}] for text, _ in items]
    return Dataset.from_dict({"prompt": prompts, "answer": [answer for _, answer in items]})


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number alone, else 0: the reward of the arithmetic environment."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(text.strip() == wanted) for text, wanted in zip(texts, answer, strict=True)]


def main(work: Work) -> None:
    torch.set_num_threads(work.threads)
    train, evaluated = questions(work.train), questions(work.evaluated)

    def objective(trial: optuna.Trial) -> float:
        params = {name: trial.suggest_categorical(name, values) for name, values in work.grid.items()}
        report, processor = Report(trial), time.process_time()
        with tempfile.TemporaryDirectory() as output:
            config = GRPOConfig(
                output_dir=output,
                learning_rate=params["learning_rate"],
                per_device_train_batch_size=params["batch_size"],
                num_generations=work.group_size,
                max_completion_length=work.max_tokens,
                max_steps=work.steps,
                eval_strategy="steps",
                eval_steps=work.steps_per_eval,
                eval_on_start=True,
                per_device_eval_batch_size=len(evaluated),
                num_generations_eval=1,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
                seed=0,
            )
            trainer = GRPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32),
                reward_funcs=right,
                args=config,
                train_dataset=train,
                eval_dataset=evaluated,
                processing_class=AutoTokenizer.from_pretrained(work.model, padding_side="left"),
                peft_config=LoraConfig(
                    r=params["lora_rank"],
                    lora_alpha=work.lora_alpha,
                    target_modules="all-linear",
                    task_type="CAUSAL_LM",
                ),
                callbacks=[report],
            )
            trainer.train()
        trial.set_user_attr("processor", time.process_time() - processor)
        return report.last

    pruner = optuna.pruners.NopPruner()
    if work.pruner == "asha":
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=work.steps_per_eval, reduction_factor=3)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.GridSampler(work.grid, seed=0), pruner=pruner
    )

    def tell(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        assert trial.duration is not None
        record = {
            "params": trial.params,
            "state": trial.state.name,
            "values": {str(step): value for step, value in trial.intermediate_values.items()},
            "seconds": trial.duration.total_seconds(),
            "processor": trial.user_attrs.get("processor"),
        }
        print(json.dumps({"trial": record}), flush=True)

    before = time.perf_counter() - BEGUN
    study.optimize(objective, callbacks=[tell])
    print(json.dumps({"before": before, "seconds": time.perf_counter() - BEGUN}), flush=True)


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    main(Work(**json.load(sys.stdin)))
