"""Tests of softfree.data."""
