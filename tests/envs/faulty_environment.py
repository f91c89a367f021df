"""An environment module whose tasks name the fault that they show; for pool_test."""

import dataclasses
import os
import time

import gymnasium


@dataclasses.dataclass(frozen=True)
class Options:
    refuse: bool = False

    def __post_init__(self):
        if self.refuse:
            raise ValueError("faulty.refuse=True: must be False")


class FaultyEnv(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        if options["task"] == "slow reset":
            time.sleep(60)
        return f"{os.getpid()}", {"won": False}

    def step(self, action):
        if action == "raise":
            raise ZeroDivisionError("as asked")
        if action == "hang":
            time.sleep(60)
        if action == "die":
            os._exit(7)
        if action == "print":
            print("a line that must not end up among the replies", flush=True)
        return action, 0.0, False, False, {}

    def close(self):
        raise OSError("close fails as well")


def make(options):
    return FaultyEnv()
