import asyncio
import contextlib
import json
import pathlib

import numpy as np
import pytest
import tokenizers

from crbc_jax import envs
from crbc_jax.envs.pool import EnvPool
from crbc_jax.graph.batch import columns_of
from crbc_jax.models.config import load_config, resolve_directory
from crbc_jax.models.decoder import init_params
from crbc_jax.models.tokenizer import Tokenizer, load_tokenizer
from crbc_jax.rollout.collect import (
    EVAL,
    TRAIN,
    EpisodeKey,
    Player,
    StaleRollout,
    check_any_played,
    check_replies,
    collect,
    collect_all,
    request_seed,
    rollout_stats,
    run_episode,
)
from crbc_jax.rollout.engine import Completion
from crbc_jax.rollout.prompts import encode_reply, stop_ids
from crbc_jax.rollout.sampler import Sampler
from crbc_jax.rollout.scripted import ScriptedEngine
from crbc_jax.rollout.templates import PROMPTS
from crbc_jax.types import INVALID_ACTION, Trajectory, UserError

COMPACT = PROMPTS["sokoban_compact"]
TINY = load_tokenizer("preset:sokoban_tiny")
SOKOBAN = {"max_steps": 6, "max_moves": 5}


@pytest.fixture
def rigged(monkeypatch):
    """The name of an environment whose tasks say how they end."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    monkeypatch.setitem(envs.ENVIRONMENTS, "rigged", "rigged_environment")
    return "rigged"


def reply(action: str) -> list[int]:
    return encode_reply(COMPACT, TINY, action).tolist()


def always(action: str, **options) -> ScriptedEngine:
    return ScriptedEngine(lambda _: reply(action), **options)


def by_seed(**options) -> ScriptedEngine:
    """Chooses by the request's seed among moves, an odd action and junk."""
    replies = [reply(a) for a in ("up", "down", "left", "right", "P")] + [[5, 10, 18]]
    return ScriptedEngine(lambda request: replies[request.seed % 6], **options)


class SlowEngine(ScriptedEngine):
    """Answers after a time that has nothing to do with the request's order."""

    def __init__(self, script, seed):
        super().__init__(script)
        self._rng = np.random.default_rng(seed)

    async def generate(self, request):
        await asyncio.sleep(self._rng.uniform(0, 0.003))
        return await super().generate(request)


class DeafEngine(ScriptedEngine):
    """Accepts the requests of some seeds, and never answers them (PITFALLS B8)."""

    def __init__(self, script, is_deaf_to):
        super().__init__(script)
        self._is_deaf_to = is_deaf_to
        self.num_held = 0

    async def generate(self, request):
        if self._is_deaf_to(request):
            await asyncio.Event().wait()
        return await super().generate(request)

    @contextlib.contextmanager
    def episode(self):
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1


@contextlib.asynccontextmanager
async def playing(
    engine,
    env="sokoban",
    *,
    num_workers=0,
    step_timeout=60.0,
    params=None,
    version=0,
    **options,
):
    """A player; at its end no episode holds an environment and no task is left."""
    await engine.publish(params, version)
    env_options = SOKOBAN if env == "sokoban" else {}
    settings = {
        "tokenizer": TINY,
        "template": COMPACT,
        "history_length": 0,
        "max_prompt_tokens": 64,
        "max_response_tokens": 4,
        "stop_ids": stop_ids(COMPACT, TINY),
        "seed": 0,
    }
    try:
        async with EnvPool(env, env_options, num_workers, step_timeout) as pool:
            try:
                yield Player(engine, pool, **(settings | options))
            finally:
                assert all(host.slots.num_taken == 0 for host in pool._hosts)
    finally:
        async with asyncio.timeout(5):  # Workers may still owe an answer.
            while asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0.01)


def collect_groups(
    engine, task_ids, env="sokoban", *, group_size=3, update=0, versions=None, **options
):
    async def main():
        async with playing(engine, env, **options) as player:
            return await collect_all(
                player,
                task_ids,
                group_size=group_size,
                update=update,
                temperature=1.0,
                versions=versions or range(1),
            )

    return asyncio.run(main())


