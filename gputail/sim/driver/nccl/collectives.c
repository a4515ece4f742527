/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Collectives. Each is one launch inside libcuda of a kernel that starts when all ranks have come to it and then takes its
 * bytes at the link's speed; whatever the algorithm, the bytes are those of the call's own count.
 */
#include "nccl.h"

#define NAME(length, name) "_Z" #length "ncclDevKernel_" name "24ncclDevKernelArgsStorageILm4096EE"

static const struct kernel all_reduce = {NULL, NAME(39, "AllReduce_Sum_f32_RING_LL")};
static const struct kernel broadcast = {NULL, NAME(31, "Broadcast_RING_LL")};
static const struct kernel reduce = {NULL, NAME(36, "Reduce_Sum_f32_RING_LL")};
static const struct kernel all_gather = {NULL, NAME(31, "AllGather_RING_LL")};
static const struct kernel reduce_scatter = {NULL, NAME(43, "ReduceScatter_Sum_f32_RING_LL")};
static const struct kernel send_receive = {NULL, NAME(22, "SendRecv")};

static double duration_ns(size_t count, ncclDataType_t type)
{
	/* int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, float8e4m3, float8e5m2 */
	static const unsigned char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
	size_t size = type >= 0 && (size_t)type < sizeof(sizes) ? sizes[type] : 1;

	return LINK_START_NS + (double)(count * size) / LINK_BYTES_PER_NS;
}

static ncclResult_t collective(size_t count, ncclDataType_t type, ncclComm_t comm, CUstream stream, const struct kernel *kernel)
{
	struct op op = {.kind = COLLECTIVE, .work = duration_ns(count, type)};

	if (!comm)
		return INVALID_ARGUMENT;
	op.target = comm->slot;
	op.generation = comm->generation;
	op.rank = (uint16_t)comm->rank;
	op.position = ++comm->collectives;
	return add_operation(comm, stream, kernel, &op);
}

static ncclResult_t point_to_point(enum kind kind, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream)
{
	struct op op = {.kind = (uint8_t)kind, .work = duration_ns(count, type)};

	if (!comm || peer < 0 || peer >= comm->ranks)
		return INVALID_ARGUMENT;
	op.target = comm->slot;
	op.generation = comm->generation;
	op.rank = (uint16_t)comm->rank;
	op.peer = (uint16_t)peer;
	op.position = kind == SEND ? ++comm->sent[peer] : ++comm->received[peer];
	return add_operation(comm, stream, &send_receive, &op);
}

#define BUFFERS const void *from UNUSED, void *to UNUSED, size_t count, ncclDataType_t type

API ncclResult_t ncclAllReduce(BUFFERS, int op UNUSED, ncclComm_t comm, CUstream stream)
{
	return collective(count, type, comm, stream, &all_reduce);
}

API ncclResult_t ncclBroadcast(BUFFERS, int root UNUSED, ncclComm_t comm, CUstream stream)
{
	return collective(count, type, comm, stream, &broadcast);
}

API ncclResult_t ncclBcast(void *buffer UNUSED, size_t count, ncclDataType_t type, int root UNUSED, ncclComm_t comm, CUstream stream)
{
	return collective(count, type, comm, stream, &broadcast);
}

API ncclResult_t ncclReduce(BUFFERS, int op UNUSED, int root UNUSED, ncclComm_t comm, CUstream stream)
{
	return collective(count, type, comm, stream, &reduce);
}

API ncclResult_t ncclAllGather(BUFFERS, ncclComm_t comm, CUstream stream) { return collective(count, type, comm, stream, &all_gather); }

API ncclResult_t ncclReduceScatter(BUFFERS, int op UNUSED, ncclComm_t comm, CUstream stream)
{
	return collective(count, type, comm, stream, &reduce_scatter);
}

API ncclResult_t ncclAlltoAll(BUFFERS, ncclComm_t comm, CUstream stream) { return collective(count, type, comm, stream, &send_receive); }

API ncclResult_t ncclGather(BUFFERS, int root UNUSED, ncclComm_t comm, CUstream stream)
{
	return collective(count, type, comm, stream, &send_receive);
}

API ncclResult_t ncclScatter(BUFFERS, int root UNUSED, ncclComm_t comm, CUstream stream)
{
	return collective(count, type, comm, stream, &send_receive);
}

API ncclResult_t ncclSend(const void *from UNUSED, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream)
{
	return point_to_point(SEND, count, type, peer, comm, stream);
}

API ncclResult_t ncclRecv(void *to UNUSED, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream)
{
	return point_to_point(RECV, count, type, peer, comm, stream);
}
