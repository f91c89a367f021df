import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from crbc_jax.learner import gradient, sharding, trainable
from crbc_jax.types import TrainState


def make_params(seed=0):
    random = np.random.default_rng(seed)
    layer = {
        "kernel": random.normal(size=(2, 8, 16)),
        "bias": random.normal(size=(2, 16)),
        "lora_a": random.normal(size=(2, 8, 4)),
        "lora_b": random.normal(size=(2, 4, 16)),
    }
    params = {
        "embed": {"embedding": random.normal(size=(24, 8))},
        "layers": {"attention": {"query": layer}},
    }
    return jax.tree.map(jnp.float32, params)


def names(tree):
    return {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def test_adapters_train_alone():
    params = make_params()
    trained, frozen = trainable.split(params)
    assert names(trained) == {"lora_a", "lora_b"}
    assert names(frozen) == {"kernel", "bias", "embedding"}
    jax.tree.map(
        np.testing.assert_array_equal, trainable.merge(trained, frozen), params
    )


def test_without_adapters_everything_trains():
    params = make_params()
    del params["layers"]["attention"]["query"]["lora_a"]
    del params["layers"]["attention"]["query"]["lora_b"]
    trained, frozen = trainable.split(params)
    assert names(trained) == {"kernel", "bias", "embedding"} and not names(frozen)
    jax.tree.map(np.testing.assert_array_equal, trained, params)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_steps_move_adapters_and_keep_moments_of_them_alone(is_wanted):
    """Weight decay does not reach the frozen ones either."""
    optimizer = gradient.make_optimizer(1e-2, 0.5, 1.0)
    params = make_params()
    trained, frozen = trainable.split(params)
    state = TrainState(params, optimizer.init(trained), None, jnp.int32(0))
    assert names(state.opt_state[1][0].mu) == {"lora_a", "lora_b"}

    def objective(trained, _):
        params = trainable.merge(trained, frozen)
        query = params["layers"]["attention"]["query"]
        product = jnp.einsum("lir,lro->lio", query["lora_a"], query["lora_b"])
        return jnp.sum(jnp.square(query["kernel"] + product)), ({}, {})

    mesh = sharding.make_mesh(devices=jax.devices()[:1])

    @jax.jit
    def step(state):
        grads, loss, *_ = gradient.accumulate(
            objective, trained, np.zeros((1, 1)), jnp.int32(1), mesh
        )
        assert names(grads) == {"lora_a", "lora_b"}
        return gradient.apply_gradient(optimizer, state, grads, loss, is_wanted)[0]

    new, old = (trainable.split(s.params) for s in (step(state), state))
    jax.tree.map(np.testing.assert_array_equal, new[1], old[1])
    for leaf, before in zip(*map(jax.tree.leaves, (new[0], old[0])), strict=True):
        assert np.array_equal(leaf, before) != is_wanted


def test_adapters_are_sharded_like_their_kernel():
    mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2)
    query = sharding.tree_shardings(make_params(), mesh)["layers"]["attention"]["query"]
    assert query["lora_a"].spec == P(None, "fsdp", None)
    assert query["lora_b"].spec == P(None, None, "tensor")


def test_first_moment_in_bfloat16():
    optimizer = gradient.make_optimizer(1e-2, 0.0, 1.0, "bfloat16")
    adam = optimizer.init(make_params())[1][0]
    assert isinstance(adam, optax.ScaleByAdamState)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adam.mu)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adam.nu)} == {"float32"}
