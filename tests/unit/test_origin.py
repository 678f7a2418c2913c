"""The identity of an exception, and whether another start could mend it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import subprocess
import zipfile

import pytest
import torch

from adaptor.errors import StepError
from adaptor.protocol.messages import ScriptStage
from adaptor.worker.origin import origin_of


def behind(cause: BaseException) -> ValueError:
    """Return an exception that a script raises because of `cause` without chaining it."""
    error = ValueError("the tokenizer cannot be read")
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (AssertionError("class input value 320 and checkpoint value 240 do not match"), True),
        (NameError("name 'TESpecProvider' is not defined"), True),
        (RuntimeError("Error(s) in loading state_dict: size mismatch for weight"), True),
        (behind(KeyError("vocab")), True),
        (OSError("Stale file handle"), False),
        (behind(ConnectionResetError("Connection reset by peer")), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False),
        (RuntimeError("can't start new thread"), False),
        (RuntimeError("wait timeout after 300000ms, keys: /default_pg/0/0"), False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), False),
        (ImportError("libcudnn.so.9: Cannot allocate memory"), False),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), False),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed."), False),
        (RuntimeError("Error building extension 'fused_layer_norm_cuda'"), False),
        (subprocess.CalledProcessError(1, ["make"]), False),
        (zipfile.BadZipFile("File is not a zip file"), False),
        (concurrent.futures.TimeoutError(), False),
        (asyncio.TimeoutError(), False),
        (behind(RuntimeError("wait timeout after 300000ms, keys: /default_pg/0/0")), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), True),
        (NotImplementedError("this model has no pipeline"), True),
        (SystemExit("the data are not there yet"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=lambda value: None if isinstance(value, bool) else f"{type(value).__name__}-{value}"[:30],
)
def test_lasting_exceptions(error: BaseException, lasting: bool) -> None:
    assert origin_of(error, -1, ScriptStage.TRAINING, trains=False, is_restart=False).lasting is lasting
    assert not origin_of(error, -1, ScriptStage.TRAINING, trains=True, is_restart=False).lasting
    assert origin_of(error, 7, ScriptStage.TRAINED, trains=True, is_restart=False).lasting is lasting


@pytest.mark.parametrize(("trains", "is_restart"), [(True, False), (True, True), (False, False)])
def test_a_wrong_use_of_the_interface_is_a_mistake(trains: bool, is_restart: bool) -> None:
    error = StepError("step 5 has a second update of its optimizer")
    origin = origin_of(error, 4, ScriptStage.TRAINING, trains=trains, is_restart=is_restart)
    assert origin.mistake is (trains and not is_restart)
    assert not origin_of(ValueError("5"), 4, ScriptStage.TRAINING, trains=True, is_restart=False).mistake


@pytest.mark.parametrize(
    ("error", "may_be_echo"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("the loss is not finite"), False),
        (ValueError("gloo"), False),
    ],
)
def test_an_exception_that_may_follow_from_the_end_of_another_rank(
    error: Exception, may_be_echo: bool
) -> None:
    origin = origin_of(error, 4, ScriptStage.TRAINING, trains=True, is_restart=False)
    assert origin.may_be_echo is may_be_echo
