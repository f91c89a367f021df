"""Groups over devices and over time: equal results, no communication."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crbc_jax.advantages import ANNOTATED, ESTIMATORS, WHOLE_BATCH, bind
from crbc_jax.graph.batch import build_batch
from crbc_jax.kernels import groups
from crbc_jax.kernels.closure import closure_credit
from crbc_jax.kernels.groups import in_chunks, over_groups

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-\w+|reduce-scatter)(-start)?\("
)


@pytest.fixture(scope="module")
def batch():
    """16 groups, whose cores differ, at lengths that need chains composed."""
    rng = np.random.default_rng(0)
    names = ("group_id", "traj_id", "step", "anchor", "action", "reward", "success")
    columns = {name: [] for name in names}
    for number in range(16 * 4):
        anchor, success = 0, number % 3 > 0
        for step in range(int(rng.integers(5, 30))):
            values = (number // 4, number, step, anchor, step % 2, 0.0, success)
            for name, value in zip(names, values, strict=True):
                columns[name].append(value)
            anchor = anchor + 1 if rng.random() < 0.9 else int(rng.integers(90))
    built, _ = build_batch(columns)
    assert built.has_chains and built.mask.shape[0] == 16
    return built


def compiled(function, batch):
    """Text of the program. Lowered for its arrays: a batch holds nothing else."""
    leaves, tree = jax.tree.flatten(batch)
    program = jax.jit(lambda leaves: function(tree.unflatten(leaves)))
    return program.lower(leaves).compile().as_text()


@pytest.mark.parametrize("method", ["reduced", "dense"])
def test_the_closure_over_devices_is_equal_and_has_no_collective(batch, method):
    function = functools.partial(closure_credit, method=method)
    # The dense way as many anchors as rows would take long.
    small = dataclasses.replace(
        batch,
        num_anchors=128,
        **{
            name: getattr(batch, name)[:, :128]
            for name in ("chain_target", "core_index")
        },
    )
    spread = over_groups(function, jax.devices())
    assert not COLLECTIVE.findall(compiled(spread, small))
    got = spread(small)
    assert len(got.value.sharding.device_set) == 8
    for name, values in function(small)._asdict().items():
        np.testing.assert_allclose(getattr(got, name), values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", sorted({*ESTIMATORS} - {*WHOLE_BATCH, *ANNOTATED}))
def test_estimators_over_devices(batch, name):
    spread = over_groups(bind(name, {}), jax.devices())
    assert not COLLECTIVE.findall(compiled(spread, batch))
    np.testing.assert_allclose(spread(batch), bind(name, {})(batch), atol=1e-5)


def test_the_compiler_alone_would_communicate(batch):
    """The pattern above does find collectives, where there are some."""
    mesh = Mesh(np.array(jax.devices()), ("groups",))
    sharding = NamedSharding(mesh, PartitionSpec("groups"))
    assert COLLECTIVE.findall(compiled(closure_credit, jax.device_put(batch, sharding)))


@pytest.mark.parametrize("num_devices, num_used", [(1, 1), (3, 1), (6, 2), (8, 8)])
def test_as_many_devices_as_divide_the_groups(batch, num_devices, num_used):
    spread = over_groups(closure_credit, jax.devices()[:num_devices])
    assert len(spread(batch).value.sharding.device_set) == num_used


@pytest.mark.parametrize("cells", [1, 4 * 128, 7 * 128, 2**14])
def test_chunks_are_equal(batch, monkeypatch, cells):
    monkeypatch.setattr(groups, "MAX_CELLS", cells)
    chunked = jax.jit(lambda b: in_chunks(closure_credit.__wrapped__, b))
    for name, values in closure_credit(batch)._asdict().items():
        got = getattr(chunked(batch), name)
        np.testing.assert_allclose(got, values, rtol=0, atol=1e-6, err_msg=name)
