"""Requests and responses of the Tinker protocol, checked and turned into what the engine works with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from hermes_rl.engine.decoding import SampledTokens, SampleJob
from hermes_rl.engine.losses import RATIO_MASK, TOKEN_THRESHOLDS, Loss, make_loss
from hermes_rl.engine.training import Outcome, TrainingSequence

MAX_BODY_BYTES = 256 * 2**20
MAX_TARGETS = 2**22
"""Targets of one training request, all data and columns together; each takes some 30 bytes."""


class RequestError(Exception):
    """A request is refused. ``status`` is the HTTP status; the message names the field."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


# --- bodies --------------------------------------------------------------------------------------------


def decompress(body: bytes, encoding: str) -> bytes:
    """Undo ``Content-Encoding``.

    Raises:
        RequestError: unknown encoding, damaged or too large.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RequestError(f"Content-Encoding {encoding!r} is not supported; use zstd", 415)
    try:
        size = zstandard.frame_content_size(body)
        if size > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", 413)
        limit = 0 if size >= 0 else MAX_BODY_BYTES
        return zstandard.ZstdDecompressor(max_window_size=2**27).decompress(body, max_output_size=limit)
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not valid zstd: {error}") from error


def read_json(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestError: the body is not one.
    """
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


_ABSENT = object()


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = _ABSENT) -> Any:
    """A field of a JSON object, of the given type.

    Raises:
        RequestError: it is missing and has no default, or is of another type.
    """
    value = body.get(name)
    if value is None:
        if default is _ABSENT:
            raise RequestError(f"{name} is missing")
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool) and bool not in kinds:
        raise RequestError(f"{name} must be a {kinds[0].__name__}, got {value!r}")
    if float in kinds and isinstance(value, int):
        try:
            value = float(value)
        except OverflowError as error:
            raise RequestError(f"{name} must be a number up to 1.8e308") from error
    if not isinstance(value, kinds):
        raise RequestError(f"{name} must be a {kinds[0].__name__}, got {str(value)[:80]!r}")
    return value


def read_ttl(body: Mapping[str, Any]) -> int | None:
    """``ttl_seconds`` of a request.

    Raises:
        RequestError: not between an hour and ten years.
    """
    ttl = field(body, "ttl_seconds", int, None)
    if ttl is not None and not 3600 <= ttl <= 10 * 366 * 86400:
        raise RequestError(f"ttl_seconds must be between 1 hour (3600) and 10 years, got {ttl}")
    return ttl


# --- model input ---------------------------------------------------------------------------------------


def _check_tokens(tokens: np.ndarray, vocab: int, where: str) -> np.ndarray:
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab):
        raise RequestError(f"{where} holds a token outside 0 … {vocab - 1}")
    return tokens.astype(np.int64)


