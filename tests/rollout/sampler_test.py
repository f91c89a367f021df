import asyncio
import dataclasses
import json
import os
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crbc_jax.models.config import load_config
from crbc_jax.models.decoder import forward, init_params, unembed
from crbc_jax.models.weights import import_params
from crbc_jax.rollout.decoding import sample
from crbc_jax.rollout.engine import Request, SamplingParams
from crbc_jax.rollout.sampler import Sampler

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CONFIG = dataclasses.replace(
    load_config("preset:sokoban_tiny"),
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    initializer_range=0.4,
)
MAX_PROMPT, MAX_NEW = 8, 4


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, 0)


def make_sampler(**options):
    options = {"row_buckets": (4, 16), "num_prompt_buckets": 1, **options}
    return Sampler(
        CONFIG, max_prompt_tokens=MAX_PROMPT, max_response_tokens=MAX_NEW, **options
    )


def make_requests(count, temperature=1.0, max_tokens=MAX_NEW, stop_ids=()):
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens, stop_ids, temperature)
    return [
        Request(
            rng.integers(
                0, CONFIG.vocab_size, rng.integers(1, MAX_PROMPT + 1), "int32"
            ),
            sampling,
            seed=int(rng.integers(0, 2**63)),
        )
        for _ in range(count)
    ]


def complete(params, requests, sampler=None, version=0):
    """Completions of requests that wait together."""
    sampler = sampler or make_sampler()

    async def run():
        await sampler.publish(params, version)
        return await asyncio.gather(*map(sampler.generate, requests))

    return asyncio.run(run())


