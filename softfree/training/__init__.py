"""Training: one loop for every task, with settings, checkpoints, logs and distribution.

Read engine.py first; classification.py is an example of a task.
"""