def play_one(engine, task_id, env, **options) -> Trajectory:
    return collect_groups(engine, [task_id], env, group_size=1, **options)[0][0]


def sokoban_tasks(count):
    return envs.tasks("sokoban", "train", count=count, **SOKOBAN).ids


def flat(groups) -> str:
    """Every field of every trajectory, arrays with their types and bytes."""
    return repr(
        [
            [
                [
                    (v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else v
                    for v in (getattr(step, name) for name in step.__slots__)
                ]
                for step in trajectory.steps
            ]
            + [getattr(trajectory, n) for n in trajectory.__slots__ if n != "steps"]
            for group in groups
            for trajectory in group
        ]
    )


# What is collected.


def test_workers_change_no_bit_of_what_is_sampled():
    config = load_config("preset:sokoban_tiny")
    params = init_params(config, 0)

    def collect_with(num_workers):
        sampler = Sampler(
            config,
            max_prompt_tokens=64,
            max_response_tokens=4,
            row_buckets=(16,),
            num_prompt_buckets=1,
        )
        return collect_groups(
            sampler,
            sokoban_tasks(3),
            params=params,
            num_workers=num_workers,
            history_length=2,
        )

    expected = collect_with(num_workers=0)
    steps = [step for group in expected for t in group for step in t.steps]
    assert len({step.logprobs.tobytes() for step in steps}) > len(steps) / 2
    assert flat(collect_with(num_workers=1)) == flat(expected)
    assert flat(collect_with(num_workers=3)) == flat(expected)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_timing_changes_nothing(num_workers):
    task_ids = sokoban_tasks(4)
    expected = collect_groups(by_seed(), task_ids, history_length=2)
    assert len({step.action for g in expected for t in g for step in t.steps}) > 4
    engine = SlowEngine(by_seed()._reply, seed=num_workers)
    groups = collect_groups(engine, task_ids, history_length=2, num_workers=num_workers)
    assert flat(groups) == flat(expected)


def test_groups_are_whole_and_in_the_order_of_their_tasks():
    """PITFALLS A5: one group a task, by index, whoever finishes first."""
    task_ids = [*sokoban_tasks(3), sokoban_tasks(1)[0]]  # The last one comes twice.
    groups = collect_groups(SlowEngine(by_seed()._reply, seed=0), task_ids)
    assert [[t.group for t in g] for g in groups] == [[i] * 3 for i in range(4)]
    assert [[t.rollout for t in g] for g in groups] == [[0, 1, 2]] * 4
    assert [g[0].task_id for g in groups] == task_ids
    for group in groups:
        assert len({(t.steps[0].observation, t.steps[0].anchor) for t in group}) == 1
    assert flat(groups[:1]) != flat(groups[3:])  # Same task, other seeds.
    assert rollout_stats(groups)["groups/size_min"] == 3


def test_groups_come_as_they_finish_and_no_step_waits_for_another_episode(rigged):
    """The first group never finishes; the others do all the same."""
    engine = DeafEngine(lambda _: reply("right"), lambda r: r.seed in deaf)
    deaf = {request_seed(0, EpisodeKey(TRAIN, 0, 0, n), 1) for n in range(2)}

    async def main():
        async with playing(engine, rigged) as player:
            groups = collect(
                player,
                ["lose"] * 3,
                group_size=2,
                update=0,
                temperature=1.0,
                versions=range(1),
            )
            async with contextlib.aclosing(groups):
                first, second = await anext(groups), await anext(groups)
                assert engine.num_held == 2  # Finished episodes left the batch.
        assert engine.num_held == 0
        return {first[0].group, second[0].group}

    assert asyncio.run(main()) == {1, 2}


@pytest.mark.parametrize(
    "task, action, outcome, num_steps",
    [
        ("win", "down", "success", 1),
        ("lose", "down", "failure", 1),
        ("win", "right", "truncated", 4),
    ],
)
def test_outcomes(rigged, task, action, outcome, num_steps):
    trajectory = play_one(always(action), task, rigged)
    assert (trajectory.outcome, len(trajectory.steps)) == (outcome, num_steps)
    assert trajectory.success == (outcome == "success")
    assert trajectory.error == ""


def test_trained_ids_are_the_sampled_ones_whatever_the_text():
    """PITFALLS B1: two spellings of one reply; re-encoding would take the other."""
    folder = resolve_directory("preset:sokoban_tiny")
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"] |= {"u": 24, "p": 25}
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), {})
    served = [3, 24, 25, 4]
    assert tokenizer.decode(served) == "<action>up</action>"
    assert tokenizer.encode("<action>up</action>").tolist() == [3, 10, 4]
    engine = ScriptedEngine(lambda _: served, logprob=-0.7)
    groups = collect_groups(engine, sokoban_tasks(1), tokenizer=tokenizer)
    steps = [step for trajectory in groups[0] for step in trajectory.steps]
    assert {step.action for step in steps} == {"up"}
    for step in steps:
        assert step.response_ids.tolist() == served
        np.testing.assert_array_equal(step.logprobs, np.float32([-0.7] * 4))


