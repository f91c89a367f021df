"""The vLLM engine against a stand-in server: whose weights answer, and every fault."""

import asyncio
import json
import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
import pytest

from crbc_jax.config import default_config
from crbc_jax.models.config import load_config
from crbc_jax.models.decoder import init_params
from crbc_jax.models.weights import import_params
from crbc_jax.rollout import make_engine
from crbc_jax.rollout.engine import Request, SamplingParams
from crbc_jax.rollout.vllm.publishing import Publisher
from crbc_jax.types import UserError

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from fake_server import FakeServer, fingerprint  # noqa: E402

PRESET = "preset:sokoban_tiny"
MODEL = load_config(PRESET)
REQUEST = Request(
    np.arange(5, dtype=np.int32), SamplingParams(3, (2, 7), 0.6), seed=2**62
)


@pytest.fixture
def base(tmp_path):
    """A published version that servers begin with, and is not the current one."""
    publisher = Publisher(tmp_path / "base", MODEL, PRESET, "float32")
    return publisher.write(init_params(MODEL, 99), 0)


@pytest.fixture
def servers(base):
    made = [FakeServer(base) for _ in range(3)]
    yield made
    for server in made:
        server.shutdown()
        server.server_close()


def settings(folder, servers=(), **options):
    config = default_config()
    config.model.directory = PRESET
    config.rollout.engine = "vllm"
    vllm = config.rollout.vllm
    vllm.folder = str(folder)
    vllm.urls = ",".join(server.url for server in servers)
    vllm.request_timeout = 1.0
    vllm.update(options)
    return config


def tokens_of(folder, version):
    return fingerprint(folder / f"{version:06d}")


def run(config, work):
    """Runs `work(engine)`, and closes the engine."""

    async def main():
        engine = make_engine(config, MODEL)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def test_the_published_weights_answer(servers, tmp_path):
    folder = tmp_path / "weights"

    async def work(engine):
        for version in (0, 1, 2):
            await engine.publish(init_params(MODEL, version), version)
            replies = await asyncio.gather(*[engine.generate(REQUEST)] * 1)
            assert replies[0].policy_version == version
            assert replies[0].token_ids.tolist() == tokens_of(folder, version)
        assert replies[0].logprobs.dtype == np.float32
        assert replies[0].finish_reason == "length"
        stats = engine.stats()
        assert (stats["requests"], stats["retries"]) == (3, 0)
        assert (stats["prompt_tokens"], stats["response_tokens"]) == (15, 9)
        assert not any(engine.stats().values())

    run(settings(folder, servers), work)
    assert {server.version for server in servers} == {"000002"}
    sent = [body for server in servers for body in server.requests][0]
    assert sent["prompt"] == [0, 1, 2, 3, 4]
    assert sent["seed"] == 2**62 and sent["temperature"] == 0.6
    assert sent["stop_token_ids"] == [2, 7] and sent["ignore_eos"]
    # Two versions stay, each complete.
    assert sorted(p.name for p in folder.iterdir()) == ["000001", "000002"]


def test_requests_are_spread(servers, tmp_path):
    async def work(engine):
        await engine.publish(init_params(MODEL, 0), 0)
        await asyncio.gather(*(engine.generate(REQUEST) for _ in range(12)))

    run(settings(tmp_path / "weights", servers), work)
    assert [len(server.requests) for server in servers] == [4, 4, 4]


@pytest.mark.parametrize("fault", ["500", "half", "hang", "wrong"])
def test_a_request_that_fails_is_repeated(servers, tmp_path, fault):
    async def work(engine):
        await engine.publish(init_params(MODEL, 0), 0)
        servers[0].faults["/v1/completions"] = [fault, fault]
        started = time.monotonic()
        reply = await engine.generate(REQUEST)
        assert time.monotonic() - started < 10
        assert reply.token_ids.tolist() == tokens_of(tmp_path / "weights", 0)
        assert engine.stats()["retries"] == 2

    run(settings(tmp_path / "weights", servers[:1]), work)


def test_a_request_that_always_fails_ends_its_episode_alone(servers, tmp_path):
    async def work(engine):
        await engine.publish(init_params(MODEL, 0), 0)
        servers[0].faults["/v1/completions"] = ["500"] * 3
        with pytest.raises(ConnectionError, match="last problem.*answers 500.*memory"):
            await engine.generate(REQUEST)
        await engine.generate(REQUEST)

    run(settings(tmp_path / "weights", servers[:1], num_retries=2), work)


