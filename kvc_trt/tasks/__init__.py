"""Questions about long contexts: pure generators of prompts and expected answers, and data sets of them.

A task is one file in `kinds/` that defines `TASKS`; `registry` finds it. Nothing here knows of engines or policies.
"""

from kvc_trt.tasks.task import Task, TaskSample

__all__ = ["Task", "TaskSample"]