def test_each_step_keeps_its_own_prompt_as_served():
    """PITFALLS B2: no step's prompt is assumed to begin with the one before."""
    engine = by_seed()
    groups = collect_groups(engine, sokoban_tasks(2), history_length=2)
    kept = [s.prompt_ids.tobytes() for g in groups for t in g for s in t.steps]
    served = [request.prompt_ids.tobytes() for request in engine.requests]
    assert sorted(kept) == sorted(served)


def test_nothing_is_added_to_a_reply_that_was_cut(rigged):
    """PITFALLS B4: no forced end token; what was sampled has its log-probability."""
    trajectory = play_one(ScriptedEngine(lambda _: [3, 10, 10, 10, 4]), "lose", rigged)
    step = trajectory.steps[0]
    assert step.response_ids.tolist() == [3, 10, 10, 10]
    assert len(step.logprobs) == 4
    assert (step.finish_reason, step.parse_code) == ("length", "no_tag")


@pytest.mark.parametrize("num_tokens, num_logprobs", [(3, 2), (2, 3), (0, 0)])
def test_reply_without_a_logprob_for_every_token_is_refused(
    rigged, num_tokens, num_logprobs
):
    """PITFALLS B4, B12: the shapes are checked at the door, and named."""

    class Broken(ScriptedEngine):
        async def generate(self, request):
            ids = np.full(num_tokens, 3, np.int32)
            return Completion(ids, np.zeros(num_logprobs, np.float32), 0, "stop")

    needed = rf"token_ids \[tokens={num_tokens}\] and logprobs \[tokens={num_logprobs}"
    with pytest.raises(ValueError, match=needed):
        play_one(Broken(lambda _: []), "lose", rigged)


def test_flags_of_replies_and_of_rollouts_are_apart(rigged):
    """PITFALLS B12: truncated is of a rollout, finish_reason of each reply."""
    groups = collect_groups(always("right"), ["lose"], rigged, group_size=4)
    assert [t.outcome for t in groups[0]] == ["truncated"] * 4
    reasons = [step.finish_reason for t in groups[0] for step in t.steps]
    assert reasons == ["stop"] * 16
    assert rollout_stats(groups)["rollout/truncated"] == 1.0


@pytest.mark.parametrize(
    "ids, action, code, is_valid",
    [
        ([5, 10, 6], INVALID_ACTION, "no_tag", False),
        ([3, 4], INVALID_ACTION, "empty", False),
        (reply("up"), "up", "not_admissible", True),
        (reply("right"), "right", "ok", True),
    ],
)
def test_what_is_kept_of_a_reply(rigged, ids, action, code, is_valid):
    """PITFALLS C10: a refused action repeats its anchor, and is counted."""
    trajectory = play_one(ScriptedEngine(lambda _: ids), "lose", rigged)
    assert len(trajectory.steps) == 4
    for step in trajectory.steps:
        kept = (step.action, step.parse_code, step.is_action_valid)
        assert kept == (action, code, is_valid)
        assert step.reward == -0.1  # The environment's, without a penalty of ours.
    stats = rollout_stats([(trajectory,)])
    assert stats["rollout/invalid_share"] == (not is_valid)
    assert stats["rollout/noop_share"] == (0.75 if code == "ok" else 1.0)
    if code != "ok":
        assert stats[f"invalid/{code}"] == 1.0


