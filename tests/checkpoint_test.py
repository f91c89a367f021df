import asyncio
import errno
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crbc_jax import checkpoint
from crbc_jax.checkpoint import Checkpointer, CheckpointError, check_same_run
from crbc_jax.types import TrainState

META = {"update": 3, "task_cursor": 48, "config": {"seed": 0}, "panel": "abc"}


def make_state(seed=0, num_devices=1, dtype=np.float32, width=16, reference=False):
    """A small state as the learner has it, on the first `num_devices` devices."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    rng = np.random.default_rng(seed)
    params = {
        "embed": rng.normal(size=(width, 8)).astype(dtype),
        "layers": {"scale": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16)},
    }

    def place(leaf):
        split = leaf.ndim == 2 and leaf.shape[0] % num_devices == 0
        spec = PartitionSpec("data") if split else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    opt_state = optax.adamw(1e-3).init(jax.tree.map(jnp.asarray, params))
    opt_state = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(x.dtype), opt_state
    )
    state = TrainState(
        params, opt_state, dict(params) if reference else None, np.int32(seed)
    )
    return jax.tree.map(place, state)


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("reference", [False, True])
def test_round_trip_is_exact_and_compiles_nothing(tmp_path, reference):
    state = make_state(1, reference=reference)
    pending = tmp_path / "pending.jsonl.gz"
    pending.write_bytes(b"\x00\x01 rollouts")
    compiled = []

    def listen(event, seconds, **_):
        compiled.extend([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        Checkpointer(tmp_path, keep_last=2).save(3, state, META, files=[pending])
        fresh = Checkpointer(tmp_path, keep_last=2)
        restored, meta = fresh.restore(fresh.latest(), state)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert_equal(restored, state)
    assert meta == META == fresh.meta(3)
    assert fresh.file(3, "pending.jsonl.gz").read_bytes() == pending.read_bytes()
    assert fresh.file(3, "other") is None
    assert compiled == []


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_state_of_eight_devices_restores_on_fewer(tmp_path, num_devices):
    Checkpointer(tmp_path, keep_last=1).save(1, make_state(1, num_devices=8), META)
    target = make_state(2, num_devices=num_devices)
    restored, _ = Checkpointer(tmp_path, keep_last=1).restore(1, target)
    assert_equal(restored, make_state(1))
    for got, wanted in zip(
        jax.tree.leaves(restored), jax.tree.leaves(target), strict=True
    ):
        assert got.sharding == wanted.sharding


def test_target_may_be_abstract_or_numpy_and_params_alone(tmp_path):
    state = make_state(1)
    checkpoints = Checkpointer(tmp_path, keep_last=1)
    checkpoints.save(1, state, META)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    assert_equal(checkpoints.restore(1, abstract)[0], state)
    on_host = checkpoints.restore_params(1, jax.tree.map(np.asarray, state.params))
    assert isinstance(on_host["embed"], np.ndarray)
    assert_equal(on_host, state.params)


def test_works_inside_a_mesh_and_an_event_loop(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    state = make_state(1, num_devices=8)

    async def main():
        with jax.set_mesh(mesh):
            checkpoints = Checkpointer(tmp_path, keep_last=1)
            checkpoints.save(1, state, META)
            return checkpoints.restore(1, make_state(2, num_devices=2))[0]

    assert_equal(asyncio.run(main()), state)


TWO_PROCESSES = """
import sys
sys.path.insert(0, sys.argv[1])
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.config.update("jax_platforms", "cpu")
process = int(sys.argv[3])
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=process)
from crbc_jax.checkpoint import Checkpointer
from crbc_jax.types import TrainState
sharding = NamedSharding(
    Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data")
)
values = np.arange(8, dtype=np.float32)
array = jax.make_array_from_callback((8,), sharding, lambda index: values[index])
state = TrainState({"a": array}, (), None, np.int32(3))
checkpoints = Checkpointer(sys.argv[4 + process], keep_last=1)
for step in (1, 2):
    checkpoints.save(step, state, {"x": step})
restored, meta = checkpoints.restore(2, state)
assert meta == {"x": 2} and checkpoints.steps() == [2]
for shard in restored.params["a"].addressable_shards:
    np.testing.assert_array_equal(shard.data, values[shard.index])
