"""The embedded model's folder: what loads it, how long texts get, and which tokens a chat trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

FOLDER = Path(__file__).parents[2] / "models" / "embedded"
CHAT = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_folder_stays_small_enough_for_the_repository() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000


def test_it_is_a_qwen3_that_ends_with_im_end(tokenizer: Any) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["eos_token_id"] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id in generation["eos_token_id"]
    assert config["pad_token_id"] == tokenizer.pad_token_id
    assert config["vocab_size"] >= len(tokenizer)


def test_both_major_versions_of_transformers_know_the_tokenizer_class() -> None:
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("text", ["12+34=", "  two  spaces\n\n\ttab", "héllo 中文 🙂", "\x00\x7f"])
def test_any_text_survives_one_token_a_byte(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_markup_is_one_token_and_only_framing_is_dropped_on_decoding(tokenizer: Any) -> None:
    text = "<|im_start|><think>a</think><tool_call>b</tool_call><|im_end|>"
    ids = tokenizer.encode(text)
    assert len(ids) == 8
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think><tool_call>b</tool_call>"


def test_a_chat_trains_the_answer_and_its_end_and_nothing_else(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert whole[: len(prompt)] == prompt
    assert whole[len(prompt) :] == [*b"46", tokenizer.eos_token_id]


def test_the_default_prompt_is_short(tokenizer: Any) -> None:
    assert len(tokenizer.apply_chat_template(CHAT, return_dict=False)) <= 40


def test_every_turn_of_a_longer_chat_extends_the_turn_before(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *CHAT, {"role": "user", "content": "1+1="}]
    first = tokenizer.apply_chat_template(chat[:3], tokenize=False)
    assert tokenizer.apply_chat_template(chat, tokenize=False).startswith(first + "\n")


def test_tools_and_disabled_thinking_are_rendered(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    text = tokenizer.apply_chat_template(
        CHAT[:1], tools=[tool], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert text.startswith("<|im_start|>system\n")
    assert '"name": "add"' in text
    assert "<|im_end|>\n<|im_start|>user\n12+34=" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_atropos_masks_the_chat_right(tokenizer: Any) -> None:
    from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

    for every_turn in (False, True):
        result = tokenize_for_trainer(tokenizer, CHAT, train_on_all_assistant_turns=every_turn)
        trained = [mask for mask in result["masks"] if mask != -100]
        assert trained == [*b"46", tokenizer.eos_token_id]
        assert len(result["masks"]) == len(result["tokens"])


def test_atropos_drops_the_end_of_a_truncated_answer(tokenizer: Any) -> None:
    from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

    result = tokenize_for_trainer(tokenizer, CHAT, finish_reason="length")
    assert [mask for mask in result["masks"] if mask != -100] == [*b"46"]
