"""Tests of softfree.explorer."""
