/* SPDX-License-Identifier: GPL-2.0 */
/* Inside libnccl: its types, with the numbers of nccl.h (NCCL 2.28), and what it finds in libcuda. */
#ifndef GPUTAIL_SIM_NCCL_H
#define GPUTAIL_SIM_NCCL_H

#include "gpu.h"

#define API __attribute__((visibility("default"), noinline))
#define UNUSED __attribute__((unused))

enum { OK = 0, UNHANDLED_CUDA_ERROR = 1, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };

typedef int ncclResult_t;
typedef int ncclDataType_t;
typedef struct ncclComm *ncclComm_t;
typedef void *CUstream;

typedef struct {
	char internal[128];
} ncclUniqueId;

struct ncclComm {
	uint32_t slot, generation;
	int ranks, rank;
	uint64_t collectives, splits;
	uint64_t sent[RANKS], received[RANKS];
	char id[128];
};

/* A kernel's handle, laid out as the driver's. */
struct kernel {
	void *module;
	const char *name;
};

struct launch_config {
	unsigned int grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
	CUstream stream;
	void *attributes;
	unsigned int attribute_count;
};

struct driver {
	int (*init)(unsigned int flags);
	int (*launch)(const struct launch_config *config, const struct kernel *kernel, void **params, void **extra);
	int (*instead)(const struct op *ops, unsigned int count);
	int (*join)(const char id[128], uint32_t ranks, uint32_t rank, uint32_t *slot, uint32_t *generation);
	int (*meet)(uint32_t slot);
	int (*split)(uint32_t slot, uint64_t round, uint32_t rank, int color, int key, int colors[RANKS], int keys[RANKS]);
	int (*leave)(uint32_t slot, uint32_t rank, bool abort);
};

/* communicators.c */
const struct driver *find_driver(void); /* NULL: there is no libcuda */
ncclResult_t meet(ncclComm_t comm);

/* groups.c: between start and end, what is asked for is only noted */
bool in_group(void);
ncclResult_t add_operation(ncclComm_t comm, CUstream stream, const struct kernel *kernel, const struct op *op);
ncclResult_t add_meeting(ncclComm_t comm);

#endif
