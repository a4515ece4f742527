/* SPDX-License-Identifier: GPL-2.0 */
/* The structs that describe copies of two and three dimensions; those of CUDA 3.1 and older have sizes of 32 bits. */
#ifndef GPUTAIL_SIM_COPIES_H
#define GPUTAIL_SIM_COPIES_H

#include "driver.h"

enum memory { MEMORY_HOST = 1, MEMORY_DEVICE, MEMORY_ARRAY, MEMORY_UNIFIED };

#define COPY_2D(name, size, pointer)                                                                                          \
	typedef struct {                                                                                                      \
		size source_x, source_y;                                                                                      \
		int source_type;                                                                                              \
		const void *source_host;                                                                                      \
		pointer source_device;                                                                                        \
		CUarray source_array;                                                                                         \
		size source_pitch, target_x, target_y;                                                                        \
		int target_type;                                                                                              \
		void *target_host;                                                                                            \
		pointer target_device;                                                                                        \
		CUarray target_array;                                                                                         \
		size target_pitch, width_bytes, height;                                                                       \
	} name;

COPY_2D(CUDA_MEMCPY2D, size_t, CUdeviceptr)
COPY_2D(CUDA_MEMCPY2D_v1, unsigned int, CUdeviceptr_v1)

#define COPY_3D(name, size, pointer)                                                                                          \
	typedef struct {                                                                                                      \
		size source_x, source_y, source_z, source_level;                                                              \
		int source_type;                                                                                              \
		const void *source_host;                                                                                      \
		pointer source_device;                                                                                        \
		CUarray source_array;                                                                                         \
		void *source_context;                                                                                         \
		size source_pitch, source_height, target_x, target_y, target_z, target_level;                                 \
		int target_type;                                                                                              \
		void *target_host;                                                                                            \
		pointer target_device;                                                                                        \
		CUarray target_array;                                                                                         \
		void *target_context;                                                                                         \
		size target_pitch, target_height, width_bytes, height, depth;                                                 \
	} name;

COPY_3D(CUDA_MEMCPY3D, size_t, CUdeviceptr)
COPY_3D(CUDA_MEMCPY3D_v1, unsigned int, CUdeviceptr_v1)

/* copies.c: what all copies come to. `host` is the host's side, NULL if neither is. */
enum manner { ASYNC, SYNC };
CUresult copy(enum kind kind, const void *host, size_t bytes, CUstream stream, enum manner manner, bool per_thread);

#endif