@jax.jit
def full_logits(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ones = jnp.ones_like(tokens)
    hidden, _ = forward(CONFIG, params, tokens, positions, ones)
    return unembed(CONFIG, params, hidden)


def reply_logits(params, request, completion):
    """Full forward over prompt and reply -> logits that each reply token came from."""
    tokens = np.zeros((1, MAX_PROMPT + MAX_NEW), np.int32)
    both = np.concatenate([request.prompt_ids, completion.token_ids])
    tokens[0, : len(both)] = both
    first = len(request.prompt_ids) - 1
    logits = full_logits(params, tokens)[0]
    return np.asarray(logits)[first : first + len(completion.token_ids)]


def log_softmax(logits):
    logits = np.float64(logits)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_greedy_is_the_argmax_of_the_full_forward(params):
    requests = make_requests(6, temperature=0.0)
    for request, reply in zip(requests, complete(params, requests), strict=True):
        logits = reply_logits(params, request, reply)
        np.testing.assert_array_equal(reply.token_ids, logits.argmax(axis=-1))
        expected = log_softmax(logits)[np.arange(MAX_NEW), reply.token_ids]
        np.testing.assert_allclose(reply.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_those_of_the_sampling_temperature(params, temperature):
    requests = make_requests(6, temperature)
    for request, reply in zip(requests, complete(params, requests), strict=True):
        logits = reply_logits(params, request, reply)
        tokens = np.arange(len(logits)), reply.token_ids
        expected = log_softmax(logits / temperature)[tokens]
        np.testing.assert_allclose(reply.logprobs, expected, atol=1e-5)
        assert reply.logprobs.dtype == np.float32
        if temperature != 1.0:  # The fault of others that this guards against.
            assert not np.allclose(
                reply.logprobs, log_softmax(logits)[tokens], atol=1e-3
            )


def test_samples_follow_the_distribution(params):
    count = 4096
    prompt = np.array([1, 20, 18], np.int32)
    sampling = SamplingParams(1, (), 0.8)
    requests = [Request(prompt, sampling, seed) for seed in range(count)]
    replies = complete(params, requests, make_sampler(row_buckets=(1024,)))
    drawn = np.bincount(
        [reply.token_ids[0] for reply in replies], minlength=CONFIG.vocab_size
    )
    logits = reply_logits(params, requests[0], replies[0])
    expected = count * np.exp(log_softmax(logits / 0.8))[0]
    statistic = np.sum((drawn - expected) ** 2 / expected)
    # Mean 23, standard deviation 6.8 for the 24 tokens, were the draws right.
    assert statistic < 23 + 4 * 6.8


def test_a_reply_depends_on_its_seed_and_prompt_alone(params):
    requests = make_requests(13)
    sampler = make_sampler()
    together = complete(params, requests, sampler)
    shuffled = list(range(len(requests)))
    random.Random(0).shuffle(shuffled)
    again = complete(params, [requests[i] for i in shuffled], sampler)
    for position, index in enumerate(shuffled):
        assert_same(again[position], together[index])
    for start in range(0, 13, 3):  # Other companions, and another row bucket.
        parts = complete(params, requests[start : start + 3], sampler)
        for part, whole in zip(parts, together[start : start + 3], strict=True):
            np.testing.assert_array_equal(part.token_ids, whole.token_ids)
            np.testing.assert_allclose(part.logprobs, whole.logprobs, atol=1e-5)
    other_seed = [dataclasses.replace(r, seed=r.seed ^ (1 << 40)) for r in requests]
    changed = complete(params, other_seed, sampler)
    assert any(
        not np.array_equal(a.token_ids, b.token_ids)
        for a, b in zip(changed, together, strict=True)
    )


def assert_same(actual, expected):
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    np.testing.assert_array_equal(actual.logprobs, expected.logprobs)


def run_episodes(params, delays):
    """Six episodes of three steps, whose environments take `delays` turns a step."""
    sampler = make_sampler()
    requests = iter(make_requests(18))
    plan = [[next(requests) for _ in range(3)] for _ in range(6)]

    async def episode(number):
        replies = []
        with sampler.episode():
            for step in range(1 + number % 3):  # Of unequal lengths.
                for _ in range(delays(number, step)):
                    await asyncio.sleep(0)
                replies.append(await sampler.generate(plan[number][step]))
        return replies

    async def run():
        await sampler.publish(params, 0)
        return await asyncio.gather(*map(episode, range(6)))

    return asyncio.run(run()), sampler.stats()


def test_ticks_do_not_depend_on_timing(params):
    slow = random.Random(1)
    at_once, stats = run_episodes(params, lambda number, step: 0)
    delayed, delayed_stats = run_episodes(params, lambda *_: slow.randrange(20))
    for first, second in zip(at_once, delayed, strict=True):
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    assert stats["ticks"] == delayed_stats["ticks"] == 3
    assert stats["requests"] == 12


def test_request_from_outside_waits_for_the_episodes(params):
    sampler = make_sampler()
    inside, outside = make_requests(2)

    async def episode():
        with sampler.episode():
            await asyncio.sleep(0.05)
            return await sampler.generate(inside)

    async def run():
        await sampler.publish(params, 0)
        await asyncio.gather(episode(), sampler.generate(outside))
        await sampler.generate(outside)

    asyncio.run(run())
    assert sampler.stats()["ticks"] == 2


def test_cancelled_request_leaves_no_trace(params):
    sampler = make_sampler()
    first, second = make_requests(2)

    async def run():
        await sampler.publish(params, 0)
        waiting = asyncio.create_task(sampler.generate(first))
        with sampler.episode():  # Keeps it waiting.
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return await asyncio.wait_for(sampler.generate(second), 60)

    assert asyncio.run(run()).finish_reason == "length"
    assert sampler.stats()["requests"] == 1
    complete(params, [first], sampler)  # From a new event loop.


def test_stop_ids_and_token_limits_end_single_replies(params):
    free = complete(params, make_requests(12))
    stop_id = int(free[0].token_ids[1])
    requests = make_requests(12, stop_ids=(99, stop_id))
    requests[-1] = dataclasses.replace(
        requests[-1], sampling=SamplingParams(2, (), temperature=1.0)
    )
    replies = complete(params, requests)
    for reply, unstopped in zip(replies[:-1], free, strict=False):
        ends = np.flatnonzero(unstopped.token_ids == stop_id)
        expected = unstopped.token_ids[: ends[0] + 1 if len(ends) else None]
        np.testing.assert_array_equal(reply.token_ids, expected)
        assert len(reply.logprobs) == len(reply.token_ids)
        assert reply.finish_reason == ("stop" if len(ends) else "length")
    assert replies[0].finish_reason == "stop"
    np.testing.assert_array_equal(replies[-1].token_ids, free[-1].token_ids[:2])
    assert replies[-1].finish_reason == "length"


def test_logprobs_of_a_certain_token_are_not_positive(params):
    sharp = jax.tree.map(lambda leaf: (leaf * 30).astype(jnp.bfloat16), params)
    replies = complete(sharp, make_requests(16, temperature=0.3))
    logprobs = np.concatenate([reply.logprobs for reply in replies])
    assert logprobs.max() <= 0
    assert logprobs.max() > -1e-3  # Near certain indeed, else the test shows nothing.


def test_more_requests_than_the_largest_bucket(params):
    requests = make_requests(40)
    sampler = make_sampler()
    replies = complete(params, requests, sampler, version=5)
    assert {reply.policy_version for reply in replies} == {5}
    stats = sampler.stats()
    assert (stats["ticks"], stats["calls"], stats["requests"]) == (1, 3, 40)
    assert stats["response_tokens"] == 40 * MAX_NEW
    assert stats["prompt_tokens"] == sum(len(r.prompt_ids) for r in requests)
    assert stats["seconds"] > 0
    assert sampler.stats()["requests"] == 0
    alone = complete(params, requests[3:4], sampler)[0]
    np.testing.assert_array_equal(alone.token_ids, replies[3].token_ids)


def test_compilations_are_bounded_by_the_buckets(params):
    sampler = make_sampler(num_prompt_buckets=2)
    before = sample._cache_size()
    requests = make_requests(20)
    for count in (1, 2, 3, 4, 7, 11, 16, 20):
        complete(params, requests[-count:], sampler)
        complete(params, make_requests(count, 0.5, 2, (3,)), sampler)
    assert sample._cache_size() - before <= 4


def test_published_copy_survives_donation_on_any_mesh(params):
    devices = jax.devices()
    mesh = jax.make_mesh((8,), ("fsdp",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    places = {
        "one": jax.sharding.SingleDeviceSharding(devices[0]),
        "other": jax.sharding.SingleDeviceSharding(devices[3]),
        "repeated": jax.sharding.NamedSharding(mesh, spec()),
        "sharded": jax.sharding.NamedSharding(mesh, spec("fsdp")),
    }
    overwrite = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
    requests = make_requests(3)
    expected = complete(params, requests)
    for name, place in places.items():
        theirs = jax.tree.map(
            lambda leaf, place=place, name=name: jax.device_put(
                np.array(leaf),
                place if name != "sharded" or leaf.shape[0] % 8 == 0 else places["one"],
            ),
            params,
        )
        sampler = make_sampler()
        asyncio.run(sampler.publish(theirs, 1))
        jax.tree.map(overwrite, theirs)

        async def run(sampler=sampler):
            return await asyncio.gather(*map(sampler.generate, requests))

        for reply, wanted in zip(asyncio.run(run()), expected, strict=True):
            assert_same(reply, wanted)


def test_rows_split_over_devices_give_the_same_tokens(params):
    requests = make_requests(13)
    split = make_sampler(row_buckets=(16,), devices=jax.devices())
    one = make_sampler(row_buckets=(16,))
    pairs = zip(
        complete(params, requests, split), complete(params, requests, one), strict=True
    )
    for reply, wanted in pairs:
        np.testing.assert_array_equal(reply.token_ids, wanted.token_ids)
        np.testing.assert_allclose(reply.logprobs, wanted.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ([], SamplingParams(2, ()), "prompt_ids has 0 tokens"),
        ([1] * 9, SamplingParams(2, ()), "max_prompt_tokens"),
        ([24], SamplingParams(2, ()), "prompt_ids must be in"),
        ([-1], SamplingParams(2, ()), "prompt_ids must be in"),
        ([1], SamplingParams(0, ()), "max_tokens=0"),
        ([1], SamplingParams(5, ()), "max_response_tokens"),
        ([1], SamplingParams(2, (), -0.5), "temperature=-0.5"),
        ([1], SamplingParams(2, tuple(range(9))), "stop_ids has 9"),
    ],
)
def test_bad_requests_name_their_field(params, prompt, sampling, named):
    request = Request(np.array(prompt, np.int32), sampling, seed=0)
    with pytest.raises(ValueError, match=named):
        complete(params, [request])


def test_bad_sizes_name_their_argument():
    with pytest.raises(ValueError, match="row_buckets=0"):
        make_sampler(row_buckets=())
    with pytest.raises(ValueError, match="devices, 8"):
        make_sampler(row_buckets=(4,), devices=jax.devices())
    with pytest.raises(ValueError, match="512 positions"):
        Sampler(CONFIG, max_prompt_tokens=511, max_response_tokens=2)


def test_use_before_publish_and_after_close(params):
    sampler = make_sampler()
    request = make_requests(1)[0]

    async def run():
        with pytest.raises(RuntimeError, match="before the first publish"):
            await sampler.generate(request)
        await sampler.publish(params, 0)
        waiting = asyncio.create_task(sampler.generate(request))
        with sampler.episode():  # Keeps it waiting.
            await asyncio.sleep(0.05)
            await sampler.close()
        await sampler.close()
        with pytest.raises(RuntimeError, match="after close"):
            await sampler.generate(request)
        return await asyncio.gather(waiting, return_exceptions=True)

    (outcome,) = asyncio.run(run())
    assert isinstance(outcome, RuntimeError)


@pytest.mark.skipif(
    "CRBC_SMOLLM2" not in os.environ,
    reason="CRBC_SMOLLM2 does not name what get_model.py smollm2 makes",
)
def test_smollm2_replies_as_in_transformers():
    """Layers come apart here; the golden file is transformers' greedy generation."""
    directory = os.environ["CRBC_SMOLLM2"]
    config = load_config(directory)
    golden = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
    sampling = SamplingParams(max_tokens=24, stop_ids=(2,), temperature=0.0)
    requests = [
        Request(np.array(item["prompt_ids"], np.int32), sampling, seed=number)
        for number, item in enumerate(golden)
    ]
    sampler = Sampler(
        config,
        max_prompt_tokens=max(len(item["prompt_ids"]) for item in golden),
        max_response_tokens=24,
        row_buckets=(4,),
        num_prompt_buckets=1,
    )
    replies = complete(import_params(directory, config), requests, sampler)
    for reply, item in zip(replies, golden, strict=True):
        assert reply.token_ids.tolist() == item["reply_ids"]
        np.testing.assert_allclose(reply.logprobs, item["logprobs"], atol=1e-4)
