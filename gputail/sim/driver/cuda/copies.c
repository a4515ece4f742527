/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Copies of one dimension. Pageable memory goes through a staging buffer of the driver's, 4 MB at a time: the call returns
 * from a copy to the device when the last piece is in the buffer, from one to the host when all is there.
 */
#include "copies.h"

#include <math.h>

#define STAGE_BYTES (4ULL << 20)
#define SMALL_BYTES (64ULL << 10) /* goes with the command itself */
#define COPY_START_NS 1000
#define FULL_SHARE_BYTES 4194304.0

static CUresult pageable_to_device(CUstream stream, const struct op *op, enum manner manner)
{
	double piece = op->work < STAGE_BYTES ? op->work : STAGE_BYTES;
	struct mark mark;
	CUresult result = queue_op(stream, op, &mark);

	if (result || (op->work <= SMALL_BYTES && manner == ASYNC))
		return result;
	/* When the last piece is in the buffer, what it takes at the bus's speed is still to do. */
	mark.left = op->work <= SMALL_BYTES ? INFINITY : piece * PAGEABLE_BYTES_PER_NS / PCIE_BYTES_PER_NS;
	wait_for(&mark, 1);
	return SUCCESS;
}

CUresult copy(enum kind kind, const void *host, size_t bytes, CUstream stream, enum manner manner, bool per_thread)
{
	struct op op = {.kind = (uint8_t)kind, .work = (double)bytes, .rate = PCIE_BYTES_PER_NS};
	CUresult result = find_stream(&stream, per_thread);
	bool pageable = host && !is_pinned(host);
	struct mark mark;

	if (result || !bytes)
		return result;
	if (kind == DTOD || kind == MEMSET) {
		op.work = COPY_START_NS + (double)bytes / DEVICE_BYTES_PER_NS;
		op.share = fmin(1, (double)bytes / FULL_SHARE_BYTES);
	}
	if (stream->capture)
		return pageable || manner == SYNC ? STREAM_CAPTURE_UNSUPPORTED : record_op(stream->capture, &op, 1);
	if (pageable)
		op.rate = PAGEABLE_BYTES_PER_NS;
	if (pageable && kind == HTOD)
		return pageable_to_device(stream, &op, manner);
	result = queue_op(stream, &op, &mark);
	/* Copies within the device and memsets are not waited for: that is documented for the synchronous calls too. */
	if (!result && (kind == HTOD || kind == DTOH) && (pageable || manner == SYNC))
		wait_for(&mark, 1);
	return result;
}

/* Of addresses of one space: which way the copy goes. */
static CUresult copy_unified(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, enum manner manner, bool per_thread)
{
	if (is_device(to) && is_device(from))
		return copy(DTOD, NULL, bytes, stream, manner, per_thread);
	if (is_device(to))
		return copy(HTOD, (const void *)(uintptr_t)from, bytes, stream, manner, per_thread);
	return copy(DTOH, (const void *)(uintptr_t)to, bytes, stream, manner, per_thread);
}

API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return copy_unified(to, from, bytes, NULL, SYNC, false); }
API CUresult cuMemcpy_ptds(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return copy_unified(to, from, bytes, NULL, SYNC, true); }

API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	return copy_unified(to, from, bytes, stream, ASYNC, false);
}

API CUresult cuMemcpyAsync_ptsz(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	return copy_unified(to, from, bytes, stream, ASYNC, true);
}

#define PEER(name, ...)                                                                                                       \
	API CUresult name(CUdeviceptr to UNUSED, CUcontext to_context UNUSED, CUdeviceptr from UNUSED,                        \
			  CUcontext from_context UNUSED, size_t bytes __VA_ARGS__)

PEER(cuMemcpyPeer) { return copy(DTOD, NULL, bytes, NULL, SYNC, false); }
PEER(cuMemcpyPeer_ptds) { return copy(DTOD, NULL, bytes, NULL, SYNC, true); }
PEER(cuMemcpyPeerAsync, , CUstream stream) { return copy(DTOD, NULL, bytes, stream, ASYNC, false); }
PEER(cuMemcpyPeerAsync_ptsz, , CUstream stream) { return copy(DTOD, NULL, bytes, stream, ASYNC, true); }

/* The three entry points of a call whose sizes were 32 bits wide before CUDA 3.2, given its arguments for either width. */
#define SYNCHRONOUS(name, kind, host, narrow, wide)                                                                           \
	API CUresult name narrow { return copy(kind, host, bytes, NULL, SYNC, false); }                                       \
	API CUresult name##_v2 wide { return copy(kind, host, bytes, NULL, SYNC, false); }                                    \
	API CUresult name##_v2_ptds wide { return copy(kind, host, bytes, NULL, SYNC, true); }

