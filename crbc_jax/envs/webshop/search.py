"""Ranked search over short texts: BM25 as Lucene computes it."""

import array
import collections
import functools
from collections.abc import Iterable

import numpy as np

from crbc_jax.envs.webshop.analyzer import analyze

# Anserini's defaults.
_K1 = np.float32(0.9)
_B = np.float32(0.4)
_CACHED_QUERIES = 4096
_EXACT_LENGTHS = 24  # Lucene's norm byte: the codes that are the length itself.


class SearchIndex:
    """An index over documents, numbered in the order given; read-only once built.

    score(query, document) = sum over the query's terms, counted as often as they
    occur there, of idf * f / (f + k1 * (1 - b + b * length / mean length)), with
    idf = ln(1 + (N - n + 0.5) / (n + 0.5)). Source: Robertson and Zaragoza, The
    Probabilistic Relevance Framework (2009), less its factor k1 + 1, as in Lucene,
    whose one-byte document length and float32 arithmetic this follows too.

    Args:
        texts: the documents' texts.
        names: the documents' names, by which equal scores are ordered.
    """

    def __init__(self, texts: Iterable[str], names: list[str]):
        documents = collections.defaultdict(lambda: array.array("i"))
        counts = collections.defaultdict(lambda: array.array("i"))
        lengths = array.array("i")
        for document, text in enumerate(texts):
            terms = collections.Counter(analyze(text))
            lengths.append(terms.total())
            for term, count in terms.items():
                documents[term].append(document)
                counts[term].append(count)
        self._num_documents = len(names)
        self.lengths = np.array(lengths, np.int32)
        norm = self._norms()
        self._postings = {}  # Term -> (documents, scores for one occurrence in a query)
        for term in list(documents):
            # Popped, so that the lists and the arrays are never all there at once.
            holders = np.array(documents.pop(term), np.int32)
            frequency = np.array(counts.pop(term), np.float32)
            idf = np.float32(
                np.log(
                    1
                    + (self._num_documents - len(holders) + 0.5) / (len(holders) + 0.5)
                )
            )
            scores = idf - idf / (1 + frequency / norm[holders])
            self._postings[term] = holders, scores.astype(np.float32)
        self._name_rank = np.empty(len(names), np.int32)
        self._name_rank[np.argsort(np.array(names))] = np.arange(len(names))
        self.top = functools.lru_cache(_CACHED_QUERIES)(self._top)

    def score(self, query: str) -> np.ndarray:
        """Returns every document's score, float32 [documents]; 0 if no term matches."""
        total = np.zeros(self._num_documents)
        for term, count in collections.Counter(analyze(query)).items():
            if term in self._postings:
                holders, scores = self._postings[term]
                total[holders] += np.float32(count) * scores
        return total.astype(np.float32)

    def _top(self, query: str, count: int) -> tuple[int, ...]:
        """Returns the `count` best documents that match at all, the best first.

        Called as `top`, which remembers the latest queries.
        """
        scores = self.score(query)
        found = np.flatnonzero(scores)
        if len(found) > count:
            threshold = np.partition(scores[found], -count)[-count]
            found = found[scores[found] >= threshold]  # Ties too: names decide.
        order = np.lexsort((self._name_rank[found], -scores[found]))
        return tuple(found[order[:count]].tolist())

    def _norms(self) -> np.ndarray:
        """Returns k1 * (1 - b + b * length / mean length), float32 [documents]."""
        mean = np.float32(self.lengths.sum(dtype=np.int64) / max(len(self.lengths), 1))
        rounded = round_lengths(self.lengths).astype(np.float32)
        return _K1 * ((np.float32(1) - _B) + _B * rounded / max(mean, np.float32(1)))


def round_lengths(lengths: np.ndarray) -> np.ndarray:
    """Rounds lengths down to what Lucene's norm byte holds.

    Lengths up to 40 are exact; of longer ones, less 24, the four leading bits stay.
    """
    excess = np.maximum(lengths - _EXACT_LENGTHS, 0).astype(np.int64)
    bits = np.frexp(excess.astype(np.float64))[1]  # Number of binary digits.
    shift = np.maximum(bits - 4, 0)
    return np.where(
        lengths < _EXACT_LENGTHS, lengths, _EXACT_LENGTHS + (excess >> shift << shift)
    )
