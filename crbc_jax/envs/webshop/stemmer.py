"""Porter's stemmer of English words, as Lucene has it.

Source: M. F. Porter, An algorithm for suffix stripping (1980), with the author's later
changes ("bli" and "logi" in step 2). Words of two letters stay as they are.
"""

import functools

_STEP_2 = {
    "ational": "ate",
    "tional": "tion",
    "enci": "ence",
    "anci": "ance",
    "izer": "ize",
    "bli": "ble",
    "alli": "al",
    "entli": "ent",
    "eli": "e",
    "ousli": "ous",
    "ization": "ize",
    "ation": "ate",
    "ator": "ate",
    "alism": "al",
    "iveness": "ive",
    "fulness": "ful",
    "ousness": "ous",
    "aliti": "al",
    "iviti": "ive",
    "biliti": "ble",
    "logi": "log",
}
_STEP_3 = {
    "icate": "ic",
    "ative": "",
    "alize": "al",
    "iciti": "ic",
    "ical": "ic",
    "ful": "",
    "ness": "",
}
_STEP_4 = dict.fromkeys(
    "al ance ence er ic able ible ant ement ment ent sion tion ou ism ate iti ous ive "
    "ize".split(),
    "",
) | {"sion": "s", "tion": "t"}


@functools.lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Returns the stem of a lower-case word."""
    if len(word) <= 2:
        return word
    word = _strip_plural(word)
    word = _strip_participle(word)
    if word.endswith("y") and "v" in _form(word[:-1]):
        word = word[:-1] + "i"
    word = _replace_suffix(word, _STEP_2, min_measure=1)
    word = _replace_suffix(word, _STEP_3, min_measure=1)
    word = _replace_suffix(word, _STEP_4, min_measure=2)
    measure = _measure(word)
    if word.endswith("e"):
        if measure > 1 or (measure == 1 and not _ends_in_short_syllable(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and measure > 1:
        word = word[:-1]
    return word


def _form(word: str) -> str:
    """Spells `word` in c and v, consonants and vowels; y is a vowel after a c."""
    form = ""
    for letter in word:
        is_vowel = letter in "aeiou" or (letter == "y" and form[-1:] == "c")
        form += "v" if is_vowel else "c"
    return form


def _measure(word: str) -> int:
    """Returns how many times consonants follow vowels: Porter's m."""
    return _form(word).count("vc")


def _ends_in_short_syllable(word: str) -> bool:
    return _form(word)[-3:] == "cvc" and word[-1] not in "wxy"


def _strip_plural(word: str) -> str:
    if word.endswith("sses") or word.endswith("ies"):
        return word[:-2]
    if word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def _strip_participle(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        if word.endswith(suffix):
            rest = word.removesuffix(suffix)
            if "v" not in _form(rest):
                return word
            if rest.endswith(("at", "bl", "iz")):
                return rest + "e"
            if rest[-2:-1] == rest[-1] and _form(rest)[-1] == "c":
                return rest if rest[-1] in "lsz" else rest[:-1]
            if _measure(rest) == 1 and _ends_in_short_syllable(rest):
                return rest + "e"
            return rest
    return word


def _replace_suffix(word: str, table: dict[str, str], min_measure: int) -> str:
    """Applies the longest suffix of `table`, if what is left is long enough."""
    for length in range(min(7, len(word)), 1, -1):
        suffix = word[-length:]
        if suffix in table:
            rest = word[:-length] + table[suffix]
            # The t or s that "ion" needs before it belongs to what is left.
            kept = rest if suffix in ("sion", "tion") else word[:-length]
            return rest if _measure(kept) >= min_measure else word
    return word
