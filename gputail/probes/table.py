"""The table of probed functions: one row each, from which attach lists, cookies, categories and labels derive.

A row says what kind of call it is, under which symbols a library exports it, and where its arguments are. The
kernel side (bpf/cuda.c, bpf/nccl.c) knows no function by name: all it is told is the cookie that `cookie` packs
from the row. Argument numbers count from 1; 0 means the function has no such argument. Prototypes are those of
cuda.h (CUDA 13) and nccl.h (NCCL 2.28).

What a record's `handle`, `stream`, `size` and `block` mean for each category:

category      handle                         size                     block
launch        CUfunction or CUkernel         blocks in the grid       threads in a block
graph         CUgraphExec                    -                        -
host_func     the host function              -                        -
sync, query   CUevent, CUcontext or 0        -                        -
event         CUevent                        -                        -
stream_wait   CUevent                        -                        -
copy          host address, or destination   bytes                    -
memset        device address                 bytes                    -
alloc, free   address or memory handle       bytes, 0 when freeing    -
module        CUmodule or CUlibrary          -                        -
lookup        CUfunction or CUkernel         -                        -
context       CUcontext                      device ordinal or flags  -
capture       CUgraph (at its end)           -                        -
stream        CUstream                       -                        -
collective    ncclComm_t                     bytes of the count       ncclDataType_t
group         -                              -                        -
communicator  ncclComm_t                     ranks                    rank
split         ncclComm_t                     colour (signed)          key (signed)

The `stream` of a communicator's row is its identity, 64 bits made of its ncclUniqueId and thus the same in every process
(0: not known); that of a split's row is the communicator that was split. The `stream` of a row that makes an executable
graph is the CUgraph it was made of.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """How the kernel side reads a call's arguments (enum kind in bpf/calls.h)."""

    PLAIN = 0  # handle, stream, size and block are arguments, or products and shifts of them
    LAUNCH = 1  # (f, gx, gy, gz, bx, by, bz, shared, stream, ...)
    LAUNCH_CONFIG = 2  # (CUlaunchConfig *, f, ...)
    LAUNCH_LIST = 3  # (CUDA_LAUNCH_PARAMS *, count, flags): the first of the list stands for all
    COPY_2D = 4  # (CUDA_MEMCPY2D *)
    COPY_3D = 5  # (CUDA_MEMCPY3D * or CUDA_MEMCPY3D_PEER *)
    COLLECTIVE = 6  # size is a count of elements, block their ncclDataType_t
    MEMBERS = 7  # out points at an array of as many handles as size says


LAUNCH, GRAPH, HOST_FUNC = "launch", "graph", "host_func"
SYNC, QUERY, EVENT, STREAM_WAIT = "sync", "query", "event", "stream_wait"
COPY, MEMSET, ALLOC, FREE = "copy", "memset", "alloc", "free"
MODULE, LOOKUP, CONTEXT, CAPTURE, STREAM = "module", "lookup", "context", "capture", "stream"
COLLECTIVE, GROUP, COMMUNICATOR, SPLIT = "collective", "group", "communicator", "split"
OFF_CPU, TIER, EXIT = "off_cpu", "tier", "exit"

CATEGORIES = (
    LAUNCH, GRAPH, HOST_FUNC, SYNC, QUERY, EVENT, STREAM_WAIT, COPY, MEMSET, ALLOC, FREE,
    MODULE, LOOKUP, CONTEXT, CAPTURE, STREAM, COLLECTIVE, GROUP, COMMUNICATOR, SPLIT, OFF_CPU, TIER, EXIT,
)  # fmt: skip

# Calls that a program makes for each kernel: what the light tier does not see.
PER_KERNEL = frozenset((LAUNCH, MEMSET, HOST_FUNC, EVENT, STREAM_WAIT))

CUDA, NCCL, HOST = "cuda", "nccl", "host"

# Arguments passed in registers; those behind them lie on the stack.
REGISTER_ARGS = {"x86_64": 6, "aarch64": 8}

# In place of an argument's number: the struct itself is the first thing on the stack.
ID_ON_STACK = 15

# A record with this number is a stretch off the CPU, not a call (the traces use the same number).
OFF_CPU_CALL = 200
# And one with this a change of a process's probe tier (see gputail/tiers.py).
TIER_CALL = 201
# And one with this says that a traced process has ended.
EXIT_CALL = 202


