"""Language models of transformers as ONNX files: their tasks, and what they keep between tokens."""

from dynamo_moe.language_models.cases import check_parts, example_case, verification_cases
from dynamo_moe.language_models.folders import model_in
from dynamo_moe.language_models.forwards import TASKS, Role, Task, performing, role_of
from dynamo_moe.language_models.parts import turn
from dynamo_moe.language_models.tasks import export_language_model

__all__ = [
    "TASKS",
    "Role",
    "Task",
    "check_parts",
    "example_case",
    "export_language_model",
    "model_in",
    "performing",
    "role_of",
    "turn",
    "verification_cases",
]
