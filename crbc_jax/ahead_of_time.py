"""Config and devices that are elsewhere -> the programs of a run, compiled for them.

Nothing runs and no array is made. For a TPU the compiler is the real one, and says what
each device will hold; for CUDA, which has none without a GPU, programs are lowered.
"""

import collections
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from crbc_jax.graph.batch import build_batch
from crbc_jax.learner import sharding
from crbc_jax.learner.learner import Learner, make_learner
from crbc_jax.models.config import DecoderConfig
from crbc_jax.models.flops import step_flops
from crbc_jax.rollout import decoding
from crbc_jax.stages import Credit
from crbc_jax.types import Step, Trajectory, UserError

GIB = 2**30
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-\w+|reduce-scatter)(?:-start)?\("
)


class Chip(NamedTuple):
    """What a device offers; from its maker's pages and its compiler's messages."""

    memory_gib: float  # That programs may use.
    peak_flops: float  # Products of bfloat16, operations a second.


CHIPS = {  # By the name that JAX gives the kind of device.
    "TPU v4": Chip(30.75, 275e12),
    "TPU v5 lite": Chip(15.75, 197e12),
    "TPU v5": Chip(95.74, 459e12),
    "TPU v6 lite": Chip(31.25, 918e12),
}


class Cost(NamedTuple):
    """Of an optimiser step on a mini-batch that is full, all devices together."""

    tokens: int
    flops: int


class Phase(NamedTuple):
    """A program of a run, compiled; sizes in bytes a device."""

    name: str
    program: int  # Arguments, results and all that is between, at the peak.
    resident: int  # What else lies there meanwhile.
    collectives: dict[str, int]  # How many of each kind its text has.
    seconds: float  # That it took to compile.
    error: str = ""  # What the compiler said, where it found no room.

    @property
    def total(self) -> int:
        return self.program + self.resident


def topology_devices(name: str) -> list[jax.Device]:
    """Returns the devices of a TPU slice, such as "v5e:4x4", that need not exist.

    Raises:
        UserError: without the compiler for TPU, or if it knows no such slice.
    """
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # Of several kinds, by the version of JAX.
        raise UserError(
            f"--topology={name!r}: {str(error).splitlines()[0]}. Known are v5e:4x4, "
            "v5p:2x2x4, v6e:4x4 and others of their kind; the compiler comes with "
            "pip install 'crbc_jax[tpu]', in an environment of its own"
        ) from error
    return list(found.devices)


def host_devices(name: str) -> list[jax.Device]:
    """Returns those of one host of the slice, by themselves: four, side by side.

    A program for a part of a slice cannot be compiled, but for a slice of that size.
    """
    family, _, shape = name.partition(":")
    return topology_devices(f"{family}:2x2{'x1' * (shape.count('x') == 2)}")


def chip_of(device: jax.Device) -> Chip:
    """Raises UserError if its numbers are not known here."""
    if device.device_kind not in CHIPS:
        raise UserError(
            f"--topology: memory and speed of {device.device_kind!r} are not known; "
            f"known: {sorted(CHIPS)}"
        )
    return CHIPS[device.device_kind]


def step_cost(
    config: ConfigDict, model: DecoderConfig, devices: Sequence[jax.Device]
) -> Cost:
    """Counts the products of the largest optimiser step, computed anew or not."""
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
    minibatch = largest_minibatch(config, make_learner(config, model, mesh))
    microbatches, rows, length = minibatch.rows.tokens.shape
    flops = step_flops(
        model,
        rows=microbatches * rows,
        length=length,
        num_logits=minibatch.rows.response_ids.shape[2],
        has_reference=config.loss.kl_coef > 0,
        recomputes=config.learner.remat == "full",
    )
    return Cost(microbatches * rows * length, flops)


