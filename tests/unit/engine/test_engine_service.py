"""What becomes of requests, models and sampler weights when others end, are unloaded or superseded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hermes_rl.engine import service as service_module
from hermes_rl.engine.adapter import AdapterSpec
from hermes_rl.engine.checkpoints import CheckpointStore
from hermes_rl.engine.losses import make_loss
from hermes_rl.engine.optimizer import AdamSettings
from hermes_rl.engine.service import Future, Service, Session, TrainingModel
from hermes_rl.engine.training import TrainingSequence
from hermes_rl.engine.wire import RequestError, read_sample

ALPHA = 16.0


@pytest.fixture
def service(base, tmp_path) -> Iterator[Service]:
    made = Service(
        base, CheckpointStore(tmp_path), lora_alpha=ALPHA, session_timeout=600.0, cache_bytes=2**24
    )
    made.compute.start()
    yield made
    made.close()


@pytest.fixture
def session(service) -> Session:
    return service.create_session(None, None)


def until(condition: Callable[[], bool], service: Service) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        service._run_posted()
        time.sleep(0.001)


def answer(service: Service, future: Future) -> dict:
    """The JSON result of a request, once it is there."""
    until(lambda: future.body is not None, service)
    assert future.body is not None
    return json.loads(future.body)


def new_model(service: Service, session: Session, seq: int = 0, **spec) -> TrainingModel:
    wanted = AdapterSpec(**({"rank": 8, "alpha": ALPHA} | spec))
    made = answer(service, service.create_model(session, seq, wanted, 1, None))
    return service.models[made["model_id"]]


def publish(service: Service, model: TrainingModel, number: int, *, inflight: bool = False) -> str:
    return answer(service, service.publish(model, None, number, inflight=inflight))["sampling_session_id"]


@pytest.fixture
def busy(service) -> Iterator[None]:
    """The compute thread is at work on something else until the end of the test."""
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        over.wait(60)

    def start() -> Callable[[], None]:
        service.compute.submit("other", work, lambda *_: None)
        assert begun.wait(60)
        return over.set

    yield start
    over.set()


def test_what_an_unloaded_model_was_still_to_do_fails(service, session, busy):
    model = new_model(service, session)
    path = answer(
        service,
        service.save(model, None, "weights", "one", overwrite=False, ttl_seconds=None, user_metadata=None),
    )["path"]
    go_on = busy()
    item = TrainingSequence(np.arange(4), np.arange(4), np.arange(4), {"weights": np.ones(4, "f4")}, (4,))
    loss = make_loss("cross_entropy", {})
    futures = [
        service.forward_backward(model, None, [item], loss, False),
        service.optim_step(model, None, AdamSettings()),
        service.publish(model, None, 1, inflight=False),
        service.load(model, None, path, False),
        service.save(model, None, "weights", "two", overwrite=False, ttl_seconds=None, user_metadata=None),
        service.optim_step(model, model.next_seq + 7, AdamSettings()),
    ]
    service.unload(model)
    go_on()
    for future in futures:
        found = answer(service, future)
        assert found["category"] == "user"
        assert "was unloaded before this request began" in found["error"]
    assert not service.samplers
    assert [meta.name for meta in service.store.all()] == ["one"]


@pytest.mark.parametrize(
    ("other", "named"),
    [({"alpha": 512.0}, "alpha 512"), ({"rank": 4}, "rank 4"), ({"train_mlp": False}, "train_mlp False")],
)
def test_a_checkpoint_of_another_kind_of_adapter_is_not_loaded(service, session, other, named):
    saved, model = new_model(service, session, 0, **other), new_model(service, session, 1)
    path = answer(
        service,
        service.save(saved, None, "weights", "one", overwrite=False, ttl_seconds=None, user_metadata=None),
    )["path"]
    before = model.adapter.flat.clone()
    found = answer(service, service.load(model, None, path, False))
    assert found["category"] == "user"
    assert named in found["error"]
    assert "create_training_client_from_state" in found["error"]
    assert torch.equal(model.adapter.flat, before)
    again = answer(service, service.create_from_checkpoint(session, 2, path, False, None))
    assert service.models[again["model_id"]].adapter.spec == saved.adapter.spec


def test_superseded_sampler_weights_go_and_those_in_use_stay(service, session, monkeypatch):
    monkeypatch.setattr(service_module, "WEIGHTS_BYTES", 1)
    model = new_model(service, session)
    ids = [publish(service, model, number) for number in range(service_module.KEPT_SNAPSHOTS + 4)]
    samplers = [service.samplers[each] for each in ids]
    files = [each.weights.spilled[1] for each in samplers if each.weights.spilled is not None]
    assert len(files) > service_module.KEPT_SNAPSHOTS
    assert all(file.parent == service._scratch for file in files)
    service.expire()
    assert list(service.samplers) == ids
    long_ago = time.monotonic() - service_module.SNAPSHOT_IDLE_S - 1
    for sampler in samplers:
        sampler.weights.used = long_ago
    body = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"max_tokens": 1}}
    options = read_sample(body, 300, 512)
    used = service.sample(samplers[1], None, options)
    assert samplers[1].weights.running == 1
    until(lambda: used.body is not None, service)
    samplers[2].weights.running = 1
    service.expire()
    assert list(service.samplers) == [ids[1], ids[2], *ids[4:]]
    with pytest.raises(RequestError, match="nobody has sampled from them for 60 minutes"):
        service.sampler(ids[0])
    assert not samplers[0].weights.spilled
    assert sum(file.exists() for file in files) == len(files) - 2
    service.finish_session(session)
    assert not any(file.exists() for file in files)
    assert not service._snapshots


def test_weights_of_one_sampler_that_is_updated_leave_no_files(service, session, monkeypatch):
    monkeypatch.setattr(service_module, "WEIGHTS_BYTES", 1)
    model = new_model(service, session)
    for number in range(4):
        publish(service, model, 2 * number, inflight=True)
        publish(service, model, 2 * number + 1)
    scratch = service._scratch
    assert scratch is not None
    spilled = {each.weights.spilled[1] for each in service.samplers.values() if each.weights.spilled}
    assert set(scratch.iterdir()) == spilled
    service.close()
    assert not scratch.exists()


def test_the_end_of_a_session_frees_the_adapters_that_sampling_kept(service, session):
    model = new_model(service, session)
    sampler = service.samplers[publish(service, model, 0)]
    body = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"max_tokens": 1}}
    future = service.sample(sampler, None, read_sample(body, 300, 512))
    until(lambda: future.body is not None, service)
    assert sampler.weights.key in service.table._keys
    service.finish_session(session)
    until(lambda: not service.table._keys, service)
    assert not service.table._weights
    assert not service.table._a


def test_models_beyond_the_memory_are_refused(service, session):
    model = new_model(service, session, 0)
    service._model_bytes = 2 * service._adapter_bytes(model.adapter.spec)
    new_model(service, session, 1)
    with pytest.raises(RequestError, match="unload models"):
        service.create_model(session, 2, AdapterSpec(8, ALPHA), 1, None)
    service.unload(model)
    new_model(service, session, 3)
