"""Axis names of array annotations, and what they mean.

Annotations are jaxtyping strings such as `Float[Tensor, "batch seq dim"]`; tests check them, production pays nothing.

    batch     rows of a launch                       seq       tokens of this call, per row
    visible   tokens a query may see, cache included dim       width of the stream
    heads     query heads                            kv_heads  key and value heads
    head_dim  width of one head                      vocab     columns of the logits
    noise     channels of initial noise              tokens    flattened scored tokens
    documents units of resampling                    replicates draws of a bootstrap

A single axis is written `" batch"`, with a blank.
"""

from jaxtyping import Bool, Float, Int, Integer

__all__ = ["Bool", "Float", "Int", "Integer"]
