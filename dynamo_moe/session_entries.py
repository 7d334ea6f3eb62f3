"""Entries of ONNX Runtime's session options that results depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnxruntime

_ACCURACY = "session.qdq_matmulnbits_accuracy_level"


def keep_tokens(options: onnxruntime.SessionOptions) -> None:
    """Lets products of packed weights read their tokens as they are, if options say nothing of it.

    By ONNX Runtime's own default, 4, it rounds them to 8 bits.
    """
    try:
        options.get_session_config_entry(_ACCURACY)
    except RuntimeError:  # There is none.
        options.add_session_config_entry(_ACCURACY, "1")
