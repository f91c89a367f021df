import jax
import pytest
from jax.sharding import PartitionSpec as P

from crbc_jax.learner import gradient, sharding


@pytest.mark.parametrize(
    "sizes, shape",
    [
        ({}, (8, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, (1, 4, 2)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    ],
)
def test_mesh_sizes(sizes, shape):
    mesh = sharding.make_mesh(**sizes)
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_names == ("data", "fsdp", "tensor")


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"fsdp": 3}, "config.mesh.fsdp=3.* the 8 devices"),
        ({"data": 4}, "config.mesh.data=4.* the 8 devices"),
        ({"data": 1, "fsdp": 16}, "config.mesh.fsdp=16.* the 8 devices"),
        ({"fsdp": 16}, "config.mesh.fsdp=16.* the 8 devices"),
        ({"fsdp": -1}, "one of them -1"),
        ({"tensor": 0}, "config.mesh.tensor=0.*at least 1"),
    ],
)
def test_impossible_meshes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(**sizes)


def test_rows_must_split_over_the_mesh():
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    sharding.check_rows(8, mesh, "config.learner.microbatch_rows")
    with pytest.raises(ValueError, match="microbatch_rows=6 .* 4 devices.*use 8"):
        sharding.check_rows(6, mesh, "config.learner.microbatch_rows")


def test_every_kernel_is_split_and_moments_like_their_parameter(decoder_config):
    mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2)
    optimizer = gradient.make_optimizer(1e-3, 0.0, 1.0)
    state = gradient.abstract_state(
        decoder_config, optimizer, mesh, keep_reference=True
    )
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    assert specs.params["embed"]["embedding"] == P("tensor", "fsdp")
    assert specs.reference == specs.params
    assert specs.opt_state[1][0].mu == specs.params
    whole = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
        if not any(leaf.sharding.spec)
    ]
    assert whole and all(name.endswith("scale") for name in whole)


def test_axis_that_does_not_divide_stays_whole():
    mesh = sharding.make_mesh(data=1, fsdp=8)
    leaf = jax.ShapeDtypeStruct((6, 20), "float32")
    shardings = sharding.tree_shardings({"embed": {"embedding": leaf}}, mesh)
    assert shardings["embed"]["embedding"].spec == P("tensor", None)
