"""``verify``: an ONNX file in ONNX Runtime against its model in PyTorch."""

from dynamo_moe.verification.comparison import (
    CaseResult,
    VerificationError,
    VerificationReport,
    verify,
)

__all__ = ["CaseResult", "VerificationError", "VerificationReport", "verify"]
