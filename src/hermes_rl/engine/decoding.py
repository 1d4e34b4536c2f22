"""Sampling as one running batch that requests of any adapter join and leave at every step."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from hermes_rl.engine.adapter import HEAD_LAYER, Adapter
from hermes_rl.engine.adapter_table import MIN_GROUP_ROWS, AdapterTable, Layout, lay_out
from hermes_rl.engine.base_model import BaseModel
from hermes_rl.engine.choosing import Choice, choose
from hermes_rl.engine.linears import Linears
from hermes_rl.engine.packing import Prompts, pack_prompts
from hermes_rl.engine.pointwise import rms_norm
from hermes_rl.engine.randomness import stream_keys, uniforms
from hermes_rl.engine.transformer import hidden_states

MAX_ROWS = 512
CPU_ROWS = 64
"""Rows of one running batch on a CPU, or more while their keys and values fit its cache: beyond that, more
rows are no faster, and cost memory."""

LOOK_AHEAD = 256
"""How many waiting requests are looked at for one with the same weights."""

CPU_CACHE_BYTES = 24 * 2**20
PREFILL_ROWS = 8192
LOGITS_BYTES = 128 * 2**20
NOT_FINITE = (
    "these weights give logits that are not finite (NaN or infinity); "
    "go on from an earlier checkpoint, with a smaller learning rate or a larger eps"
)
_LENGTH_STEP = 32
_IDLE_CACHE_BYTES = 32 * 2**20


@dataclass
class SampledTokens:
    """One completion. ``top_tokens`` and ``top_logprobs`` are ``[length, k]`` when asked for."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclass
class PromptScores:
    """What was asked of the prompt; arrays are over its tokens, NaN where nothing is known."""

    logprobs: np.ndarray | None = None
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    targets: np.ndarray | None = None
    alternatives: np.ndarray | None = None
    alternative_logprobs: np.ndarray | None = None


@dataclass(eq=False)
class SampleJob:
    """A request for ``count`` completions of one prompt.

    Attributes:
        key: identity of the weights; equal keys mean equal weights.
        stop_tokens: tokens that end a completion; they stay in it.
        stop_text: given all tokens so far, whether a stop string has appeared; None without stop strings.
        prompt_logprobs, prompt_top_k, prompt_last: score the prompt's tokens, or its last ones only.
        prompt_targets: ``[len(prompt) - 1, k]`` tokens to score, -1 for none.
        prompt_alternatives: tokens to draw at every prompt position.
        finished: called once on the compute thread with the job itself, or with an error message.
        begun: how many of the completions have begun; fewer than ``count`` where all would not fit the cache.
        failure: why it cannot be finished.
        settled: whether ``finished`` has been called.
    """

    key: object
    adapter: Adapter | None
    prompt: np.ndarray
    count: int
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    stop_tokens: tuple[int, ...]
    finished: Callable[[SampleJob, str | None], None]
    stop_text: Callable[[np.ndarray], bool] | None = None
    sample_top_k: int = 0
    prompt_logprobs: bool = False
    prompt_top_k: int = 0
    prompt_last: int | None = None
    prompt_targets: np.ndarray | None = None
    prompt_alternatives: int = 0
    results: list[SampledTokens | None] = field(default_factory=list)
    scores: PromptScores = field(default_factory=PromptScores)
    cancelled: bool = False
    begun: int = 0
    failure: str | None = None
    settled: bool = False

    def settle(self, failure: str | None) -> None:
        """Call ``finished`` unless that has been done."""
        if not self.settled:
            self.settled = True
            self.finished(self, failure)

    @property
    def scores_prompt(self) -> bool:
        return bool(
            self.prompt_logprobs
            or self.prompt_top_k
            or self.prompt_alternatives
            or self.prompt_targets is not None
        )


@dataclass
class _Row:
    job: SampleJob
    index: int
    tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True)
class _Joining:
    """A request on its way into the batch: its adapter's slot, pinned, and how many rows it will have."""

    slot: int
    rows: int


