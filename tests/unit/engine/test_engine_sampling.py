"""A completion depends on its weights, prompt, parameters, seed and index, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from engine_reference import logprobs, peft_model

from hermes_rl.engine import adapter_table, decoding
from hermes_rl.engine.adapter_table import AdapterTable
from hermes_rl.engine.choosing import Choice, choose
from hermes_rl.engine.decoding import DecodeBatch, SampleJob
from hermes_rl.engine.process import multiplies_bfloat16
from hermes_rl.engine.randomness import stream_keys, uniforms


@pytest.fixture(params=["merged", "low-rank"])
def form(request, monkeypatch):
    """Both ways in which adapters are stacked."""
    monkeypatch.setattr(adapter_table, "STACK_LIMIT_BYTES", 2**40 if request.param == "merged" else 0)
    return request.param


def job(adapter, prompt, *, count=1, seed=0, max_tokens=12, temperature=1.0, **options) -> SampleJob:
    def finished(job: SampleJob, failure: str | None) -> None:
        assert failure is None

    defaults = {"top_k": -1, "top_p": 1.0, "stop_tokens": (), "finished": finished}
    return SampleJob(
        key=id(adapter),
        adapter=adapter,
        prompt=np.asarray(prompt),
        count=count,
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        **(defaults | options),
    )


def run(base, jobs, *, staggered: bool = False, table: AdapterTable | None = None) -> None:
    batch = DecodeBatch(base, table or AdapterTable(base), cache_bytes=2**28)
    for each in jobs:
        batch.waiting.append(each)
        if staggered:
            batch.advance()
    while batch.busy:
        batch.advance()


def test_nobody_else_in_the_batch_matters(base, make_adapter, form):
    check_alone_and_among_others(base, make_adapter, tolerance=2e-6)


@pytest.mark.skipif(not multiplies_bfloat16(), reason="bfloat16 is not chosen on this processor")
def test_nobody_else_in_the_batch_matters_to_bfloat16(base_bfloat16, make_adapter):
    check_alone_and_among_others(base_bfloat16, make_adapter, tolerance=0)


def check_alone_and_among_others(base, make_adapter, tolerance: float) -> None:
    adapters = [make_adapter(seed, rank) for seed, rank in enumerate((8, 16, 32, 4))]
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 300, 20)
    alone = job(adapters[0], prompt, seed=7)
    run(base, [alone])
    expected = alone.results[0]
    for trial in range(6):
        others = [
            job(
                [*adapters, None][int(rng.integers(0, 5))],
                rng.integers(0, 300, int(rng.integers(1, 40))),
                count=int(rng.integers(1, 6)),
                seed=number,
                max_tokens=int(rng.integers(1, 20)),
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
            )
            for number in range(int(rng.integers(1, 9)))
        ]
        mine = job(adapters[0], prompt, seed=7, count=int(rng.integers(1, 5)))
        others.insert(int(rng.integers(0, len(others) + 1)), mine)
        run(base, others, staggered=bool(trial % 2))
        assert mine.results[0].tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(mine.results[0].logprobs, expected.logprobs, rtol=0, atol=tolerance)


def test_logprobs_are_those_of_the_reference(base, make_adapter, tmp_path, form):
    adapters = [make_adapter(1, 8), make_adapter(2, 16)]
    jobs = [
        job(adapter, range(10, 30), count=3, seed=4, temperature=0.8, sample_top_k=4) for adapter in adapters
    ]
    run(base, jobs)
    for adapter, each in zip(adapters, jobs, strict=True):
        model = peft_model(base, adapter, tmp_path / str(adapter.spec.rank))
        for result in each.results:
            tokens = torch.from_numpy(np.concatenate([each.prompt, result.tokens]))
            expected = logprobs(model, tokens[:-1], tokens[1:])[len(each.prompt) - 1 :]
            np.testing.assert_allclose(result.logprobs, expected.detach().numpy(), atol=1e-3)
            table = model(tokens[None]).logits[0, len(each.prompt) - 1 : -1].log_softmax(-1).detach()
            best = table.topk(4, dim=1)
            assert result.top_tokens.tolist() == best.indices.tolist()
            np.testing.assert_allclose(result.top_logprobs, best.values.numpy(), atol=1e-3)


def test_temperature_zero_is_greedy_decoding(base, form):
    model = transformers.AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    prompt = list(range(40, 60))
    mine = job(None, prompt, temperature=0.0, max_tokens=16)
    run(base, [mine])
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=0
    )[0, len(prompt) :]
    assert mine.results[0].tokens.tolist() == expected.tolist()


def test_many_adapters_queue_for_few_slots(base, make_adapter):
    adapters = [make_adapter(seed) for seed in range(7)]
    together = [job(adapter, range(20), seed=3) for adapter in adapters]
    run(base, together, table=AdapterTable(base, max_slots=2))
    for adapter, each in zip(adapters, together, strict=True):
        alone = job(adapter, range(20), seed=3)
        run(base, [alone])
        assert alone.results[0].tokens.tolist() == each.results[0].tokens.tolist()


def test_stop_tokens_end_a_completion_and_stay_in_it(base):
    free = job(None, range(20), seed=5, max_tokens=12)
    run(base, [free])
    tokens = free.results[0].tokens.tolist()
    stopper = tokens[4]
    stopped = job(None, range(20), seed=5, max_tokens=12, stop_tokens=(stopper, 299))
    run(base, [stopped])
    assert stopped.results[0].tokens.tolist() == tokens[: tokens.index(stopper) + 1]
    assert stopped.results[0].stopped
    assert not free.results[0].stopped


def test_prompt_scores(base, make_adapter, tmp_path):
    adapter = make_adapter(1)
    prompt = np.arange(30, 50)
    targets = np.full((19, 2), -1)
    targets[3] = (7, 8)
    mine = job(
        adapter,
        prompt,
        max_tokens=1,
        prompt_logprobs=True,
        prompt_top_k=4,
        prompt_targets=targets,
        prompt_alternatives=3,
    )
    run(base, [mine])
    model = peft_model(base, adapter, tmp_path / "adapter")
    table = model(torch.from_numpy(prompt)[None]).logits[0].log_softmax(-1).detach().numpy()
    scores = mine.scores
    expected = table[np.arange(19), prompt[1:]]
    assert np.isnan(scores.logprobs[0])
    np.testing.assert_allclose(scores.logprobs[1:], expected, atol=1e-4)
    np.testing.assert_allclose(scores.top_logprobs[1:], -np.sort(-table[:-1], axis=1)[:, :4], atol=1e-4)
    np.testing.assert_allclose(scores.targets[3], table[3, [7, 8]], atol=1e-4)
    assert not scores.targets[4].any()
    drawn = scores.alternatives
    np.testing.assert_allclose(
        scores.alternative_logprobs, np.take_along_axis(table[:-1], drawn, axis=1), atol=1e-4
    )


def test_last_prompt_tokens_only(base):
    mine = job(None, range(20), max_tokens=0, prompt_logprobs=True, prompt_last=5)
    run(base, [mine])
    assert np.isnan(mine.scores.logprobs[:15]).all()
    assert not np.isnan(mine.scores.logprobs[15:]).any()


def test_choices_follow_the_distribution():
    torch.manual_seed(0)
    logits = torch.randn(1, 12)
    rows = 40_000
    at = uniforms(stream_keys(1, rows), np.zeros(rows, np.int64))

    def frequencies(temperature: float, top_k: int, top_p: float) -> np.ndarray:
        choice = Choice(
            np.full(rows, temperature, np.float32), np.full(rows, top_k), np.full(rows, top_p, np.float32)
        )
        tokens, _ = choose(logits.expand(rows, -1), choice, at)
        return np.bincount(tokens.numpy(), minlength=12) / rows

    for temperature in (1.0, 0.5, 2.0):
        expected = torch.softmax(logits[0] / temperature, 0).numpy()
        np.testing.assert_allclose(frequencies(temperature, -1, 1.0), expected, atol=0.01)
    probabilities = torch.softmax(logits[0], 0).numpy()
    order = np.argsort(-probabilities)
    top = np.zeros(12)
    top[order[:3]] = probabilities[order[:3]]
    np.testing.assert_allclose(frequencies(1.0, 3, 1.0), top / top.sum(), atol=0.01)
    kept = order[: int((np.cumsum(probabilities[order]) < 0.6).sum()) + 1]
    nucleus = np.zeros(12)
    nucleus[kept] = probabilities[kept]
    np.testing.assert_allclose(frequencies(1.0, -1, 0.6), nucleus / nucleus.sum(), atol=0.01)


def test_random_streams_are_uniform_and_apart():
    keys = np.concatenate([stream_keys(seed, 50) for seed in range(50)])
    assert len(set(keys.tolist())) == 2500
    drawn = np.stack([uniforms(keys, np.full(2500, position)) for position in range(20)])
    assert abs(drawn.mean() - 0.5) < 0.005
    assert np.abs(np.corrcoef(drawn[:, :50].T) - np.eye(50)).max() < 0.95
    assert abs(np.corrcoef(drawn[0], drawn[1])[0, 1]) < 0.08


def test_requests_of_one_adapter_join_together_and_none_waits_for_ever(base, make_adapter, monkeypatch):
    monkeypatch.setattr(decoding, "CPU_ROWS", 4)
    monkeypatch.setattr(decoding, "CPU_CACHE_BYTES", 0)
    first, second = make_adapter(1), make_adapter(2)
    ended: list[str] = []

    def named(adapter, name: str) -> SampleJob:
        return job(
            adapter, [5, 6, 7], count=2, max_tokens=3, finished=lambda job, failure: ended.append(name)
        )

    batch = DecodeBatch(base, AdapterTable(base), cache_bytes=2**28)
    batch.waiting.extend([named(first, "a"), named(second, "b"), named(first, "c"), named(first, "d")])
    while batch.busy:
        if len(batch.waiting) < 4 and len(ended) < 20:
            batch.waiting.append(named(first, "later"))
        batch.advance()
    assert ended[:2] == ["a", "c"]
    assert "b" in ended[2:4]


def outcomes(jobs: list[SampleJob]) -> list[str | None]:
    """How each job ends, its failure or None; filled as they do."""
    ended: list[str | None] = ["not ended"] * len(jobs)

    def keep(number: int) -> None:
        def finished(job: SampleJob, failure: str | None) -> None:
            assert ended[number] == "not ended"
            ended[number] = failure

        jobs[number].finished = finished

    for number in range(len(jobs)):
        keep(number)
    return ended


def test_an_error_in_a_prompt_ends_all_that_joins_and_leaves_no_adapter_held(base, make_adapter, monkeypatch):
    table = AdapterTable(base, max_slots=2)
    batch = DecodeBatch(base, table, cache_bytes=2**28)
    adapters = [make_adapter(1), make_adapter(2)]
    jobs = [job(adapter, range(20), count=2) for adapter in adapters]
    ended = outcomes(jobs)
    batch.waiting.extend(jobs)
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "hidden_states", lambda *_: torch.zeros(1, 1, 1) @ torch.zeros(2, 2))
        with pytest.raises(RuntimeError):
            batch.advance()
        batch.abort("broken")
    assert ended == ["broken", "broken"]
    assert not batch.busy
    after = [job(make_adapter(seed), range(20)) for seed in (3, 4, 5)]
    ended = outcomes(after)
    run(base, after, table=table)
    assert ended == [None] * 3


def test_a_long_prompt_without_completion_beside_a_short_one(base):
    scored = job(None, np.arange(200), max_tokens=0, prompt_logprobs=True)
    short = job(None, range(20), max_tokens=8, seed=3)
    run(base, [scored, short])
    alone = job(None, range(20), max_tokens=8, seed=3)
    run(base, [alone])
    assert short.results[0].tokens.tolist() == alone.results[0].tokens.tolist()
    assert np.isfinite(scored.scores.logprobs[1:]).all()


def test_a_prompt_of_one_token_has_no_logprob(base):
    others = job(None, range(20), max_tokens=1)
    one = job(None, [7], max_tokens=1, prompt_logprobs=True, prompt_last=1)
    run(base, [others, one])
    assert np.isnan(one.scores.logprobs).tolist() == [True]


def test_more_completions_than_the_cache_holds_come_one_after_the_other(base):
    at_once = job(None, range(20), count=7, seed=5)
    run(base, [at_once])
    split = job(None, range(20), count=7, seed=5, prompt_logprobs=True)
    other = job(None, range(30), count=1, seed=6)
    ended = outcomes([split, other])
    batch = DecodeBatch(base, AdapterTable(base), cache_bytes=2**28)
    batch._cache_bytes = 3 * 32 * batch._bytes_per_token()
    batch.waiting.extend([split, other])
    most = 0
    while batch.busy:
        batch.advance()
        most = max(most, len(batch))
    assert most == 3
    assert ended == [None, None]
    for mine, expected in zip(split.results, at_once.results, strict=True):
        assert mine.tokens.tolist() == expected.tokens.tolist()
    assert np.isfinite(split.scores.logprobs[1:]).all()


def test_broken_weights_fail_and_hurt_nobody_else(base, make_adapter, form):
    good, broken = make_adapter(1), make_adapter(2)
    broken.flat.fill_(float("nan"))
    alone = job(good, range(20), seed=7, max_tokens=30)
    run(base, [alone])
    batch = DecodeBatch(base, AdapterTable(base), cache_bytes=2**28)
    bad = [job(broken, range(10, 40), count=3, max_tokens=20, prompt_logprobs=True) for _ in range(2)]
    bad += [job(broken, range(10, 40), count=9, max_tokens=20)]
    bad += [job(broken, range(10, 40), max_tokens=0, prompt_logprobs=True)]
    ended = outcomes(bad)
    before, after = (job(good, range(20), seed=7, max_tokens=30) for _ in range(2))
    batch.waiting.append(before)
    batch.advance()
    batch.waiting.extend(bad)
    batch.advance()
    batch.waiting.append(after)
    while batch.busy:
        batch.advance()
    assert ended == [decoding.NOT_FINITE] * 4
    for each in (before, after):
        assert each.results[0].tokens.tolist() == alone.results[0].tokens.tolist()
        np.testing.assert_allclose(each.results[0].logprobs, alone.results[0].logprobs, atol=2e-6)
        assert np.isfinite(each.results[0].logprobs).all()


def test_weights_that_break_later_leave_nothing_behind(base, make_adapter):
    """Rows that failed after some steps are used again by others, whose results are theirs alone."""
    good, bad = make_adapter(1), make_adapter(2)
    alone = job(good, range(4), seed=7, max_tokens=40)
    run(base, [alone])
    table = AdapterTable(base)
    batch = DecodeBatch(base, table, cache_bytes=2**28)
    failing = job(bad, range(30), count=4, max_tokens=30)
    ended = outcomes([failing])
    batch.waiting.append(failing)
    for _ in range(5):
        batch.advance()
    for stack in (*table._weights.values(), *table._a.values()):
        stack.fill_(float("nan"))
    batch.advance()
    assert ended == [decoding.NOT_FINITE]
    batch.table = AdapterTable(base)
    mine = job(good, range(4), seed=7, max_tokens=40)
    batch.waiting.append(mine)
    while batch.busy:
        batch.advance()
    np.testing.assert_allclose(mine.results[0].logprobs, alone.results[0].logprobs, atol=2e-6)


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (3, 1.0), (-1, 0.9)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-40])
def test_the_last_of_the_random_numbers_chooses_a_token_that_can_be(temperature, top_k, top_p):
    logits = torch.full((2, 50), -1e4)
    logits[:, :4] = torch.tensor([3.0, 2.0, 1.0, -1.0])
    last = np.array([1 - 2.0**-53, 1 - 2.0**-30])
    choice = Choice(np.full(2, temperature, np.float32), np.full(2, top_k), np.full(2, top_p, np.float32))
    tokens, logprobs = choose(logits, choice, last)
    expected = {(-1, 1.0): 3, (3, 1.0): 2, (-1, 0.9): 1 if temperature < 1 else 2}[top_k, top_p]
    assert tokens.tolist() == [0 if temperature < 1e-6 else expected] * 2
    assert torch.isfinite(logprobs).all()


def test_adapters_that_are_dropped_give_back_their_memory_and_their_width(base, make_adapter, monkeypatch):
    monkeypatch.setattr(adapter_table, "STACK_LIMIT_BYTES", 0)
    table = AdapterTable(base)
    narrow, wide = make_adapter(1, 8), make_adapter(2, 200)
    alone = job(narrow, range(20), seed=3)
    run(base, [alone], table=table)
    width = table._rank
    run(base, [job(wide, range(20))], table=table)
    assert table._rank > width
    slot = table.acquire(id(wide), wide)
    table.drop(id(wide))  # while it is used
    assert id(wide) in table._keys
    table.release(slot)
    assert id(wide) not in table._keys
    again = job(narrow, range(20), seed=3)
    run(base, [again], table=table)
    assert table._rank == width
    np.testing.assert_array_equal(again.results[0].logprobs, alone.results[0].logprobs)
    table.drop(id(narrow))
    assert not table._a
    run(base, [again := job(narrow, range(20), seed=3)], table=table)
    np.testing.assert_array_equal(again.results[0].logprobs, alone.results[0].logprobs)