def test_a_server_restarted_on_base_weights_gets_the_current_ones(
    servers, base, tmp_path
):
    async def work(engine):
        await engine.publish(init_params(MODEL, 0), 0)
        servers[0].restart(base)  # The connection lives on: nothing else tells of it.
        reply = await engine.generate(REQUEST)
        assert reply.token_ids.tolist() == tokens_of(tmp_path / "weights", 0)
        assert reply.token_ids.tolist() != fingerprint(base)
        assert engine.stats()["retries"] == 1

    run(settings(tmp_path / "weights", servers[:1]), work)


def test_a_replica_that_never_acknowledges_is_left_out(servers, tmp_path):
    async def work(engine):
        servers[1].faults["/collective_rpc"] = ["hang"] * 9
        await engine.publish(init_params(MODEL, 0), 0)
        for _ in range(6):
            await engine.generate(REQUEST)

    run(settings(tmp_path / "weights", servers), work)
    assert [len(server.requests) for server in servers][1] == 0


def test_where_no_server_takes_the_weights_the_run_ends(servers, tmp_path):
    async def work(engine):
        for server in servers:
            server.faults["/collective_rpc"] = ["500"]
        with pytest.raises(UserError, match="no vLLM server took version 0.*500"):
            await engine.publish(init_params(MODEL, 0), 0)

    run(settings(tmp_path / "weights", servers), work)


def test_a_server_without_the_token_of_the_trainer_is_refused(servers, tmp_path):
    servers[0].token = "secret"

    async def work(engine):
        with pytest.raises(UserError, match="401.*token"):
            await engine.publish(init_params(MODEL, 0), 0)

    run(settings(tmp_path / "weights", servers[:1]), work)


@pytest.fixture
def interpreter(tmp_path):
    """What starts the stand-in in place of vLLM's script, with the same arguments."""
    path = tmp_path / "python"
    script = pathlib.Path(__file__).parent / "fake_server.py"
    path.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} {script} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_managed_server_that_dies_is_started_on_the_current_weights(
    interpreter, tmp_path
):
    async def work(engine):
        await engine.publish(init_params(MODEL, 0), 0)
        await engine.publish(init_params(MODEL, 1), 1)
        server = engine._replicas[0].server
        os.killpg(server._process.pid, signal.SIGKILL)
        reply = await engine.generate(REQUEST)
        assert reply.token_ids.tolist() == tokens_of(tmp_path / "weights", 1)
        assert engine.stats()["restarts"] == 1
        return server._process.pid

    pid = run(settings(tmp_path / "weights", python=interpreter), work)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_managed_server_that_cannot_start_says_why(
    interpreter, tmp_path, monkeypatch
):
    monkeypatch.setenv("FAKE_DIES", "1")

    async def work(engine):
        with pytest.raises(UserError, match="no room for the KV cache"):
            await engine.publish(init_params(MODEL, 0), 0)

    run(settings(tmp_path / "weights", python=interpreter, start_timeout=20.0), work)


def test_what_is_published_can_be_proved_and_read_back(tmp_path):
    publisher = Publisher(tmp_path, MODEL, PRESET, "bfloat16")
    params = init_params(MODEL, 0)
    directory = publisher.write(params, 3)
    files = json.loads((directory / "manifest.json").read_text())["files"]
    names = {path.name for path in directory.iterdir()} - {"manifest.json"}
    assert names == set(files) >= {"config.json", "model.safetensors"}
    again = import_params(str(directory), MODEL)
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(
            one, np.asarray(other, jax.numpy.bfloat16).astype(np.float32)
        ),
        again,
        params,
    )
    script = pathlib.Path(__file__).parents[3] / "third_party/vllm/crbc_vllm.py"
    verify = {}
    exec(compile(script.read_text(), script, "exec"), verify)
    verify["_verify"](directory)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        verify["_verify"](directory)


def test_a_full_disk_leaves_the_versions_before(tmp_path, monkeypatch):
    from crbc_jax.models import weights

    publisher = Publisher(tmp_path, MODEL, PRESET, "float32")
    publisher.write(init_params(MODEL, 0), 0)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", fail)
    with pytest.raises(OSError, match="No space"):
        publisher.write(init_params(MODEL, 1), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["000000"]
    fingerprint(tmp_path / "000000")