"""


@pytest.mark.parametrize("is_shared", [True, False])
def test_two_processes_save_one_checkpoint_in_a_shared_folder(tmp_path, is_shared):
    root = str(pathlib.Path(__file__).parents[1])
    address = f"localhost:{20000 + os.getpid() % 20000}"
    folders = ["a", "a"] if is_shared else ["a", "b"]
    workdirs = [str(tmp_path / folder) for folder in folders]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, root, address, str(i), *workdirs],
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        if is_shared:
            assert process.returncode == 0, error
        else:  # Both say so, none waits for the other.
            assert process.returncode != 0
            assert "processes [1] do not see the folder" in error
    if not is_shared:
        assert Checkpointer(workdirs[0], keep_last=1).latest() is None


@pytest.mark.parametrize(
    "target, leaf, kinds",
    [
        ({"dtype": ml_dtypes.bfloat16}, "embed", ("float32[16, 8]", "bfloat16[16, 8]")),
        ({"width": 24}, "embed", ("float32[16, 8]", "float32[24, 8]")),
        ({"reference": True}, "reference/embed", ("<absent>", "float32[16, 8]")),
    ],
)
def test_other_dtype_shape_or_structure_is_refused(tmp_path, target, leaf, kinds):
    checkpoints = Checkpointer(tmp_path, keep_last=1)
    checkpoints.save(1, make_state(), META)
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(1, make_state(**target))
    assert leaf in str(error.value)
    assert f"is {kinds[0]} in" in str(error.value)
    assert f"and {kinds[1]} in" in str(error.value)


def test_keeps_the_last_and_the_best(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep_last=2)
    for step, success in [(1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.9), (6, 0.1)]:
        checkpoints.save(step, make_state(step), META, success=success)
        if step == 4:
            assert checkpoints.best() == 2
            assert checkpoints.steps() == [2, 3, 4]
    assert checkpoints.best() == 5  # Of equals, the newest.
    assert Checkpointer(tmp_path, keep_last=2).steps() == [5, 6]


def test_resumed_checkpoint_stays_until_two_newer_are_good(tmp_path):
    state = make_state()
    Checkpointer(tmp_path, keep_last=1).save(10, state, META)
    checkpoints = Checkpointer(tmp_path, keep_last=1)
    checkpoints.restore(10, state)
    checkpoints.save(11, state, META)
    assert checkpoints.steps() == [10, 11]
    checkpoints.save(12, state, META)
    assert checkpoints.steps() == [12]


def damage_truncate(path):
    big = max(
        (p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    big.write_bytes(big.read_bytes()[:-1])


def damage_flip(path):
    some = next(
        p for p in (path / "state").rglob("*") if p.is_file() and p.stat().st_size
    )
    data = bytearray(some.read_bytes())
    data[len(data) // 2] ^= 1
    some.write_bytes(data)


def damage_lose_record(path):
    (path / "record.json").unlink()


@pytest.mark.parametrize("harm", [damage_truncate, damage_flip, damage_lose_record])
def test_damaged_checkpoint_is_never_chosen(tmp_path, harm):
    checkpoints = Checkpointer(tmp_path, keep_last=2)
    checkpoints.save(1, make_state(1), META, success=0.1)
    checkpoints.save(2, make_state(2), META, success=0.9)
    harm(tmp_path / "checkpoints" / "000002")
    fresh = Checkpointer(tmp_path, keep_last=2)
    assert fresh.latest() == fresh.best() == 1
    with pytest.raises(CheckpointError, match="000002 is damaged"):
        fresh.restore(2, make_state())
    fresh.save(2, make_state(2), META)  # The run comes by again: now it is good.
    assert fresh.latest() == 2
    assert_equal(fresh.restore(2, make_state())[0], make_state(2))


def test_only_damaged_checkpoints_is_an_error_not_a_new_start(tmp_path):
    Checkpointer(tmp_path, keep_last=1).save(1, make_state(), META)
    damage_truncate(tmp_path / "checkpoints" / "000001")
    with pytest.raises(CheckpointError, match="every checkpoint .* is damaged"):
        Checkpointer(tmp_path, keep_last=1).latest()


def test_empty_workdir_and_unknown_step(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep_last=1)
    assert checkpoints.latest() is None
    assert checkpoints.best() is None
    with pytest.raises(CheckpointError, match=r"no checkpoint 7 .* there are \[\]"):
        checkpoints.restore(7, make_state())


class Killed(BaseException):
    """Stands for kill -9: no handler of the product may run on it."""


# The functions that a save calls after one another, in a killed process's order.
@pytest.mark.parametrize(
    "owner, name",
    [
        (checkpoint, "_fingerprint"),
        (checkpoint, "_flush_to_disk"),
        (pathlib.Path, "rename"),
        (checkpoint, "_damage"),
        (checkpoint.shutil, "rmtree"),
    ],
)
def test_death_at_any_call_leaves_a_good_checkpoint(tmp_path, monkeypatch, owner, name):
    Checkpointer(tmp_path, keep_last=1).save(1, make_state(1), META)
    for nth in range(3):
        original, calls = getattr(owner, name), []

        def die(*args, _original=original, _calls=calls, _nth=nth, **kwargs):
            _calls.append(1)
            if len(_calls) > _nth:
                raise Killed
            return _original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, die)
            try:
                Checkpointer(tmp_path, keep_last=1).save(
                    nth + 2, make_state(nth + 2), META
                )
            except Killed:
                pass
        fresh = Checkpointer(tmp_path, keep_last=1)
        step = fresh.latest()
        assert step in range(1, nth + 3)
        assert_equal(fresh.restore(step, make_state())[0], make_state(step))
    fresh.save(9, make_state(9), META)
    leftovers = [p.name for p in (tmp_path / "checkpoints").iterdir()]
    assert not [name for name in leftovers if name.startswith(".writing")]


SAVE_FOR_EVER = """
import itertools, sys
sys.path[:0] = sys.argv[2:]
import jax
jax.config.update("jax_platforms", "cpu")
from tests.checkpoint_test import META, make_state
from crbc_jax.checkpoint import Checkpointer
checkpoints = Checkpointer(sys.argv[1], keep_last=1)
for step in itertools.count(checkpoints.latest() or 1):
    checkpoints.save(step, make_state(step), META)
    print(step, flush=True)
