/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Queueing operations on streams, and waiting for them.
 *
 * A wait sleeps until what it waits for could be over at the earliest, and looks again: others' work can only delay it. The
 * real driver polls instead, as this one does under GPUTAIL_SIM_SPIN=1.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

void burn_until(int64_t until_ns)
{
	while (now_ns() < until_ns)
		;
}

void sleep_until(int64_t until_ns)
{
	static __thread bool precise;
	struct timespec time = {until_ns / 1000000000, until_ns % 1000000000};

	if (!precise) {
		prctl(PR_SET_TIMERSLACK, 1);
		precise = true;
	}
	while (now_ns() < until_ns)
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
}

/* Until the given time, but no longer than a process's end or an aborted communicator may go unnoticed. */
void wait_a_moment(int64_t until_ns)
{
	static int spins = -1;
	int64_t now = now_ns();

	if (spins < 0) {
		const char *spin = getenv("GPUTAIL_SIM_SPIN");

		spins = spin && *spin == '1';
	}
	if (until_ns > now + MS)
		until_ns = now + MS;
	if (until_ns < now + US)
		until_ns = now + US;
	if (spins)
		burn_until(until_ns);
	else
		sleep_until(until_ns);
}

bool is_done(const struct mark *mark)
{
	const struct queue *queue = &gpu->queues[mark->queue];
	const struct op *op = op_at(gpu, mark->queue, mark->position);

	if (queue->head != mark->position)
		return queue->head > mark->position;
	return mark->left > 0 && op->start_ns && op->left <= mark->left;
}

static double least_ns(const struct op *op, double left)
{
	if (op->kind == HTOD || op->kind == DTOH)
		return (op->left - left) / op->rate;
	return op->left - left;
}

/* The earliest time at which a mark that is not done can be. */
static int64_t earliest_ns(const struct mark *mark)
{
	double sum = 0;
	uint64_t position;

	for (position = gpu->queues[mark->queue].head; position < mark->position; position++)
		sum += least_ns(op_at(gpu, mark->queue, position), 0);
	if (mark->left < op_at(gpu, mark->queue, position)->left)
		sum += least_ns(op_at(gpu, mark->queue, position), mark->left);
	return gpu->now_ns + (int64_t)sum;
}

void wait_for(const struct mark *marks, unsigned int count)
{
	unsigned int done = 0;

	for (;;) {
		int64_t until_ns, change_ns;

		lock_gpu();
		while (done < count && is_done(&marks[done]))
			done++;
		if (done == count)
			break;
		until_ns = earliest_ns(&marks[done]);
		change_ns = next_change_ns(gpu);
		unlock_gpu();
		wait_a_moment(change_ns != NEVER && change_ns > until_ns ? change_ns : until_ns);
	}
	unlock_gpu();
}

/* Everything this process has queued so far. */
void wait_for_device(void)
{
	static __thread struct mark marks[STREAMS];
	unsigned int count = 0;
	uint32_t i;

	lock_gpu();
	for (i = 0; i < gpu->busy_count; i++) {
		const struct queue *queue = &gpu->queues[gpu->busy[i]];

		if (queue->process == self)
			marks[count++] = (struct mark){gpu->busy[i], queue->tail - 1, 0};
	}
	unlock_gpu();
	if (count)
		wait_for(marks, count);
}

/* Queue operations all at once, waiting for room; mark is the last of them. At most QUEUE. */
CUresult queue_group(CUstream stream, const struct op *ops, unsigned int count, struct mark *mark)
{
	struct queue *queue = &gpu->queues[stream->queue];
	unsigned int i;

	for (;;) {
		struct mark room;

		lock_gpu();
		if (queue->tail - queue->head + count <= QUEUE)
			break;
		room = (struct mark){stream->queue, queue->tail + count - QUEUE - 1, 0};
		unlock_gpu();
		wait_for(&room, 1);
	}
	for (i = 0; i < count; i++)
		push(gpu, stream->queue, &ops[i]);
	if (mark)
		*mark = (struct mark){stream->queue, queue->tail - 1, 0};
	unlock_gpu();
	return SUCCESS;
}

CUresult queue_op(CUstream stream, const struct op *op, struct mark *mark)
{
	return queue_group(stream, op, 1, mark);
}
