"""AppWorld as a Gymnasium environment."""

from typing import Any

import gymnasium

from crbc_jax.envs.appworld.options import Options
from crbc_jax.envs.appworld.server import Server
from crbc_jax.envs.base import AnyText

_WON_REWARD = 10.0  # As the published results have it; else 0.
_EXPERIMENT = "crbc_jax"  # Folder of AppWorld's own logs, below its root.


class AppWorldEnv(gymnasium.Env[str, str]):
    """A phone's apps behind a Python prompt; see crbc_jax/envs/base.py.

    An action is Python code, which AppWorld's server runs; nothing of it runs here.
    The first observation is the task and whose it is, a later one what the code
    printed. The episode ends once the code has called `complete_task`; the reward is
    10 if AppWorld's tests then pass. `info["anchor"]` is the last output, "" at the
    start (G2PO's, arXiv 2606.22995), `info["test_share"]` the share of tests passed.
    """

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.render_mode = "ansi"
        self.action_space = AnyText(max_length=1 << 20)
        self.observation_space = AnyText(max_length=1 << 24)
        self._server: Server | None = None
        self._task_id = ""
        self._is_over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts the task `options["task"]`; without one, a training task by the seed.

        Raises:
            RuntimeError: if the server does not start, or refuses the task.
        """
        super().reset(seed=seed)
        task_id = (options or {}).get("task") or self._draw_task()
        if self._server is None:
            self._server = Server(
                self.options.python,
                self.options.root,
                start_timeout=self.options.start_timeout,
                call_timeout=self.options.call_timeout,
            )
        elif self._task_id:
            self._server.call("close", task_id=self._task_id)
        self._task_id = ""
        task = self._server.call(
            "initialize",
            task_id=task_id,
            experiment_name=_EXPERIMENT,
            max_interactions=self.options.max_steps,
            timeout_seconds=int(self.options.call_timeout),
        )
        self._task_id = task_id
        self._num_steps, self._is_over = 0, False
        self._output, self._tests = "", {}
        owner = task["supervisor"]
        self._text = (
            f"Task: {task['instruction']}\nFor: {owner['first_name']} "
            f"{owner['last_name']}, {owner['email']}, {owner['phone_number']}\n"
            f"Date: {task['datetime']}"
        )
        return self._text, self._info("")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Runs one piece of code on the server.

        Raises:
            RuntimeError: if the episode is over, or the server fails.
            TimeoutError: if it takes too long.
        """
        if self._is_over:
            raise RuntimeError("the episode is over, or none was begun: call reset")
        self._num_steps += 1
        reason = "" if action.strip() else "no code"
        terminated = False
        if not reason:
            self._output = self._call("execute", code=action)
            terminated = bool(self._call("task_completed"))
        truncated = not terminated and self._num_steps >= self.options.max_steps
        self._is_over = terminated or truncated
        if terminated:
            self._tests = self._call("evaluate", suppress_errors=True)
        self._text = self._output if not reason else reason
        info = self._info(reason)
        return self._text, _WON_REWARD * info["won"], terminated, truncated, info

    def render(self) -> str:
        """Returns the observation."""
        return self._text

    def close(self) -> None:
        """Stops the server."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._is_over = True

    def _call(self, path: str, **body: Any) -> Any:
        return self._server.call(path, task_id=self._task_id, **body)

    def _info(self, reason: str) -> dict[str, Any]:
        tests = self._tests
        passed = len(tests.get("passes", ())) / max(tests.get("num_tests", 0), 1)
        return {
            "won": bool(tests.get("success", False)),
            "test_share": passed,
            "admissible_actions": None,
            "anchor": self._output,
            "task_id": self._task_id,
            "reason": reason,
        }

    def _draw_task(self) -> str:
        ids = self.options.task_ids(self.options.train_set)
        return ids[int(self.np_random.integers(len(ids)))]
