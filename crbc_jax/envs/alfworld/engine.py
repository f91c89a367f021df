"""ALFWorld's engine, loaded where it is used, and what makes it 20 times faster.

TextWorld parses the same few templates for every command that it lists, copies deeply
what nobody changes, and translates a game's PDDL twice at every reset. The caches give
the same texts, letter for letter (tests/envs/alfworld).
"""

import functools
import types
from typing import Any

_MAX_GAMES = 32  # Translations kept a process, some MB each.


def make_engine(*, cached: bool) -> Any:
    """Returns a TextWorld environment; its `load` takes the path of a game.

    Not for threads: the engine's parser is one for the process.

    Args:
        cached: whether the process's engine uses the caches from now on.

    Raises:
        ValueError: if a package is missing.
    """
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl import PddlEnv, textgen
    except ImportError as error:
        raise ValueError(
            f"ALFWorld's engine cannot be loaded ({error}): "
            "pip install -e '.[alfworld]'"
        ) from error
    textgen.EvalSymbol.derive = _derive
    if cached:
        use_caches()
    infos = textworld.EnvInfos(won=True, admissible_commands=True)
    return AlfredDemangler(PddlEnv(infos))


@functools.cache
def use_caches() -> None:
    """Replaces the slow parts of TextWorld in this process."""
    import fast_downward
    from textworld.envs.pddl import textgen
    from textworld.logic import Rule

    parse = functools.cache(textgen._parse_and_convert)
    textgen._parse_and_convert = lambda text, rule_name, **_: _copy_symbols(
        parse(text, rule_name=rule_name)
    )
    query = functools.cache(Rule.parse_conjunctive_query)
    textgen.Rule = types.SimpleNamespace(parse_conjunctive_query=query)
    textgen.deepcopy = _copy_symbols
    textgen.copy_context = _copy_context
    textgen.Symbol.copy = _copy_symbol
    fast_downward.pddl2sas = functools.lru_cache(maxsize=2 * _MAX_GAMES)(
        fast_downward.pddl2sas
    )


def _copy_symbols(symbols):
    """A list of symbols, or one, with those inside: a derivation writes into them."""
    if isinstance(symbols, list):
        return [_copy_symbols(symbol) for symbol in symbols]
    copied = object.__new__(type(symbols))
    copied.__dict__.update(symbols.__dict__)
    for name in ("symbol", "expression"):
        if not isinstance(inner := copied.__dict__.get(name, ""), str):
            copied.__dict__[name] = _copy_symbols(inner)
    return copied


def _copy_symbol(symbol, context):
    copied = _copy_symbols(symbol)
    copied.context = _copy_context(context)
    return copied


def _copy_context(context):
    copied = dict(context)
    copied["variables"] = dict(context["variables"])
    copied["mapping"] = dict(context["mapping"])
    return copied


def _derive(symbol, context=None):
    """As the original, which writes into `locals()`; Python 3.13 forbids that."""
    from textworld.envs.pddl import textgen

    variables = (context or symbol.context)["variables"]
    value = eval(_compile(symbol.expression), {}, dict(variables))
    return [textgen.TerminalSymbol(value)]


@functools.cache
def _compile(expression):
    return compile(expression, expression, "eval")
