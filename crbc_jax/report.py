"""A finished run -> report.html, in one file, and curves.png.

What it reads of the workdir:

    metrics.jsonl            rows, see metrics.py; each `seconds/NAME` but
                             `seconds/clock` is the time of one stage, none within
                             another; a part of it is `seconds/NAME/PART`
    config.json              the config
    evals/000030.json        EvalResult.to_json() and `update`, `temperature`, `panel`
                             (the digest); the first and the last are compared
    rollouts/000030.jsonl.gz see trajectories.py; two trajectories of the last file are
                             drawn, with all that `credit` holds
"""

import base64
import gzip
import html
import importlib.metadata
import io
import json
import pathlib
import platform
import string
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from crbc_jax import figures
from crbc_jax.metrics import read_metrics
from crbc_jax.types import UserError

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_SYMBOLS = {"value": "V", "action_value": "Q", "group_advantage": "group advantage"}

_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; color: #555; padding-bottom: .3rem; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child { text-align: left; font-weight: 600; }
pre { font: .85rem/1.25 ui-monospace, monospace; margin: 0; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.block { background: #f5f5f5; padding: .7rem; border-radius: .3rem; }
.headline { font-size: 1.15rem; }
.muted { color: #555; font-size: .9rem; }
ol.steps { display: flex; flex-wrap: wrap; gap: .6rem; padding: 0; list-style: none; }
ol.steps > li { border: 1px solid #ccc; border-radius: .4rem; padding: .5rem .7rem;
  min-width: 8rem; max-width: 28rem; border-top: .35rem solid var(--credit, #ccc); }
dl { display: grid; grid-template-columns: auto auto; gap: 0 .8rem; margin: .4rem 0 0;
  font-size: .85rem; } dt { color: #555; } dd { margin: 0; text-align: right;
  font-variant-numeric: tabular-nums; }
</style>
</head>
<body>
<main>
<h1>$title</h1>
$summary
<h2>Learning curves</h2>
$curves
$category
<h2>Time by stage</h2>
$seconds
<h2>Rollouts, step by step</h2>
$rollouts
<h2>How it was run</h2>
$provenance
</main>
</body>
</html>
""")


def write_report(workdir: pathlib.Path, *, command: str) -> pathlib.Path:
    """Writes report.html and curves.png into the workdir of a run.

    Args:
        workdir: as described above; what is missing is left out of the report.
        command: how the run was started, as the user would type it.

    Returns:
        The path of report.html.

    Raises:
        UserError: naming a file of the workdir that is damaged.
    """
    workdir = pathlib.Path(workdir)
    rows = read_metrics(workdir)
    evaluations = [
        record
        for path in sorted(workdir.glob("evals/[0-9]*.json"))
        for record in _read_json(path)
    ]
    config_path = workdir / "config.json"
    config = _read_json(config_path)[0] if config_path.exists() else {}
    curves = figures.draw_curves(rows)
    curves.savefig(workdir / "curves.png", dpi=150)
    page = _PAGE.substitute(
        title=f"Run {html.escape(workdir.resolve().name)}",
        summary=_summary(rows, evaluations),
        curves=_image(curves, "Success rate and learner statistics over updates"),
        category=_category(evaluations),
        seconds=_seconds(rows),
        rollouts=_rollouts(workdir),
        provenance=_provenance(command, config, evaluations),
    )
    path = workdir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _summary(rows: Sequence[Mapping], evaluations: Sequence[Mapping]) -> str:
    sentences = []
    if evaluations:
        before, after = evaluations[0], evaluations[-1]
        if len(evaluations) > 1 and before["overall"]["trials"]:
            gain = 100 * ((after["overall"]["rate"] or 0) - before["overall"]["rate"])
            sentences.append(
                f"Held-out success went from <b>{_share(before['overall'])}</b> to "
                f"<b>{_share(after['overall'])}</b>, {gain:+.0f} points."
            )
        else:
            sentences.append(f"Held-out success: <b>{_share(after['overall'])}</b>.")
        sentences.append(
            f"{after['overall']['trials']}/{after['num_tasks']} tasks counted, "
            f"{after['num_aborted']} aborted, at temperature {after['temperature']}; "
            "brackets are 95 % Wilson intervals."
        )
    if rows:
        minutes = sum(_stage_seconds(rows).values()) / 60
        sentences.append(f"{rows[-1]['step']} updates in {minutes:.1f} minutes.")
        if "compilations" in rows[-1]:
            sentences.append(f"{rows[-1]['compilations']} compilations.")
    return f'<p class="headline">{" ".join(sentences)}</p>'


def _category(evaluations: Sequence[Mapping]) -> str:
    if not evaluations or len(evaluations[-1]["by_category"]) < 2:
        return ""
    before, after = evaluations[0], evaluations[-1]
    table_rows = [
        (
            name,
            _share(before["by_category"].get(name)),
            _share(share),
            share["trials"],
        )
        for name, share in after["by_category"].items()
    ]
    header = ("category", f"update {before['update']}", f"update {after['update']}")
    return "\n".join(
        (
            "<h2>Success by category</h2>",
            _image(
                figures.draw_category(before, after),
                "Success by category before and after; the table has the numbers",
            ),
            _table((*header, "tasks"), table_rows, "Success, 95 % interval"),
        )
    )


def _stage_seconds(rows: Sequence[Mapping]) -> dict[str, float]:
    """Sum of each `seconds/NAME` over all rows, without its parts."""
    total: dict[str, float] = {}
    for row in rows:
        for field, value in row.items():
            prefix, *names = field.split("/")
            if prefix == "seconds" and len(names) == 1 and names != ["clock"]:
                total[names[0]] = total.get(names[0], 0.0) + (value or 0.0)
    return total


def _seconds(rows: Sequence[Mapping]) -> str:
    seconds = _stage_seconds(rows)
    if not seconds:
        return "<p>No times were logged.</p>"
    text = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return _image(figures.draw_seconds(seconds), f"Time by stage: {text}")


def _read_json(path: pathlib.Path) -> list[Any]:
    """The value of a JSON file, or those of a compressed file of JSON lines."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt") as file:
                return [json.loads(line) for line in file]
        return [json.loads(path.read_text())]
    except (EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove it and run the same command again: "
            "the report is then made without it"
        ) from error


def _rollouts(workdir: pathlib.Path) -> str:
    paths = sorted(workdir.glob("rollouts/[0-9]*.jsonl.gz"))
    if not paths:
        return "<p>No rollouts were kept.</p>"
    records = _read_json(paths[-1])
    update = int(paths[-1].name.split(".")[0])
    return "\n".join(
        [
            f'<p class="muted">From update {update}. V is the value of a state among '
            "the group's rollouts, Q that of the action taken there. The bar over a "
            "step is its credit or advantage: blue is better than expected, orange "
            "worse.</p>",
            *(_trajectory(record) for record in _choose(records)),
        ]
    )


def _choose(records: Sequence[Mapping]) -> list[Mapping]:
    """A success and a failure of one task, if some task has both; else the first two.

    Of such tasks, the one whose two shortest such trajectories are the shortest.
    """
    pairs = []
    for group in {record["group"]: None for record in records}:
        members = [r for r in records if r["group"] == group and r["steps"]]
        won = [r for r in members if r["outcome"] == "success"]
        lost = [r for r in members if r["outcome"] in ("failure", "truncated")]
        if won and lost:
            pair = [min(side, key=lambda r: len(r["steps"])) for side in (won, lost)]
            pairs.append(pair)
    if not pairs:
        return [record for record in records if record["steps"]][:2]
    # A pair of one step shows nothing of credit over time.
    long_enough = [pair for pair in pairs if len(pair[0]["steps"]) >= 3] or pairs
    return min(long_enough, key=lambda pair: sum(len(r["steps"]) for r in pair))


def _trajectory(record: Mapping[str, Any]) -> str:
    sizes = [abs(_main_credit(step) or 0.0) for step in record["steps"]]
    largest = max(sizes, default=0.0) or 1.0
    cards = []
    for number, step in enumerate(record["steps"]):
        facts = {"action": step["action"], "reward": _number(step["reward"])}
        if step["parse_code"] != "ok":
            facts["reply"] = step["parse_code"]
        for name, value in step.get("credit", {}).items():
            facts[_SYMBOLS.get(name, name)] = _number(value)
        items = "".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
            for name, value in facts.items()
        )
        colour = _colour((_main_credit(step) or 0.0) / largest)
        cards.append(
            f'<li style="--credit: {colour}"><div class="muted">step {number}</div>'
            f"<pre>{html.escape(step['observation'])}</pre><dl>{items}</dl></li>"
        )
    end = f"<pre>{html.escape(record['final_observation'])}</pre>"
    cards.append(f'<li><div class="muted">{record["outcome"]}</div>{end}</li>')
    return (
        f"<h3>Task {html.escape(str(record['task_id']))}, rollout "
        f"{record['rollout']}: {record['outcome']}</h3>"
        f'<ol class="steps">{"".join(cards)}</ol>'
    )


def _main_credit(step: Mapping[str, Any]) -> float | None:
    """What colours a step: its credit, or else its advantage."""
    values = step.get("credit", {})
    return values.get("credit", values.get("advantage"))


def _colour(credit: float) -> str:
    """Blue for 1, grey for 0, orange for -1."""
    end = (0, 114, 178) if credit > 0 else (213, 94, 0)
    parts = (round(204 + abs(credit) * (part - 204)) for part in end)
    return "#" + "".join(f"{part:02x}" for part in parts)


def _provenance(command: str, config: Mapping, evaluations: Sequence[Mapping]) -> str:
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    versions["machine"] = f"{platform.system()} {platform.machine()}"
    panel = evaluations[-1]["panel"] if evaluations else ""
    return "\n".join(
        (
            f'<pre class="block">{html.escape(command)}</pre>',
            f'<p class="muted">Held-out panel: {html.escape(panel)}</p>',
            _table(("software", "version"), list(versions.items()), "Versions"),
            "<details><summary>Config</summary>",
            f'<pre class="block">{html.escape(json.dumps(config, indent=2))}</pre>',
            "</details>",
        )
    )


def _table(header: Sequence[str], rows: Sequence[Sequence], caption: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{html.escape(str(row[0]))}</th>'
        + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _share(share: Mapping | None) -> str:
    if share is None or not share["trials"]:
        return "–"
    return f"{share['rate']:.2f} [{share['low']:.2f}, {share['high']:.2f}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}".replace("-", "−")


def _image(figure, alt: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'
