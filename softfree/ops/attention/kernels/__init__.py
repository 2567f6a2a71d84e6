"""Triton kernels of the attention, and their launcher."""