def test_lenient_rule_is_an_option():
    ids = [3, 10, 4]
    strict = collect_groups(ScriptedEngine(lambda _: ids), sokoban_tasks(1))
    published = collect_groups(
        ScriptedEngine(lambda _: ids), sokoban_tasks(1), parser="lenient_sokoban"
    )
    assert strict[0][0].steps[0].parse_code == "ok"
    assert published[0][0].steps[0].parse_code == "no_think"
    assert published[0][0].steps[0].action == "up"


def test_dropped_history_is_counted():
    """PITFALLS B14: a limit that cuts histories shows in the metrics."""
    groups = collect_groups(
        always("P"), sokoban_tasks(1), history_length=2, max_prompt_tokens=34
    )
    assert [t.prompts_truncated for t in groups[0]] == [4] * 3  # From step 2 on.
    assert rollout_stats(groups)["rollout/prompts_truncated"] == 12
    with pytest.raises(UserError, match="max_prompt_tokens=15"):
        collect_groups(always("P"), sokoban_tasks(1), max_prompt_tokens=15)


# Seeds and versions.


def test_every_request_has_a_seed_of_its_own():
    engine = by_seed()
    collect_groups(engine, sokoban_tasks(4))
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    keys = [
        (run, EpisodeKey(purpose, update, group, rollout), step)
        for run in (0, 1, 2**40)
        for purpose in (TRAIN, EVAL)
        for update in range(3)
        for group in range(3)
        for rollout in range(3)
        for step in range(3)
    ]
    assert len({request_seed(*key) for key in keys}) == len(keys)


def test_updates_and_runs_sample_anew():
    task_ids = sokoban_tasks(2)
    first = flat(collect_groups(by_seed(), task_ids))
    assert flat(collect_groups(by_seed(), task_ids)) == first
    assert flat(collect_groups(by_seed(), task_ids, update=1)) != first
    assert flat(collect_groups(by_seed(), task_ids, seed=1)) != first


@pytest.mark.parametrize("version, is_allowed", [(2, False), (3, True), (5, False)])
def test_versions_outside_of_the_window_are_refused(rigged, version, is_allowed):
    window = {"versions": range(3, 5), "version": version}
    if is_allowed:
        trajectory = play_one(always("right"), "lose", rigged, **window)
        assert [step.policy_version for step in trajectory.steps] == [version] * 4
    else:
        needed = rf"version {version} answered step 0 .* allowed are 3 to 4"
        with pytest.raises(StaleRollout, match=needed):
            play_one(always("right"), "lose", rigged, **window)


def test_version_of_every_step_is_checked(rigged):
    class RollsBack(ScriptedEngine):
        async def generate(self, request):
            if len(self.requests) == 2:
                self.version -= 1
            return await super().generate(request)

    engine = RollsBack(lambda _: reply("right"))
    with pytest.raises(StaleRollout, match="version 6 answered step 2"):
        play_one(engine, "lose", rigged, version=7, versions=range(7, 8))


# What goes wrong.


def test_environment_that_fails_aborts_its_episode_alone(rigged):
    """PITFALLS B5: aborted is no failure, and enters no statistic."""
    groups = collect_groups(always("down"), ["raise", "win"], rigged, group_size=2)
    assert [[t.outcome for t in g] for g in groups] == [
        ["aborted", "aborted"],
        ["success", "success"],
    ]
    assert "ZeroDivisionError: as asked" in groups[0][0].error
    assert groups[0][0].steps == ()
    assert groups[0][0].final_anchor == "start"
    stats = rollout_stats(groups)
    assert stats["rollout/success_rate"] == 1.0
    assert (stats["rollout/aborted"], stats["groups/size_min"]) == (2, 0)
    check_any_played(groups)


