"""The embedded model's byte-level tokenizer and its chat template.

Runs inside ``make_embedded.py``; talks to nothing.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that end or frame text; ``decode(skip_special_tokens=True)`` drops them."""

MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Tokens of Qwen3's vocabulary that belong to the text itself; decoding keeps them."""

VOCABULARY_SIZE = 272
"""256 bytes, 9 named tokens, and unused rows up to a multiple of 16."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions.\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nTo call one: <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
    {{- '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {%- if not loop.first or (tools and message.role != 'system') %}
            {{- '\\n' }}
        {%- endif %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if message.role == 'tool' %}
            {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>' }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- for call in message.tool_calls or [] %}
                {%- set function = call.function or call %}
                {%- if content or not loop.first %}
                    {{- '\\n' }}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
                {{- function.arguments if function.arguments is string else function.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '\\n<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""Qwen3's layout with one difference: the newline stands *between* messages, not after each.

A rendered chat that ends with the assistant therefore ends with ``<|im_end|>``, exactly as
sampled text does, and the part after the generation prompt is the answer and ``<|im_end|>``
and nothing else.
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token a byte, id = byte value, named tokens from id 256.

    Returns:
        A fast tokenizer ready for ``save_pretrained``.
    """
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[], byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # pyright: ignore
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_vocabulary() -> dict[str, int]:
    """Map the printable stand-in that the ByteLevel pre-tokenizer uses for each byte to the byte's value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = {byte: chr(byte) for byte in printable}
    shifted = 0
    for byte in range(256):
        if byte not in stand_in:
            stand_in[byte] = chr(256 + shifted)
            shifted += 1
    return {stand_in[byte]: byte for byte in range(256)}
