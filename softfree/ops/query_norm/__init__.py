"""The norm of each head's queries."""

from softfree.ops.query_norm.operator import query_norm

__all__ = ["query_norm"]
