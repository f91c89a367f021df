"""The real vLLM: weights, parity, and a run whose server is killed.

CRBC_VLLM_PYTHON names an interpreter that has it (third_party/vllm/install.sh).
"""

import asyncio
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from crbc_jax.config import default_config
from crbc_jax.learner.sharding import make_mesh
from crbc_jax.models.config import load_config
from crbc_jax.models.decoder import init_params
from crbc_jax.parity import ParityProbe
from crbc_jax.rollout import make_engine
from crbc_jax.types import UserError

pytestmark = [
    pytest.mark.skipif(
        "CRBC_VLLM_PYTHON" not in os.environ,
        reason="CRBC_VLLM_PYTHON names no interpreter that has vLLM",
    ),
    pytest.mark.timeout(1200),
]
ROOT = pathlib.Path(__file__).parents[3]
PRESET = "preset:text_tiny"
MODEL = load_config(PRESET)


def settings(folder):
    config = default_config()
    config.model.directory = PRESET
    config.rollout.engine = "vllm"
    config.rollout.temperature = 0.6
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 32, 16
    config.rollout.vllm.python = os.environ.get("CRBC_VLLM_PYTHON", "")
    config.rollout.vllm.folder = str(folder)
    return config


def weights(seed):
    mesh = make_mesh(devices=jax.devices()[:1])
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.device_put(init_params(MODEL, seed), where)


def with_temperature(requests, temperature):
    return [
        dataclasses.replace(
            request,
            sampling=dataclasses.replace(request.sampling, temperature=temperature),
        )
        for request in requests
    ]


def test_fresh_weights_are_served_and_all_else_is_caught(tmp_path):
    config = settings(tmp_path / "weights")
    probe = ParityProbe(config, MODEL)

    async def ask(engine, temperature=0.6):
        requests = with_temperature(probe.requests, temperature)
        return await asyncio.gather(*map(engine.generate, requests))

    async def check_served(engine, sampler):
        for version in (0, 1, 2, 3):
            await engine.publish(weights(version), version)
            await sampler.publish(weights(version), version)
            replies = await ask(engine)
            difference = probe.compare(weights(version), replies)
            assert difference["parity/max"] < 1e-3, version
            with pytest.raises(UserError, match=f"version {version}: .* nats a token"):
                probe.compare(weights(version + 1), replies)
            for ours, theirs in zip(
                await ask(sampler, 0.0), await ask(engine, 0.0), strict=True
            ):
                assert ours.token_ids.tolist() == theirs.token_ids.tolist()
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-3)
        return replies

    async def check_caught(engine, replies):
        # Log-probabilities without the temperature.
        with pytest.raises(UserError, match="temperature"):
            probe.compare(weights(3), await ask(engine, 1.0))
        # Positions turned by another base.
        turned = dataclasses.replace(MODEL, rope_theta=500.0)
        with pytest.raises(UserError, match="rotary base"):
            ParityProbe(config, turned).compare(weights(3), replies)
        # vLLM's own way of loading leaves the tied head one version old.
        directory = engine._publisher.write(weights(4), 4)
        client = engine._replicas[0].client
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await client._post("/collective_rpc", json=body)
        with pytest.raises(UserError, match="output head"):
            probe.compare(weights(4), await ask(engine))

    async def main():
        sampling = config.copy_and_resolve_references()
        sampling.rollout.engine = "sampler"
        sampler, engine = make_engine(sampling, MODEL), make_engine(config, MODEL)
        try:
            replies = await check_served(engine, sampler)
            await check_caught(engine, replies)
            # A server that starts on the same directory answers the same.
            await engine.publish(weights(3), 5)
            before = await ask(engine)
            os.killpg(engine._replicas[0].server._process.pid, signal.SIGKILL)
            after = await ask(engine)
            assert engine.stats()["restarts"] == 1
            for one, other in zip(before, after, strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist()
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_run_goes_on_when_its_server_is_killed(tmp_path):
    workdir = tmp_path / "run"
    arguments = (
        "--config=configs/sokoban.py:vllm",
        f"--config.rollout.vllm.python={os.environ['CRBC_VLLM_PYTHON']}",
        "--config.env.num_train_tasks=32",
        "--config.env.num_eval_tasks=8",
        "--config.warm_start.steps=30",
        "--config.warm_start.noise_steps=0",
        "--config.rollout.tasks_per_update=2",
        "--config.learner.num_updates=3",
        "--config.evaluate.every=3",
        f"--workdir={workdir}",
    )
    process = subprocess.Popen(
        [sys.executable, "experiments/run.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )

    def rows():
        path = workdir / "metrics.jsonl"
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    while len(rows()) < 2 and process.poll() is None:
        time.sleep(0.2)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    threads = pathlib.Path(f"/proc/{process.pid}/task").glob("*/children")
    pids = {pid for path in (children, *threads) for pid in path.read_text().split()}
    servers = [
        int(pid)
        for pid in pids
        if "crbc_vllm.py" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert len(servers) == 1
    os.killpg(servers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    updates = rows()[1:]
    assert [row["step"] for row in updates] == [1, 2, 3]
    assert sum(row["engine/restarts"] for row in updates) >= 1
    assert all(row["parity/max"] < 1e-3 for row in updates)
    assert all(row["rollout/aborted"] == 0 for row in updates)
    assert all(row["learner/logprob_difference_max"] < 1e-3 for row in updates)
    assert "eval/success_rate" in updates[-1]
