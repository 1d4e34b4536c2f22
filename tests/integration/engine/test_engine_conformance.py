"""Every method of the SDK's public surface that the engine offers, by the real SDK against a real engine."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
import uvicorn
from safetensors.torch import load_file
from tinker import types
from training_data import PROMPT, cross_entropy_data, policy_data, sample

from hermes_rl.engine import service as service_module
from hermes_rl.engine.architecture import read_architecture
from hermes_rl.engine.base_model import load_base_model
from hermes_rl.engine.checkpoints import CheckpointStore, parse_path
from hermes_rl.engine.process import listen
from hermes_rl.engine.server import EngineApp
from hermes_rl.engine.service import Service

ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture
def training(engine, service):
    return service.create_lora_training_client(engine.model, rank=8, seed=1).result()


def tokens(response: types.SampleResponse) -> list[list[int]]:
    return [list(sequence.tokens) for sequence in response.sequences]


def test_capabilities_name_the_model(engine):
    client = tinker.RestClient(base_url=engine.base_url, api_key=engine.api_key)
    (model,) = client.get_server_capabilities().result().supported_models
    assert model.model_name == engine.model
    assert model.max_context_length == 512


def test_info_and_tokenizer(engine, training):
    info = training.get_info()
    assert (info.lora_rank, info.model_data.model_name) == (8, engine.model)
    assert training.get_tokenizer().decode(training.get_tokenizer().encode("ab")) == "ab"


def test_losses_go_down(training):
    data = cross_entropy_data()
    losses = []
    for _ in range(6):
        forward, step = training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)
        losses.append(forward.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.8 * losses[0]


def test_forward_gives_logprobs_and_no_gradient(training):
    data = cross_entropy_data()
    result = training.forward(data, "cross_entropy").result()
    assert [len(output["logprobs"].data) for output in result.loss_fn_outputs] == [41] * 4
    assert training.optim_step(ADAM).result().metrics["grad_norm"] == 0


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_policy_losses_prefer_what_was_better(training, loss):
    before = training.save_weights_and_get_sampling_client().result()
    group = sample(before, 2)
    data = policy_data(group, [1.0, -1.0], sequence_ratios=loss == "gspo")
    first = training.forward_backward(data, loss).result()
    for output, sequence in zip(first.loss_fn_outputs, group.sequences, strict=True):
        scored = np.array(output["logprobs"].data)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(scored, sequence.logprobs, atol=1e-3)
    training.optim_step(ADAM).result()
    second = training.forward(data, loss).result()
    sums = [
        [float(np.sum(output["logprobs"].data)) for output in result.loss_fn_outputs]
        for result in (first, second)
    ]
    assert sums[1][0] - sums[1][1] > sums[0][0] - sums[0][1]


def test_loss_configuration_is_honoured(training):
    group = sample(training.save_weights_and_get_sampling_client().result(), 2)
    data = policy_data(group, [1.0, -1.0])
    for datum in data:
        datum.loss_fn_inputs["logprobs"] = types.TensorData.from_numpy(
            datum.loss_fn_inputs["logprobs"].to_numpy() - 1.0
        )
    plain = training.forward(data, "ppo").result().metrics["loss:sum"]
    wide = training.forward(data, "ppo", {"clip_high_threshold": 5.0}).result().metrics["loss:sum"]
    assert plain != wide


def test_custom_losses_run_through_the_sdk(training):
    data = cross_entropy_data()

    def squared(_, logprobs):
        loss = sum((values**2).sum() for values in logprobs)
        return loss, {"count": float(len(logprobs))}

    result = training.forward_backward_custom(data, squared).result()
    assert result.metrics["count"] == 4
    assert training.optim_step(ADAM).result().metrics["grad_norm"] > 0
    again = training.forward(data, "cross_entropy").result()
    total = sum(float((np.array(output["logprobs"].data) ** 2).sum()) for output in again.loss_fn_outputs)
    assert total < result.metrics["loss:sum"]


def test_a_custom_loss_teaches_what_the_same_built_in_one_does(engine, service):
    def reinforce(data, logprobs):
        return sum(
            -(values - datum.loss_fn_inputs["logprobs"].to_torch()).exp()
            @ datum.loss_fn_inputs["advantages"].to_torch()
            for datum, values in zip(data, logprobs, strict=True)
        ), {}

    trained = []
    for custom in (True, False):
        client = service.create_lora_training_client(engine.model, rank=8, seed=1).result()
        data = policy_data(sample(client.save_weights_and_get_sampling_client().result()), [1, -1, 2, 0.5])
        if custom:
            first = client.forward_backward_custom(data, reinforce).result()
        else:
            first = client.forward_backward(data, "importance_sampling").result()
        norm = client.optim_step(ADAM).result().metrics["grad_norm"]
        after = client.forward(data, "importance_sampling").result()
        trained.append((first.metrics["loss:sum"], norm, after.metrics["loss:sum"]))
    assert trained[0] == pytest.approx(trained[1], rel=1e-3, abs=1e-3)


def test_gradients_of_several_calls_add_up(engine, service):
    data = cross_entropy_data(count=4)
    norms = []
    for parts in ([data], [data[:1], data[1:]]):
        client = service.create_lora_training_client(engine.model, rank=8, seed=1).result()
        for part in parts:
            client.forward_backward(part, "cross_entropy")
        norms.append(client.optim_step(ADAM).result().metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_chunked_requests_are_put_together(training):
    data = cross_entropy_data(count=1100)
    result = training.forward(data, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == 1100


def test_seeds_make_models_equal(engine, service):
    results = []
    for seed in (5, 5, 6):
        client = service.create_lora_training_client(engine.model, rank=4, seed=seed).result()
        client.forward_backward(cross_entropy_data(), "cross_entropy")
        client.optim_step(ADAM).result()
        results.append(client.forward(cross_entropy_data(), "cross_entropy").result().metrics["loss:sum"])
    assert results[0] == results[1] != results[2]


def test_state_is_saved_and_gone_on_from(training, service):
    data = cross_entropy_data()
    training.forward_backward(data, "cross_entropy")
    training.optim_step(ADAM)
    path = training.save_state("half", user_metadata={"note": "x"}).result().path
    continued = service.create_training_client_from_state_with_optimizer(path).result()
    weights_only = service.create_training_client_from_state(path).result()
    outcomes = []
    for client in (training, continued, weights_only):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(ADAM)
        outcomes.append(client.forward(data, "cross_entropy").result().metrics["loss:sum"])
    assert outcomes[0] == outcomes[1]
    assert outcomes[2] != outcomes[0]
    for load in (training.load_state, training.load_state_with_optimizer):
        load(path).result()
        reloaded = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
        fresh = service.create_training_client_from_state(path).result()
        assert reloaded == fresh.forward(data, "cross_entropy").result().metrics["loss:sum"]


def test_names_are_not_overwritten_unasked(training):
    training.save_state("taken").result()
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        training.save_state("taken").result()
    training.save_state("taken", overwrite=True).result()


def test_samplers_keep_their_weights(training):
    before = training.save_weights_and_get_sampling_client().result()
    first = sample(before)
    training.forward_backward(cross_entropy_data(), "cross_entropy")
    training.optim_step(ADAM).result()
    after = training.save_weights_and_get_sampling_client().result()
    assert tokens(sample(before)) == tokens(first)
    assert tokens(sample(after)) != tokens(first)


def test_inflight_samplers_share_the_latest_weights(training):
    one = training.save_weights_and_get_sampling_client(kind="inflight").result()
    first = tokens(sample(one))
    training.forward_backward(cross_entropy_data(), "cross_entropy")
    training.optim_step(ADAM).result()
    two = training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert tokens(sample(one)) == tokens(sample(two)) != first


def test_saved_samplers_sample_the_same(training, service, engine):
    direct = training.save_weights_and_get_sampling_client().result()
    path = training.save_weights_for_sampler("for-later").result().path
    saved = service.create_sampling_client(model_path=path).result()
    assert tokens(sample(direct)) == tokens(sample(saved))
    assert saved.get_base_model() == engine.model
    base = service.create_sampling_client(base_model=engine.model).result()
    assert len(sample(base, 2).sequences) == 2


def test_samplers_travel_to_other_processes(training):
    client = training.save_weights_and_get_sampling_client().result()
    copies = [pickle.loads(pickle.dumps(client)), tinker.SamplingClient.from_sampler_handle(
        client.get_sampler_handle(), api_key=client.holder._api_key)]  # fmt: skip
    for copy in copies:
        assert tokens(sample(copy)) == tokens(sample(client))


def test_sampling_parameters(training):
    client = training.save_weights_and_get_sampling_client().result()
    greedy = tokens(sample(client, temperature=0.0))
    assert greedy == [greedy[0]] * 4
    assert tokens(sample(client, top_k=1)) == greedy
    assert tokens(sample(client, top_p=1e-6)) == greedy
    assert tokens(sample(client, seed=3)) == tokens(sample(client, seed=3)) != tokens(sample(client, seed=4))
    free = sample(client, 1, seed=9)
    assert len(free.sequences[0].tokens) == 10
    assert free.sequences[0].stop_reason == "length"
    stopper = int(free.sequences[0].tokens[3])
    stopped = sample(client, 1, seed=9, stop=[stopper]).sequences[0]
    assert stopped.stop_reason == "stop"
    assert (
        list(stopped.tokens)
        == list(free.sequences[0].tokens)[: list(free.sequences[0].tokens).index(stopper) + 1]
    )


def test_stop_strings(training):
    client = training.save_weights_and_get_sampling_client().result()
    free = sample(client, 1, seed=9, max_tokens=60).sequences[0]
    tokenizer = training.get_tokenizer()
    text = tokenizer.decode(free.tokens)
    wanted = next(text[i : i + 2] for i in range(5, len(text) - 2) if text[i : i + 2].isascii())
    stopped = sample(client, 1, seed=9, max_tokens=60, stop=[wanted]).sequences[0]
    assert stopped.stop_reason == "stop"
    assert wanted in tokenizer.decode(stopped.tokens)
    assert wanted not in tokenizer.decode(list(stopped.tokens)[:-1])


def test_scores_of_prompts_and_samples(training):
    client = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(PROMPT)
    plain = client.compute_logprobs(prompt).result()
    assert plain[0] is None
    assert all(value < 0 for value in plain[1:])
    last = client.compute_logprobs(prompt, prompt_logprobs_last_n=4).result()
    assert last[:-4] == [None] * (len(PROMPT) - 4)
    assert last[-4:] == plain[-4:]
    targets = torch.full((len(PROMPT) - 1, 2), -1)
    targets[4] = torch.tensor([PROMPT[5], 7])
    for tensor in (
        types.TensorData.from_torch(targets),
        types.TensorData.from_torch_sparse(targets, pad_value=-1),
    ):
        response = client.sample(
            prompt,
            2,
            types.SamplingParams(max_tokens=3, seed=1, stop=[]),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
            topk_sample_logprobs=2,
            target_prompt_logprobs=tensor,
            prompt_alt_tokens_k=4,
        ).result()
        assert response.topk_prompt_logprobs[0] is None
        assert len(response.topk_prompt_logprobs[5]) == 3
        scored = response.target_prompt_logprobs.to_numpy()
        assert scored.shape == (len(PROMPT) - 1, 2)
        assert scored[4, 0] == pytest.approx(plain[5], abs=1e-5)
        assert response.prompt_alt_tokens.tokens.to_numpy().shape == (len(PROMPT) - 1, 4)
        assert len(response.sequences[0].topk_logprobs) == 3


def test_the_most_likely_tokens_of_samples_are_those_of_the_prompt_scores(training):
    """What sampling says of its own tokens is what scoring them as a prompt says."""
    client = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
    (sequence,) = client.sample(prompt, 1, params, topk_sample_logprobs=3).result().sequences
    whole = types.ModelInput.from_ints(PROMPT + list(sequence.tokens))
    one = types.SamplingParams(max_tokens=1, seed=3, stop=[])
    scored = client.sample(whole, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    for mine, expected in zip(
        sequence.topk_logprobs, scored.topk_prompt_logprobs[len(PROMPT) :], strict=True
    ):
        assert [token for token, _ in mine] == [token for token, _ in expected]
        np.testing.assert_allclose([p for _, p in mine], [p for _, p in expected], atol=1e-5)
        assert [p for _, p in mine] == sorted((p for _, p in mine), reverse=True)


def saved(engine, training, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """An adapter's flat vector and its optimizer's state, from a checkpoint made now."""
    path = training.save_state(name).result().path
    loaded = CheckpointStore(engine.log.parent / "checkpoints").load(path, optimizer=True)
    adapter = loaded.build(read_architecture(Path(engine.model)), torch.device("cpu"))
    assert loaded.optimizer is not None
    return adapter.flat, loaded.optimizer


@pytest.mark.parametrize(("decay", "clip"), [(0.0, 0.0), (0.3, 0.0), (0.0, 1e-3), (0.3, 1e-3)])
def test_optimizer_steps_are_those_of_adamw(engine, service, decay, clip):
    training = service.create_lora_training_client(engine.model, rank=8, seed=1).result()
    start, _ = saved(engine, training, "start")
    reference = torch.nn.Parameter(start.clone().double())
    adamw = torch.optim.AdamW([reference], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=decay)
    params = types.AdamParams(
        learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=decay, grad_clip_norm=clip
    )
    # a model beside it, whose first moment after a step that moves nothing is the gradient itself
    probe = types.AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0)
    for step in range(2):
        beside = service.create_training_client_from_state(training.save_state(f"at-{step}").result().path)
        beside.result().forward_backward(cross_entropy_data(), "cross_entropy").result()
        beside.result().optim_step(probe).result()
        _, state = saved(engine, beside.result(), "gradient")
        reference.grad = state["first"].double()
        if clip:
            torch.nn.utils.clip_grad_norm_([reference], clip)
        adamw.step()
        training.forward_backward(cross_entropy_data(), "cross_entropy").result()
        norm = training.optim_step(params).result().metrics["grad_norm"]
        assert norm == pytest.approx(float(state["first"].norm()), rel=1e-5)
    found, _ = saved(engine, training, "end")
    assert not torch.equal(found, start)
    torch.testing.assert_close(found.double(), reference.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("off", "adapted"),
    [("train_attn", {"mlp", "lm_head"}), ("train_mlp", {"self_attn", "lm_head"}),
     ("train_unembed", {"self_attn", "mlp"})],
)  # fmt: skip
def test_what_is_not_to_be_trained_carries_no_adapter(engine, service, off, adapted):
    training = service.create_lora_training_client(engine.model, rank=8, seed=1, **{off: False}).result()
    data = cross_entropy_data()
    losses = []
    for _ in range(4):
        forward, step = training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)
        losses.append(forward.result().metrics["loss:sum"])
        step.result()
    assert losses[-1] < losses[0]
    path = training.save_state("part").result().path
    folder = CheckpointStore(engine.log.parent / "checkpoints").folder(*parse_path(path))
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {part for part in ("self_attn", "mlp", "lm_head") if any(f".{part}." in name for name in tensors)}
    assert found == adapted
    assert all(value.any() for name, value in tensors.items() if "lora_B" in name)


def test_an_unloaded_model_is_gone_and_what_it_published_stays(engine, training):
    sampler = training.save_weights_and_get_sampling_client().result()
    before = tokens(sample(sampler, 2))
    path = training.save_state("kept").result().path
    answer = engine.request("POST", "/api/v1/unload_model", json={"model_id": training.model_id})
    assert answer.status_code == 200
    request_id = answer.json()["request_id"]
    done = engine.request("POST", "/api/v1/retrieve_future", json={"request_id": request_id})
    assert done.json()["type"] == "unload_model"
    assert "may have been unloaded" in refused(lambda: training.optim_step(ADAM))
    assert tokens(sample(sampler, 2)) == before
    rest = tinker.RestClient(base_url=engine.base_url, api_key=engine.api_key)
    assert path in [
        each.tinker_path for each in rest.list_checkpoints(training.model_id).result().checkpoints
    ]


def test_a_state_of_another_scale_is_refused(engine, training):
    """``--lora-alpha`` is part of what weights mean; here it is the checkpoint that says another."""
    path = training.save_state("scaled").result().path
    folder = CheckpointStore(engine.log.parent / "checkpoints").folder(*parse_path(path))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 512.0}))
    message = refused(lambda: training.load_state(path))
    assert "alpha 512.0" in message
    assert "--lora-alpha 512" in message
    assert training.forward(cross_entropy_data(), "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_busy_engine_is_waited_for_by_the_sdk(model_folder, tmp_path, monkeypatch):
    """With room for one waiting request the others are told to come again, and all get their samples."""
    monkeypatch.setattr(service_module, "MAX_PENDING_SAMPLES", 1)
    base = load_base_model(str(model_folder), torch.device("cpu"), torch.float32)
    served = Service(
        base, CheckpointStore(tmp_path), lora_alpha=16.0, session_timeout=600.0, cache_bytes=2**26
    )
    app = EngineApp(served, "tml-busy")
    statuses: list[int] = []

    async def counted(scope, receive, send) -> None:
        async def counting(message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        await app(scope, receive, counting)

    server = uvicorn.Server(uvicorn.Config(counted, lifespan="off", log_level="warning"))
    listener = listen("127.0.0.1", 0)

    async def serve() -> None:
        served.start(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = tinker.ServiceClient(base_url=url, api_key="tml-busy")
        sampler = client.create_sampling_client(base_model=str(model_folder)).result()
        prompt = types.ModelInput.from_ints(PROMPT)
        params = types.SamplingParams(max_tokens=300, seed=1, stop=[])
        futures = [sampler.sample(prompt, 4, params) for _ in range(4)]
        assert all(len(future.result().sequences) == 4 for future in futures)
        assert 429 in statuses
        client.close("success").result()
    finally:
        server.should_exit = True
        thread.join(60)
        served.close()


def test_checkpoints_are_listed_described_and_deleted(engine, training):
    rest = tinker.RestClient(base_url=engine.base_url, api_key=engine.api_key)
    path = training.save_state("listed", ttl_seconds=7200, user_metadata={"a": "b"}).result().path
    training.save_weights_for_sampler("listed").result()
    run = rest.get_training_run(training.model_id).result()
    assert (run.base_model, run.lora_rank) == (engine.model, 8)
    assert run.last_checkpoint.tinker_path == path
    assert training.model_id in [
        found.training_run_id for found in rest.list_training_runs().result().training_runs
    ]
    found = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {each.checkpoint_type for each in found} == {"training", "sampler"}
    mine = next(each for each in found if each.tinker_path == path)
    assert mine.user_metadata == {"a": "b"}
    assert mine.size_bytes > 0
    assert mine.expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    mine = next(
        each for each in rest.list_user_checkpoints().result().checkpoints if each.tinker_path == path
    )
    assert mine.public
    assert mine.expires_at is None
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.lora_rank, info.train_attn, info.train_unembed) == (8, True, True)
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in [
        each.tinker_path for each in rest.list_checkpoints(training.model_id).result().checkpoints
    ]


def test_weights_are_downloaded(engine, training, tmp_path):
    rest = tinker.RestClient(base_url=engine.base_url, api_key=engine.api_key)
    path = training.save_weights_external("out").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    for name, url in urls.items():
        (tmp_path / name).write_bytes(httpx.get(url).raise_for_status().content)
    assert load_file(tmp_path / "adapter_model.safetensors")
    assert httpx.get(urls["adapter_config.json"].replace("signature=", "signature=0")).status_code == 403


def test_sessions_are_listed(engine, service, training):
    rest = tinker.RestClient(base_url=engine.base_url, api_key=engine.api_key)
    session_id = service.holder.get_session_id()
    assert session_id in rest.list_sessions().result().sessions
    assert training.model_id in rest.get_session(session_id).result().training_run_ids


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")
def test_sessions_are_searched(engine):
    rest = tinker.RestClient(base_url=engine.base_url, api_key=engine.api_key)
    clients, ids = [], []
    for number in range(3):
        metadata = {"searched": "yes", "number": str(number)}
        client = tinker.ServiceClient(
            base_url=engine.base_url, api_key=engine.api_key, user_metadata=metadata
        )
        clients.append(client)
        ids.append(client.holder.get_session_id())
    training = clients[1].create_lora_training_client(engine.model, rank=8).result()
    training.save_state("kept").result()
    clients[0].close("errored").result()
    everywhere = {"user_metadata": {"searched": "yes"}, "owner": types.AccessibleSearchOwner()}
    page = rest.search_sessions(types.SessionSearchRequest(**everywhere, limit=2)).result()
    assert [found.session_id for found in page.sessions] == [ids[2], ids[1]]
    assert [found.checkpoints_count for found in page.sessions] == [0, 1]
    rest_of_it = types.SessionSearchRequest(**everywhere, limit=2, cursor=page.next_cursor)
    last = rest.search_sessions(rest_of_it).result()
    assert [(found.session_id, found.status.type) for found in last.sessions] == [(ids[0], "client_finished")]
    assert last.next_cursor is None
    running = types.SessionSearchRequest(
        user_metadata={"number": "0"}, statuses=[types.ActiveSessionStatusQuery()]
    )
    assert not rest.search_sessions(running).result().sessions
    for client in clients[1:]:
        client.close("success").result()


def test_checkpoints_are_copied(engine, training, service):
    rest = tinker.RestClient(base_url=engine.base_url, api_key=engine.api_key)
    path = training.save_state("copied").result().path
    copy = rest.copy_weights(path, "archive", ttl_seconds=7200).result()
    assert copy != path
    rest.delete_checkpoint_from_tinker_path(path).result()
    gone_on = service.create_training_client_from_state_with_optimizer(copy).result()
    assert gone_on.get_info().model_data.model_name == engine.model
    with pytest.raises(tinker.APIStatusError, match="no checkpoint"):
        rest.copy_weights(path, "archive").result()


def test_a_closed_session_frees_its_models(engine):
    client = engine.service()
    training = client.create_lora_training_client(engine.model, rank=8).result()
    client.close("success").result()
    answer = engine.request("POST", "/api/v1/get_info", json={"model_id": training.model_id})
    assert answer.status_code == 404


def refused(call) -> str:
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError)) as caught:
        call().result()
    return str(caught.value)


def test_what_is_wrong_is_named(engine, service, training):
    data = cross_entropy_data()
    assert "is not served here" in refused(lambda: service.create_lora_training_client("other/model"))
    assert "rank" in refused(lambda: service.create_lora_training_client(engine.model, rank=0))
    assert "stable_reinforce" in refused(lambda: training.forward_backward(data, "stable_reinforce"))
    group = sample(training.save_weights_and_get_sampling_client().result(), 1)
    unmarked = policy_data(group, [1.0])
    assert "lacks sequence_ratio_mask" in refused(lambda: training.forward_backward(unmarked, "gspo"))
    unmarked = policy_data(group, [0.0], sequence_ratios=True)
    assert "marks no token" in refused(lambda: training.forward_backward(unmarked, "gspo"))
    assert "clip" in refused(lambda: training.forward_backward(data, "ppo", {"clip": 1.0}))
    assert "lacks logprobs" in refused(lambda: training.forward_backward(data, "ppo"))
    assert "beta1" in refused(lambda: training.optim_step(types.AdamParams(beta1=1.5)))
    assert "name" in refused(lambda: training.save_state("a/b"))
    assert "ttl_seconds" in refused(lambda: training.save_state("a", ttl_seconds=5))
    assert "no checkpoint" in refused(lambda: service.create_sampling_client("tinker://x/weights/y"))
    assert "no checkpoint" in refused(
        lambda: service.create_training_client_from_state("tinker://x/weights/y")
    )
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    client = training.save_weights_and_get_sampling_client().result()
    assert "image" in refused(lambda: client.sample(image, 1, types.SamplingParams(max_tokens=1)))
    long = types.ModelInput.from_ints([5] * 600)
    assert "512" in refused(lambda: client.sample(long, 1, types.SamplingParams(max_tokens=1)))
    hot = types.SamplingParams(max_tokens=1, temperature=-1.0)
    assert "temperature" in refused(lambda: client.sample(types.ModelInput.from_ints([5]), 1, hot))
    # after all that, the model still trains
    assert training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_wrong_key_is_refused(engine):
    answer = httpx.post(f"{engine.base_url}/api/v1/create_session", json={}, headers={"X-API-Key": "tml-no"})
    assert answer.status_code == 401
