import asyncio
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from crbc_jax.config import default_config
from crbc_jax.models.config import load_config
from crbc_jax.rollout import make_engine
from crbc_jax.rollout.engine import Request, SamplingParams
from crbc_jax.rollout.sampler import Sampler
from crbc_jax.rollout.scripted import ScriptedEngine


def request(seed, max_tokens=4, stop_ids=()):
    ids = np.array([seed], np.int32)
    return Request(ids, SamplingParams(max_tokens, stop_ids), seed)


def test_script_is_cut_like_a_sampled_reply():
    engine = ScriptedEngine(lambda r: [r.seed, 7, 8, 9, 10], logprob=-0.5)

    async def run():
        await engine.publish({}, 3)
        with engine.episode():
            return [
                await engine.generate(request(1)),
                await engine.generate(request(2, stop_ids=(8,))),
            ]

    cut, stopped = asyncio.run(run())
    assert cut.token_ids.tolist() == [1, 7, 8, 9]
    assert (cut.finish_reason, cut.policy_version) == ("length", 3)
    assert stopped.token_ids.tolist() == [2, 7, 8]
    assert stopped.finish_reason == "stop"
    np.testing.assert_array_equal(stopped.logprobs, np.float32([-0.5] * 3))
    assert engine.stats() == {"requests": 2, "response_tokens": 7}
    assert engine.stats()["requests"] == 0


def test_failures_come_where_the_script_says():
    engine = ScriptedEngine(lambda _: [1], failures=[1])

    async def run():
        waiting = [engine.generate(request(seed)) for seed in range(3)]
        return await asyncio.gather(*waiting, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [isinstance(o, ConnectionError) for o in outcomes] == [False, True, False]
    assert [r.seed for r in engine.requests] == [0, 1, 2]


def test_engines_are_made_by_name():
    config = default_config()
    model = load_config("preset:sokoban_tiny")
    assert isinstance(make_engine(config, model), Sampler)
    config.rollout.engine = "smapler"
    with pytest.raises(ValueError, match="rollout.engine='smapler'"):
        make_engine(config, model)


def test_importing_models_and_engines_touches_no_device():
    code = (
        "import crbc_jax.models.pretrained, crbc_jax.rollout.sampler\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
