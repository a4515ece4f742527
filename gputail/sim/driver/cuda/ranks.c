/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Communicators, for libnccl: ranks of several processes meet in the shared memory. The names are not CUDA's.
 * All return 0, or a CUresult.
 */
#include "driver.h"

#include <string.h>

/* Take a rank's place in the communicator of an id, which the first to come makes. */
API int gputail_sim_join(const char id[128], uint32_t ranks, uint32_t rank, uint32_t *slot, uint32_t *generation)
{
	struct communicator *comm = NULL;
	uint32_t i;

	if (!gpu || !ranks || ranks > RANKS || rank >= ranks)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	lock_gpu();
	for (i = 0; i < COMMUNICATORS; i++)
		if (gpu->communicators[i].ranks && !memcmp(gpu->communicators[i].id, id, 128))
			break;
	if (i == COMMUNICATORS) {
		for (i = 0; i < COMMUNICATORS && gpu->communicators[i].ranks; i++)
			;
		if (i < COMMUNICATORS) {
			comm = &gpu->communicators[i];
			*comm = (struct communicator){.generation = comm->generation, .ranks = ranks};
			memcpy(comm->id, id, 128);
			memset(comm->members, 0xff, sizeof(comm->members));
		}
	} else if (gpu->communicators[i].ranks == ranks && gpu->communicators[i].members[rank] == NONE) {
		comm = &gpu->communicators[i];
	}
	if (comm) {
		comm->members[rank] = self;
		comm->joined++;
		*slot = i;
		*generation = comm->generation;
	}
	unlock_gpu();
	return comm ? SUCCESS : INVALID_VALUE;
}

/* Wait until all ranks have joined. */
API int gputail_sim_meet(uint32_t slot)
{
	bool all;

	do {
		lock_gpu();
		all = gpu->communicators[slot].joined >= gpu->communicators[slot].ranks || gpu->communicators[slot].aborted;
		unlock_gpu();
		if (!all)
			wait_a_moment(NEVER);
	} while (!all);
	return SUCCESS;
}

/* Tell all ranks a colour and a key, and learn theirs; `round` counts a communicator's splits from 1. */
API int gputail_sim_split(uint32_t slot, uint64_t round, uint32_t rank, int color, int key, int colors[RANKS], int keys[RANKS])
{
	struct communicator *comm = &gpu->communicators[slot];
	bool all;

	lock_gpu();
	comm->colors[round & 1][rank] = color;
	comm->keys[round & 1][rank] = key;
	comm->split_calls++;
	unlock_gpu();
	do {
		lock_gpu();
		all = comm->split_calls >= round * comm->ranks || comm->aborted;
		memcpy(colors, comm->colors[round & 1], sizeof(comm->colors[0]));
		memcpy(keys, comm->keys[round & 1], sizeof(comm->keys[0]));
		unlock_gpu();
		if (!all)
			wait_a_moment(NEVER);
	} while (!all);
	return SUCCESS;
}

/* Leave; after all work, or at once and with it whatever waits for a peer. */
API int gputail_sim_leave(uint32_t slot, uint32_t rank, bool abort)
{
	if (!gpu)
		return NOT_INITIALIZED;
	if (!abort)
		wait_for_device();
	lock_gpu();
	if (abort) {
		gpu->communicators[slot].aborted = true;
		advance(gpu, now_ns());
	}
	leave_communicator(gpu, slot, rank);
	unlock_gpu();
	return SUCCESS;
}
