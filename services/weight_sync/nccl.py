"""Broadcast between GPUs with NCCL, called directly (ctypes on the library that PyTorch has loaded).

Why not through PyTorch or vLLM: a blocking `ncclCommInitRank` or a broadcast whose peer has died can't be
ended from outside, and PyTorch's watchdog ends the whole process. Here the communicator is non-blocking (NCCL
2.14 and later): every call returns at once, progress is asked for, and `ncclCommAbort` ends whatever hangs,
the kernels on the device included.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Values of ncclResult_t and ncclDataType_t.
_SUCCESS = 0
_IN_PROGRESS = 7
_UINT8 = 1
_ABORT_SECONDS = 10.0


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = [("internal", ctypes.c_char * 128)]


class NcclConfig(ctypes.Structure):
    """The first fields of `ncclConfig_t`, as NCCL 2.14 has them; a newer library fills in the rest from its
    defaults."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]

    @classmethod
    def nonblocking(cls) -> NcclConfig:
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, 21400, 0)


class Library:
    """The functions of libnccl that are used here. Raises OSError where there is no such library."""

    def __init__(self, path: str | None = None):
        lib = ctypes.CDLL(path or os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2")
        comm = ctypes.c_void_p
        result = ctypes.c_int
        signatures: dict[str, list[Any]] = {
            "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
            "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
            "ncclCommInitRankConfig": [
                ctypes.POINTER(comm),
                ctypes.c_int,
                UniqueId,
                ctypes.c_int,
                ctypes.POINTER(NcclConfig),
            ],
            "ncclCommGetAsyncError": [comm, ctypes.POINTER(result)],
            "ncclBroadcast": [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
                ctypes.c_int,
                comm,
                ctypes.c_void_p,
            ],
            "ncclCommAbort": [comm],
        }
        for name, arguments in signatures.items():
            function = getattr(lib, name)
            function.argtypes = arguments
            function.restype = result
        # Both give text; ctypes takes a result for an int where it is not told.
        lib.ncclGetErrorString.argtypes = [result]
        lib.ncclGetErrorString.restype = ctypes.c_char_p
        lib.ncclGetLastError.argtypes = [comm]
        lib.ncclGetLastError.restype = ctypes.c_char_p
        self.lib = lib

    def check(self, code: int, what: str, comm: ctypes.c_void_p | None = None) -> None:
        """Raises RuntimeError unless a call has succeeded, or is under way."""
        if code not in (_SUCCESS, _IN_PROGRESS):
            more = (self.lib.ncclGetLastError(comm) or b"").decode(errors="replace").strip()
            raise RuntimeError(
                f"{what}: {self.lib.ncclGetErrorString(code).decode()}" + (f" ({more})" if more else "")
            )

    def version(self) -> str:
        """Such as `2.28.9`."""
        code = ctypes.c_int()
        self.check(self.lib.ncclGetVersion(ctypes.byref(code)), "ncclGetVersion")
        return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"

    def unique_id(self) -> str:
        """A new group's id, in hexadecimal."""
        unique = UniqueId()
        self.check(self.lib.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
        return bytes(unique).hex()


def facts(rank: int, device: torch.device) -> dict[str, Any]:
    """This rank's GPU and NCCL version; of rank 0 also the new group's id."""
    import torch

    library = Library()
    said = {"device": str(torch.cuda.get_device_properties(device).uuid), "nccl": library.version()}
    return said | ({"unique_id": library.unique_id()} if rank == 0 else {})


class NcclCommunicator:
    """See services.weight_sync.group.Communicator. `wait(done)` is the group's: it raises when waiting is
    over."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        unique_id: str,
        device: torch.device,
        wait: Callable[[Callable[[], bool]], None],
    ):
        import torch

        self._library = Library()
        self._wait = wait
        self._device = device
        self._comm = ctypes.c_void_p()
        self._stream = torch.cuda.Stream(device)
        try:
            with torch.cuda.device(device):
                config = NcclConfig.nonblocking()
                code = self._library.lib.ncclCommInitRankConfig(
                    ctypes.byref(self._comm),
                    world_size,
                    UniqueId.from_buffer_copy(bytes.fromhex(unique_id)),
                    rank,
                    ctypes.byref(config),
                )
                self._library.check(code, "ncclCommInitRankConfig", self._comm)
                self._wait(self._settled)
                # The first operation opens the connections.
                self._wait(self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device)))
        except BaseException:
            self.abort()
            raise

    def _settled(self) -> bool:
        """True once NCCL has accepted the last call. Raises RuntimeError for an error since."""
        state = ctypes.c_int()
        self._library.check(
            self._library.lib.ncclCommGetAsyncError(self._comm, ctypes.byref(state)),
            "ncclCommGetAsyncError",
            self._comm,
        )
        self._library.check(state.value, "NCCL", self._comm)
        return state.value == _SUCCESS

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        import torch

        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            where = buffer.data_ptr()
            code = self._library.lib.ncclBroadcast(
                where, where, buffer.numel(), _UINT8, 0, self._comm, self._stream.cuda_stream
            )
            self._library.check(code, "ncclBroadcast", self._comm)
            self._wait(self._settled)
            event = torch.cuda.Event()
            event.record(self._stream)
        looked = 0

        def done() -> bool:
            nonlocal looked
            if event.query():
                return True
            looked += 1
            if looked % 64 == 0:
                self._settled()  # a connection that was lost shows here
            return False

        return done

    def fence(self) -> None:
        import torch

        torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if not comm:
            return
        # It waits for NCCL's own threads; a process that is in trouble should not wait for ever.
        thread = threading.Thread(
            target=self._library.lib.ncclCommAbort, args=(comm,), name="nccl-abort", daemon=True
        )
        thread.start()
        thread.join(_ABORT_SECONDS)