def compile_phases(
    config: ConfigDict,
    model: DecoderConfig,
    devices: Sequence[jax.Device],
    host: Sequence[jax.Device],
) -> Iterator[Phase]:
    """Compiles a run's programs at their largest shapes, one after the other.

    Training with the reference; publishing, which casts the parameters and gathers a
    copy of them on each host; decoding on the devices of a host, each of which holds a
    part of that copy; and credit, over the groups of an update.

    Args:
        devices: all of them.
        host: those of one host; see `host_devices`.

    Raises:
        UserError: if the config does not fit the devices.
    """
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
    learner = make_learner(config, model, mesh)
    minibatch = largest_minibatch(config, learner)
    state, hosts = learner.abstract_state, _by_host(devices)
    copy = _copy_on_each_host(config, state.params, hosts)
    state_bytes, copy_bytes = _bytes_a_device(state), _bytes_a_device(copy)
    params_bytes = _bytes_a_device(state.params)
    yield _compile(
        "training step",
        lambda: learner.step.lower(state, minibatch, minibatch.sampled_logprobs),
        resident=copy_bytes,
    )
    yield _compile(
        "publishing",
        lambda: _lower_publishing(state.params, copy, mesh, hosts),
        resident=state_bytes - params_bytes,
    )
    yield _compile(
        "decoding",
        lambda: _lower_decoding(config, model, copy, host, len(hosts)),
        resident=state_bytes,
    )
    yield _compile(
        "credit",
        lambda: _lower_credit(config, devices),
        resident=state_bytes + copy_bytes,
    )


def lower_for_cuda(
    config: ConfigDict, model: DecoderConfig, devices: Sequence[jax.Device]
) -> dict[str, int]:
    """Lowers training step and credit for CUDA.

    Args:
        devices: of any platform; they only give the mesh its size.

    Returns:
        By program, the bytes of its StableHLO.
    """
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
    learner = make_learner(config, model, mesh)
    minibatch = largest_minibatch(config, learner)
    arguments = learner.abstract_state, minibatch, minibatch.sampled_logprobs
    batch = _largest_batch(config)
    credit = Credit(config.advantage, devices).program
    return {
        name: len(program.trace(*args).lower(lowering_platforms=("cuda",)).as_text())
        for name, program, args in (
            ("training step", learner.step, arguments),
            ("credit", credit, (batch,)),
        )
    }


def largest_minibatch(config: ConfigDict, learner: Learner) -> Any:
    """Shapes of the largest mini-batch that `learner.pack` makes."""
    rollout = config.rollout
    limits = rollout.max_prompt_tokens, rollout.max_response_tokens
    step = Step(
        observation="",
        anchor="",
        prompt_ids=np.zeros(limits[0], np.int32),
        response_ids=np.zeros(limits[1], np.int32),
        logprobs=np.zeros(limits[1], np.float32),
        policy_version=0,
        finish_reason="length",
        action="",
        parse_code="ok",
        is_action_valid=True,
        reward=0.0,
    )
    # As many as fill a row.
    steps = (step,) * max(config.learner.row_tokens // sum(limits), 1)
    group = (Trajectory("", 0, 0, "failure", steps, "", ""),)
    (minibatch,), _ = learner.pack([group], np.ones(len(steps), np.float32))
    return _abstract(minibatch)


def _compile(name: str, lower: Callable[[], Any], resident: int) -> Phase:
    started = time.perf_counter()
    lowered = lower()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = str(error).splitlines()[0]
        return Phase(name, 0, resident, {}, time.perf_counter() - started, message)
    size = compiled.memory_analysis()
    return Phase(
        name,
        # What the compiler compares with the chip's memory; arguments, results and
        # temporaries together would count some twice.
        program=size.peak_memory_in_bytes + size.generated_code_size_in_bytes,
        resident=resident,
        collectives=dict(collections.Counter(_COLLECTIVE.findall(compiled.as_text()))),
        seconds=time.perf_counter() - started,
    )


def _by_host(devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices [hosts, devices of a host]."""
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    num_hosts = len({device.process_index for device in devices})
    return np.array(devices).reshape(num_hosts, -1)


def _copy_on_each_host(config: ConfigDict, params: Any, hosts: np.ndarray) -> Any:
    """Shapes of the parameters as they are sampled from: a host's devices share one."""
    cast = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, config.learner.compute_dtype),
        params,
    )
    mesh = Mesh(hosts[:, None], sharding.AXES)  # Hosts along `data`: each the same.
    return _placed(cast, sharding.tree_shardings(cast, mesh))


