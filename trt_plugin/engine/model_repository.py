"""Models in a repository of the Triton Inference Server: a folder with a model's engines.

Names of files and parameters are those of the server's backend for TensorRT; for several ranks see
https://github.com/triton-inference-server/tensorrt_backend/blob/main/docs/multi_device.md.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

_CONFIG = 'platform: "tensorrt_plan"\nmax_batch_size: 0\n'
_RANKS = """\
instance_group [ {{ kind: KIND_MODEL count: 1 }} ]
parameters [
  {{ key: "enable_multi_device" value: {{ string_value: "true" }} }},
  {{ key: "multi_device_gpus" value: {{ string_value: "{gpus}" }} }},
  {{ key: "multi_device_per_rank_engines" value: {{ string_value: "true" }} }}
]
"""


def write_triton_model(
    engines: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    gpus: Sequence[int] | None = None,
) -> list[Path]:
    """Writes a model of a repository of the Triton Inference Server, whole or not at all.

    Args:
        engines: The engine; of a model over several ranks one for each rank, in their order, which
            are copied.
        folder: The model's folder in the repository, which names the model. There must be none.
        gpus: The GPU of each rank; None: 0 and so on.

    Returns:
        The files.

    Raises:
        ValueError: If there is no engine, or ``gpus`` are not one for each of several ranks.
        FileNotFoundError: If an engine or the repository does not exist.
        FileExistsError: If the folder exists.
        OSError: If a file cannot be written.
    """
    folder = Path(folder)
    ranks = len(engines)
    if not ranks:
        raise ValueError("engines holds none")
    if gpus is not None and (ranks == 1 or len(set(gpus)) != ranks or min(gpus) < 0):
        raise ValueError(f"gpus must be one for each of several ranks; got {list(gpus)}")
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as part:
        model = Path(part) / folder.name
        version = model / "1"
        version.mkdir(parents=True)
        if ranks == 1:
            shutil.copyfile(engines[0], version / "model.plan")
            config = _CONFIG
        else:
            for rank, engine in enumerate(engines):
                shutil.copyfile(engine, version / f"model.plan.rank{rank}")
            (version / "model.plan").symlink_to("model.plan.rank0")
            numbers = range(ranks) if gpus is None else gpus
            config = _CONFIG + _RANKS.format(gpus=",".join(map(str, numbers)))
        (model / "config.pbtxt").write_text(config, encoding="utf-8")
        model.rename(folder)
    return [folder / "config.pbtxt", *sorted((folder / "1").iterdir())]
