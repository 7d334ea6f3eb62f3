"""Language models of transformers as ONNX files: their tasks, and what they keep between tokens."""

from dynamo_moe.language_models.tasks import (
    TASKS,
    Role,
    Task,
    example_case,
    export_language_model,
    performing,
    role_of,
    verification_cases,
)

__all__ = [
    "TASKS",
    "Role",
    "Task",
    "example_case",
    "export_language_model",
    "performing",
    "role_of",
    "verification_cases",
]
