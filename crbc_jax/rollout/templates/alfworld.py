"""ALFWorld's household in words, after the published layout."""

from crbc_jax.rollout.templates.base import Scene, Template, history, tagged_action

# What differs between prompts comes late, so that a server can reuse the beginning.
_RULES = """\
You act in a household that is described to you in text (ALFRED's embodied tasks).

You see what is in or on a place once you are there, and in a closed one once it is \
open. You can hold one thing at a time. Things are cleaned in a sink basin, heated in \
a microwave, cooled in a fridge, and looked at under a lamp that is on.
"""
_REPLY = """
Think first: what does the task still need, where could it be, and which possible \
action brings you closer? Write that between <think> and </think>. Then give one \
possible action, and only one, word for word, between <action> and </action>.
"""
_MARK = "Your task is to:"


def _prompt(scene: Scene) -> str:
    actions = "\n".join(f"'{action}'" for action in scene.admissible_actions)
    return (
        f"{_RULES}\nYour task: {_task(scene)}\n{history(scene)}"
        f"\nThis is step {scene.num_steps + 1}. You see now:\n{scene.observation}\n"
        f"\nYour possible actions:\n{actions}\n{_REPLY}"
    )


def _compact_prompt(scene: Scene) -> str:
    past = "".join(f"{r.observation}\n> {r.action}\n" for r in scene.records)
    actions = "\n".join(scene.admissible_actions)
    return f"{actions}\n\n{past}{scene.observation}\n{_task(scene)}\n"


def _task(scene: Scene) -> str:
    return scene.first_observation.partition(_MARK)[2].strip().partition("\n")[0]


# Words for a language model, after the published layout.
TEMPLATE = Template(_prompt, tagged_action, end=None, is_message=True)
# The facts alone, for a small policy that is trained from nothing.
COMPACT = Template(_compact_prompt, tagged_action, end="</action>", is_message=False)
