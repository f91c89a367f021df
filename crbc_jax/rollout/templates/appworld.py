"""AppWorld's Python prompt in words, after the published layout."""

from crbc_jax.rollout.templates.base import Scene, Template, history

# What differs between prompts comes late, so that a server can reuse the beginning.
_RULES = """\
You do a task for somebody by writing Python code, which runs at once in their world \
of apps (mail, music, money, files and so on). You see what the code prints, and \
variables stay as they are from one piece of code to the next.

- `apis.api_docs.show_app_descriptions()` lists the apps, \
`apis.api_docs.show_api_descriptions(app_name=...)` the functions of one, and \
`apis.api_docs.show_api_doc(app_name=..., api_name=...)` how to call it. Read before \
you call, and print what comes back.
- `apis.supervisor` knows the person: account passwords, addresses, payment cards.
- Calls that come back in pages must be read to their last page.
- When the task is done, call `apis.supervisor.complete_task()`, with `answer=...` if \
something was asked. Nothing can be changed after that.
"""
_REPLY = """
Think first: what is known, what is missing, what is the next small step? Write that \
between <think> and </think>. Then write one piece of code between <code> and </code>.
"""


def _prompt(scene: Scene) -> str:
    now = f"\nThe last output:\n{scene.observation}\n" if scene.num_steps else ""
    return (
        f"{_RULES}\n{scene.first_observation}\n{history(scene)}"
        f"\nThis is step {scene.num_steps + 1}.{now}\n{_REPLY}"
    )


TEMPLATE = Template(
    _prompt, lambda code: f"<code>{code}</code>", end=None, is_message=True
)
