/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What happens on the GPU between two looks at it, from one change to the next.
 *
 * At any time the operations at the heads of the streams that nothing holds up are at work: kernels of the process whose
 * time slice it is as far as their shares fit, copies on the engine of their direction, collectives all of whose ranks have
 * come to them. All go on at rates that stay the same until the next change: an operation ends, or a slice does.
 */
#include "gpu.h"

#include <math.h>

struct work {
	uint32_t stream;
	struct op *op;
	double rate; /* of `left`, per nanosecond; 0: held up */
};

static struct op *head(struct gpu *gpu, uint32_t stream)
{
	return op_at(gpu, stream, gpu->queues[stream].head);
}

/* The legacy default stream waits for all earlier work of its process's blocking streams, and they for it. */
static bool is_ready(struct gpu *gpu, uint32_t stream)
{
	const struct queue *queue = &gpu->queues[stream];
	uint64_t ticket = head(gpu, stream)->ticket;
	uint32_t legacy = gpu->processes[queue->process].legacy, i;

	if (queue->nonblocking)
		return true;
	if (!queue->legacy)
		return !gpu->queues[legacy].busy || head(gpu, legacy)->ticket > ticket;
	for (i = 0; i < gpu->busy_count; i++) {
		const struct queue *other = &gpu->queues[gpu->busy[i]];

		if (other->process == queue->process && !other->nonblocking && head(gpu, gpu->busy[i])->ticket < ticket)
			return false;
	}
	return true;
}

static void remove_busy(struct gpu *gpu, uint32_t stream)
{
	uint32_t i;

	gpu->queues[stream].busy = false;
	for (i = 0; i < gpu->busy_count; i++)
		if (gpu->busy[i] == stream) {
			gpu->busy[i] = gpu->busy[--gpu->busy_count];
			break;
		}
	if (gpu->queues[stream].closed)
		gpu->queues[stream].process = NONE;
}

static void complete(struct gpu *gpu, uint32_t stream)
{
	struct queue *queue = &gpu->queues[stream];
	struct op *op = head(gpu, stream);

	if (!op->start_ns)
		op->start_ns = gpu->now_ns;
	if (op->kind == EVENT) {
		struct event *event = &gpu->events[op->target];

		if (event->stream == stream && event->position == queue->head)
			event->end_ns = gpu->now_ns;
	}
	log_op(gpu, stream, op);
	if (++queue->head == queue->tail)
		remove_busy(gpu, stream);
}

/* A rank has come to the operations of one group: tell its peers. */
static void arrive(struct gpu *gpu, uint32_t stream)
{
	const struct queue *queue = &gpu->queues[stream];
	unsigned int i, count = head(gpu, stream)->group;

	for (i = 0; i < count && queue->head + i < queue->tail; i++) {
		const struct op *op = op_at(gpu, stream, queue->head + i);
		struct communicator *comm = &gpu->communicators[op->target];
		uint64_t *counter = op->kind == COLLECTIVE ? &comm->reached[op->rank] :
				    op->kind == SEND	   ? &comm->sent[op->rank][op->peer] :
							     &comm->received[op->rank][op->peer];

		if (comm->generation == op->generation && *counter < op->position)
			*counter = op->position;
	}
}

static bool is_met(const struct gpu *gpu, const struct op *op)
{
	const struct communicator *comm = &gpu->communicators[op->target];
	uint32_t rank;

	if (comm->aborted || comm->generation != op->generation)
		return true;
	if (op->kind == SEND)
		return comm->received[op->peer][op->rank] >= op->position;
	if (op->kind == RECV)
		return comm->sent[op->peer][op->rank] >= op->position;
	for (rank = 0; rank < comm->ranks; rank++)
		if (comm->reached[rank] < op->position)
			return false;
	return true;
}

/* Whether an operation at the head of its stream takes no time and is over, or has come to its peers just now. */
static bool settle_one(struct gpu *gpu, uint32_t stream)
{
	struct op *op = head(gpu, stream);

	if (!is_ready(gpu, stream))
		return false;
	switch (op->kind) {
	case WAIT:
		if (gpu->queues[op->target].head <= op->position)
			return false;
		/* fall through */
	case EVENT:
	case HOST:
		complete(gpu, stream);
		return true;
	case COLLECTIVE:
	case SEND:
	case RECV:
		if (!op->group)
			return false;
		arrive(gpu, stream);
		op->group = 0;
		return true;
	default:
		return false;
	}
}

