"""Of Megatron-LM's extension `megatron.data.helpers`: where samples begin in a corpus."""

from __future__ import annotations

import numpy


def build_sample_idx(
    sizes: numpy.ndarray, doc_idx: numpy.ndarray, seq_length: int, num_epochs: int, tokens_per_epoch: int
) -> numpy.ndarray:
    """Return, for each sample and for the end of the last: the entry of `doc_idx` and the offset of its
    begin.

    A sample has `seq_length` tokens and the first token of the next sample.
    """
    ends = numpy.cumsum(sizes[doc_idx], dtype=numpy.int64)
    begins = numpy.arange((num_epochs * tokens_per_epoch - 1) // seq_length + 1) * seq_length
    documents = numpy.searchsorted(ends, begins, side="right")
    offsets = begins - (ends - sizes[doc_idx])[documents]
    return numpy.stack([documents, offsets], axis=1).astype(numpy.int32)
