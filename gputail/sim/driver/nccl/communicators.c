/* SPDX-License-Identifier: GPL-2.0 */
/* Communicators: their ids, ranks that meet by them, and their end. */
#include "nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static struct driver driver;
static bool found;

static void look_up(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	size_t i;
	const struct {
		void *function;
		const char *name;
	} wanted[] = {
		{&driver.init, "cuInit"},
		{&driver.launch, "cuLaunchKernelEx"},
		{&driver.instead, "gputail_sim_instead"},
		{&driver.join, "gputail_sim_join"},
		{&driver.meet, "gputail_sim_meet"},
		{&driver.split, "gputail_sim_split"},
		{&driver.leave, "gputail_sim_leave"},
	};

	for (i = 0; library && i < sizeof(wanted) / sizeof(*wanted); i++) {
		void *symbol = dlsym(library, wanted[i].name);

		if (!symbol)
			return;
		memcpy(wanted[i].function, &symbol, sizeof(symbol));
	}
	found = library && !driver.init(0);
}

const struct driver *find_driver(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, look_up);
	return found ? &driver : NULL;
}

ncclResult_t meet(ncclComm_t comm)
{
	return driver.meet(comm->slot) ? UNHANDLED_CUDA_ERROR : OK;
}

static ncclResult_t join(ncclComm_t *comm, int ranks, const char id[128], int rank)
{
	ncclComm_t new;

	if (!comm || ranks < 1 || rank < 0 || rank >= ranks)
		return INVALID_ARGUMENT;
	if (!find_driver())
		return UNHANDLED_CUDA_ERROR;
	new = calloc(1, sizeof(*new));
	if (!new)
		return INTERNAL_ERROR;
	new->ranks = ranks;
	new->rank = rank;
	memcpy(new->id, id, 128);
	if (driver.join(id, (uint32_t)ranks, (uint32_t)rank, &new->slot, &new->generation)) {
		free(new);
		return INVALID_USAGE;
	}
	*comm = new;
	return OK;
}

static ncclResult_t join_and_meet(ncclComm_t *comm, int ranks, const char id[128], int rank)
{
	ncclResult_t result = join(comm, ranks, id, rank);

	return result ? result : add_meeting(*comm);
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
	return getrandom(id, sizeof(*id), 0) == sizeof(*id) ? OK : INTERNAL_ERROR;
}

API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
	return join_and_meet(comm, ranks, id.internal, rank);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, void *config UNUSED)
{
	return join_and_meet(comm, ranks, id.internal, rank);
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int ranks, int rank, int ids UNUSED, ncclUniqueId *id, void *config UNUSED)
{
	return join_and_meet(comm, ranks, id->internal, rank);
}

API ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices UNUSED)
{
	ncclUniqueId id;
	ncclResult_t result = getrandom(&id, sizeof(id), 0) == sizeof(id) ? OK : INTERNAL_ERROR;
	int rank;

	for (rank = 0; rank < count && !result; rank++)
		result = join(&comms[rank], count, id.internal, rank);
	return result;
}

/* Ranks of one colour become a communicator, in the order of their keys. */
API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *part, void *config UNUSED)
{
	int colors[RANKS], keys[RANKS], ranks = 0, rank = 0, i;
	char id[128] = {0};

	if (!comm || !part)
		return INVALID_ARGUMENT;
	*part = NULL;
	if (driver.split(comm->slot, ++comm->splits, (uint32_t)comm->rank, color, key, colors, keys))
		return UNHANDLED_CUDA_ERROR;
	if (color < 0)
		return OK;
	for (i = 0; i < comm->ranks; i++)
		if (colors[i] == color) {
			ranks++;
			rank += keys[i] < key || (keys[i] == key && i < comm->rank);
		}
	memcpy(id, comm->id, 64);
	snprintf(id + 64, 64, "%u %u %llu %d", comm->slot, comm->generation, (unsigned long long)comm->splits, color);
	return join_and_meet(part, ranks, id, rank);
}

static ncclResult_t leave(ncclComm_t comm, bool abort)
{
	if (!comm)
		return INVALID_ARGUMENT;
	driver.leave(comm->slot, (uint32_t)comm->rank, abort);
	free(comm);
	return OK;
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm) { return comm && find_driver() ? OK : INVALID_ARGUMENT; }
API ncclResult_t ncclCommDestroy(ncclComm_t comm) { return leave(comm, false); }
API ncclResult_t ncclCommAbort(ncclComm_t comm) { return leave(comm, true); }

API ncclResult_t ncclCommCount(ncclComm_t comm, int *count)
{
	*count = comm->ranks;
	return OK;
}

API ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
	*rank = comm->rank;
	return OK;
}

API ncclResult_t ncclCommCuDevice(ncclComm_t comm UNUSED, int *device)
{
	*device = 0;
	return OK;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm UNUSED, ncclResult_t *error)
{
	*error = OK;
	return OK;
}

API ncclResult_t ncclGetVersion(int *version)
{
	*version = 22800;
	return OK;
}

API const char *ncclGetErrorString(ncclResult_t result)
{
	static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
					    "invalid argument", "invalid usage"};

	return result >= 0 && result <= INVALID_USAGE ? texts[result] : "unknown result code";
}
