/* SPDX-License-Identifier: GPL-2.0 */
/* Events: recorded on a stream, waited for by the host or by other streams, and the time between two. */
#include "driver.h"

#include <stdlib.h>

static CUresult create(CUevent *event, unsigned int flags)
{
	CUevent new;
	uint32_t i;

	if (!gpu || !event)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	new = calloc(1, sizeof(*new));
	if (!new)
		return OUT_OF_MEMORY;
	lock_gpu();
	for (i = 0; i < EVENTS && gpu->events[i].process != NONE; i++)
		;
	if (i < EVENTS)
		gpu->events[i] = (struct event){.process = self, .stream = NONE};
	unlock_gpu();
	*new = (struct CUevent_st){.slot = i, .flags = flags};
	*event = new;
	if (i < EVENTS)
		return SUCCESS;
	free(new);
	return OUT_OF_MEMORY;
}

static CUresult destroy(CUevent event)
{
	if (!gpu || !event)
		return gpu ? INVALID_HANDLE : NOT_INITIALIZED;
	lock_gpu();
	gpu->events[event->slot] = (struct event){.process = NONE, .stream = NONE};
	unlock_gpu();
	free(event);
	return SUCCESS;
}

static CUresult record(CUevent event, CUstream stream, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);
	struct op op = {.kind = EVENT};

	if (result || !event)
		return result ? result : INVALID_HANDLE;
	event->capture = stream->capture;
	if (stream->capture)
		return SUCCESS;
	op.target = event->slot;
	return queue_op(stream, &op, NULL);
}

/* Whether an event is to be waited for, and the place of its latest record. */
static bool find_mark(CUevent event, struct mark *mark)
{
	const struct event *shared = &gpu->events[event->slot];
	bool pending = false;

	lock_gpu();
	if (shared->stream != NONE) {
		*mark = (struct mark){shared->stream, shared->position, 0};
		pending = !is_done(mark);
	}
	unlock_gpu();
	return pending;
}

static CUresult stream_wait(CUstream stream, CUevent event, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);
	struct op op = {.kind = WAIT};
	struct mark mark;

	if (result || !event)
		return result ? result : INVALID_HANDLE;
	if (event->capture) {
		record_too(event->capture, stream);
		return SUCCESS;
	}
	if (stream->capture || !find_mark(event, &mark))
		return SUCCESS;
	op.target = mark.queue;
	op.position = mark.position;
	return queue_op(stream, &op, NULL);
}

API CUresult cuEventCreate(CUevent *event, unsigned int flags) { return create(event, flags); }
API CUresult cuEventDestroy(CUevent event) { return destroy(event); }
API CUresult cuEventDestroy_v2(CUevent event) { return destroy(event); }
API CUresult cuEventRecord(CUevent event, CUstream stream) { return record(event, stream, false); }
API CUresult cuEventRecord_ptsz(CUevent event, CUstream stream) { return record(event, stream, true); }

API CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags UNUSED)
{
	return record(event, stream, false);
}

API CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned int flags UNUSED)
{
	return record(event, stream, true);
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags UNUSED)
{
	return stream_wait(stream, event, false);
}

API CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned int flags UNUSED)
{
	return stream_wait(stream, event, true);
}

API CUresult cuEventSynchronize(CUevent event)
{
	struct mark mark;

	if (!gpu || !event)
		return gpu ? INVALID_HANDLE : NOT_INITIALIZED;
	if (find_mark(event, &mark))
		wait_for(&mark, 1);
	return SUCCESS;
}

API CUresult cuEventQuery(CUevent event)
{
	struct mark mark;

	if (!gpu || !event)
		return gpu ? INVALID_HANDLE : NOT_INITIALIZED;
	return find_mark(event, &mark) ? NOT_READY : SUCCESS;
}

static CUresult elapsed(float *ms, CUevent start, CUevent end)
{
	CUresult result = SUCCESS;

	if (!gpu || !start || !end)
		return gpu ? INVALID_HANDLE : NOT_INITIALIZED;
	lock_gpu();
	if (gpu->events[start->slot].stream == NONE || gpu->events[end->slot].stream == NONE)
		result = INVALID_HANDLE;
	else if (!gpu->events[start->slot].end_ns || !gpu->events[end->slot].end_ns)
		result = NOT_READY;
	else
		*ms = (float)(gpu->events[end->slot].end_ns - gpu->events[start->slot].end_ns) / MS;
	unlock_gpu();
	return result;
}

API CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) { return elapsed(ms, start, end); }
API CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) { return elapsed(ms, start, end); }
