"""Tests of softfree.ops."""
