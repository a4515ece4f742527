/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Groups. At the end of the outermost, each communicator's operations on a stream become one launch, which has come to all
 * its peers as soon as it has come to the first: so sends and receives of a group do not wait for each other in turn.
 */
#include "nccl.h"

#include <string.h>

#define MEETINGS 64

struct pending {
	ncclComm_t comm;
	CUstream stream;
	const struct kernel *kernel;
	struct op op;
};

static __thread struct pending pending[QUEUE];
static __thread unsigned int pending_count;
static __thread ncclComm_t meetings[MEETINGS];
static __thread unsigned int meeting_count;
static __thread int depth;

bool in_group(void)
{
	return depth > 0;
}

static ncclResult_t launch(const struct kernel *kernel, CUstream stream, struct op *ops, unsigned int count)
{
	const struct driver *driver = find_driver();
	struct launch_config config = {8, 1, 1, 512, 1, 1, 0, stream, NULL, 0};

	if (!driver)
		return UNHANDLED_CUDA_ERROR;
	ops[0].group = (uint16_t)count;
	return driver->instead(ops, count) || driver->launch(&config, kernel, NULL, NULL) ? UNHANDLED_CUDA_ERROR : OK;
}

ncclResult_t add_operation(ncclComm_t comm, CUstream stream, const struct kernel *kernel, const struct op *op)
{
	struct op alone = *op;

	if (!depth)
		return launch(kernel, stream, &alone, 1);
	if (pending_count == QUEUE)
		return INTERNAL_ERROR;
	pending[pending_count++] = (struct pending){comm, stream, kernel, *op};
	return OK;
}

ncclResult_t add_meeting(ncclComm_t comm)
{
	if (!depth)
		return meet(comm);
	if (meeting_count == MEETINGS)
		return INTERNAL_ERROR;
	meetings[meeting_count++] = comm;
	return OK;
}

/* Launch what belongs together with the first of what is pending, and keep the rest. */
static ncclResult_t launch_first(void)
{
	static __thread struct op ops[QUEUE];
	struct pending first = pending[0];
	unsigned int count = 0, kept = 0, i;

	for (i = 0; i < pending_count; i++)
		if (pending[i].comm == first.comm && pending[i].stream == first.stream)
			ops[count++] = pending[i].op;
		else
			pending[kept++] = pending[i];
	pending_count = kept;
	return launch(first.kernel, first.stream, ops, count);
}

API ncclResult_t ncclGroupStart(void)
{
	depth++;
	return OK;
}

API ncclResult_t ncclGroupEnd(void)
{
	ncclResult_t result = OK;
	unsigned int i;

	if (!depth)
		return INVALID_USAGE;
	if (--depth)
		return OK;
	for (i = 0; i < meeting_count && !result; i++)
		result = meet(meetings[i]);
	meeting_count = 0;
	while (pending_count && !result)
		result = launch_first();
	pending_count = 0;
	return result;
}
