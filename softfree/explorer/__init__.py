"""A page that shows where each patch of a photo attends to; see docs/explorer.md."""
