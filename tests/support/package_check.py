"""Builds the sdist and the wheel, installs the wheel elsewhere and tries it: `make package-test`.

The packages that dynamo-moe needs are not installed again, which would take minutes and gigabytes:
the clean environment sees the folders of this interpreter's packages behind its own. They are
plain entries of its path, so an editable dynamo-moe in one of them has no effect.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
PACKAGES = ("custom_ops", "dynamo_moe", "trt_plugin")
LIBRARIES = {"trt_plugin/libdynamo_moe.so", "trt_plugin/libdynamo_moe_self_registering.so"}

# Runs in the clean environment, in a folder outside the checkout.
SMOKE_TEST = """
import ctypes, sys, torch
import custom_ops, dynamo_moe, trt_plugin
from dynamo_moe.models import swin_moe_digits

for package in (custom_ops, dynamo_moe, trt_plugin):
    assert package.__file__.startswith(sys.prefix), f"not the wheel's: {package.__file__}"
model = swin_moe_digits().eval()
converted = dynamo_moe.convert(model)
assert len(converted.replaced) == 2, converted
report = dynamo_moe.export(model, torch.randn(4, 1, 8, 8), "swin_moe.onnx")
assert report.operators == {"DroplessMoE": 2}, report
assert dynamo_moe.verify("swin_moe.onnx", model).passed
if sys.platform == "linux":
    ctypes.CDLL(str(trt_plugin.library_path()))
"""


def main() -> None:
    with TemporaryDirectory() as folder:
        sdist, wheel = build(Path(folder) / "through_sdist")
        _, direct = build(Path(folder) / "direct", "--wheel")
        check_sdist(sdist)
        check_wheel(wheel)
        if contents(wheel) != contents(direct):
            fail("the wheel of the sdist is not that of the checkout", wheel, direct)
        try_wheel(wheel, Path(folder) / "elsewhere")
        sys.stdout.write(f"ok: {wheel.name}, of {sdist.name}, works outside the checkout\n")


def build(folder: Path, *options: str) -> tuple[Path, Path]:
    """Builds the sdist, and from it the wheel; with ``--wheel``, the wheel from the checkout."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, *options, ROOT)
    (wheel,) = folder.glob("*.whl")
    return next(folder.glob("*.tar.gz"), wheel), wheel


def sources() -> set[str]:
    """Returns the packages' files that the repository holds, the native library's sources aside."""
    command = ["git", "ls-files", *PACKAGES]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return {name for name in listed.splitlines() if not name.startswith("trt_plugin/csrc/")}


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    lacking = sources() - names
    foreign = {name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))}
    if lacking or foreign:
        fail("the sdist lacks files of the packages, or has others", sorted(lacking | foreign))


def check_wheel(wheel: Path) -> None:
    expected = sources()
    if sys.platform == "linux":
        expected |= LIBRARIES
    names = {name for name in contents(wheel) if ".dist-info/" not in name}
    if names != expected:
        fail("the wheel has other files than the packages have", sorted(names ^ expected))


def contents(wheel: Path) -> dict[str, bytes]:
    """Returns a wheel's files; of those that a build writes anew, the names alone."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: b"" if name.endswith((".so", "/RECORD")) else archive.read(name)
            for name in archive.namelist()
            if not name.endswith("/")
        }


def try_wheel(wheel: Path, folder: Path) -> None:
    environment = folder / "venv"
    venv.create(environment, symlinks=os.name != "nt")
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
        "--no-index", wheel)  # fmt: skip
    (own,) = environment.glob("**/site-packages")
    seen = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    (own / "packages_of_the_checkout.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    run(python, "-c", SMOKE_TEST, cwd=folder)
    for option in ("--version", "--help"):
        run(scripts / "dynamo-moe", option, cwd=folder, stdout=subprocess.DEVNULL)


def run(*command: str | Path, cwd: Path = ROOT, stdout: int | None = None) -> None:
    # What the checkout's tests put on the path must not be found.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, cwd=cwd, stdout=stdout, env=environment)


def fail(*what: object) -> None:
    sys.exit(": ".join(map(str, what)))


if __name__ == "__main__":
    main()
