"""Sampler weights that leave memory come back as they were."""

from __future__ import annotations

import torch

from hermes_rl.engine import service as service_module
from hermes_rl.engine.checkpoints import CheckpointStore
from hermes_rl.engine.service import Service, Weights


def test_weights_beyond_the_limit_go_to_the_disk_and_come_back(base, make_adapter, tmp_path, monkeypatch):
    adapters = [make_adapter(number) for number in range(4)]
    monkeypatch.setattr(service_module, "WEIGHTS_BYTES", 2 * adapters[0].flat.nbytes)
    service = Service(
        base, CheckpointStore(tmp_path), lora_alpha=16.0, session_timeout=60.0, cache_bytes=2**24
    )
    session = service.create_session(None, None)
    kept = [adapter.flat.clone() for adapter in adapters]
    weights = [Weights(f"w{number}", adapter) for number, adapter in enumerate(adapters)]
    for number, each in enumerate(weights):
        service._add_sampler(session, f"sampler-{number}", each)
    assert [each.adapter is None for each in weights] == [True, True, False, False]
    for each, flat in zip(weights, kept, strict=True):
        adapter = service._use(each)
        assert adapter is not None
        torch.testing.assert_close(adapter.flat, flat, rtol=0, atol=0)
    files = [each.spilled[1] for each in weights if each.spilled is not None]
    assert len(files) == 4
    service.finish_session(session, "success")
    assert not any(file.exists() for file in files)
