import asyncio
import os
import pathlib
import subprocess
import sys
import time

import pytest

from crbc_jax import envs
from crbc_jax.envs.base import EnvironmentFailed
from crbc_jax.envs.pool import EnvPool

OPTIONS = {"max_steps": 15}
ACTIONS = ("up", "left", "", "down", "right", "Ω" * 10_000)


@pytest.fixture
def faulty(monkeypatch):
    """The name of an environment with faults, which workers can import too."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    monkeypatch.setitem(envs.ENVIRONMENTS, "faulty", "faulty_environment")
    return "faulty"


def child_processes() -> set[str]:
    tasks = pathlib.Path(f"/proc/{os.getpid()}/task")
    if not tasks.exists():
        pytest.skip("needs /proc")
    return {
        child
        for children in tasks.glob("*/children")
        for child in children.read_text().split()
    }


async def play(pool: EnvPool, task_id: str) -> list:
    async with pool.environment() as env:
        record = [await env.reset(task_id)]
        for action in ACTIONS:
            record.append(await env.step(action))
            if record[-1][2] or record[-1][3]:
                break
    return record


def play_all(num_workers: int, task_ids) -> list:
    async def run():
        async with EnvPool("sokoban", OPTIONS, num_workers, step_timeout=30.0) as pool:
            return await asyncio.gather(*(play(pool, task_id) for task_id in task_ids))

    return asyncio.run(run())


def test_results_do_not_depend_on_the_number_of_workers():
    task_ids = envs.tasks("sokoban", "eval", count=12, **OPTIONS).ids
    expected = play_all(0, task_ids)
    assert play_all(1, task_ids) == expected
    assert play_all(3, task_ids) == expected
    assert len({record[0][0] for record in expected}) == len(task_ids)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_fails_one_episode_only(faulty, num_workers):
    async def run():
        async with EnvPool(faulty, {}, num_workers, step_timeout=30.0) as pool:
            async with pool.environment() as broken, pool.environment() as sound:
                await broken.reset("")
                await sound.reset("")
                with pytest.raises(EnvironmentFailed, match="ZeroDivisionError: as as"):
                    await broken.step("raise")
                assert (await sound.step("print"))[0] == "print"
                assert pool.num_restarts == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "action, message", [("hang", "more than 0.5 s"), ("die", "exit code 7")]
)
def test_a_lost_worker_is_replaced(faulty, action, message):
    async def run():
        async with EnvPool(faulty, {}, num_workers=1, step_timeout=0.5) as pool:
            async with pool.environment() as culprit, pool.environment() as victim:
                before, _ = await victim.reset("")
                await culprit.reset("")
                with pytest.raises(EnvironmentFailed, match=message):
                    await culprit.step(action)
                with pytest.raises(EnvironmentFailed, match="restarted"):
                    await victim.step("hello")
            async with pool.environment() as env:
                after, _ = await env.reset("")
                assert after != before
                assert (await env.step("hello"))[0] == "hello"
            assert pool.num_restarts == 1

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 15
    assert not child_processes()


def test_reset_has_the_time_budget_too(faulty):
    async def run():
        async with EnvPool(faulty, {}, num_workers=1, step_timeout=0.3) as pool:
            async with pool.environment() as env:
                with pytest.raises(EnvironmentFailed, match="reset.*more than 0.3 s"):
                    await env.reset("slow reset")

    asyncio.run(run())


def test_a_cancelled_call_does_not_shift_replies():
    task_ids = envs.tasks("sokoban", "train", count=2, **OPTIONS).ids

    async def run():
        async with EnvPool(
            "sokoban", OPTIONS, num_workers=1, step_timeout=30.0
        ) as pool:
            async with pool.environment() as env:
                call = asyncio.ensure_future(env.reset(task_ids[0]))
                await asyncio.sleep(0)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                _, info = await env.reset(task_ids[1])
                assert info["task_id"] == task_ids[1]
            assert pool.num_restarts == 0

    asyncio.run(run())


def test_close_ends_a_hanging_worker_and_later_calls_fail(faulty):
    async def run():
        async with EnvPool(faulty, {}, num_workers=2, step_timeout=60.0) as pool:
            async with pool.environment() as env:
                await env.reset("")
                hanging = asyncio.ensure_future(env.step("hang"))
                await asyncio.sleep(0.1)
        with pytest.raises(EnvironmentFailed, match="exit code"):
            await hanging
        with pytest.raises(EnvironmentFailed, match="closed"):
            await env.step("hello")

    asyncio.run(run())
    assert not child_processes()


def test_a_worker_that_cannot_start_says_why(faulty, monkeypatch, tmp_path):
    monkeypatch.setitem(envs.ENVIRONMENTS, "late", "late_environment")
    source = pathlib.Path(__file__).with_name("faulty_environment.py").read_text()
    module = tmp_path / "late_environment.py"
    module.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = EnvPool("late", {}, num_workers=1, step_timeout=1.0)
    module.write_text("import a_package_that_is_missing")

    async def run():
        async with pool:
            pass

    with pytest.raises(EnvironmentFailed, match="a_package_that_is_missing"):
        asyncio.run(run())
    sys.modules.pop("late_environment")
    assert not child_processes()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("sokobann", {}, 0, 1.0), "did you mean 'sokoban'"),
        (("sokoban", {"sise": 6}, 0, 1.0), "did you mean 'size'"),
        (("sokoban", {"size": 3}, 1, 1.0), "sokoban.size=3"),
        (("sokoban", {}, -1, 1.0), "num_workers=-1"),
        (("sokoban", {}, 1, 0.0), "step_timeout=0.0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        EnvPool(*arguments)


def test_workers_load_no_jax():
    program = "from crbc_jax.envs import worker, sokoban, pool; import sys; "
    status = os.spawnv(
        os.P_WAIT,
        sys.executable,
        [sys.executable, "-c", program + "sys.exit('jax' in sys.modules)"],
    )
    assert status == 0


def test_many_episodes_leave_memory_and_processes_flat():
    task_ids = envs.tasks("sokoban", "train", count=8, **OPTIONS).ids

    def resident_mib() -> float:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    async def cycle(pool, count):
        for index in range(count):
            async with pool.environment() as env:
                await env.reset(task_ids[index % 8])
                await env.step("up")

    async def run():
        async with EnvPool("sokoban", OPTIONS, num_workers=0, step_timeout=1.0) as pool:
            await cycle(pool, 200)
            before = resident_mib()
            await cycle(pool, 10_000)
            return resident_mib() - before

    child_processes()
    assert asyncio.run(run()) < 20
    assert not child_processes()


def test_workers_end_when_the_run_is_killed():
    program = (
        "import asyncio, os\n"
        "from crbc_jax.envs.pool import EnvPool\n"
        "async def run():\n"
        "    async with EnvPool('sokoban', {}, num_workers=1, step_timeout=9.0):\n"
        "        children = f'/proc/{os.getpid()}/task/{os.getpid()}/children'\n"
        "        print(open(children).read(), flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(run())\n"
    )
    child_processes()
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == -9
    worker = pathlib.Path("/proc", result.stdout.strip(), "stat")
    deadline = time.monotonic() + 10
    while worker.exists() and worker.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.05)