@dataclass(frozen=True)
class Args:
    """Where a function's arguments are: their numbers from 1, 0 for none."""

    kind: Kind = Kind.PLAIN
    handle: int = 0
    stream: int = 0
    size: int = 0
    times: int = 0  # size is multiplied by this argument
    shift: int = 0  # and then shifted left by this many bits
    block: int = 0
    size_is_int: bool = False  # size is a 32-bit argument: its register's upper half means nothing
    out: int = 0  # the handle is what this pointer points at once the call has returned
    name: int = 0  # a string that names what `out` returns
    after_id: int = 0  # this argument is a 128-byte ncclUniqueId passed by value
    id: int = 0  # this one points at such a struct


@dataclass(frozen=True)
class Function:
    """One probed function: `name` is its label, `symbols` every name a library exports it under."""

    number: int
    name: str
    category: str
    library: str
    args: Args
    symbols: tuple[str, ...]
    narrow: frozenset[str] = frozenset()  # symbols of CUDA 3.1 and older, whose sizes are 32 bits wide
    waits_for: str = ""  # device, stream, event or copy: what the call blocks for; "" when it only enqueues
    direction: str = ""  # of a copy: HtoD, DtoH, DtoD, or "" when the call does not tell


def _cuda(
    number: int, name: str, category: str, args: Args, suffixes: str = "", v1: bool = False, waits_for: str = "", direction: str = ""
) -> Function:
    """A driver function exported as `name` and with each of the space-separated `suffixes`.

    v1: the plain name is the 32-bit ABI that a `_v2` replaced in CUDA 3.2.
    """
    symbols = (name, *(name + suffix for suffix in suffixes.split()))
    return Function(number, name, category, CUDA, args, symbols, frozenset([name]) if v1 else frozenset(), waits_for, direction)


def _nccl(number: int, name: str, category: str, args: Args, waits_for: str = "") -> Function:
    return Function(number, name, category, NCCL, args, (name,), waits_for=waits_for)


_LAUNCH = Args(Kind.LAUNCH, handle=1)

_GRAPH_INSTANTIATE = Args(out=1, stream=2)
_BY_ID = Args(out=1, size=2, block=4, after_id=3, size_is_int=True)