def _token_array(values: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(values)
        if array.size == 0:
            return np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise RequestError(f"{where} must be a list of token ids") from error
    return array.astype(np.int64)


def read_prompt(value: Any, vocab: int, limit: int) -> np.ndarray:
    """Tokens of a JSON model input.

    Raises:
        RequestError: not text tokens, empty, too long, or outside the vocabulary.
    """
    if not isinstance(value, dict) or not isinstance(value.get("chunks"), list):
        raise RequestError("prompt.chunks must be a list")
    parts = []
    for number, chunk in enumerate(value["chunks"]):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise RequestError(f"prompt.chunks[{number}]: {kind} is not supported; this engine serves text")
        parts.append(_token_array(chunk.get("tokens", []), f"prompt.chunks[{number}].tokens"))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not len(tokens):
        raise RequestError("prompt is empty")
    if len(tokens) >= limit:
        raise RequestError(f"prompt has {len(tokens)} tokens; the model's context is {limit}")
    return _check_tokens(tokens, vocab, "prompt")


# --- forward_backward ----------------------------------------------------------------------------------


def read_training(
    message: pb.ForwardBackwardRequest, vocab: int, limit: int
) -> tuple[list[TrainingSequence], Loss]:
    """Sequences and loss of a ``forward_backward`` request.

    Raises:
        RequestError: anything in it cannot be trained on; the message names the datum and field.
    """
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    try:
        loss = make_loss(message.loss_fn, config)
    except ValueError as error:
        raise RequestError(str(error)) from error
    if not message.data:
        raise RequestError("data is empty")
    thresholds: tuple[str, ...] = ()
    if loss.name in ("ppo", "cispo"):
        given = (name for datum in message.data for name in datum.loss_fn_inputs)
        # one datum that gives one of them makes both a matter of tokens, for all data
        thresholds = TOKEN_THRESHOLDS if any(name in TOKEN_THRESHOLDS for name in given) else ()
    sequences: list[TrainingSequence] = []
    left = MAX_TARGETS
    for index, datum in enumerate(message.data):
        sequences.append(_read_datum(datum, loss, thresholds, vocab, limit, left, f"data[{index}]"))
        left -= len(sequences[-1].targets)
    return sequences, loss


def _read_datum(
    datum: pb.Datum,
    loss: Loss,
    thresholds: tuple[str, ...],
    vocab: int,
    limit: int,
    left: int,
    where: str,
) -> TrainingSequence:
    """A datum as the engine works with it; at most ``left`` targets."""
    parts = []
    for number, chunk in enumerate(datum.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RequestError(
                f"{where}.model_input[{number}]: {kind} is not supported; this engine trains on text"
            )
        raw = chunk.encoded_text.tokens
        if len(raw) % 4:
            raise RequestError(f"{where}.model_input[{number}].tokens is cut off")
        parts.append(np.frombuffer(raw, np.int32))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if not len(tokens):
        raise RequestError(f"{where}.model_input is empty")
    if len(tokens) > limit:
        raise RequestError(f"{where}.model_input has {len(tokens)} tokens; the model's context is {limit}")
    tokens = _check_tokens(tokens, vocab, f"{where}.model_input")
    given = datum.loss_fn_inputs
    if "target_tokens" not in given:
        raise RequestError(f"{where}.loss_fn_inputs lacks target_tokens")
    most = (len(tokens), max(1, min(vocab, left // len(tokens))))
    targets = read_tensor(given["target_tokens"], f"{where}.target_tokens", most)
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or targets.dtype.kind != "i":
        raise RequestError(
            f"{where}.target_tokens has shape {list(targets.shape)} and type {targets.dtype}; expected "
            f"integers [{len(tokens)}] or [{len(tokens)}, K], one row a token of model_input"
        )
    if targets.size > left:
        raise RequestError(
            f"{where}.target_tokens: a request holds at most {MAX_TARGETS} targets; send the data in several"
        )
    shape = targets.shape
    most = (len(tokens), 1 if targets.ndim == 1 else shape[1])
    inputs: dict[str, np.ndarray] = {}
    for name in (*loss.inputs, *thresholds):
        if name not in given:
            if name == "weights":
                inputs[name] = np.ones(shape, np.float32)
                continue
            if name in thresholds:
                inputs[name] = np.full(shape, loss.threshold(name), np.float32)
                continue
            raise RequestError(f"{where}.loss_fn_inputs lacks {name}, which {loss.name} needs")
        value = read_tensor(given[name], f"{where}.{name}", most).astype(np.float32)
        if value.shape != shape:
            raise RequestError(
                f"{where}.{name} has shape {list(value.shape)}; expected {list(shape)} as target_tokens"
            )
        if not np.isfinite(value).all():
            raise RequestError(f"{where}.{name} holds a value that is not finite")
        if name == RATIO_MASK and not value.any():
            raise RequestError(f"{where}.{name} marks no token")
        inputs[name] = value
    width = 1 if targets.ndim == 1 else shape[1]
    positions = np.repeat(np.arange(len(tokens)), width)
    return TrainingSequence(
        tokens=tokens,
        positions=positions,
        targets=_check_tokens(targets.reshape(-1), vocab, f"{where}.target_tokens"),
        inputs={name: value.reshape(-1) for name, value in inputs.items()},
        shape=tuple(shape),
    )


_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


def read_tensor(message: pb.Tensor, where: str, most: tuple[int, int]) -> np.ndarray:
    """A protocol tensor, dense; entries that a sparse one does not list are zero.

    Args:
        most: rows that a sparse one must have, and how many columns it may have: it says how large it is
            without sending as much.

    Raises:
        RequestError: its bytes, type and shape do not go together.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise RequestError(f"{where} has an unknown dtype ({message.dtype})")
    shape = [int(size) for size in message.shape]
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_BODY_BYTES // 4:
        raise RequestError(f"{where} has an impossible shape {shape}")
    try:
        if message.HasField("sparse_csr"):
            if len(shape) != 2 or shape[0] != most[0] or shape[1] > most[1]:
                raise RequestError(
                    f"{where} is sparse and has shape {shape}; expected [{most[0]}, K] with K up to {most[1]}"
                )
            sparse = message.sparse_csr
            return _dense(
                np.frombuffer(sparse.values, dtype),
                np.frombuffer(sparse.crow_indices, np.int64),
                np.frombuffer(sparse.col_indices, np.int64),
                shape,
            )
        values = np.frombuffer(message.dense, dtype)
        return values.reshape(shape) if shape or values.size == 1 else values
    except ValueError as error:
        raise RequestError(f"{where}: {error}") from error


def _dense(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int], fill: int = 0
) -> np.ndarray:
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(values) != len(columns):
        raise ValueError("the sparse tensor's parts do not fit its shape")
    if len(values) and (rows[0] != 0 or rows[-1] != len(values) or (np.diff(rows) < 0).any()):
        raise ValueError("the sparse tensor's row pointers are not ascending")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise ValueError("the sparse tensor names a column outside its shape")
    dense = np.full(shape, fill, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def parse_training_request(body: bytes) -> pb.ForwardBackwardRequest:
    """The protobuf message of a ``forward_backward`` request.

    Raises:
        RequestError: the bytes are not one.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except (DecodeError, ValueError) as error:
        raise RequestError("the body is not a valid ForwardBackwardRequest message") from error
    return message


def training_response(outcome: Outcome, sequences: Sequence[TrainingSequence]) -> bytes:
    """Serialised ``ForwardBackwardOutput``: one record for each run of equally wide targets."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn")
    message.metrics["loss:sum"] = outcome.loss
    pairs = zip(sequences, outcome.logprobs, strict=True)
    for trailing, group in groupby(pairs, key=lambda pair: pair[0].shape[1:]):
        chunks = [logprobs.tobytes() for _, logprobs in group]
        record = message.loss_fn_outputs.add(type_tag="TorchLossReturn", num_datums=len(chunks))
        tensor = record.fields["logprobs"]
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.data = b"".join(chunks)
        tensor.offsets = np.cumsum([0, *map(len, chunks)], dtype=np.int64).tobytes()
        tensor.trailing_shape.extend(trailing)
    return message.SerializeToString()


# --- sampling ------------------------------------------------------------------------------------------


@dataclass
class SampleOptions:
    """What a sampling request asks for, apart from the weights."""

    prompt: np.ndarray
    count: int
    max_tokens: int
    seed: int | None
    temperature: float
    top_k: int
    top_p: float
    stop_tokens: tuple[int, ...] | None
    stop_strings: tuple[str, ...]
    sample_top_k: int
    prompt_logprobs: bool
    prompt_top_k: int
    prompt_last: int | None
    prompt_targets: np.ndarray | None
    sparse_targets: dict[str, Any] | None
    prompt_alternatives: int


MAX_SAMPLES = 512
MAX_ALTERNATIVES = 1024
MAX_TOP_K_CELLS = 2**24
MAX_SPARSE_CELLS = 2**22


def read_sample(body: Mapping[str, Any], vocab: int, limit: int) -> SampleOptions:
    """Options of an ``asample`` request.

    Raises:
        RequestError: a field is missing or outside its range.
    """
    prompt = read_prompt(body.get("prompt"), vocab, limit)
    params = field(body, "sampling_params", dict)
    count = _within(field(body, "num_samples", int, 1), "num_samples", 1, MAX_SAMPLES)
    room = limit - len(prompt)
    max_tokens = field(params, "max_tokens", int, None)
    if max_tokens is None:
        max_tokens = room
    _within(max_tokens, "sampling_params.max_tokens", 0, 2**31)
    temperature = field(params, "temperature", float, 1.0)
    if not (0 <= temperature < math.inf):
        raise RequestError(f"sampling_params.temperature must be 0 or greater, got {temperature}")
    top_p = field(params, "top_p", float, 1.0)
    if not 0 < top_p <= 1:
        raise RequestError(f"sampling_params.top_p must be in (0, 1], got {top_p}")
    top_k = _within(field(params, "top_k", int, -1), "sampling_params.top_k", -1, 2**31)
    stop_tokens, stop_strings = _read_stop(params.get("stop"), vocab)
    prompt_top_k = _within(field(body, "topk_prompt_logprobs", int, 0), "topk_prompt_logprobs", 0, vocab)
    alternatives = _within(
        field(body, "prompt_alt_tokens_k", int, 0), "prompt_alt_tokens_k", 0, min(vocab, MAX_ALTERNATIVES)
    )
    sample_top_k = _within(field(body, "topk_sample_logprobs", int, 0), "topk_sample_logprobs", 0, vocab)
    max_tokens = min(max_tokens, room)
    if count * max_tokens * sample_top_k > MAX_TOP_K_CELLS:
        raise RequestError(
            f"topk_sample_logprobs: num_samples {count} times max_tokens {max_tokens} times {sample_top_k} "
            f"is more than {MAX_TOP_K_CELLS}; ask for fewer, or in several requests"
        )
    last = field(body, "prompt_logprobs_last_n", int, None)
    wants_logprobs = bool(field(body, "prompt_logprobs", bool, False))
    if last is not None:
        if not wants_logprobs:
            raise RequestError("prompt_logprobs_last_n requires prompt_logprobs")
        _within(last, "prompt_logprobs_last_n", 1, max(1, len(prompt) - 1))
    if len(prompt) * max(prompt_top_k, alternatives) > MAX_TOP_K_CELLS:
        raise RequestError(
            "topk_prompt_logprobs, prompt_alt_tokens_k: the prompt's length times either must be at most "
            f"{MAX_TOP_K_CELLS}, got {len(prompt)} times {max(prompt_top_k, alternatives)}"
        )
    targets, sparse = _read_prompt_targets(body.get("target_prompt_logprobs"), len(prompt), vocab)
    return SampleOptions(
        prompt=prompt,
        count=count,
        max_tokens=max_tokens,
        seed=field(params, "seed", int, None),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        sample_top_k=sample_top_k,
        prompt_logprobs=wants_logprobs,
        prompt_top_k=prompt_top_k,
        prompt_last=last,
        prompt_targets=targets,
        sparse_targets=sparse,
        prompt_alternatives=alternatives,
    )


def _within(value: int, name: str, low: int, high: int) -> int:
    if not low <= value <= high:
        raise RequestError(f"{name} must be {low} to {high}, got {value}")
    return value


def _read_stop(value: Any, vocab: int) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Stop tokens (None for the model's own only) and stop strings."""
    if value is None:
        return None, ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or len(value) > 64:
        raise RequestError("sampling_params.stop must be a string or a list of at most 64 strings or tokens")
    if all(isinstance(item, str) and item for item in value) and value:
        return None, tuple(value)
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab for item in value):
        raise RequestError(
            f"sampling_params.stop must hold non-empty strings only, or tokens 0 … {vocab - 1} only"
        )
    return tuple(value), ()


def _read_prompt_targets(
    value: Any, length: int, vocab: int
) -> tuple[np.ndarray | None, dict[str, Any] | None]:
    if value is None:
        return None, None
    name = "target_prompt_logprobs"
    if not isinstance(value, dict) or value.get("dtype") != "int64":
        raise RequestError(f"{name} must be an int64 tensor")
    shape = value.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(isinstance(size, int) and size >= 0 for size in shape)
        or shape[0] != length - 1
        or shape[0] * shape[1]
        > (MAX_TOP_K_CELLS if value.get("sparse_crow_indices") is None else MAX_SPARSE_CELLS)
    ):
        raise RequestError(
            f"{name} must have shape [{length - 1}, K] of at most {MAX_TOP_K_CELLS} entries (sparse: "
            f"{MAX_SPARSE_CELLS}), got {str(shape)[:80]}"
        )
    data = _token_array(value.get("data", []), f"{name}.data")
    try:
        if value.get("sparse_crow_indices") is None:
            sparse = None
            targets = data.reshape(shape)
        else:
            rows = _token_array(value["sparse_crow_indices"], f"{name}.sparse_crow_indices")
            columns = _token_array(value.get("sparse_col_indices", []), f"{name}.sparse_col_indices")
            sparse = {"rows": rows, "columns": columns}
            targets = _dense(data, rows, columns, shape, fill=-1)
    except ValueError as error:
        raise RequestError(f"{name}: {error}") from error
    if targets.size and (targets.min() < -1 or targets.max() >= vocab):
        raise RequestError(f"{name} holds a token outside -1 … {vocab - 1}")
    return targets, sparse


def sample_response(job: SampleJob, sparse_targets: Mapping[str, Any] | None) -> bytes:
    """Serialised ``SampleResponse``."""
    message = pb.SampleResponse()
    for result in job.results:
        assert result is not None
        _write_sequence(message.sequences.add(), result)
    scores = job.scores
    if scores.logprobs is not None:
        message.prompt_logprobs = scores.logprobs.tobytes()
    if scores.top_tokens is not None and scores.top_logprobs is not None:
        _write_top(message.topk_prompt_logprobs, scores.top_tokens, scores.top_logprobs)
    if scores.targets is not None:
        tensor = message.target_prompt_logprobs
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend(scores.targets.shape)
        if sparse_targets is None:
            tensor.dense = scores.targets.tobytes()
        else:
            rows, columns = sparse_targets["rows"], sparse_targets["columns"]
            at = np.repeat(np.arange(len(rows) - 1), np.diff(rows))
            tensor.sparse_csr.values = scores.targets[at, columns].tobytes()
            tensor.sparse_csr.crow_indices = rows.tobytes()
            tensor.sparse_csr.col_indices = columns.tobytes()
    if scores.alternatives is not None and scores.alternative_logprobs is not None:
        for tensor, array, dtype in (
            (message.prompt_alt_tokens.tokens, scores.alternatives, pb.DTYPE_INT64),
            (message.prompt_alt_tokens.logprobs, scores.alternative_logprobs, pb.DTYPE_FLOAT32),
        ):
            tensor.dtype = dtype
            tensor.shape.extend(array.shape)
            tensor.dense = array.tobytes()
    return message.SerializeToString()


def _write_sequence(message: pb.SampledSequence, result: SampledTokens) -> None:
    message.stop_reason = pb.STOP_REASON_STOP if result.stopped else pb.STOP_REASON_LENGTH
    message.tokens = result.tokens.astype(np.int32).tobytes()
    message.logprobs = result.logprobs.tobytes()
    if result.top_tokens is not None and result.top_logprobs is not None:
        _write_top(message.topk_sampled_logprobs, result.top_tokens, result.top_logprobs)


def _write_top(message: pb.TopkLogprobs, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    message.length, message.k = tokens.shape
    message.token_ids = tokens.astype(np.int32).tobytes()
    message.logprobs = logprobs.astype(np.float32).tobytes()