static void settle(struct gpu *gpu)
{
	bool changed;
	uint32_t i;

	do {
		changed = false;
		for (i = gpu->busy_count; i-- > 0;)
			if (i < gpu->busy_count && settle_one(gpu, gpu->busy[i]))
				changed = true;
	} while (changed);
}

static bool is_kernel(const struct op *op)
{
	return op->kind <= DTOD;
}

/* The process whose kernels run on a device now: slices go round among those that have any. */
static uint32_t choose_owner(struct gpu *gpu, struct device *device, uint64_t wanting)
{
	bool others = wanting & (wanting - 1);
	uint32_t i;

	if (!wanting)
		return NONE;
	if (device->owner < PROCESSES && (wanting >> device->owner & 1) && (!others || gpu->now_ns < device->slice_end_ns))
		return device->owner;
	for (i = 1; i <= PROCESSES; i++)
		if (wanting >> (device->owner + i) % PROCESSES & 1)
			break;
	device->owner = (device->owner + i) % PROCESSES;
	device->slice_end_ns = gpu->now_ns + SLICE_NS;
	return device->owner;
}

/* Kernels of one process run together while their shares fit: those begun go on, others start in the order of queueing. */
static void run_kernels(struct gpu *gpu, uint32_t process, struct work *works, uint32_t count)
{
	double taken = 0;
	uint32_t i;

	for (i = 0; i < count; i++)
		if (is_kernel(works[i].op) && gpu->queues[works[i].stream].process == process && works[i].op->start_ns) {
			works[i].rate = 1;
			taken += works[i].op->share;
		}
	for (;;) {
		struct work *first = NULL;

		for (i = 0; i < count; i++)
			if (is_kernel(works[i].op) && gpu->queues[works[i].stream].process == process && !works[i].op->start_ns &&
			    (!first || works[i].op->ticket < first->op->ticket))
				first = &works[i];
		if (!first || (taken > 0 && taken + first->op->share > 1 + 1e-9))
			return;
		first->op->start_ns = gpu->now_ns;
		first->rate = 1;
		taken += first->op->share;
	}
}

/* Fill in what is at work now and at which rates; return when a slice ends, NEVER if none matters. */
static int64_t plan(struct gpu *gpu, struct work *works, uint32_t *count_out)
{
	uint32_t copies[DEVICES][2] = {0}, count = 0, i;
	uint64_t wanting[DEVICES] = {0};
	int64_t slice_end_ns = NEVER;

	for (i = 0; i < gpu->busy_count; i++) {
		uint32_t stream = gpu->busy[i], process = gpu->queues[stream].process, device = gpu->processes[process].device;
		struct op *op = head(gpu, stream);

		if (op->kind == WAIT || op->kind == EVENT || op->kind == HOST || !is_ready(gpu, stream))
			continue;
		if (op->kind >= COLLECTIVE && !op->start_ns && !is_met(gpu, op))
			continue;
		works[count++] = (struct work){stream, op, op->kind >= COLLECTIVE};
		if (is_kernel(op))
			wanting[device] |= 1ULL << process;
		else if (!op->start_ns)
			op->start_ns = gpu->now_ns;
		if (op->kind == HTOD || op->kind == DTOH)
			copies[device][op->kind == DTOH]++;
	}
	for (i = 0; i < count; i++) {
		const struct op *op = works[i].op;

		if (op->kind == HTOD || op->kind == DTOH) {
			uint32_t device = gpu->processes[gpu->queues[works[i].stream].process].device;

			works[i].rate = fmin(op->rate, PCIE_BYTES_PER_NS / copies[device][op->kind == DTOH]);
		}
	}
	for (i = 0; i < DEVICES; i++) {
		uint32_t owner = choose_owner(gpu, &gpu->devices[i], wanting[i]);

		if (owner == NONE)
			continue;
		run_kernels(gpu, owner, works, count);
		if (wanting[i] & (wanting[i] - 1) && gpu->devices[i].slice_end_ns < slice_end_ns)
			slice_end_ns = gpu->devices[i].slice_end_ns;
	}
	*count_out = count;
	return slice_end_ns;
}

