"""PyTorch's own tests for devices outside of its tree, on a remote device: all pass but those in EXPECTED.

They are in PyTorch's repository and not in its package: ``SKYFAB_TEST_PYTORCH`` names a checkout, of the version that
is installed. This file is also the program that runs one of their files, on a host of an inventory:
``python tests/device/test_torch_suite.py CHECKOUT FILE HOST [PATTERN]`` prints what fails.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path
from typing import Any

import pytest

Raises: Any = unittest.case._AssertRaisesContext  # type: ignore[attr-defined]

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.soak, pytest.mark.timeout(3600)]

CHECKOUT = os.environ.get("SKYFAB_TEST_PYTORCH", "")
LIMIT = 600
"""Seconds for one test."""

TEXT = "the meta device raises an error of another type, or with another text, than the CPU"
OWN_TEXT = "remote devices refuse it with a text of their own"
SPARSE = "remote devices do not support sparse tensors"
QUANTIZED = "remote devices do not support quantized tensors"
NESTED = "remote devices support jagged nested tensors only"
ON_CPU = "the test expects what it knows of GPUs, and the host computes on its CPU"
PERTURBED = "the test changes inputs by `.data` between forward and backward, which the host's graph notices"
UNITS = "the test takes its bounds for CUDA, in units of the last place; the host rounds as a CPU does"
WARNED = "the host's kernel warns, in its own output"
FLOAT8 = "DLPack has no number for this dtype"

EXPECTED: dict[str, dict[str, str]] = {
    "test_indexing": {
        "test_index_select_sky_float8_e4m3fnuz": FLOAT8,
        "test_index_select_sky_float8_e5m2fnuz": FLOAT8,
    },
    "test_view_ops": {
        "test_view_as_complex_sky": SPARSE,
        "test_view_as_real_sky_complex*": SPARSE,
        "test_flatten_sky": QUANTIZED,
        "test_ravel_sky": QUANTIZED,
        "test_as_strided_overflow_storage_offset_sky": "an offset near 2**63 is an error when the view is used",
    },
    "test_shape_ops": {
        "test_clamp_raises_arg_errors_sky": TEXT,
        "test_flip_sky_float32": QUANTIZED,
        "test_nonzero_sky_*": OWN_TEXT,
    },
    "test_reductions": {
        "test_empty_tensor_empty_slice_*am??_sky": TEXT,
        "test_tensor_compare_ops_*empty_sky": TEXT,
        "test_repeated_dim_sky": TEXT,
        "test_bucketization_sky": WARNED,
        "test_warn_invalid_degrees_of_freedom_sky_*": WARNED,
    },
    "test_nn": {
        "test_GRU_grad_and_gradgrad_sky_float64": PERTURBED,
        "test_LSTM_grad_and_gradgrad_sky_float64": PERTURBED,
        "test_TransformerEncoderLayer_empty_sky": NESTED,
        "test_avg_pool2d_invalid_parameters_sky": TEXT,
        "test_linear_cross_entropy_loss_default_bias_*_sky_float32": UNITS,
        "test_linear_cross_entropy_loss_with_acc_dtype_bias_*": UNITS,
        "test_nll_loss_1d_input_1d_target_invalid_size_sky": TEXT,
        "test_softshrink_lambda_dtype_range_sky": TEXT,
        "test_unfold_invalid_arg_sky": TEXT,
        "test_transformerencoderlayer_sky_float32": ON_CPU,
        "test_upsamplingBiMode2d_nonsupported_dtypes_antialias_*_uint8_sky_uint8": ON_CPU,
    },
    "nn/test_pooling": {
        "test_adaptive_pooling_empty_output_size_sky_float??": TEXT,
        "test_fractional_max_pool2d_sky": TEXT,
    },
}
"""What fails, by file: the names of tests, or patterns, with the reason."""


@pytest.mark.parametrize("name", EXPECTED)
def test_torchs_own_tests(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = Path(CHECKOUT, "test", f"{name}.py")
    if not CHECKOUT:
        pytest.skip("SKYFAB_TEST_PYTORCH names no checkout of PyTorch")
    assert path.is_file(), f"SKYFAB_TEST_PYTORCH: {CHECKOUT} is not a checkout of PyTorch"
    lab = request.getfixturevalue("lent_lab")
    env = {**os.environ, "SKYFAB_INVENTORY": str(lab.inventory)}
    ran = subprocess.run(
        [sys.executable, __file__, CHECKOUT, name, "node1"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    failed = {test.partition(".")[2]: text for test, text in found.items() if text not in ("passed", "skipped")}
    patterns = EXPECTED[name]
    known = {test for pattern in patterns for test in fnmatch.filter(failed, pattern)}
    assert not {test: text for test, text in failed.items() if test not in known}
    assert not [pattern for pattern in patterns if not fnmatch.filter(failed, pattern)], "these pass"
    assert "passed" in found.values()


# ---- the program


class Outcomes(unittest.TestResult):
    """What became of each test, by name: "passed", "skipped", or the error."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._set(test, "passed")
        self._began = time.monotonic()
        signal.alarm(LIMIT)

    def stopTest(self, test: Any) -> None:
        """An error of the host that the test has not noticed is a failure too."""
        import skyfab as sky

        signal.alarm(0)
        try:
            sky.synchronize()
        except sky.DeviceError as error:
            if self.found[_name(test)] == "passed":
                self._set(test, f"afterwards: {error}")
        took = time.monotonic() - self._began
        print(f"{took:.1f} s {_name(test)}: {self.found[_name(test)]}", file=sys.stderr, flush=True)
        super().stopTest(test)

    def _set(self, test: Any, text: str) -> None:
        self.found[_name(test)] = text
        if text not in ("passed", "skipped"):
            print(f"{_name(test)}: {text}", flush=True)

    def _failed(self, test: Any, error: Any) -> None:
        self._set(test, f"{error[0].__name__}: {' '.join(str(error[1]).split())[:300]}")

    def addError(self, test: Any, err: Any) -> None:
        self._failed(test, err)

    def addFailure(self, test: Any, err: Any) -> None:
        self._failed(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._failed(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self._set(test, "skipped")

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self._set(test, "skipped")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._set(test, "passes unexpectedly")


def _name(test: Any) -> str:
    return f"{type(test).__name__}.{getattr(test, '_testMethodName', test)}"


def _waiting(original: Any) -> Any:
    """Errors that only the host finds are raised by a later line: the end of `assertRaises` waits for them."""
    import skyfab as sky

    def leave(self: Any, kind: Any, error: Any, frames: Any) -> Any:
        if error is None:
            try:
                sky.synchronize()
            except sky.DeviceError as late:
                kind, error, frames = type(late), late, late.__traceback__
        return original(self, kind, error, frames)

    return leave


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"takes longer than {LIMIT} s")


def main(checkout: str, name: str, host: str, pattern: str = "*") -> None:
    """Runs the tests of a file, and prints what became of them as JSON."""
    os.environ.update(PYTORCH_TESTING_DEVICE_ONLY_FOR="privateuse1", PYTORCH_PRINT_REPRO_ON_FAILURE="0")
    import skyfab as sky

    Raises.__exit__ = _waiting(Raises.__exit__)
    signal.signal(signal.SIGALRM, _too_long)
    with sky.Compute(host, ui="none") as compute:
        compute.device("cpu")  # before PyTorch looks for device types
        from torch.testing._internal.common_device_type import PrivateUse1TestBase

        PrivateUse1TestBase.setUpClass()
        path = Path(checkout, "test", f"{name}.py")
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        classes = [
            one for one in vars(module).values() if isinstance(one, type) and issubclass(one, PrivateUse1TestBase)
        ]
        outcomes = Outcomes()
        loader = unittest.TestLoader()
        loader.testNamePatterns = [f"*.{pattern}"]
        for each in classes:
            loader.loadTestsFromTestCase(each).run(outcomes)
    print(json.dumps(outcomes.found))


if __name__ == "__main__":
    main(*sys.argv[1:])
