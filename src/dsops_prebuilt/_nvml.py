"""Ask NVIDIA's management library for the GPUs of the box: the part of the host that only a CUDA op needs."""

from __future__ import annotations

import ctypes
from typing import Any, List, Optional, Tuple

from dsops_prebuilt._variant import CudaRelease, Gpu


def ask(library: Any) -> Tuple[Optional[Tuple[Gpu, ...]], Optional[CudaRelease]]:
    """Every GPU of the box, and the CUDA release of its driver; None for what NVML does not tell.

    ``library`` is a file name or an already opened library. NVML creates no CUDA context, so a later ``fork`` is safe.
    Functions and their return code 0: NVML API Reference, "Initialization and Cleanup", "Device Queries".
    """
    try:
        nvml = ctypes.CDLL(library) if isinstance(library, str) else library
    except OSError:
        return None, None
    if nvml.nvmlInit_v2() != 0:
        return None, None
    try:
        number = ctypes.c_int()
        failed = nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
        driver = None if failed else CudaRelease(number.value // 1000, number.value % 1000 // 10)
        return _devices(nvml), driver
    finally:
        nvml.nvmlShutdown()


def _devices(nvml: Any) -> Optional[Tuple[Gpu, ...]]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    gpus: List[Gpu] = []
    for index in range(count.value):
        device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        major, minor = ctypes.c_int(), ctypes.c_int()
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
            or nvml.nvmlDeviceGetUUID(device, uuid, ctypes.c_uint(96))
            or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        ):
            return None
        gpus.append(Gpu(uuid.value.decode("ascii", "replace"), major.value, minor.value))
    return tuple(gpus)
