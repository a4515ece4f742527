/* SPDX-License-Identifier: GPL-2.0 */
/* Copies of two and three dimensions, prefetches of managed memory, and memsets. */
#include "copies.h"

struct place {
	int type;
	const void *host;
	CUdeviceptr device;
};

static bool is_host(const struct place *place)
{
	return place->type == MEMORY_HOST || (place->type == MEMORY_UNIFIED && !is_device(place->device));
}

static const void *host_address(const struct place *place)
{
	return place->type == MEMORY_HOST ? place->host : (const void *)(uintptr_t)place->device;
}

static CUresult copy_places(struct place from, struct place to, size_t bytes, CUstream stream, enum manner manner, bool per_thread)
{
	if (is_host(&from))
		return copy(HTOD, host_address(&from), bytes, stream, manner, per_thread);
	if (is_host(&to))
		return copy(DTOH, host_address(&to), bytes, stream, manner, per_thread);
	return copy(DTOD, NULL, bytes, stream, manner, per_thread);
}

#define FROM(c) ((struct place){(c)->source_type, (c)->source_host, (c)->source_device})
#define TO(c) ((struct place){(c)->target_type, (c)->target_host, (c)->target_device})
#define BYTES_2D(c) ((size_t)(c)->width_bytes * (c)->height)
#define BYTES_3D(c) (BYTES_2D(c) * (c)->depth)

#define SYNC_COPY(name, type, bytes, per_thread)                                                                              \
	API CUresult name(const type *c) { return copy_places(FROM(c), TO(c), bytes(c), NULL, SYNC, per_thread); }
#define ASYNC_COPY(name, type, bytes, per_thread)                                                                             \
	API CUresult name(const type *c, CUstream s) { return copy_places(FROM(c), TO(c), bytes(c), s, ASYNC, per_thread); }

SYNC_COPY(cuMemcpy2D, CUDA_MEMCPY2D_v1, BYTES_2D, false)
SYNC_COPY(cuMemcpy2D_v2, CUDA_MEMCPY2D, BYTES_2D, false)
SYNC_COPY(cuMemcpy2D_v2_ptds, CUDA_MEMCPY2D, BYTES_2D, true)
SYNC_COPY(cuMemcpy2DUnaligned, CUDA_MEMCPY2D_v1, BYTES_2D, false)
SYNC_COPY(cuMemcpy2DUnaligned_v2, CUDA_MEMCPY2D, BYTES_2D, false)
SYNC_COPY(cuMemcpy2DUnaligned_v2_ptds, CUDA_MEMCPY2D, BYTES_2D, true)
SYNC_COPY(cuMemcpy3D, CUDA_MEMCPY3D_v1, BYTES_3D, false)
SYNC_COPY(cuMemcpy3D_v2, CUDA_MEMCPY3D, BYTES_3D, false)
SYNC_COPY(cuMemcpy3D_v2_ptds, CUDA_MEMCPY3D, BYTES_3D, true)
SYNC_COPY(cuMemcpy3DPeer, CUDA_MEMCPY3D, BYTES_3D, false)
SYNC_COPY(cuMemcpy3DPeer_ptds, CUDA_MEMCPY3D, BYTES_3D, true)
ASYNC_COPY(cuMemcpy2DAsync, CUDA_MEMCPY2D_v1, BYTES_2D, false)
ASYNC_COPY(cuMemcpy2DAsync_v2, CUDA_MEMCPY2D, BYTES_2D, false)
ASYNC_COPY(cuMemcpy2DAsync_v2_ptsz, CUDA_MEMCPY2D, BYTES_2D, true)
ASYNC_COPY(cuMemcpy3DAsync, CUDA_MEMCPY3D_v1, BYTES_3D, false)
ASYNC_COPY(cuMemcpy3DAsync_v2, CUDA_MEMCPY3D, BYTES_3D, false)
ASYNC_COPY(cuMemcpy3DAsync_v2_ptsz, CUDA_MEMCPY3D, BYTES_3D, true)
ASYNC_COPY(cuMemcpy3DPeerAsync, CUDA_MEMCPY3D, BYTES_3D, false)
ASYNC_COPY(cuMemcpy3DPeerAsync_ptsz, CUDA_MEMCPY3D, BYTES_3D, true)