# Numbers are part of the recording format: never reused, never changed.
FUNCTIONS: tuple[Function, ...] = (
    # launches
    _cuda(1, "cuLaunchKernel", LAUNCH, _LAUNCH, "_ptsz"),
    _cuda(2, "cuLaunchKernelEx", LAUNCH, Args(Kind.LAUNCH_CONFIG, handle=2), "_ptsz"),
    _cuda(3, "cuLaunchCooperativeKernel", LAUNCH, _LAUNCH, "_ptsz"),
    _cuda(4, "cuLaunchCooperativeKernelMultiDevice", LAUNCH, Args(Kind.LAUNCH_LIST)),
    _cuda(5, "cuLaunch", LAUNCH, Args(handle=1)),
    _cuda(6, "cuLaunchGrid", LAUNCH, Args(handle=1, size=2, times=3, size_is_int=True)),
    _cuda(7, "cuLaunchGridAsync", LAUNCH, Args(handle=1, size=2, times=3, stream=4, size_is_int=True)),
    _cuda(8, "cuGraphLaunch", GRAPH, Args(handle=1, stream=2), "_ptsz"),
    _cuda(9, "cuLaunchHostFunc", HOST_FUNC, Args(handle=2, stream=1), "_ptsz"),
    # waits and queries
    _cuda(20, "cuStreamSynchronize", SYNC, Args(stream=1), "_ptsz", waits_for="stream"),
    _cuda(21, "cuEventSynchronize", SYNC, Args(handle=1), waits_for="event"),
    _cuda(22, "cuCtxSynchronize", SYNC, Args(), waits_for="device"),
    # Its own row: the argument, a context, exists only here.
    _cuda(23, "cuCtxSynchronize_v2", SYNC, Args(handle=1), waits_for="device"),
    _cuda(24, "cuStreamQuery", QUERY, Args(stream=1), "_ptsz"),
    _cuda(25, "cuEventQuery", QUERY, Args(handle=1)),
    _cuda(26, "cuEventRecord", EVENT, Args(handle=1, stream=2), "_ptsz"),
    _cuda(27, "cuEventRecordWithFlags", EVENT, Args(handle=1, stream=2), "_ptsz"),
    _cuda(28, "cuStreamWaitEvent", STREAM_WAIT, Args(handle=2, stream=1), "_ptsz"),
    # copies
    _cuda(40, "cuMemcpy", COPY, Args(handle=1, size=3), "_ptds", waits_for="copy"),
    _cuda(41, "cuMemcpyPeer", COPY, Args(handle=1, size=5), "_ptds", waits_for="copy", direction="DtoD"),
    _cuda(42, "cuMemcpyHtoD", COPY, Args(handle=2, size=3), "_v2 _v2_ptds", v1=True, waits_for="copy", direction="HtoD"),
    _cuda(43, "cuMemcpyDtoH", COPY, Args(handle=1, size=3), "_v2 _v2_ptds", v1=True, waits_for="copy", direction="DtoH"),
    _cuda(44, "cuMemcpyDtoD", COPY, Args(handle=1, size=3), "_v2 _v2_ptds", v1=True, waits_for="copy", direction="DtoD"),
    _cuda(45, "cuMemcpyDtoA", COPY, Args(handle=1, size=4), "_v2 _v2_ptds", v1=True, waits_for="copy", direction="DtoD"),
    _cuda(46, "cuMemcpyAtoD", COPY, Args(handle=1, size=4), "_v2 _v2_ptds", v1=True, waits_for="copy", direction="DtoD"),
    _cuda(47, "cuMemcpyHtoA", COPY, Args(handle=3, size=4), "_v2 _v2_ptds", v1=True, waits_for="copy", direction="HtoD"),
    _cuda(48, "cuMemcpyAtoH", COPY, Args(handle=1, size=4), "_v2 _v2_ptds", v1=True, waits_for="copy", direction="DtoH"),
    _cuda(49, "cuMemcpyAtoA", COPY, Args(handle=1, size=5), "_v2 _v2_ptds", v1=True, waits_for="copy", direction="DtoD"),
    _cuda(50, "cuMemcpy2D", COPY, Args(Kind.COPY_2D), "_v2 _v2_ptds", v1=True, waits_for="copy"),
    _cuda(51, "cuMemcpy2DUnaligned", COPY, Args(Kind.COPY_2D), "_v2 _v2_ptds", v1=True, waits_for="copy"),
    _cuda(52, "cuMemcpy3D", COPY, Args(Kind.COPY_3D), "_v2 _v2_ptds", v1=True, waits_for="copy"),
    _cuda(53, "cuMemcpy3DPeer", COPY, Args(Kind.COPY_3D), "_ptds", waits_for="copy", direction="DtoD"),
    _cuda(60, "cuMemcpyAsync", COPY, Args(handle=1, size=3, stream=4), "_ptsz"),
    _cuda(61, "cuMemcpyPeerAsync", COPY, Args(handle=1, size=5, stream=6), "_ptsz", direction="DtoD"),
    _cuda(62, "cuMemcpyHtoDAsync", COPY, Args(handle=2, size=3, stream=4), "_v2 _v2_ptsz", v1=True, direction="HtoD"),
    _cuda(63, "cuMemcpyDtoHAsync", COPY, Args(handle=1, size=3, stream=4), "_v2 _v2_ptsz", v1=True, direction="DtoH"),
    _cuda(64, "cuMemcpyDtoDAsync", COPY, Args(handle=1, size=3, stream=4), "_v2 _v2_ptsz", v1=True, direction="DtoD"),
    _cuda(65, "cuMemcpyHtoAAsync", COPY, Args(handle=3, size=4, stream=5), "_v2 _v2_ptsz", v1=True, direction="HtoD"),
    _cuda(66, "cuMemcpyAtoHAsync", COPY, Args(handle=1, size=4, stream=5), "_v2 _v2_ptsz", v1=True, direction="DtoH"),
    _cuda(67, "cuMemcpy2DAsync", COPY, Args(Kind.COPY_2D, stream=2), "_v2 _v2_ptsz", v1=True),
    _cuda(68, "cuMemcpy3DAsync", COPY, Args(Kind.COPY_3D, stream=2), "_v2 _v2_ptsz", v1=True),
    _cuda(69, "cuMemcpy3DPeerAsync", COPY, Args(Kind.COPY_3D, stream=2), "_ptsz", direction="DtoD"),
    _cuda(70, "cuMemPrefetchAsync", COPY, Args(handle=1, size=2, stream=4), "_ptsz"),
    # Its own row: the stream moved to the fifth place.
    _cuda(71, "cuMemPrefetchAsync_v2", COPY, Args(handle=1, size=2, stream=5), "_ptsz"),
    # memsets
    _cuda(80, "cuMemsetD8", MEMSET, Args(handle=1, size=3), "_v2 _v2_ptds", v1=True),
    _cuda(81, "cuMemsetD16", MEMSET, Args(handle=1, size=3, shift=1), "_v2 _v2_ptds", v1=True),
    _cuda(82, "cuMemsetD32", MEMSET, Args(handle=1, size=3, shift=2), "_v2 _v2_ptds", v1=True),
    _cuda(83, "cuMemsetD2D8", MEMSET, Args(handle=1, size=4, times=5), "_v2 _v2_ptds", v1=True),
    _cuda(84, "cuMemsetD2D16", MEMSET, Args(handle=1, size=4, times=5, shift=1), "_v2 _v2_ptds", v1=True),
    _cuda(85, "cuMemsetD2D32", MEMSET, Args(handle=1, size=4, times=5, shift=2), "_v2 _v2_ptds", v1=True),
    _cuda(86, "cuMemsetD8Async", MEMSET, Args(handle=1, size=3, stream=4), "_ptsz"),
    _cuda(87, "cuMemsetD16Async", MEMSET, Args(handle=1, size=3, shift=1, stream=4), "_ptsz"),
    _cuda(88, "cuMemsetD32Async", MEMSET, Args(handle=1, size=3, shift=2, stream=4), "_ptsz"),
    _cuda(89, "cuMemsetD2D8Async", MEMSET, Args(handle=1, size=4, times=5, stream=6), "_ptsz"),
    _cuda(90, "cuMemsetD2D16Async", MEMSET, Args(handle=1, size=4, times=5, shift=1, stream=6), "_ptsz"),
    _cuda(91, "cuMemsetD2D32Async", MEMSET, Args(handle=1, size=4, times=5, shift=2, stream=6), "_ptsz"),
    # allocation and free
    _cuda(100, "cuMemAlloc", ALLOC, Args(out=1, size=2), "_v2", v1=True),
    _cuda(101, "cuMemAllocPitch", ALLOC, Args(out=1, size=3, times=4), "_v2", v1=True),
    _cuda(102, "cuMemAllocManaged", ALLOC, Args(out=1, size=2)),
    _cuda(103, "cuMemAllocHost", ALLOC, Args(out=1, size=2), "_v2", v1=True),
    _cuda(104, "cuMemHostAlloc", ALLOC, Args(out=1, size=2)),
    _cuda(105, "cuMemHostRegister", ALLOC, Args(handle=1, size=2), "_v2"),
    _cuda(106, "cuMemAllocAsync", ALLOC, Args(out=1, size=2, stream=3), "_ptsz"),
    _cuda(107, "cuMemAllocFromPoolAsync", ALLOC, Args(out=1, size=2, stream=4), "_ptsz"),
    _cuda(108, "cuMemCreate", ALLOC, Args(out=1, size=2)),
    _cuda(109, "cuMemMap", ALLOC, Args(handle=1, size=2)),
    _cuda(110, "cuMemAddressReserve", ALLOC, Args(out=1, size=2)),
    _cuda(111, "cuMemSetAccess", ALLOC, Args(handle=1, size=2)),
    _cuda(112, "cuMemPoolCreate", ALLOC, Args(out=1)),
    _cuda(120, "cuMemFree", FREE, Args(handle=1), "_v2", v1=True),
    _cuda(121, "cuMemFreeHost", FREE, Args(handle=1)),
    _cuda(122, "cuMemHostUnregister", FREE, Args(handle=1)),
    _cuda(123, "cuMemFreeAsync", FREE, Args(handle=1, stream=2), "_ptsz"),
    _cuda(124, "cuMemUnmap", FREE, Args(handle=1, size=2)),
    _cuda(125, "cuMemRelease", FREE, Args(handle=1)),
    _cuda(126, "cuMemAddressFree", FREE, Args(handle=1, size=2)),
    _cuda(127, "cuMemPoolTrimTo", FREE, Args(handle=1, size=2)),
    _cuda(128, "cuMemPoolDestroy", FREE, Args(handle=1)),
    # modules, libraries and just-in-time compilation
    _cuda(130, "cuModuleLoad", MODULE, Args(out=1)),
    _cuda(131, "cuModuleLoadData", MODULE, Args(out=1)),
    _cuda(132, "cuModuleLoadDataEx", MODULE, Args(out=1)),
    _cuda(133, "cuModuleLoadFatBinary", MODULE, Args(out=1)),
    _cuda(134, "cuModuleUnload", MODULE, Args(handle=1)),
    _cuda(135, "cuLibraryLoadData", MODULE, Args(out=1)),
    _cuda(136, "cuLibraryLoadFromFile", MODULE, Args(out=1)),
    _cuda(137, "cuLibraryUnload", MODULE, Args(handle=1)),
    _cuda(138, "cuLinkAddData", MODULE, Args(handle=1), "_v2"),
    _cuda(139, "cuLinkAddFile", MODULE, Args(handle=1), "_v2"),
    _cuda(140, "cuLinkComplete", MODULE, Args(handle=1)),
    _cuda(141, "cuFuncLoad", MODULE, Args(handle=1)),
    _cuda(145, "cuModuleGetFunction", LOOKUP, Args(out=1, name=3)),
    _cuda(146, "cuLibraryGetKernel", LOOKUP, Args(out=1, name=3)),
    _cuda(147, "cuKernelGetFunction", LOOKUP, Args(out=1)),
    # contexts: which device a thread works on
    _cuda(150, "cuCtxSetCurrent", CONTEXT, Args(handle=1)),
    _cuda(151, "cuCtxPushCurrent", CONTEXT, Args(handle=1), "_v2"),
    _cuda(152, "cuCtxPopCurrent", CONTEXT, Args(out=1), "_v2"),
    _cuda(153, "cuDevicePrimaryCtxRetain", CONTEXT, Args(out=1, size=2, size_is_int=True)),
    _cuda(154, "cuCtxCreate", CONTEXT, Args(out=1, size=3, size_is_int=True), "_v2"),
    _cuda(155, "cuCtxCreate_v3", CONTEXT, Args(out=1, size=5, size_is_int=True)),
    _cuda(156, "cuCtxCreate_v4", CONTEXT, Args(out=1, size=4, size_is_int=True)),
    _cuda(157, "cuCtxDestroy", CONTEXT, Args(handle=1), "_v2"),
    # streams, capture and graphs
    _cuda(160, "cuStreamCreate", STREAM, Args(out=1, size=2, size_is_int=True)),
    _cuda(161, "cuStreamCreateWithPriority", STREAM, Args(out=1, size=2, size_is_int=True)),
    _cuda(162, "cuStreamDestroy", STREAM, Args(handle=1), "_v2"),
    _cuda(165, "cuStreamBeginCapture", CAPTURE, Args(stream=1), "_ptsz _v2 _v2_ptsz"),
    _cuda(166, "cuStreamBeginCaptureToGraph", CAPTURE, Args(stream=1), "_ptsz"),
    _cuda(167, "cuStreamEndCapture", CAPTURE, Args(out=2, stream=1), "_ptsz"),
    _cuda(170, "cuGraphInstantiate", MODULE, _GRAPH_INSTANTIATE, "_v2"),
    _cuda(171, "cuGraphInstantiateWithFlags", MODULE, _GRAPH_INSTANTIATE),
    _cuda(172, "cuGraphInstantiateWithParams", MODULE, _GRAPH_INSTANTIATE, "_ptsz"),
    _cuda(173, "cuGraphUpload", MODULE, Args(handle=1, stream=2), "_ptsz"),
    _cuda(174, "cuGraphExecUpdate", MODULE, Args(handle=1), "_v2"),
    _cuda(175, "cuGraphExecDestroy", MODULE, Args(handle=1)),
    # NCCL
    _nccl(300, "ncclAllReduce", COLLECTIVE, Args(Kind.COLLECTIVE, size=3, block=4, handle=6, stream=7)),
    _nccl(301, "ncclBroadcast", COLLECTIVE, Args(Kind.COLLECTIVE, size=3, block=4, handle=6, stream=7)),
    _nccl(302, "ncclBcast", COLLECTIVE, Args(Kind.COLLECTIVE, size=2, block=3, handle=5, stream=6)),
    _nccl(303, "ncclReduce", COLLECTIVE, Args(Kind.COLLECTIVE, size=3, block=4, handle=7, stream=8)),
    _nccl(304, "ncclAllGather", COLLECTIVE, Args(Kind.COLLECTIVE, size=3, block=4, handle=5, stream=6)),
    _nccl(305, "ncclReduceScatter", COLLECTIVE, Args(Kind.COLLECTIVE, size=3, block=4, handle=6, stream=7)),
    _nccl(306, "ncclAlltoAll", COLLECTIVE, Args(Kind.COLLECTIVE, size=3, block=4, handle=5, stream=6)),
    _nccl(307, "ncclGather", COLLECTIVE, Args(Kind.COLLECTIVE, size=3, block=4, handle=6, stream=7)),
    _nccl(308, "ncclScatter", COLLECTIVE, Args(Kind.COLLECTIVE, size=3, block=4, handle=6, stream=7)),
    _nccl(309, "ncclSend", COLLECTIVE, Args(Kind.COLLECTIVE, size=2, block=3, handle=5, stream=6)),
    _nccl(310, "ncclRecv", COLLECTIVE, Args(Kind.COLLECTIVE, size=2, block=3, handle=5, stream=6)),
    _nccl(320, "ncclGroupStart", GROUP, Args()),
    _nccl(321, "ncclGroupEnd", GROUP, Args()),
    _nccl(330, "ncclCommInitRank", COMMUNICATOR, _BY_ID),
    _nccl(331, "ncclCommInitRankConfig", COMMUNICATOR, _BY_ID),
    _nccl(332, "ncclCommInitAll", COMMUNICATOR, Args(Kind.MEMBERS, out=1, size=2, size_is_int=True)),
    _nccl(333, "ncclCommInitRankScalable", COMMUNICATOR, Args(out=1, size=2, block=3, id=5, size_is_int=True)),
    _nccl(334, "ncclCommSplit", SPLIT, Args(out=4, stream=1, size=2, block=3, size_is_int=True)),
    _nccl(335, "ncclCommFinalize", COMMUNICATOR, Args(handle=1)),
    _nccl(336, "ncclCommDestroy", COMMUNICATOR, Args(handle=1)),
    _nccl(337, "ncclCommAbort", COMMUNICATOR, Args(handle=1)),
)

