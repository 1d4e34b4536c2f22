"""Stop strings: text whose appearance ends a completion."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hermes_rl.engine.wire import RequestError


class StopStrings:
    """Watches completions for strings. The tokenizer is loaded at the first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def watcher(self, strings: tuple[str, ...]) -> Callable[[np.ndarray], bool]:
        """A function that says whether one of ``strings`` has appeared in a completion's tokens.

        It looks at the end only: as many tokens as the longest string has UTF-8 bytes, and one.

        Raises:
            RequestError: this model has no tokenizer that could tell.
        """
        decode = self._decode
        reach = max(len(text.encode()) for text in strings) + 1

        def appeared(tokens: np.ndarray) -> bool:
            text = decode(tokens[-reach:].tolist())
            return any(string in text for string in strings)

        return appeared

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        try:
            if (self._folder / "tokenizer.json").exists():
                from tokenizers import Tokenizer

                fast = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
                return lambda tokens: fast.decode(tokens, skip_special_tokens=False)
            from transformers import AutoTokenizer

            slow: Any = AutoTokenizer.from_pretrained(self._folder)
            return lambda tokens: slow.decode(tokens, skip_special_tokens=False)
        except Exception as error:
            raise RequestError(
                f"sampling_params.stop: this model's tokenizer cannot be loaded ({error}); "
                "give stop tokens instead of strings"
            ) from error