struct location {
	int type; /* 1: a device */
	int id;
};

static CUresult prefetch(size_t bytes, bool to_device, CUstream stream, bool per_thread)
{
	return copy(to_device ? HTOD : DTOH, NULL, bytes, stream, ASYNC, per_thread);
}

#define PREFETCH(name, per_thread)                                                                                            \
	API CUresult name(CUdeviceptr address UNUSED, size_t bytes, CUdevice device, CUstream stream)                         \
	{                                                                                                                     \
		return prefetch(bytes, device >= 0, stream, per_thread);                                                      \
	}
#define PREFETCH_V2(name, per_thread)                                                                                         \
	API CUresult name(CUdeviceptr address UNUSED, size_t bytes, struct location to, unsigned int flags UNUSED, CUstream stream) \
	{                                                                                                                     \
		return prefetch(bytes, to.type == 1, stream, per_thread);                                                     \
	}

PREFETCH(cuMemPrefetchAsync, false)
PREFETCH(cuMemPrefetchAsync_ptsz, true)
PREFETCH_V2(cuMemPrefetchAsync_v2, false)
PREFETCH_V2(cuMemPrefetchAsync_v2_ptsz, true)

#define V1 (CUdeviceptr_v1 address UNUSED
#define V2 (CUdeviceptr address UNUSED

/* Of a row of elements: the plain call, its two 64-bit entry points, and the asynchronous one's two. */
#define MEMSET(name, type)                                                                                                    \
	API CUresult name V1, type value UNUSED, unsigned int count)                                                          \
	{ return copy(MEMSET, NULL, count * sizeof(type), NULL, SYNC, false); }                                               \
	API CUresult name##_v2 V2, type value UNUSED, size_t count)                                                           \
	{ return copy(MEMSET, NULL, count * sizeof(type), NULL, SYNC, false); }                                               \
	API CUresult name##_v2_ptds V2, type value UNUSED, size_t count)                                                      \
	{ return copy(MEMSET, NULL, count * sizeof(type), NULL, SYNC, true); }                                                \
	API CUresult name##Async V2, type value UNUSED, size_t count, CUstream stream)                                        \
	{ return copy(MEMSET, NULL, count * sizeof(type), stream, ASYNC, false); }                                            \
	API CUresult name##Async_ptsz V2, type value UNUSED, size_t count, CUstream stream)                                   \
	{ return copy(MEMSET, NULL, count * sizeof(type), stream, ASYNC, true); }

#define MEMSET_2D(name, type)                                                                                                 \
	API CUresult name V1, unsigned int pitch UNUSED, type value UNUSED, unsigned int width, unsigned int height)          \
	{ return copy(MEMSET, NULL, sizeof(type) * width * height, NULL, SYNC, false); }                                      \
	API CUresult name##_v2 V2, size_t pitch UNUSED, type value UNUSED, size_t width, size_t height)                       \
	{ return copy(MEMSET, NULL, sizeof(type) * width * height, NULL, SYNC, false); }                                      \
	API CUresult name##_v2_ptds V2, size_t pitch UNUSED, type value UNUSED, size_t width, size_t height)                  \
	{ return copy(MEMSET, NULL, sizeof(type) * width * height, NULL, SYNC, true); }                                       \
	API CUresult name##Async V2, size_t pitch UNUSED, type value UNUSED, size_t width, size_t height, CUstream stream)    \
	{ return copy(MEMSET, NULL, sizeof(type) * width * height, stream, ASYNC, false); }                                   \
	API CUresult name##Async_ptsz V2, size_t pitch UNUSED, type value UNUSED, size_t width, size_t height, CUstream stream) \
	{ return copy(MEMSET, NULL, sizeof(type) * width * height, stream, ASYNC, true); }

MEMSET(cuMemsetD8, unsigned char)
MEMSET(cuMemsetD16, unsigned short)
MEMSET(cuMemsetD32, unsigned int)
MEMSET_2D(cuMemsetD2D8, unsigned char)
MEMSET_2D(cuMemsetD2D16, unsigned short)
MEMSET_2D(cuMemsetD2D32, unsigned int)
