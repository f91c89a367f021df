"""The planner's solution of a game."""

from crbc_jax.envs.alfworld.engine import make_engine
from crbc_jax.envs.alfworld.env import ALFWorldEnv
from crbc_jax.envs.alfworld.games import find_game
from crbc_jax.envs.alfworld.options import Options
from crbc_jax.envs.base import Demonstration


def play_expert(task_id: str, options: Options) -> list[Demonstration]:
    """Plans once, from the game's true state, and plays that.

    Raises:
        ValueError: if the plan does not win within `max_steps`.
    """
    planner = make_engine(cached=options.cached, plans=True)
    planner.load(str(find_game(task_id, options)))
    plan = planner.reset().policy_commands
    planner.close()
    env = ALFWorldEnv(options)
    observation, info = env.reset(options={"task": task_id})
    steps = []
    for action in plan[: options.max_steps]:
        steps.append(Demonstration(observation, info, action))
        observation, _, _, _, info = env.step(action)
    env.close()
    if not info["won"]:
        raise ValueError(
            f"ALFWorld task {task_id!r}: the planner's {len(plan)} actions do not win; "
            f"max_steps is {options.max_steps}"
        )
    return steps