class DecodeBatch:
    """The running batch.

    Rows ``0 … size - 1`` of the key-value cache are in use; a finished row's place is taken by the last one.
    Every row pins its adapter's slot once, and so does every request between leaving ``waiting`` and having
    rows.
    """

    def __init__(self, base: BaseModel, table: AdapterTable, *, cache_bytes: int) -> None:
        self.base = base
        self.table = table
        self.waiting: deque[SampleJob] = deque()
        self._cache_bytes = cache_bytes
        self._rows: list[_Row] = []
        self._joining: dict[SampleJob, _Joining] = {}
        self._cache = torch.empty(0)
        self._capacity = 0
        self._length_capacity = 0
        self._layout: Layout | None = None
        self._linears: Linears | None = None
        self._stop_width = 1
        self._allocate_arrays(0)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._rows or self.waiting)

    def advance(self) -> None:
        """Let waiting requests join as far as there is room, then choose one more token in every row."""
        if self.waiting:
            self._join()
        if self._rows:
            self._step()
        if not self._rows and self._cache.nbytes > _IDLE_CACHE_BYTES:
            self._free_cache()

    def abort(self, reason: str) -> None:
        """Fail everything running, joining or waiting."""
        jobs = dict.fromkeys([row.job for row in self._rows] + list(self._joining) + list(self.waiting))
        for slot in self._slot[: len(self._rows)]:
            self.table.release(int(slot))
        for joining in self._joining.values():
            self.table.release(joining.slot)
        self._rows.clear()
        self._joining.clear()
        self.waiting.clear()
        self._layout = None
        self._free_cache()
        for job in jobs:
            job.settle(reason)

    def _free_cache(self) -> None:
        self._cache = torch.empty(0)
        self._capacity = self._length_capacity = 0
        self._allocate_arrays(0)

    # --- joining ---------------------------------------------------------------------------------------

    def _join(self) -> None:
        joining = self._joining
        prompt_rows = 0
        longest = int(self._limit[: len(self._rows)].max(initial=0))
        rows = len(self._rows)
        beside: object = None
        while self.waiting:
            number = self._next_waiting(beside)
            job = self.waiting[number]
            del self.waiting[number]
            if job.settled:
                continue
            if job.cancelled:
                job.settle("cancelled")
                continue
            need = max(longest, len(job.prompt) + job.max_tokens)
            taken = job.count - job.begun if job.max_tokens else 0
            full = self._full(rows + taken, need) or prompt_rows + len(job.prompt) > PREFILL_ROWS
            if full and (rows or joining):
                self.waiting.insert(number, job)
                break
            taken = min(taken, self._fitting(need))
            slot = self.table.acquire(job.key, job.adapter)
            if slot is None:
                self.waiting.insert(number, job)
                break
            joining[job] = _Joining(slot, taken)
            beside = job.key
            longest, rows = need, rows + taken
            prompt_rows += len(job.prompt)
        by_slot: dict[int, list[SampleJob]] = {}
        for job, place in joining.items():
            by_slot.setdefault(place.slot, []).append(job)
        for slot, jobs in by_slot.items():
            self._prefill(slot, jobs)
            # what does not fit the cache at once waits for its next turn
            self.waiting.extend(job for job in jobs if job.max_tokens and job.begun < job.count)

    def _next_waiting(self, key: object) -> int:
        """Place of the request to join next: one with the same weights as the last, else the oldest.

        A batch of few adapters is faster than one of many. None waits for ever: whenever there is room again,
        the oldest comes first.
        """
        ahead = itertools.islice(self.waiting, LOOK_AHEAD)
        return next((place for place, job in enumerate(ahead) if job.key == key), 0)

    def _full(self, rows: int, length: int) -> bool:
        """Whether that many rows of that length are more than should run at once."""
        size = rows * length * self._bytes_per_token()
        if self.base.device.type == "cpu" and rows > CPU_ROWS and size > CPU_CACHE_BYTES:
            return True
        return rows > MAX_ROWS or size > self._cache_bytes

    def _fitting(self, length: int) -> int:
        """How many rows of that length the cache holds; one at least."""
        return max(1, min(MAX_ROWS, self._cache_bytes // (length * self._bytes_per_token())))

    def _prefill(self, slot: int, jobs: list[SampleJob]) -> None:
        """Compute prompts (equal ones once), store their keys and values, choose the first tokens."""
        prompts: dict[bytes, int] = {}
        distinct: list[np.ndarray] = []
        for job in jobs:
            text = job.prompt.tobytes()
            if text not in prompts:
                prompts[text] = len(distinct)
                distinct.append(job.prompt)
        packed = pack_prompts(distinct, self.base.device)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys.append(k)
            values.append(v)
            return packed.attend(layer, q, k, v)

        layout = Layout(None, None, slot, [len(packed.tokens)])
        linears = self.table.linears(layout)
        with torch.inference_mode():
            hidden = hidden_states(self.base, linears, packed.tokens, packed.positions, attend)
            for job in jobs:
                if job.begun:
                    continue
                job.results = [None] * job.count
                if job.scores_prompt:
                    self._score_prompt(job, prompts[job.prompt.tobytes()], packed, hidden, linears)
            starting: list[SampleJob] = []
            for job in jobs:
                if job.max_tokens > 0 and job.failure is None:
                    starting.append(job)
                    continue
                self.table.release(self._joining.pop(job).slot)
                empty = np.empty(0, np.int64)
                job.results = [
                    SampledTokens(empty, empty.astype(np.float32), False) for _ in range(job.count)
                ]
                job.settle(job.failure)
            if not starting:
                return
            parents = np.concatenate(
                [np.full(self._joining[job].rows, prompts[job.prompt.tobytes()]) for job in starting]
            )
            first = len(self._rows)
            self._add_rows(slot, starting)
            self._store(first, parents, packed, keys, values)
            last = torch.from_numpy(packed.last_rows).to(self.base.device)
            logits = self._logits(hidden[_filled(last)], linears)[: len(last)]
            self._choose(np.arange(first, len(self._rows)), logits[torch.from_numpy(parents)])
        self._finish_rows(first)

    def _store(
        self,
        first: int,
        parents: np.ndarray,
        packed: Prompts,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> None:
        lengths = packed.lengths[parents]
        longest = int(lengths.max())
        steps = np.minimum(np.arange(longest)[None, :], lengths[:, None] - 1)
        places = torch.from_numpy(packed.starts[parents][:, None] + steps).to(self.base.device)
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            self._cache[layer, 0, first : len(self._rows), :, :longest] = k[places].transpose(1, 2)
            self._cache[layer, 1, first : len(self._rows), :, :longest] = v[places].transpose(1, 2)

    # --- one step --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> None:
        size = len(self._rows)
        device = self.base.device
        if self._layout is None:
            self._layout = lay_out(self._slot[:size], device)
            self._linears = self.table.linears(self._layout)
        layout, linears = self._layout, self._linears
        assert linears is not None
        lengths = self._length[:size]
        longest = int(lengths.max()) + 1
        self._reserve(size, longest, 1)
        window = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
        tokens = torch.from_numpy(self._last[:size]).to(device)
        positions = torch.from_numpy(lengths).to(device)
        hidden_from = torch.arange(window, device=device)[None, :] > positions[:, None]
        mask = torch.zeros(size, 1, 1, window, dtype=self.base.dtype, device=device)
        mask.masked_fill_(hidden_from[:, None, None, :], -torch.inf)
        rows = torch.arange(size, device=device)
        kv_heads = self.base.architecture.num_kv_heads

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if layout.places is not None:
                q, k, v = q[layout.places], k[layout.places], v[layout.places]
            cache = self._cache[layer]
            cache[0, rows, :, positions] = k
            cache[1, rows, :, positions] = v
            # query heads of one key-value head stand where query positions would
            out = _attend_one(
                q.unflatten(1, (kv_heads, -1)),
                cache[0, :size, :, :window],
                cache[1, :size, :, :window],
                mask,
            ).flatten(1)
            return out if layout.rows is None else out[layout.rows]

        if layout.rows is not None:
            tokens, places = tokens[layout.rows], positions[layout.rows]
        else:
            places = positions
        hidden = hidden_states(self.base, linears, tokens, places, attend)
        logits = self._logits(hidden, linears)
        if layout.places is not None:
            logits = logits[layout.places]
        lengths += 1
        self._choose(np.arange(size), logits)
        self._finish_rows(0)

    def _logits(self, hidden: torch.Tensor, linears: Linears) -> torch.Tensor:
        normed = rms_norm(hidden, self.base.final_norm, self.base.architecture.norm_eps)
        return linears(HEAD_LAYER, "head", normed).float()

    def _choose(self, rows: np.ndarray, logits: torch.Tensor) -> None:
        """Choose a token in each of the given rows (a contiguous range)."""
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        choice = Choice(self._temperature[span], self._top_k[span], self._top_p[span])
        made = self._made[span]
        tokens, logprobs = choose(logits, choice, uniforms(self._key[span], made))
        chosen = tokens.cpu().numpy()
        if made.max() >= self._tokens.shape[1]:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, self._tokens.shape[1])))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, self._logprobs.shape[1])))
        found = logprobs.cpu().numpy()
        self._tokens[rows, made] = chosen
        self._logprobs[rows, made] = found
        self._broken[span] = ~np.isfinite(found)
        self._last[span] = chosen
        made += 1
        for row in rows[self._sample_top[span] > 0]:
            entry = self._rows[row]
            table = torch.log_softmax(logits[row - span.start], dim=0)
            best = table.topk(min(entry.job.sample_top_k, len(table)))
            entry.tops.append((best.indices.cpu().numpy(), best.values.cpu().numpy()))

    def _finish_rows(self, first: int) -> None:
        """Take out rows that stopped, reached their limit or were cancelled."""
        size = len(self._rows)
        span = slice(first, size)
        stopped = (self._stops[span] == self._last[span, None]).any(axis=1)
        done = stopped | (self._made[span] >= self._allowed[span])
        for row in np.flatnonzero(self._watched[span]) + first:
            entry = self._rows[row]
            if entry.job.cancelled:
                done[row - first] = True
            elif entry.job.stop_text is not None and not done[row - first]:
                found = entry.job.stop_text(self._tokens[row, : self._made[row]])
                stopped[row - first] |= found
                done[row - first] |= found
        if self._broken[span].any():
            for row in np.flatnonzero(self._broken[span]) + first:
                self._rows[row].job.failure = NOT_FINITE
            broken = np.array([row.job.failure is not None for row in self._rows[first:]])
            done |= broken
            # whoever has these rows next also computes with what is beyond their own tokens
            with torch.inference_mode():
                self._cache[:, :, torch.from_numpy(np.flatnonzero(broken) + first)] = 0
        leaving = np.flatnonzero(done) + first
        if not len(leaving):
            return
        completed: dict[SampleJob, None] = {}
        for row in leaving:
            entry, made = self._rows[row], self._made[row]
            job = entry.job
            sampled = SampledTokens(
                self._tokens[row, :made].copy(),
                self._logprobs[row, :made].copy(),
                bool(stopped[row - first]),
            )
            if entry.tops:
                sampled.top_tokens = np.stack([tokens for tokens, _ in entry.tops])
                sampled.top_logprobs = np.stack([logprobs for _, logprobs in entry.tops])
            job.results[entry.index] = sampled
            self.table.release(int(self._slot[row]))
            if job.failure is not None or all(result is not None for result in job.results):
                completed[job] = None
        self._remove(leaving)
        for job in completed:
            job.settle("cancelled" if job.cancelled else job.failure)

    # --- rows ------------------------------------------------------------------------------------------

    def watch(self, job: SampleJob) -> None:
        """Have a cancelled job's rows taken out at the next step."""
        for row, entry in enumerate(self._rows):
            if entry.job is job:
                self._watched[row] = True

    def _remove(self, leaving: np.ndarray) -> None:
        size = len(self._rows) - len(leaving)
        holes = leaving[leaving < size]
        movers = np.setdiff1d(np.arange(size, len(self._rows)), leaving, assume_unique=True)
        if len(holes):
            window = int(self._length[movers].max())
            to, source = torch.from_numpy(holes), torch.from_numpy(movers)
            with torch.inference_mode():
                self._cache[:, :, to, :, :window] = self._cache[:, :, source, :, :window]
            for name in _ROW_ARRAYS:
                array = getattr(self, name)
                array[holes] = array[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self._rows[hole] = self._rows[mover]
        del self._rows[size:]
        self._layout = None

    def _add_rows(self, slot: int, jobs: list[SampleJob]) -> None:
        first = len(self._rows)
        size = first + sum(self._joining[job].rows for job in jobs)
        width = max(len(job.stop_tokens) for job in jobs)
        self._reserve(size, max(len(job.prompt) for job in jobs) + 1, width)
        row = first
        for job in jobs:
            # the request's pin becomes its first row's
            count = self._joining.pop(job).rows
            for _ in range(count - 1):
                self.table.acquire(job.key, job.adapter)
            span, samples = slice(row, row + count), slice(job.begun, job.begun + count)
            self._rows += [_Row(job, index) for index in range(job.begun, job.begun + count)]
            job.begun += count
            self._slot[span] = slot
            self._length[span] = len(job.prompt)
            self._limit[span] = len(job.prompt) + job.max_tokens
            self._allowed[span] = job.max_tokens
            self._made[span] = 0
            self._key[span] = stream_keys(job.seed, job.count)[samples]
            self._temperature[span] = job.temperature
            self._top_k[span] = job.top_k
            self._top_p[span] = job.top_p
            self._sample_top[span] = job.sample_top_k
            self._watched[span] = job.stop_text is not None or job.cancelled
            self._broken[span] = False
            self._stops[span] = -1
            self._stops[span, : len(job.stop_tokens)] = job.stop_tokens
            row += count
        self._layout = None

    def _bytes_per_token(self) -> int:
        architecture = self.base.architecture
        width = architecture.num_kv_heads * architecture.head_dim
        return 2 * architecture.num_layers * width * self.base.dtype.itemsize

    def _reserve(self, rows: int, length: int, stop_width: int) -> None:
        if stop_width > self._stops.shape[1]:
            extra = stop_width - self._stops.shape[1]
            self._stops = np.pad(self._stops, ((0, 0), (0, extra)), constant_values=-1)
        if rows <= self._capacity and length <= self._length_capacity:
            return
        architecture = self.base.architecture
        used = len(self._rows)
        if rows > self._capacity:
            capacity = max(MIN_GROUP_ROWS, 1 << (rows - 1).bit_length())
            self._allocate_arrays(capacity)
        else:
            capacity = self._capacity
        if length > self._length_capacity:
            # room for as much as is needed, and a quarter more than there was
            length = max(length, self._length_capacity + self._length_capacity // 4)
            length = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        else:
            length = self._length_capacity
        with torch.inference_mode():
            layers, heads, width = architecture.num_layers, architecture.num_kv_heads, architecture.head_dim
            cache = _zeros((layers, 2, capacity, heads, length, width), self.base)
            if used:
                kept = self._length_capacity
                cache[:, :, :used, :, :kept] = self._cache[:, :, :used]
        self._cache = cache
        self._capacity, self._length_capacity = capacity, length

    def _allocate_arrays(self, capacity: int) -> None:
        old = {name: getattr(self, name, None) for name in _ROW_ARRAYS}
        self._slot = np.zeros(capacity, np.int64)
        self._length = np.zeros(capacity, np.int64)
        self._limit = np.zeros(capacity, np.int64)
        self._allowed = np.zeros(capacity, np.int64)
        self._made = np.zeros(capacity, np.int64)
        self._last = np.zeros(capacity, np.int64)
        self._key = np.zeros(capacity, np.uint64)
        self._temperature = np.ones(capacity, np.float32)
        self._top_k = np.full(capacity, -1, np.int64)
        self._top_p = np.ones(capacity, np.float32)
        self._sample_top = np.zeros(capacity, np.int64)
        self._watched = np.zeros(capacity, bool)
        self._broken = np.zeros(capacity, bool)
        width = old["_stops"].shape[1] if old["_stops"] is not None else 1
        made = old["_tokens"].shape[1] if old["_tokens"] is not None else 64
        self._stops = np.full((capacity, width), -1, np.int64)
        self._tokens = np.zeros((capacity, made), np.int64)
        self._logprobs = np.zeros((capacity, made), np.float32)
        used = len(self._rows)
        for name, array in old.items():
            if array is not None and used:
                getattr(self, name)[:used] = array[:used]

    # --- prompts ---------------------------------------------------------------------------------------

    def _score_prompt(
        self, job: SampleJob, number: int, packed: Prompts, hidden: torch.Tensor, linears: Linears
    ) -> None:
        """Logprobs of the prompt's own tokens, of the most likely and of named ones, and drawn ones.

        The hidden state at position ``i`` scores position ``i + 1``; nothing scores position 0.
        """
        length = len(job.prompt)
        scores = job.scores
        top = min(job.prompt_top_k, self.base.architecture.vocab_size)
        begin = 1 if job.prompt_last is None else max(1, length - job.prompt_last)
        if job.prompt_logprobs:
            scores.logprobs = np.full(length, np.nan, np.float32)
        if top:
            scores.top_tokens = np.zeros((length, top), np.int32)
            scores.top_logprobs = np.full((length, top), -99999.0, np.float32)
        targets = job.prompt_targets
        first = begin if (job.prompt_logprobs or top) else length
        if targets is not None:
            scores.targets = np.zeros(targets.shape, np.float32)
            first = 1
        draws = job.prompt_alternatives
        if draws:
            scores.alternatives = np.zeros((length - 1, draws), np.int64)
            scores.alternative_logprobs = np.zeros((length - 1, draws), np.float32)
            first = 1
        keys = stream_keys(job.seed ^ 0x5DEECE66D, draws) if draws else np.empty(0, np.uint64)
        per_block = max(1, LOGITS_BYTES // (4 * self.base.architecture.vocab_size))
        for start in range(first, length, per_block):
            stop = min(length, start + per_block)
            rows = torch.arange(start - 1, stop - 1, device=self.base.device) + int(packed.starts[number])
            table = torch.log_softmax(self._logits(hidden[_filled(rows)], linears)[: len(rows)], dim=1)
            if not torch.isfinite(table[:, 0]).all():  # a logit that is not finite leaves none of its row
                job.failure = NOT_FINITE
                return
            if scores.logprobs is not None and stop > begin:
                keep = slice(max(start, begin), stop)
                own = torch.from_numpy(job.prompt[start:stop]).to(self.base.device)
                values = table.gather(1, own[:, None])[:, 0].cpu().numpy()
                scores.logprobs[keep] = values[keep.start - start :]
            if scores.top_tokens is not None and scores.top_logprobs is not None and stop > begin:
                keep = slice(max(start, begin), stop)
                best = table.topk(top, dim=1)
                scores.top_tokens[keep] = best.indices[keep.start - start :].cpu().numpy()
                scores.top_logprobs[keep] = best.values[keep.start - start :].cpu().numpy()
            if targets is not None and scores.targets is not None:
                wanted = targets[start - 1 : stop - 1]
                safe = torch.from_numpy(np.maximum(wanted, 0)).to(self.base.device)
                values = table.gather(1, safe).cpu().numpy()
                scores.targets[start - 1 : stop - 1] = np.where(wanted >= 0, values, 0.0)
            if draws and scores.alternatives is not None and scores.alternative_logprobs is not None:
                for draw in range(draws):
                    count = stop - start
                    choice = Choice(
                        np.full(count, job.temperature, np.float32), np.full(count, -1), np.ones(count)
                    )
                    at = uniforms(np.repeat(keys[draw], count), np.arange(start, stop))
                    tokens, logprobs = choose(table, choice, at)
                    scores.alternatives[start - 1 : stop - 1, draw] = tokens.cpu().numpy()
                    scores.alternative_logprobs[start - 1 : stop - 1, draw] = logprobs.cpu().numpy()


_ROW_ARRAYS = (
    "_slot",
    "_length",
    "_limit",
    "_allowed",
    "_made",
    "_last",
    "_key",
    "_temperature",
    "_top_k",
    "_top_p",
    "_sample_top",
    "_watched",
    "_broken",
    "_stops",
    "_tokens",
    "_logprobs",
)


def _zeros(shape: tuple[int, ...], base: BaseModel) -> torch.Tensor:
    """Zeros that take memory only where they are written, on a CPU."""
    if base.device.type != "cpu":
        return torch.zeros(shape, dtype=base.dtype, device=base.device)
    raw = np.zeros(math.prod(shape) * base.dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(base.dtype).view(shape)


def _attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention of one new token a row.

    On a CPU two batched products take about half the time of the fused kernel, which is made for many
    query positions.
    """
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    scores = torch.matmul(q * q.shape[-1] ** -0.5, keys.transpose(2, 3)).add_(mask)
    return torch.matmul(torch.softmax(scores, dim=-1), values)


def _filled(rows: torch.Tensor) -> torch.Tensor:
    """Rows repeated up to the size below which matrix multiplication rounds differently."""
    if len(rows) >= MIN_GROUP_ROWS:
        return rows
    return torch.cat([rows, rows[-1:].expand(MIN_GROUP_ROWS - len(rows))])