# A record with this number is a further communicator of an ncclCommInitAll, whose own record is about the first.
MEMBER_CALL = 338

_MEMBER = Function(MEMBER_CALL, "member", COMMUNICATOR, HOST, Args(), ())
_OFF_CPU = Function(OFF_CPU_CALL, "off_cpu", OFF_CPU, HOST, Args(), ())
_TIER = Function(TIER_CALL, "tier", TIER, HOST, Args(), ())
_EXIT = Function(EXIT_CALL, "exit", EXIT, HOST, Args(), ())

BY_NUMBER: dict[int, Function] = {function.number: function for function in (*FUNCTIONS, _MEMBER, _OFF_CPU, _TIER, _EXIT)}
BY_SYMBOL: dict[str, Function] = {symbol: function for function in FUNCTIONS for symbol in function.symbols}


def is_per_thread(symbol: str) -> bool:
    """Whether stream 0 of this symbol means the calling thread's own default stream."""
    return symbol.endswith(("_ptsz", "_ptds"))


def cookie(function: Function, symbol: str, machine: str = platform.machine()) -> int:
    """What the kernel side is told of an attached address: 64 bits, unpacked by the macros in bpf/calls.h.

    A struct of 128 bytes passed by value lies on the stack on x86-64 and takes no register there; on arm64 (and
    riscv64) it is replaced by a pointer that takes one. So the arguments behind it count differently.
    """
    args = function.args

    def place(number: int) -> int:
        return number - 1 if args.after_id and number > args.after_id and machine == "x86_64" else number

    places = [place(n) for n in (args.handle, args.stream, args.size, args.times, args.block, args.out, args.name)]
    handle, stream, size, times, block, out, name = places
    unique_id = ID_ON_STACK if args.after_id and machine == "x86_64" else args.after_id or args.id
    fields = (
        (function.number, 16),
        (args.kind, 4),
        (handle, 4),
        (stream, 4),
        (size, 4),
        (times, 4),
        (args.shift, 4),
        (block, 4),
        (out, 4),
        (name, 4),
        (is_per_thread(symbol), 1),
        (symbol in function.narrow or args.size_is_int, 1),
        (args.kind == Kind.LAUNCH or max(places) > REGISTER_ARGS.get(machine, 6), 1),
        (unique_id, 4),
    )
    packed = position = 0
    for value, bits in fields:
        packed |= int(value) << position
        position += bits
    return packed
