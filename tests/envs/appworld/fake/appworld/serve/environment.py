"""The protocol of AppWorld 0.1.3's environment server, with one made-up task."""

import os
import time


class _App:
    task_id, is_done = None, False

    def answer(self, path, body):
        if path == "initialize":
            if body["task_id"].startswith("none"):
                raise FileNotFoundError("task directory doesn't exist")
            self.task_id, self.is_done = body["task_id"], False
            return {
                "task_id": self.task_id,
                "instruction": "Like all songs of my playlist.",
                "supervisor": {
                    "first_name": "Ada",
                    "last_name": "Byron",
                    "email": "ada@example.com",
                    "phone_number": "1234567890",
                },
                "datetime": "2023-05-18T12:00:00",
            }
        if body["task_id"] != self.task_id:
            raise ValueError(f"The active task world is {self.task_id}.")
        return getattr(self, path)(body)

    def execute(self, body):
        code = body["code"]
        if code == "die":
            os._exit(3)
        if code == "hang":
            time.sleep(60)
        self.is_done = self.is_done or "complete_task" in code
        return f"ran {code}"

    def task_completed(self, body):
        return self.is_done

    def evaluate(self, body):
        return {
            "success": self.task_id.endswith("1"),
            "difficulty": 1,
            "num_tests": 4,
            "passes": [{}] * (4 if self.task_id.endswith("1") else 3),
            "failures": [],
        }

    def close(self, body):
        self.task_id = None


app = _App()
