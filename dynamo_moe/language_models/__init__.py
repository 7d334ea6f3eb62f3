"""Language models of transformers as ONNX files: their tasks, and what they keep between tokens."""

from dynamo_moe.language_models.tasks import (
    TASKS,
    Task,
    example_case,
    export_language_model,
    performing,
    task_of,
    verification_cases,
)

__all__ = [
    "TASKS",
    "Task",
    "example_case",
    "export_language_model",
    "performing",
    "task_of",
    "verification_cases",
]
