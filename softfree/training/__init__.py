"""What a run does: one loop for every task, its settings, checkpoints, logs and distribution.

Read engine.py first; classification.py shows what a task gives it.
"""