#define ASYNCHRONOUS(name, kind, host, narrow, wide)                                                                          \
	API CUresult name narrow { return copy(kind, host, bytes, stream, ASYNC, false); }                                    \
	API CUresult name##_v2 wide { return copy(kind, host, bytes, stream, ASYNC, false); }                                 \
	API CUresult name##_v2_ptsz wide { return copy(kind, host, bytes, stream, ASYNC, true); }

SYNCHRONOUS(cuMemcpyHtoD, HTOD, from, (CUdeviceptr_v1 to UNUSED, const void *from, unsigned int bytes),
	    (CUdeviceptr to UNUSED, const void *from, size_t bytes))
SYNCHRONOUS(cuMemcpyDtoH, DTOH, to, (void *to, CUdeviceptr_v1 from UNUSED, unsigned int bytes),
	    (void *to, CUdeviceptr from UNUSED, size_t bytes))
SYNCHRONOUS(cuMemcpyDtoD, DTOD, NULL, (CUdeviceptr_v1 to UNUSED, CUdeviceptr_v1 from UNUSED, unsigned int bytes),
	    (CUdeviceptr to UNUSED, CUdeviceptr from UNUSED, size_t bytes))
SYNCHRONOUS(cuMemcpyDtoA, DTOD, NULL,
	    (CUarray to UNUSED, unsigned int offset UNUSED, CUdeviceptr_v1 from UNUSED, unsigned int bytes),
	    (CUarray to UNUSED, size_t offset UNUSED, CUdeviceptr from UNUSED, size_t bytes))
SYNCHRONOUS(cuMemcpyAtoD, DTOD, NULL,
	    (CUdeviceptr_v1 to UNUSED, CUarray from UNUSED, unsigned int offset UNUSED, unsigned int bytes),
	    (CUdeviceptr to UNUSED, CUarray from UNUSED, size_t offset UNUSED, size_t bytes))
SYNCHRONOUS(cuMemcpyHtoA, HTOD, from, (CUarray to UNUSED, unsigned int offset UNUSED, const void *from, unsigned int bytes),
	    (CUarray to UNUSED, size_t offset UNUSED, const void *from, size_t bytes))
SYNCHRONOUS(cuMemcpyAtoH, DTOH, to, (void *to, CUarray from UNUSED, unsigned int offset UNUSED, unsigned int bytes),
	    (void *to, CUarray from UNUSED, size_t offset UNUSED, size_t bytes))
SYNCHRONOUS(cuMemcpyAtoA, DTOD, NULL,
	    (CUarray to UNUSED, unsigned int offset UNUSED, CUarray from UNUSED, unsigned int start UNUSED, unsigned int bytes),
	    (CUarray to UNUSED, size_t offset UNUSED, CUarray from UNUSED, size_t start UNUSED, size_t bytes))

ASYNCHRONOUS(cuMemcpyHtoDAsync, HTOD, from, (CUdeviceptr_v1 to UNUSED, const void *from, unsigned int bytes, CUstream stream),
	     (CUdeviceptr to UNUSED, const void *from, size_t bytes, CUstream stream))
ASYNCHRONOUS(cuMemcpyDtoHAsync, DTOH, to, (void *to, CUdeviceptr_v1 from UNUSED, unsigned int bytes, CUstream stream),
	     (void *to, CUdeviceptr from UNUSED, size_t bytes, CUstream stream))
ASYNCHRONOUS(cuMemcpyDtoDAsync, DTOD, NULL,
	     (CUdeviceptr_v1 to UNUSED, CUdeviceptr_v1 from UNUSED, unsigned int bytes, CUstream stream),
	     (CUdeviceptr to UNUSED, CUdeviceptr from UNUSED, size_t bytes, CUstream stream))
ASYNCHRONOUS(cuMemcpyHtoAAsync, HTOD, from,
	     (CUarray to UNUSED, unsigned int offset UNUSED, const void *from, unsigned int bytes, CUstream stream),
	     (CUarray to UNUSED, size_t offset UNUSED, const void *from, size_t bytes, CUstream stream))
ASYNCHRONOUS(cuMemcpyAtoHAsync, DTOH, to,
	     (void *to, CUarray from UNUSED, unsigned int offset UNUSED, unsigned int bytes, CUstream stream),
	     (void *to, CUarray from UNUSED, size_t offset UNUSED, size_t bytes, CUstream stream))