static int64_t first_change(const struct gpu *gpu, const struct work *works, uint32_t count, int64_t change_ns)
{
	uint32_t i;

	for (i = 0; i < count; i++)
		if (works[i].rate > 0) {
			int64_t end_ns = gpu->now_ns + (int64_t)ceil(fmax(works[i].op->left, 1e-3) / works[i].rate);

			change_ns = end_ns < change_ns ? end_ns : change_ns;
		}
	return change_ns;
}

/* Work out what happens up to `to_ns`. */
void advance(struct gpu *gpu, int64_t to_ns)
{
	struct work works[STREAMS];
	uint32_t count, i;

	settle(gpu);
	while (gpu->now_ns < to_ns && gpu->busy_count) {
		int64_t slice_end_ns = plan(gpu, works, &count), change_ns = first_change(gpu, works, count, slice_end_ns);
		int64_t until_ns = change_ns < to_ns ? change_ns : to_ns;

		for (i = 0; i < count; i++)
			works[i].op->left -= works[i].rate * (double)(until_ns - gpu->now_ns);
		gpu->now_ns = until_ns;
		for (i = 0; i < count; i++)
			if (works[i].rate > 0 && works[i].op->left < 1e-3)
				complete(gpu, works[i].stream);
		settle(gpu);
	}
	if (gpu->now_ns < to_ns)
		gpu->now_ns = to_ns;
}

/* When something next changes if nothing is queued; NEVER if nothing is at work. */
int64_t next_change_ns(struct gpu *gpu)
{
	struct work works[STREAMS];
	uint32_t count;
	int64_t slice_end_ns = plan(gpu, works, &count);

	return first_change(gpu, works, count, slice_end_ns);
}

/* Queue an operation, from now on; false when the stream's queue is full. */
bool push(struct gpu *gpu, uint32_t stream, const struct op *op)
{
	struct queue *queue = &gpu->queues[stream];
	struct op *new = op_at(gpu, stream, queue->tail);

	if (queue->tail - queue->head >= QUEUE)
		return false;
	*new = *op;
	new->ticket = gpu->processes[queue->process].tickets++;
	new->queued_ns = gpu->now_ns;
	new->start_ns = 0;
	new->left = new->work;
	if (op->kind == EVENT) {
		gpu->events[op->target].stream = stream;
		gpu->events[op->target].position = queue->tail;
		gpu->events[op->target].end_ns = 0;
	}
	queue->tail++;
	if (!queue->busy) {
		queue->busy = true;
		gpu->busy[gpu->busy_count++] = stream;
	}
	return true;
}

/* A slot is free once all who joined have left it. */
void leave_communicator(struct gpu *gpu, uint32_t communicator, uint32_t rank)
{
	struct communicator *comm = &gpu->communicators[communicator];
	uint32_t i;

	comm->members[rank] = NONE;
	for (i = 0; i < RANKS; i++)
		if (comm->members[i] != NONE)
			return;
	comm->ranks = 0;
	comm->generation++;
}

/* A process is gone: so is its work. Its ranks never come to a collective again. */
void drop(struct gpu *gpu, uint32_t process)
{
	uint32_t i, rank;

	for (i = 0; i < STREAMS; i++)
		if (gpu->queues[i].process == process) {
			gpu->queues[i].head = gpu->queues[i].tail;
			gpu->queues[i].closed = true;
			remove_busy(gpu, i);
		}
	for (i = 0; i < EVENTS; i++)
		if (gpu->events[i].process == process)
			gpu->events[i].process = NONE;
	for (i = 0; i < COMMUNICATORS; i++)
		for (rank = 0; rank < gpu->communicators[i].ranks; rank++)
			if (gpu->communicators[i].members[rank] == process)
				leave_communicator(gpu, i, rank);
	gpu->processes[process].pid = 0;
}

/* The holder of the lock died: what it may have left half done is the list of busy streams. */
void repair(struct gpu *gpu)
{
	uint32_t i;

	gpu->busy_count = 0;
	for (i = 0; i < STREAMS; i++) {
		struct queue *queue = &gpu->queues[i];

		queue->busy = queue->process != NONE && queue->head != queue->tail;
		if (queue->busy)
			gpu->busy[gpu->busy_count++] = i;
	}
}
