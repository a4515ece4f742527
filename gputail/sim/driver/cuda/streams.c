/* SPDX-License-Identifier: GPL-2.0 */
/* Streams: the legacy default stream, each thread's own, and those created; waiting for them and asking after them. */
#include "driver.h"

#include <stdlib.h>

#define STREAM_LEGACY ((CUstream)1)
#define STREAM_PER_THREAD ((CUstream)2)
#define NON_BLOCKING 1

struct CUstream_st legacy_stream;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t thread_stream;

static void free_thread_stream(void *stream)
{
	if (gpu)
		close_stream(stream);
	free(stream);
}

static void make_key(void)
{
	pthread_key_create(&thread_stream, free_thread_stream);
}

CUresult open_stream(CUstream stream, unsigned int flags)
{
	uint32_t i;

	lock_gpu();
	for (i = 0; i < STREAMS && gpu->queues[i].process != NONE; i++)
		;
	if (i < STREAMS) {
		uint64_t tail = gpu->queues[i].tail;

		gpu->queues[i] = (struct queue){tail, tail, (uintptr_t)stream, self, .nonblocking = flags & NON_BLOCKING};
		*stream = (struct CUstream_st){.queue = i, .flags = flags};
	}
	unlock_gpu();
	return i < STREAMS ? SUCCESS : OUT_OF_MEMORY;
}

/* What is queued still runs. */
void close_stream(CUstream stream)
{
	struct queue *queue = &gpu->queues[stream->queue];

	lock_gpu();
	queue->closed = true;
	if (!queue->busy)
		queue->process = NONE;
	unlock_gpu();
}

static CUresult find_thread_stream(CUstream *stream)
{
	CUstream own;
	CUresult result = SUCCESS;

	pthread_once(&once, make_key);
	own = pthread_getspecific(thread_stream);
	if (!own) {
		own = malloc(sizeof(*own));
		result = own ? open_stream(own, 0) : OUT_OF_MEMORY;
		if (result)
			free(own);
		else
			pthread_setspecific(thread_stream, own);
	}
	*stream = own;
	return result;
}

/* Replace a handle that stands for a default stream by the stream. */
CUresult find_stream(CUstream *stream, bool per_thread)
{
	run_hook();
	if (!gpu)
		return NOT_INITIALIZED;
	if (*stream == STREAM_PER_THREAD || (!*stream && per_thread))
		return find_thread_stream(stream);
	if (!*stream || *stream == STREAM_LEGACY) {
		legacy_stream.queue = gpu->processes[self].legacy;
		*stream = &legacy_stream;
	}
	return SUCCESS;
}

static CUresult create(CUstream *stream, unsigned int flags, int priority)
{
	CUstream new;
	CUresult result;

	if (!gpu || !stream || flags > NON_BLOCKING)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	new = malloc(sizeof(*new));
	result = new ? open_stream(new, flags) : OUT_OF_MEMORY;
	if (result) {
		free(new);
		return result;
	}
	new->priority = priority;
	*stream = new;
	return SUCCESS;
}

static CUresult destroy(CUstream stream)
{
	if (!gpu || (uintptr_t)stream <= 2)
		return gpu ? INVALID_HANDLE : NOT_INITIALIZED;
	close_stream(stream);
	free(stream);
	return SUCCESS;
}

static CUresult synchronize(CUstream stream, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);
	struct mark mark;

	if (result)
		return result;
	if (stream->capture)
		return STREAM_CAPTURE_UNSUPPORTED;
	lock_gpu();
	mark = (struct mark){stream->queue, gpu->queues[stream->queue].tail - 1, 0};
	result = gpu->queues[stream->queue].busy;
	unlock_gpu();
	if (result)
		wait_for(&mark, 1);
	return SUCCESS;
}

static CUresult query(CUstream stream, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);

	if (result)
		return result;
	lock_gpu();
	result = gpu->queues[stream->queue].busy ? NOT_READY : SUCCESS;
	unlock_gpu();
	return result;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned int flags) { return create(stream, flags, 0); }

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
	return create(stream, flags, priority);
}

API CUresult cuStreamDestroy(CUstream stream) { return destroy(stream); }
API CUresult cuStreamDestroy_v2(CUstream stream) { return destroy(stream); }
API CUresult cuStreamSynchronize(CUstream stream) { return synchronize(stream, false); }
API CUresult cuStreamSynchronize_ptsz(CUstream stream) { return synchronize(stream, true); }
API CUresult cuStreamQuery(CUstream stream) { return query(stream, false); }
API CUresult cuStreamQuery_ptsz(CUstream stream) { return query(stream, true); }

static CUresult get_flags(CUstream stream, unsigned int *flags, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);

	if (!result)
		*flags = stream->flags;
	return result;
}

API CUresult cuStreamGetFlags(CUstream stream, unsigned int *flags) { return get_flags(stream, flags, false); }
API CUresult cuStreamGetFlags_ptsz(CUstream stream, unsigned int *flags) { return get_flags(stream, flags, true); }
