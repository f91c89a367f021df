import html.parser
import json
import re

import numpy as np
import pytest

from crbc_jax import figures
from crbc_jax.evaluate import EvalResult, TaskResult
from crbc_jax.metrics import MetricsWriter, read_metrics
from crbc_jax.report import write_report
from crbc_jax.trajectories import write_groups
from crbc_jax.types import INVALID_ACTION, Step, Trajectory, UserError

COMMAND = "python experiments/run.py --config=configs/quickstart.py --config.seed='<1>'"
BOARD = "######\n#_P__#\n#_X__#\n#__O_#\n#____#\n######"


def make_evaluation(update, rate, seed=0):
    rng = np.random.default_rng(seed)
    tasks = []
    for index in range(256):
        moves = 2 + index % 8
        won = rng.uniform() < rate - 0.06 * (moves - 5)
        outcome = "aborted" if index in (17, 80) else "success" if won else "failure"
        tasks.append(TaskResult(f"level-{index}", str(moves), outcome, moves, 1.0, ""))
    return EvalResult(tuple(tasks)), update


def make_groups():
    def make_step(index, valid=True):
        ids = np.array([1, 2], np.int32)
        return Step(
            observation=BOARD,
            anchor=BOARD,
            prompt_ids=ids,
            response_ids=ids,
            logprobs=np.zeros(2, np.float32),
            policy_version=30,
            finish_reason="stop",
            action=["up", "left", "down"][index % 3] if valid else INVALID_ACTION,
            parse_code="ok" if valid else "no_tag",
            is_action_valid=valid,
            reward=-0.1,
        )

    def make(group, rollout, outcome, num_steps):
        steps = tuple(make_step(i, valid=i != 1) for i in range(num_steps))
        return Trajectory(
            f"level-{group}", group, rollout, outcome, steps, "<solved> & done", "end"
        )

    return [
        (make(0, 0, "success", 5), make(0, 1, "success", 6)),
        (make(1, 0, "failure", 7), make(1, 1, "success", 4), make(1, 2, "aborted", 1)),
    ]


def make_workdir(workdir, num_updates=30):
    """A workdir as train.py leaves it."""
    rng = np.random.default_rng(0)
    writer = MetricsWriter(workdir)
    (workdir / "evals").mkdir()
    for update in range(num_updates + 1):
        progress = update / max(num_updates, 1)
        scalars = {"compilations": 9}
        if update % 10 == 0:
            result, _ = make_evaluation(update, 0.41 + 0.35 * progress)
            scalars |= result.scalars()
            labels = {"update": update, "temperature": 0.4, "panel": "0123abcd"}
            record = result.to_json() | labels
            path = workdir / "evals" / f"{update:06d}.json"
            path.write_text(json.dumps(record))
            scalars["seconds/evaluate"] = 0.8
        if update:
            scalars |= {
                "train/success_rate": 0.4 + 0.3 * progress + rng.normal() * 0.05,
                "loss/entropy": 1.3 - 0.6 * progress,
                "loss/kl": float("nan") if update == 3 else 0.01 * rng.uniform(),
                "loss/clip_fraction": 0.1 * rng.uniform(),
                "grad_norm": rng.uniform(),
                "rollout/invalid_share": 0.1 - 0.1 * progress,
                "seconds/collect": 0.6,
                "seconds/collect/engine": 0.5,  # Within it: not counted again.
                "seconds/credit": 0.02,
                "seconds/update": 0.3,
                "seconds/checkpoint": 0.05,
            }
        writer.write(update, scalars)
    writer.close()
    credit = np.linspace(-0.4, 0.9, 22).astype(np.float32)
    columns = {"value": credit + 0.1, "action_value": credit, "credit": credit}
    write_groups(workdir / "rollouts" / "000030.jsonl.gz", make_groups(), columns)
    (workdir / "config.json").write_text(json.dumps({"seed": 0, "env": {"name": "x"}}))