def _lower_publishing(params: Any, copy: Any, mesh: Mesh, hosts: np.ndarray):
    # A program has one order of devices. The learner's is made for its own rings; to
    # number its shards by hosts instead changes who sends to whom, not how much.
    source = Mesh(hosts.reshape(mesh.devices.shape), sharding.AXES)
    program = jax.jit(
        lambda params: jax.tree.map(
            lambda leaf, like: leaf.astype(like.dtype), params, copy
        ),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, copy),
    )
    return program.lower(_placed(params, sharding.tree_shardings(params, source)))


def _lower_decoding(config, model, copy, host, num_hosts: int):
    """Of one host, for its share of an update's episodes, all at once."""
    rollout = config.rollout
    episodes = rollout.tasks_per_update * rollout.group_size
    rows, length = -(-episodes // num_hosts), rollout.max_prompt_tokens
    mesh = Mesh(np.array(host)[None, None], sharding.AXES)
    shapes = decoding.Rows(
        prompts=jax.ShapeDtypeStruct((rows, length), jnp.int32),
        lengths=jax.ShapeDtypeStruct((rows,), jnp.int32),
        seeds=jax.ShapeDtypeStruct((rows, 2), jnp.uint32),
        temperatures=jax.ShapeDtypeStruct((rows,), jnp.float32),
        max_tokens=jax.ShapeDtypeStruct((rows,), jnp.int32),
        stop_ids=jax.ShapeDtypeStruct((rows, decoding.MAX_STOP_IDS), jnp.int32),
    )
    return decoding.sample.lower(
        model,
        _placed(copy, sharding.tree_shardings(copy, mesh)),
        _placed(shapes, jax.tree.map(lambda _: sharding.replicated(mesh), shapes)),
        rollout.max_response_tokens,
    )


def _lower_credit(config: ConfigDict, devices: Sequence[jax.Device]):
    batch, credit = _largest_batch(config), Credit(config.advantage, devices)
    parts = math.gcd(batch.mask.shape[0], len(credit.devices))
    mesh = Mesh(np.array(credit.devices[:parts]), ("groups",))
    by_group = NamedSharding(mesh, PartitionSpec("groups"))
    return credit.program.lower(_placed(batch, jax.tree.map(lambda _: by_group, batch)))


def _largest_batch(config: ConfigDict) -> Any:
    """Shapes of the groups of an update whose rollouts all last, and hardly branch."""
    rollout, num_steps = config.rollout, config.env.max_steps
    num_trajectories = rollout.tasks_per_update * rollout.group_size
    trajectory = np.repeat(np.arange(num_trajectories), num_steps)
    step = np.tile(np.arange(num_steps), num_trajectories)
    batch, _ = build_batch(
        {
            "group_id": trajectory // rollout.group_size,
            "traj_id": trajectory,
            "step": step,
            # Every tenth state is met by all rollouts of a group, the others by one.
            "anchor": np.where(step % 10 == 0, -step, trajectory * num_steps + step),
            "action": step % 4,
            "reward": np.zeros(len(step)),
            "success": trajectory % 2 == 0,
            "response_len": np.full(len(step), rollout.max_response_tokens),
        }
    )
    return _abstract(batch)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            np.shape(leaf), jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
        ),
        tree,
    )


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        tree,
        shardings,
    )


def _bytes_a_device(tree: Any) -> int:
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
