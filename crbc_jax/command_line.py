"""What the scripts in experiments/ share: flags, errors in one line, exit statuses."""

import itertools
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging

from crbc_jax.types import UserError


def start(
    main: Callable[[Any], None], required: Sequence[str], *, max_arguments: int = 0
) -> None:
    """Reads the flags and runs `main`.

    What a user can mend ends in one line and exit status 1, Ctrl-C in status 130.

    Args:
        main: called with what is left of the command line.
        required: flags that must be given, each with an example of its value:
            `("config=configs/quickstart.py",)`.
        max_arguments: that are no flags, which there may be.
    """
    script = pathlib.Path(sys.argv[0]).name

    def parse(argv):
        try:
            _check_config_file(argv)
            rest = flags.FLAGS(argv)
        except (flags.Error, OSError, AttributeError, TypeError, ValueError) as error:
            sys.exit(f"{script}: {_one_line(error)}")
        except KeyError as error:  # Of ml_collections: a section that is misspelt.
            sys.exit(f"{script}: --config has no section {_one_line(error)}")
        for example in required:
            name = example.partition("=")[0]
            if flags.FLAGS[name].value is None:
                sys.exit(f"{script}: --{name} is missing, e.g. --{example}")
        if len(rest) > 1 + max_arguments:
            sys.exit(f"{script}: not a flag: {rest[-1]!r}; flags begin with --")
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax tells of every file.
        return rest

    try:
        app.run(main, flags_parser=parse)
    except (UserError, OSError) as error:
        sys.exit(f"{script}: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _check_config_file(argv: Sequence[str]) -> None:
    """Says which config files there are, where the one asked for is not."""
    for argument, following in itertools.pairwise([*argv[1:], ""]):
        if found := re.fullmatch(r"--?config(?:=(.+))?", argument):
            name = (found[1] or following).partition(":")[0]
            if not pathlib.Path(name).is_file():
                known = sorted(str(p) for p in pathlib.Path("configs").glob("*.py"))
                raise FileNotFoundError(f"no config file {name!r}; known: {known}")


def _one_line(error: Exception) -> str:
    """The message; of one that holds a whole traceback, its end."""
    text = str(error.args[0] if error.args else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "Traceback" in text:
        return re.sub(r"^\w+(Error|Exception): ", "", lines[-1])
    text = " ".join(lines)
    if "invalid literal for int()" in text:
        text += "; this setting is a whole number: write it as such, 1000 for 1e3"
    return text