def test_steps_before_an_abort_are_kept(rigged):
    script = iter([reply("right"), reply("up"), reply("down")])
    trajectory = play_one(ScriptedEngine(lambda _: next(script)), "raise", rigged)
    assert trajectory.outcome == "aborted"
    assert [step.action for step in trajectory.steps] == ["right", "up"]
    assert trajectory.final_anchor == "moved"


def test_environment_that_hangs_costs_its_episode_alone(rigged):
    groups = collect_groups(
        always("down"),
        ["hang", "win"],
        rigged,
        group_size=1,
        num_workers=2,
        step_timeout=1.0,
    )
    assert [g[0].outcome for g in groups] == ["aborted", "success"]
    assert "took more than 1 s" in groups[0][0].error
    assert rollout_stats(groups)["rollout/success_rate"] == 1.0


def test_engine_that_fails_aborts_its_episode_alone():
    """PITFALLS B5: what is left counts as if the aborted had never been."""
    groups = collect_groups(by_seed(failures=[0, 7]), sokoban_tasks(2))
    aborted = [t for g in groups for t in g if t.outcome == "aborted"]
    assert len(aborted) == 2
    assert all("scripted failure of request" in t.error for t in aborted)
    played = [tuple(t for t in g if t.outcome != "aborted") for g in groups]
    assert columns_of(groups) == columns_of(played)
    assert rollout_stats(groups) == rollout_stats(played) | {"rollout/aborted": 2.0}


def test_engine_that_never_answers_costs_one_episode(rigged):
    """PITFALLS B8."""
    deaf = request_seed(0, EpisodeKey(TRAIN, 0, 0, 1), 2)
    engine = DeafEngine(lambda _: reply("right"), lambda r: r.seed == deaf)
    groups = collect_groups(
        engine, ["lose", "lose"], rigged, group_size=2, episode_timeout=0.3
    )
    outcomes = [t.outcome for g in groups for t in g]
    assert outcomes == ["truncated", "aborted", "truncated", "truncated"]
    assert "took more than 0.3 s" in groups[0][1].error
    assert "config.rollout.episode_timeout" in groups[0][1].error
    assert engine.num_held == 0


def test_answer_after_the_time_is_up_is_used_nowhere(rigged):
    """PITFALLS B11: an episode is never played twice, and a late reply is dropped."""

    class Late(ScriptedEngine):
        async def generate(self, request):
            work = asyncio.create_task(self._answer(request))
            late.append(work)
            return await asyncio.shield(work)

        async def _answer(self, request):
            await asyncio.sleep(0.2)
            return await super().generate(request)

    late = []

    async def main():
        engine = Late(lambda _: reply("right"))
        async with playing(engine, rigged, episode_timeout=0.1) as player:
            key = EpisodeKey(TRAIN, 0, 0, 0)
            trajectory = await run_episode(
                player, "lose", key, temperature=1.0, versions=range(1)
            )
            answers = await asyncio.gather(*late)
        return trajectory, answers

    trajectory, answers = asyncio.run(main())
    assert len(answers) == 1
    assert (trajectory.outcome, trajectory.steps) == ("aborted", ())


def test_gate_cuts_a_group_of_rollouts_alike():
    engine = SlowEngine(by_seed()._reply, seed=0)
    tasks = sokoban_tasks(3)
    everything = collect_groups(engine, tasks)
    same = SlowEngine(lambda _: reply("up"), seed=0)
    settings = {"gate_step": 2, "min_divergence": 0.12}
    engine = SlowEngine(by_seed()._reply, seed=1)
    # Rollouts that differ play on, to the same steps as without the gate.
    assert flat(collect_groups(engine, tasks, **settings)) == flat(everything)
    assert collect_groups(same, tasks, **settings) == []
    # How far a quick rollout comes before the last one is at the gate is open, but
    # hardly one goes on to the end.
    assert len(same.requests) < len(engine.requests)
    with pytest.raises(UserError, match="gate_step"):
        check_any_played([])


def test_gate_spares_quick_successes_alike_and_groups_with_an_abort(rigged):
    settings = {"gate_step": 3, "min_divergence": 1.0}
    groups = collect_groups(always("down"), ["win", "lose"], rigged, **settings)
    assert [g[0].task_id for g in groups] == ["win"]
    engine = always("right", failures=[0])
    (group,) = collect_groups(engine, ["lose"], rigged, **settings)
    assert [t.outcome for t in group] == ["aborted", "truncated", "truncated"]


