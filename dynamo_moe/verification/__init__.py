"""``verify``: an ONNX file in ONNX Runtime against its model in PyTorch."""

from dynamo_moe.verification.comparison import verify
from dynamo_moe.verification.exchange import RankError
from dynamo_moe.verification.report import CaseResult, VerificationError, VerificationReport

__all__ = ["CaseResult", "RankError", "VerificationError", "VerificationReport", "verify"]