"""


def test_kill_9_during_saves(tmp_path):
    root = str(pathlib.Path(__file__).parents[1])
    moments = np.random.default_rng().uniform(0.0, 0.3, 2)  # Any moment must do.
    for moment in moments:
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path), root],
            stdout=subprocess.PIPE,
        )
        process.stdout.readline()
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        checkpoints = Checkpointer(tmp_path, keep_last=1)
        step = checkpoints.latest()
        assert step is not None
        restored, _ = checkpoints.restore(step, make_state())
        assert_equal(restored, make_state(step))


def assert_save_fails_and_1_stays(checkpoints, state, reason):
    with pytest.raises(CheckpointError, match="step 1 is the last good one") as error:
        checkpoints.save(2, state, META)
    assert "checkpoint 2" in str(error.value)
    assert reason in str(error.value)
    assert checkpoints.latest() == 1
    assert_equal(checkpoints.restore(1, make_state())[0], make_state(1))


def test_full_disk_keeps_the_last_good_checkpoint(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        checkpoints = Checkpointer(tmp_path, keep_last=2)
        checkpoints.save(1, make_state(1), META)
        assert_save_fails_and_1_stays(
            checkpoints, make_state(2, width=20_000), os.strerror(errno.ENOSPC)
        )
        checkpoints.save(2, make_state(2), META)  # The failed one left no litter.
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_refused_write_keeps_the_last_good_checkpoint(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep_last=2)
    checkpoints.save(1, make_state(1), META)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert_save_fails_and_1_stays(
            checkpoints, make_state(2, width=20_000), os.strerror(errno.EFBIG)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_meta_that_is_not_json_is_refused_before_writing(tmp_path):
    with pytest.raises(TypeError):
        Checkpointer(tmp_path, keep_last=1).save(1, make_state(), {"x": object()})
    assert not (tmp_path / "checkpoints").exists()


def identity(**changes):
    flat = {"config.seed": 0, "config.learner.num_updates": 30, "panel": "abc"}
    tree = {}
    for field, value in (flat | changes).items():
        *sections, leaf = field.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"config.learner.num_updates": 60},
        *(
            {field: 7}
            for field in sorted(
                set(checkpoint.MAY_CHANGE) - {"config.learner.num_updates"}
            )
        ),
    ],
)
def test_same_run_may_change_what_changes_no_result(changes):
    saved = identity(**{field: 3 for field in changes if "num_updates" not in field})
    check_same_run(json.loads(json.dumps(saved)), identity(**changes))


@pytest.mark.parametrize(
    "changes, both",
    [
        ({"config.seed": 1}, "config.seed: 0 in the workdir, 1 now"),
        ({"panel": "xyz"}, "panel: 'abc' in the workdir, 'xyz' now"),
        (
            {"config.learner.num_updates": 20},
            "config.learner.num_updates: 30 in the workdir, 20 now",
        ),
        ({"config.new": 1}, "config.new: '<absent>' in the workdir, 1 now"),
    ],
)
def test_another_run_is_refused_with_both_values(changes, both):
    with pytest.raises(CheckpointError) as error:
        check_same_run(identity(), identity(**changes))
    assert both in str(error.value)