def test_update_without_a_played_episode_is_an_error(rigged):
    groups = collect_groups(always("down"), ["raise"], rigged)
    with pytest.raises(UserError, match=r"all 3 .*aborted: 3 x .*ZeroDivision"):
        check_any_played(groups)


def test_group_that_starts_from_different_states_is_an_error(rigged):
    """PITFALLS A5, C9."""
    with pytest.raises(RuntimeError, match="'never the same' started from 2 different"):
        collect_groups(always("right"), ["never the same"], rigged, group_size=2)


def test_no_task_is_an_error():
    with pytest.raises(UserError, match="no task"):
        collect_groups(always("up"), [])


def test_error_in_one_episode_stops_all_others():
    """Its siblings wait for ever; `playing` checks that none of them is left."""
    bad = request_seed(0, EpisodeKey(TRAIN, 0, 0, 0), 0)

    class OneIsStale(DeafEngine):
        async def generate(self, request):
            if request.seed == bad:
                return Completion(
                    np.array(reply("up"), np.int32), np.zeros(3, np.float32), 9, "stop"
                )
            return await super().generate(request)

    engine = OneIsStale(lambda _: reply("up"), lambda _: True)
    with pytest.raises(StaleRollout, match="version 9"):
        collect_groups(engine, sokoban_tasks(2))
    assert engine.num_held == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_cancellation_leaves_nothing_behind(num_workers):
    """As Ctrl-C does; `playing` checks tasks and environments."""
    engine = DeafEngine(lambda _: reply("up"), lambda _: len(engine.requests) > 6)

    async def main():
        async with playing(engine, num_workers=num_workers) as player:
            work = asyncio.create_task(
                collect_all(
                    player,
                    sokoban_tasks(2),
                    group_size=4,
                    update=0,
                    temperature=1.0,
                    versions=range(1),
                )
            )
            while len(engine.requests) <= 6:
                await asyncio.sleep(0.01)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
        assert engine.num_held == 0

    asyncio.run(main())


def test_policy_that_cannot_hold_the_format_is_refused():
    """PITFALLS B14: with the reasons and three sample replies."""
    prose = ScriptedEngine(lambda request: [10, 18] if request.seed % 4 else [3, 4])
    groups = collect_groups(prose, sokoban_tasks(2))
    with pytest.raises(UserError) as error:
        check_replies(groups, TINY, 0.9)
    text = str(error.value)
    assert "36 of 36 replies" in text
    assert "no_tag" in text and "empty" in text
    assert text.count("'up_'") + text.count("'<action></action>'") == 3
    check_replies(groups, TINY, 1.0)  # Switched off.
    check_replies(collect_groups(always("up"), sokoban_tasks(1)), TINY, 0.0)
    check_replies(collect_groups(always("P"), sokoban_tasks(1)), TINY, 0.0)


def test_stats_of_a_hand_made_update(rigged):
    script = {0: "right", 1: "up", 2: "down"}
    engine = always("right")
    engine._reply = lambda request: reply(script[steps[request.seed]])
    steps = {
        request_seed(0, EpisodeKey(TRAIN, 0, 0, n), step): step
        for n in range(2)
        for step in range(3)
    }
    stats = rollout_stats(collect_groups(engine, ["win"], rigged, group_size=2))
    assert all(type(value) is float for value in stats.values())
    expected = {
        "rollout/success_rate": 1.0,
        "rollout/return": 9.8,
        "rollout/episode_steps": 3.0,
        "rollout/steps": 6.0,
        "rollout/prompt_tokens": 24.0,
        "rollout/response_tokens": 18.0,
        "rollout/noop_share": 4 / 6,
        "rollout/truncated": 0.0,
        "invalid/not_admissible": 2 / 6,
        "invalid/no_tag": 0.0,
        "groups/size_min": 2.0,
    }
    for name, value in expected.items():
        assert stats[name] == pytest.approx(value), name