class Checker(html.parser.HTMLParser):
    """Collects what the test asks of a page; fails on tags that do not match."""

    VOID = {"meta", "img"}

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.links, self.text = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "img":
            self.images.append(attributes)
        self.links += [
            attributes[name] for name in ("href", "src") if name in attributes
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "quickstart"
    make_workdir(workdir)
    return workdir, write_report(workdir, command=COMMAND)


def test_page_is_sound_and_needs_nothing_outside(finished):
    _, path = finished
    page = Checker(path.read_text())
    assert len(page.images) == 3
    assert all(image["alt"] for image in page.images)
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert not re.search(r"https?://(?!www\.w3\.org)", path.read_text())


def test_page_tells_what_the_run_reached(finished):
    workdir, path = finished
    text = "".join(Checker(path.read_text()).text)
    before, after = (
        json.loads((workdir / "evals" / f"{update:06d}.json").read_text())["overall"]
        for update in (0, 30)
    )
    assert f"{before['rate']:.2f} [{before['low']:.2f}, {before['high']:.2f}]" in text
    assert f"{after['rate']:.2f} [{after['low']:.2f}, {after['high']:.2f}]" in text
    assert "254/256 tasks counted, 2 aborted, at temperature 0.4" in text
    assert "30 updates in 0.5 minutes" in text
    assert "9 compilations" in text
    assert COMMAND in text
    assert '"name": "x"' in text
    assert "0123abcd" in text
    for package in ("python", "jax", "flax", "optax", "orbax-checkpoint"):
        assert package in text


def test_page_draws_a_success_and_a_failure_of_one_task(finished):
    _, path = finished
    page = path.read_text()
    assert re.findall(r"<h3>(.*?)</h3>", page) == [
        "Task level-1, rollout 1: success",
        "Task level-1, rollout 0: failure",
    ]
    assert page.count(BOARD) == 4 + 7
    assert "&lt;solved&gt; &amp; done" in page
    assert "&lt;invalid&gt;" in page and "no_tag" in page
    # The failure's first step is row 11 of 22, in the order of the groups.
    credit = np.linspace(-0.4, 0.9, 22)[11]
    failure = page.split("<h3>")[2]
    numbers = [float(v) for v in re.findall(r"<dt>Q</dt><dd>([\d.]+)</dd>", failure)]
    np.testing.assert_allclose(numbers[0], credit, rtol=1e-2)


def test_curves_png_is_an_image(finished):
    workdir, _ = finished
    assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_show_every_known_field(finished):
    workdir, _ = finished
    figure = figures.draw_curves(read_metrics(workdir))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == "Success rate"
    assert len(titles) == 6
    success = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(success["held-out tasks"].get_xdata()) == [0, 10, 20, 30]
    kl = next(a for a in figure.axes if "KL" in a.get_title(loc="left")).lines[0]
    assert 3 not in kl.get_xdata()  # It was NaN there.


@pytest.mark.parametrize("num_updates", [None, 0])
def test_a_run_without_anything_yet_still_has_a_report(tmp_path, num_updates):
    if num_updates is not None:
        make_workdir(tmp_path, num_updates)
    Checker(write_report(tmp_path, command=COMMAND).read_text())


@pytest.mark.parametrize(
    "name", ["evals/000010.json", "rollouts/000030.jsonl.gz", "metrics.jsonl"]
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, name):
    make_workdir(tmp_path)
    path = tmp_path / name
    if path.suffix == ".jsonl":
        path.write_text(path.read_text() + "no json\n")
    else:
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"{name}.* damaged .*; remove"):
        write_report(tmp_path, command=COMMAND)


def test_half_written_files_of_a_kill_are_not_read(tmp_path):
    make_workdir(tmp_path)
    (tmp_path / "evals" / ".000005.json").write_text("{")
    (tmp_path / "rollouts" / ".000031.jsonl.gz").write_text("{")
    write_report(tmp_path, command=COMMAND)
