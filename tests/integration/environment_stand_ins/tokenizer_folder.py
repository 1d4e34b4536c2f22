"""A byte-level tokenizer in a local folder, as ``AutoTokenizer.from_pretrained`` reads it."""

import json
from pathlib import Path

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of the 256 bytes and three special tokens; ids 0 to 127 are ASCII."""
    folder.mkdir(parents=True, exist_ok=True)
    # The byte-to-character table of byte-level BPE: printable bytes stand for themselves.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }
    vocabulary = {character[byte]: byte for byte in range(256)}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 256 + index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for index, text in enumerate(special)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
