"""Breaks lines of the core on purpose, one at a time, and asks whether the tests notice.

    python tests/support/mutants.py              # all of them, for an hour
    python tests/support/mutants.py router rules # those whose names contain one of the words

A suite that gets shorter must still kill the same mutants. Each is a line of the packages, the
same line broken, and the tests that should fail; those run with ``-x``, in a copy of the checkout
with an environment of its own, so that the editable installation is not touched. A broken line of
C++ is compiled into that copy's library. The table says which test killed each mutant, and the
exit code is 1 if one survived, or if a line is not in its file exactly once.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
LIBRARY = Path("trt_plugin/libdynamo_moe.so")
_BUILD = "build/cmake"
# pytest's exit code where tests ran and one failed; others mean that they could not run.
_FAILED = 1


@dataclass(frozen=True)
class Mutant:
    """A line of the packages that is broken.

    Attributes:
        name: What goes wrong.
        file: Where, from the checkout's root.
        line: The text, which the file has exactly once.
        broken: What stands in its place.
        tests: Files of tests, from ``tests``, the one most likely to notice first.
    """

    name: str
    file: str
    line: str
    broken: str
    tests: tuple[str, ...]


def _mutants(file: str, *broken: tuple[str, str, str, str]) -> list[Mutant]:
    """Returns the mutants of a file, from their name, line, broken line and tests."""
    return [
        Mutant(name, file, line, changed, tuple(tests.split()))
        for name, line, changed, tests in broken
    ]


MUTANTS = [
    # --- The operators ---
    *_mutants(
        "custom_ops/routing.py",
        (
            "router: a group's score is its best expert's alone",
            '2 if options.group_scoring == "top2_sum" else 1',
            "1",
            "ops/test_dropless.py",
        ),
        (
            "router: ties across groups go to the better group",
            "size * groups_TC.sort(dim=-1).values",
            "size * groups_TC",
            "ops/test_dropless.py",
        ),
        (
            "router: the gradient of the renormalisation has no second term",
            "dweights_TK = (dweights_TK - inner_T1) / total_T1",
            "dweights_TK = dweights_TK / total_T1",
            "ops/test_op_contract.py ops/test_dropless.py",
        ),
    ),
    *_mutants(
        "custom_ops/_grouped.py",
        (
            "experts: slots of no expert keep their rows",
            "rows_ND[:unused] = 0",
            "rows_ND[:0] = 0",
            "ops/test_experts.py",
        ),
        (
            "experts: a second block of tokens gets the first one's weights",
            "x_TD[block], ids_TK[block], weights_TK[block], parameters, options",
            "x_TD[block], ids_TK[block], weights_TK[: len(x_TD[block])], parameters, options",
            "ops/test_experts.py",
        ),
        (
            "experts: hidden rows are not rounded to the experts' dtype",
            "h_RH = h_RH.to(w2_EDH.dtype).to(dtype)",
            "pass",
            "ops/test_experts.py ops/test_dropless.py",
        ),
        (
            "experts: the norm's gradient is not divided by the width",
            "inner_T1 * scale_T1.square() / x_TD.shape[1]",
            "inner_T1 * scale_T1.square()",
            "ops/test_pre_norm.py",
        ),
        (
            "experts: an id of E is let through",
            "if low < -1 or high >= experts:",
            "if low < -1 or high > experts:",
            "ops/test_op_errors.py ops/test_experts.py",
        ),
    ),
    *_mutants(
        "custom_ops/activations.py",
        (
            "activation: up rows have a gradient beyond the lower limit",
            "(up_RH.abs() <= options.limit) * dh_RH",
            "(up_RH <= options.limit) * dh_RH",
            "ops/test_experts.py",
        ),
        (
            "activation: relu2's gradient is halved",
            "lambda dh, z: dh * 2 * torch.relu(z)",
            "lambda dh, z: dh * torch.relu(z)",
            "ops/test_experts.py",
        ),
    ),
    # --- The kernels ---
    *_mutants(
        "custom_ops/kernels/router.py",
        (
            "router's kernel: zero and minus zero do not tie",
            "tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)",
            "score.to(tl.int32, bitcast=True)",
            "kernels/test_kernel_router.py",
        ),
        (
            "router's kernel: the sum has what lies beyond K",
            "weight = tl.where(choice < K, weight, 0.0)",
            "weight = tl.where(choice <= K, weight, 0.0)",
            "kernels/test_kernel_router.py",
        ),
        (
            "router's kernel: a float32 weight loses its lowest bits",
            "rest = (middle_logits + low_logits / SCALE) / SCALE",
            "rest = low_logits / SCALE / SCALE",
            "kernels/test_kernel_router.py",
        ),
    ),
    *_mutants(
        "custom_ops/kernels/index_sort.py",
        (
            "sort's kernel: unused tiles keep what lay there",
            "end = active + (slots - active) // BLOCK_M",
            "end = active",
            "kernels/test_kernel_index_sort.py",
        ),
    ),
    *_mutants(
        "custom_ops/kernels/grouped_gemm.py",
        (
            "product's kernel: the last group of tiles is as high as the others",
            "group = tl.minimum(num_m - first_m, GROUP_M)",
            "group = GROUP_M",
            "kernels/test_kernel_experts.py",
        ),
    ),
    *_mutants(
        "custom_ops/kernels/few_tokens.py",
        (
            "vector kernel: an expert's bias begins where an ungated one's would",
            "b1_ptr + expert * F + row",
            "b1_ptr + expert * H + row",
            "kernels/test_kernel_few_tokens.py kernels/test_kernel_experts.py",
        ),
    ),
    *_mutants(
        "custom_ops/kernels/expert_mlp.py",
        (
            "one kernel for both products: columns beyond H count",
            "h = tl.where((unit + tl.arange(0, BLOCK_N) < H)[None, :], h, 0.0)",
            "h = h + 0.0",
            "kernels/test_kernel_experts.py",
        ),
    ),
    *_mutants(
        "custom_ops/kernels/combine.py",
        (
            "sum's kernel: the residual is forgotten",
            "y += x.to(tl.float32)",
            "y += 0.0",
            "kernels/test_kernel_experts.py ops/test_pre_norm.py",
        ),
    ),
    *_mutants(
        "custom_ops/kernels/backward.py",
        (
            "backward kernel: the norm's share of the gradient is forgotten",
            "dx -= x.to(tl.float32) * tl.load(norm_factor_ptr + row)[:, None]",
            "dx -= 0.0 * tl.load(norm_factor_ptr + row)[:, None]",
            "kernels/test_kernel_backward.py",
        ),
    ),
    *_mutants(
        "custom_ops/kernels/residency.py",
        (
            "residency's kernel: the slots used last are taken first",
            "tl.where(free, last_use * BLOCK_R + slot, NEVER)",
            "tl.where(free, (2**40 - last_use) * BLOCK_R + slot, NEVER)",
            "kernels/test_kernel_residency.py",
        ),
    ),
    # --- The nodes' bodies ---
    *_mutants(
        "dynamo_moe/moe_nodes/bodies/router.py",
        (
            "body: members of a token's groups are in descending order",
            'chosen_TC, op.size("topk_group"), largest=0',
            'chosen_TC, op.size("topk_group"), largest=1',
            "export/test_bodies.py",
        ),
        (
            "body: no expert's weight counts if it is NaN",
            'op.Where(none_TK, op.constant("zero", 0, dtype), weights_TK, out="weights_TK")',
            'op.Identity(weights_TK, out="weights_TK")',
            "export/test_bodies.py",
        ),
    ),
    *_mutants(
        "dynamo_moe/moe_nodes/bodies/gathered.py",
        (
            "body for few tokens: no expert's result counts",
            'y_TKD = op.Where(idle_TK1, op.constant("nothing", 0, dtype), y_TKD, out="y_used_TKD")',
            "pass",
            "export/test_bodies.py",
        ),
    ),
    *_mutants(
        "dynamo_moe/moe_nodes/bodies/expert.py",
        (
            "body: up rows have no lower limit",
            'op.Max(op.Min(up, limit, out="up_min"), op.Neg(limit, out="low"), out="up_clamped")',
            'op.Min(up, limit, out="up_clamped")',
            "export/test_bodies.py",
        ),
        (
            "body: the error function of float64 is too coarse",
            "_ERF_POINTS = 24",
            "_ERF_POINTS = 8",
            "export/test_bodies.py",
        ),
    ),
    *_mutants(
        "dynamo_moe/moe_nodes/bodies/onnxruntime.py",
        (
            "body for ONNX Runtime's MoE: gate and up rows change places",
            "op.Concat(gate_EH1, up_EH1, axis=2",
            "op.Concat(up_EH1, gate_EH1, axis=2",
            "export/test_bodies.py",
        ),
    ),
    *_mutants(
        "dynamo_moe/moe_nodes/bodies/gradients.py",
        (
            "body of the gradient: the second bias has no share in the weights'",
            'if "b2" in wide:',
            'if "b2" in wide and not config.gated:',
            "export/test_gradient_bodies.py",
        ),
    ),
    # --- Translation and graph ---
    *_mutants(
        "dynamo_moe/moe_nodes/translation.py",
        (
            "translation: a missing second bias is as wide as the first",
            '"b2": (experts, width)',
            '"b2": (experts, rows)',
            "export/test_export_results.py export/test_export_contents.py",
        ),
    ),
    *_mutants(
        "dynamo_moe/graph/rules.py",
        (
            "rules: a shape with a size of 0 is copied",
            "before is None or after is None or 0 in after",
            "before is None or after is None",
            "graph/test_rules.py",
        ),
        (
            "rules: zeros replace NaN in half precision too",
            "x.dtype not in _WIDE or not _is_finite_scalar(zero)",
            "not _is_finite_scalar(zero)",
            "graph/test_rules.py",
        ),
        (
            "rules: two slices of one axis become one",
            "min(axes, default=-1) >= 0 and len(set(axes)) == len(axes)",
            "min(axes, default=-1) >= 0",
            "graph/test_rules.py",
        ),
        (
            "rules: a mask that is broadcast is taken for its result",
            "and sizes == _dimensions(y)",
            "",
            "graph/test_rules.py",
        ),
    ),
    *_mutants(
        "dynamo_moe/graph/stacked_weights.py",
        (
            "graph: weights that are used elsewhere are stacked in the file",
            "if lazy is None or any(user not in made_by for user in users):",
            "if lazy is None:",
            "graph/test_stacked_weights.py",
        ),
    ),
    # --- Conversion and verification ---
    *_mutants(
        "dynamo_moe/conversion/comparison.py",
        (
            "conversion: NaN is no error",
            "if not error <= TOLERANCE:",
            "if error > TOLERANCE:",
            "conversion/test_converted_modules.py conversion/test_convert.py",
        ),
    ),
    *_mutants(
        "dynamo_moe/conversion/identify_experts.py",
        (
            "conversion: only the first expert is run",
            "_check_same_function(children, weights, x_TD, expected)",
            "pass",
            "conversion/test_convert.py conversion/test_converted_modules.py",
        ),
        (
            "conversion: a bias that fits nowhere is dropped",
            "return None if remaining or len(b1) not in (0, len(w1)) else (b1, b2)",
            "return None if len(b1) not in (0, len(w1)) else (b1, b2)",
            "conversion/test_convert.py conversion/test_converted_modules.py",
        ),
    ),
    *_mutants(
        "dynamo_moe/verification/comparison.py",
        (
            "verification: a NaN that is not first is lost",
            "torch.tensor(errors, dtype=torch.float64).amax(dim=0).tolist()",
            "map(max, *errors) if len(errors) > 1 else errors[0]",
            "export/test_verify.py",
        ),
        (
            "verification: small constants decide the tolerance",
            "for t in proto.graph.initializer if len(t.dims) >= 2}",
            "for t in proto.graph.initializer}",
            "export/test_verify.py",
        ),
    ),
    # --- Kernels ahead of time, in Python ---
    *_mutants(
        "trt_plugin/compiling/cache.py",
        (
            "compiling: a damaged file of the cache is used",
            "if digest != _DIGEST(rest).digest():",
            "if not digest:",
            "trt/test_aot.py",
        ),
        (
            "compiling: another compiler's kernels are used",
            "parts = (self.compiler, self.sources[task.module], task.to_json())",
            "parts = (self.sources[task.module], task.to_json())",
            "trt/test_aot.py",
        ),
    ),
    *_mutants(
        "trt_plugin/compiling/packing.py",
        (
            "compiling: tables of the cache of experts are not zeroed",
            "zeroed=not each.dtype.is_floating_point",
            "zeroed=False",
            "trt/test_expert_cache.py trt/test_offloaded_plugin.py",
        ),
    ),
    *_mutants(
        "trt_plugin/bundle/writing.py",
        (
            "bundle: images are not aligned",
            "self.data += bytes(-len(self.data) % self.alignment)",
            "pass",
            "trt/test_bundle.py trt/test_bundle_rules.py",
        ),
    ),
    *_mutants(
        "trt_plugin/launcher.py",
        (
            "launcher: every cache of experts is for one stream",
            "w1, w2, int(shared), ctypes.byref(self._handle)",
            "w1, w2, 0, ctypes.byref(self._handle)",
            "trt/test_expert_cache.py trt/test_offloaded_plugin.py",
        ),
    ),
    # --- The native library ---
    *_mutants(
        "trt_plugin/csrc/launch/launcher.cc",
        (
            "library: a workspace may be a byte too small",
            "if (needed > workspace_size) {",
            "if (needed > workspace_size + 1) {",
            "trt/test_launcher.py",
        ),
        (
            "library: a 64-bit integer is cut to 32",
            "integer > std::numeric_limits<std::int32_t>::max()",
            "false",
            "trt/test_launcher.py trt/test_launcher_drivers.py",
        ),
        (
            "library: a wave does not wait for the launches before it",
            "(launch.after & *marked) >> other & 1",
            "(launch.after & 0U) >> other & 1",
            "trt/test_expert_cache.py",
        ),
    ),
    *_mutants(
        "trt_plugin/csrc/bundle/expression.cc",
        (
            "library: a quotient of a negative number is rounded up",
            "-static_cast<std::int64_t>(remainder < 0)",
            "std::int64_t{0}",
            "trt/test_bundle_expressions.py",
        ),
    ),
    *_mutants(
        "trt_plugin/csrc/bundle/checks.cc",
        (
            "library: a box may be wider than its swizzle",
            "record.swizzle != 0 && bytes > SwizzleSpan(record.swizzle)",
            "record.swizzle != 0 && bytes > 2 * SwizzleSpan(record.swizzle)",
            "trt/test_bundle_rules.py",
        ),
    ),
    *_mutants(
        "trt_plugin/csrc/plugin/plugin.cc",
        (
            "plugin: clones share one cache of experts",
            "copy->cache_ = nullptr;",
            "",
            "trt/test_offloaded_plugin.py",
        ),
        (
            "plugin: an engine's reserved number may be anything",
            "if (name->reserved != 0) {",
            "if (false) {",
            "trt/test_plugin_phases.py trt/test_plugin_fields.py",
        ),
    ),
]


class Checkout:
    """A copy of this checkout, in which lines are broken and tests run.

    Args:
        folder: Where it is made, empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, names.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._make_environment()
        self._use_library()

    def _make_environment(self) -> None:
        """Makes an environment that sees the copy first, then what this one has installed.

        The entries of its path are plain ones, so this one's editable installation has no effect.
        """
        venv.create(self.folder / ".venv", symlinks=True)
        self.python = self.folder / ".venv" / "bin" / "python"
        (packages,) = (self.folder / ".venv" / "lib").glob("python*/site-packages")
        installed = [path for path in sys.path if path.endswith("site-packages")]
        lines = [str(self.folder), *installed]
        (packages / "checkout.pth").write_text("\n".join(lines) + "\n")

    def _use_library(self) -> None:
        from trt_plugin.native import library_path

        shutil.copy2(library_path(), self.folder / LIBRARY)

    def check(self, mutant: Mutant, seconds: float) -> str:
        """Breaks a line, runs the tests, and mends it; returns a word and what is behind it."""
        path = self.folder / mutant.file
        whole = path.read_text()
        if whole.count(mutant.line) != 1:
            return f"NO SUCH LINE  {mutant.file} has it {whole.count(mutant.line)} times"
        path.write_text(whole.replace(mutant.line, mutant.broken))
        native = mutant.file.startswith("trt_plugin/csrc")
        try:
            if native:
                self._compile()
            return self._run(mutant.tests, seconds)
        finally:
            path.write_text(whole)
            if native:
                self._use_library()

    def _compile(self) -> None:
        """Builds the library without optimisation; the second time only what was touched."""
        configure = ["cmake", "-S", ".", "-B", _BUILD, "-DCMAKE_BUILD_TYPE=Debug"]
        build = ["cmake", "--build", _BUILD, "--target", "dynamo_moe", "--parallel"]
        for command in (configure, build):
            subprocess.run(command, cwd=self.folder, check=True, capture_output=True)
        shutil.copy2(self.folder / _BUILD / LIBRARY.name, self.folder / LIBRARY)

    def _run(self, tests: tuple[str, ...], seconds: float) -> str:
        command = [str(self.python), "-m", "pytest", "-qx", "-m", "not every", "--tb=no"]
        command += [f"tests/{name}" for name in tests]
        try:
            run = subprocess.run(
                command,
                check=False,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return f"killed        the tests do not end in {seconds:.0f} s"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
        if run.returncode == 0:
            return "SURVIVED      " + " ".join(tests)
        if run.returncode < 0:
            return f"killed        the tests end by signal {-run.returncode}"
        if run.returncode != _FAILED or not failed:
            return f"CANNOT RUN    {(run.stdout + run.stderr).strip().splitlines()[-1]}"
        return f"killed        {failed[1].removeprefix('tests/')}"


def main() -> None:
    """Tries the mutants."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="words of mutants' names or files; default: all")
    parser.add_argument("--seconds", type=float, default=1800, help="for the tests of one mutant")
    arguments = parser.parse_args()
    words: list[str] = arguments.words
    chosen = [
        mutant
        for mutant in MUTANTS
        if not words or any(word in f"{mutant.name} {mutant.file}" for word in words)
    ]
    results = []
    with TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder))
        for mutant in chosen:
            started = time.monotonic()
            results.append(checkout.check(mutant, arguments.seconds))
            seconds = time.monotonic() - started
            sys.stdout.write(f"{seconds:5.0f} s  {mutant.name:<72}  {results[-1]}\n")
            sys.stdout.flush()
    killed = sum(result.startswith("killed") for result in results)
    sys.stdout.write(f"{killed} of {len(results)} mutants killed\n")
    sys.exit(killed < len(results))


if __name__ == "__main__":
    main()
