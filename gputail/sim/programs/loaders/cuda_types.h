/* SPDX-License-Identifier: GPL-2.0 */
/* The few types of the CUDA driver API that the simulated driver and its programs need; layouts as in the ABI. */
#ifndef GPUTAIL_CUDA_SIM_H
#define GPUTAIL_CUDA_SIM_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef uint32_t CUdeviceptr_v1; /* up to CUDA 3.1 */

enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_FILE_NOT_FOUND = 301,
	CUDA_ERROR_INVALID_HANDLE = 400,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_READY = 600,
	CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
};

#define CU_STREAM_NON_BLOCKING 1
#define CU_STREAM_LEGACY ((void *)1)
#define CU_STREAM_PER_THREAD ((void *)2)
#define CU_MEMORYTYPE_HOST 1
#define CU_MEMORYTYPE_DEVICE 2
#define CU_MEMORYTYPE_ARRAY 3
#define CU_MEMORYTYPE_UNIFIED 4

typedef struct {
	unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
	void *hStream;
	void *attrs;
	unsigned int numAttrs;
} CUlaunchConfig;

typedef struct {
	void *function;
	unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
	void *hStream;
	void **kernelParams;
} CUDA_LAUNCH_PARAMS;

typedef struct {
	void *func;
	unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
	void **kernelParams;
	void **extra;
	void *kern;
	void *ctx;
} CUDA_KERNEL_NODE_PARAMS;

typedef struct {
	size_t srcXInBytes, srcY;
	unsigned int srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	void *srcArray;
	size_t srcPitch;
	size_t dstXInBytes, dstY;
	unsigned int dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	void *dstArray;
	size_t dstPitch;
	size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;

typedef struct {
	unsigned int srcXInBytes, srcY;
	unsigned int srcMemoryType;
	const void *srcHost;
	CUdeviceptr_v1 srcDevice;
	void *srcArray;
	unsigned int srcPitch;
	unsigned int dstXInBytes, dstY;
	unsigned int dstMemoryType;
	void *dstHost;
	CUdeviceptr_v1 dstDevice;
	void *dstArray;
	unsigned int dstPitch;
	unsigned int WidthInBytes, Height;
} CUDA_MEMCPY2D_v1;

typedef struct { /* and CUDA_MEMCPY3D_PEER, whose reserved words are contexts */
	size_t srcXInBytes, srcY, srcZ, srcLOD;
	unsigned int srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	void *srcArray;
	void *srcReserved;
	size_t srcPitch, srcHeight;
	size_t dstXInBytes, dstY, dstZ, dstLOD;
	unsigned int dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	void *dstArray;
	void *dstReserved;
	size_t dstPitch, dstHeight;
	size_t WidthInBytes, Height, Depth;
} CUDA_MEMCPY3D;

typedef struct {
	unsigned int srcXInBytes, srcY, srcZ, srcLOD;
	unsigned int srcMemoryType;
	const void *srcHost;
	CUdeviceptr_v1 srcDevice;
	void *srcArray;
	void *srcReserved;
	unsigned int srcPitch, srcHeight;
	unsigned int dstXInBytes, dstY, dstZ, dstLOD;
	unsigned int dstMemoryType;
	void *dstHost;
	CUdeviceptr_v1 dstDevice;
	void *dstArray;
	void *dstReserved;
	unsigned int dstPitch, dstHeight;
	unsigned int WidthInBytes, Height, Depth;
} CUDA_MEMCPY3D_v1;

typedef struct {
	unsigned int type;
	int id;
} CUmemLocation;

_Static_assert(offsetof(CUlaunchConfig, hStream) == 32, "the stream of a launch configuration is at 32");
_Static_assert(sizeof(CUDA_MEMCPY2D) == 128 && sizeof(CUDA_MEMCPY3D) == 200, "copy structs as in the ABI");

/* What the simulation adds: a kernel's first parameter may point at this many nanoseconds of its own run time. */
#define SIM_DEFAULT_KERNEL_NS 5000
#define SIM_COLLECTIVE 0x6c6c6f63u /* first word of the first parameter of NCCL's kernels */

struct sim_collective {
	uint64_t magic;
	uint32_t comm, rank;
	uint32_t kind; /* 0 collective, 1 send, 2 receive */
	uint32_t peer;
	uint64_t bytes;
};

#endif
