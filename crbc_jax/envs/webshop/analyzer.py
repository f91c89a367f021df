"""Text -> search terms, by the rules of Lucene's English analyzer.

Words are cut as Unicode Standard Annex 29 says (with Lucene's additions: each
ideograph, each Hiragana letter and each emoji is a word), then the possessive 's, the
33 stop words of Lucene and Porter's suffixes go.
"""

import re
import unicodedata

from crbc_jax.envs.webshop.stemmer import stem

_STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the "
    "their then there these they this to was will with".split()
)
_POSSESSIVES = ("'s", "\u2019s", "\uff07s")
_MAX_TOKEN_LENGTH = 255  # Lucene cuts longer ones.

# One character a class of characters. A word is found in the text's classes.
_ALETTER, _HEBREW, _KATAKANA, _NUMERIC, _OTHER = "AHKN "
_EXTEND, _JOINER, _CONNECTOR, _IDEOGRAPH, _EMOJI, _FLAG, _UNSPACED = "XZ_IERT"
_PUNCTUATION = {
    ":": ":\u00b7\u0387\u055f\u05f4\u2027\ufe13\ufe55\uff1a",  # Between letters.
    ",": ",;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c"
    "\uff1b",  # Between digits.
    ".": ".\u2018\u2019\u2024\ufe52\uff07\uff0e",  # Between either.
    "'": "'",
    '"': '"',
}
_SPECIAL = {c: kind for kind, chars in _PUNCTUATION.items() for c in chars} | {
    "\u200d": _JOINER,
    "\u202f": _CONNECTOR,
    "\u066b": _NUMERIC,
}
_EMOJI_RANGES = (
    "a9 ae 203c 2049 2122 2139 2194-2199 21a9-21aa 231a-231b 2328 2388 23cf 23e9-23f3 "
    "23f8-23fa 25aa-25ab 25b6 25c0 25fb-25fe 2600-2605 2607-2612 2614-2685 2690-2705 "
    "2708-2712 2714 2716 271d 2721 2728 2733-2734 2744 2747 274c 274e 2753-2755 2757 "
    "2763-2767 2795-2797 27a1 27b0 27bf 2934-2935 2b05-2b07 2b1b-2b1c 2b50 2b55 3030 "
    "303d 3297 3299 1f000-1f0ff 1f10d-1f10f 1f12f 1f16c-1f171 1f17e-1f17f 1f18e "
    "1f191-1f19a 1f1ad-1f1e5 1f201-1f20f 1f21a 1f22f 1f232-1f23a 1f23c-1f23f "
    "1f249-1f3fa 1f400-1f53d 1f546-1f64f 1f680-1f6ff 1f774-1f77f 1f7d5-1f7ff "
    "1f80c-1f80f 1f848-1f84f 1f85a-1f85f 1f888-1f88f 1f8ae-1f8ff 1f90c-1f93a "
    "1f93c-1f945 1f947-1faff"
)
_EMOJIS = frozenset(
    code
    for part in _EMOJI_RANGES.split()
    for low, _, high in [part.partition("-")]
    for code in range(int(low, 16), int(high or low, 16) + 1)
)
_KATAKANA_RANGES = (
    (0x3031, 0x3035),
    (0x309B, 0x309C),
    (0x30A0, 0x30FA),
    (0x30FC, 0x30FF),
    (0x31F0, 0x31FF),
    (0x32D0, 0x32FE),
    (0x3300, 0x3357),
    (0xFF66, 0xFF9D),
)
_IDEOGRAPH_NAMES = (
    "CJK UNIFIED",
    "CJK COMPATIBILITY IDEOGRAPH",
    "CJK RADICAL",
    "KANGXI",
    "IDEOGRAPHIC ITERATION",
    "IDEOGRAPHIC NUMBER ZERO",
    "HIRAGANA LETTER",
    "HIRAGANA ITERATION",
    "HIRAGANA VOICED ITERATION",
)
_UNSPACED_NAMES = ("THAI ", "LAO ", "MYANMAR ", "KHMER ")


def _classify(char: str) -> str:
    """Returns the class of one character."""
    if char in _SPECIAL:
        return _SPECIAL[char]
    code = ord(char)
    category = unicodedata.category(char)
    if 0x1F1E6 <= code <= 0x1F1FF:
        return _FLAG
    if 0x1F3FB <= code <= 0x1F3FF or char in "\uff9e\uff9f":
        return _EXTEND
    if code in _EMOJIS:
        return _EMOJI
    if any(low <= code <= high for low, high in _KATAKANA_RANGES):
        return _KATAKANA
    name = unicodedata.name(char, "")
    if name.startswith(_IDEOGRAPH_NAMES) or 0x3021 <= code <= 0x3029:
        return _IDEOGRAPH
    if name.startswith(_UNSPACED_NAMES) and category[0] in "LM":
        return _UNSPACED
    if category == "Nd":
        return _NUMERIC
    if category in ("Mn", "Me", "Mc") or (category == "Cf" and char != "\u200b"):
        return _EXTEND
    if category == "Pc":
        return _CONNECTOR
    if name.startswith("HEBREW LETTER"):
        return _HEBREW
    is_letter = category[0] == "L" or category == "Nl" or 0x24B6 <= code <= 0x24E9
    return _ALETTER if is_letter else _OTHER


class _Classes(dict):
    """Character code -> class, filled as characters are met."""

    def __missing__(self, code: int) -> str:
        kind = self[code] = _classify(chr(code))
        return kind


_CLASSES = _Classes()


def _word_pattern() -> re.Pattern[str]:
    ext = "[XZ]*"  # Marks belong to what they follow.
    connectors = f"(?:_{ext})*"
    numeric, letter = f"N{ext}", f"[AH]{ext}"
    number = f"{numeric}(?:(?:{connectors}|[,.']{ext}){numeric})*"
    letters = f"{letter}(?:(?:{connectors}|[:.']{ext}){letter})*"
    hebrew = f"H{ext}(?:\"{ext}H{ext}|'{ext})"
    katakana = f"K{ext}(?:{connectors}K{ext})*"
    run = f"(?:{katakana}|(?:{hebrew}|{number}|{letters})+)"
    word = f"{connectors}{run}(?:(?:_{ext})+{run})*{connectors}"
    emoji = f"E{ext}(?:(?<=Z)E{ext})*"
    return re.compile(f"{word}|{emoji}|R{ext}R{ext}|T[TXZ]*|I{ext}")


_WORD = _word_pattern()


def tokenize(text: str) -> list[str]:
    """Returns the words of a text, as they stand in it."""
    words = []
    for match in _WORD.finditer(text.translate(_CLASSES)):
        start, end = match.span()
        while end - start > _MAX_TOKEN_LENGTH:
            words.append(text[start : start + _MAX_TOKEN_LENGTH])
            start += _MAX_TOKEN_LENGTH
        words.append(text[start:end])
    return words


def analyze(text: str) -> list[str]:
    """Returns the search terms of a text, repeated as often as they occur."""
    terms = []
    for word in tokenize(text):
        word = word.lower()
        if word.endswith(_POSSESSIVES):
            word = word[:-2]
        if word not in _STOP_WORDS:
            terms.append(stem(word))
    return terms
