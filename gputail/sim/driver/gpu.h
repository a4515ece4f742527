/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The simulated GPU: what lies in the memory shared by its processes, and what may be done to it.
 *
 * The GPU has no thread of its own. Whoever holds the lock calls `advance`, which works out what happened since the GPU was
 * last looked at. Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef GPUTAIL_SIM_GPU_H
#define GPUTAIL_SIM_GPU_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PROCESSES 64
#define STREAMS 512
#define QUEUE 1024 /* operations a stream holds before a launch blocks */
#define EVENTS 16384
#define COMMUNICATORS 32
#define RANKS 16
#define DEVICES 8
#define NONE UINT32_MAX
#define NEVER INT64_MAX

#define SLICE_NS 2000000
#define MS 1000000
#define US 1000
#define PCIE_BYTES_PER_NS 25.0
#define PAGEABLE_BYTES_PER_NS 8.0
#define DEVICE_BYTES_PER_NS 2000.0
#define LINK_BYTES_PER_NS 100.0
#define LINK_START_NS 20000
#define DEVICE_MEMORY_BYTES (80ULL << 30)

enum kind { KERNEL, GRAPH, MEMSET, DTOD, HTOD, DTOH, EVENT, WAIT, HOST, COLLECTIVE, SEND, RECV };

/* One operation of a stream. */
struct op {
	uint64_t ticket;     /* its place in the order in which its process queued */
	int64_t queued_ns;
	int64_t start_ns;    /* 0 until it starts */
	double work;	     /* nanoseconds alone on the GPU; bytes of a copy */
	double left;
	double share;	     /* of the GPU, for what runs as a kernel */
	double rate;	     /* at most, bytes per nanosecond, of a copy */
	uint64_t position;   /* WAIT: in the stream `target`; COLLECTIVE, SEND, RECV: sequence number */
	uint32_t target;     /* EVENT: slot; WAIT: stream; COLLECTIVE, SEND, RECV: communicator */
	uint32_t generation; /* of the communicator: one since destroyed holds nothing up */
	uint16_t rank, peer;
	uint16_t group;	     /* how many operations from this one on reach the device together */
	uint8_t kind;
};

/* A stream's queue: operations head to tail, both of which only ever grow, also when the slot is used again. */
struct queue {
	uint64_t head, tail;
	uint64_t handle;     /* what its process calls it, for the log */
	uint32_t process;    /* NONE: free */
	bool nonblocking, legacy, busy;
	bool closed;	     /* destroyed: free once empty */
};

struct process {
	pid_t pid;	     /* 0: free */
	uint64_t start_time; /* of /proc/PID/stat: tells a reused pid */
	uint64_t tickets;
	uint64_t allocated_bytes;
	uint32_t device;
	uint32_t legacy;     /* its legacy default stream */
};

struct event {
	uint32_t process;    /* NONE: free */
	uint32_t stream;     /* of its latest record; NONE: never recorded */
	uint64_t position;
	int64_t end_ns;
};

struct communicator {
	char id[128];
	uint32_t generation; /* of the slot's use */
	uint32_t ranks;	     /* 0: free */
	uint32_t joined;
	bool aborted;
	uint32_t members[RANKS]; /* processes; NONE: not yet joined, or left */
	uint64_t reached[RANKS]; /* collectives that a rank's streams have come to */
	uint64_t sent[RANKS][RANKS], received[RANKS][RANKS]; /* [own rank][peer] */
	uint64_t split_calls;
	int colors[2][RANKS], keys[2][RANKS]; /* of the last two splits: no rank is further ahead of another */
};

struct device {
	uint32_t owner;	     /* the process whose slice it is */
	int64_t slice_end_ns;
};

struct gpu {
	uint64_t version;
	pthread_mutex_t mutex;
	int64_t now_ns;	     /* the time up to which all is worked out */
	int64_t reaped_ns;
	uint32_t busy[STREAMS], busy_count; /* streams with operations, in no order */
	char log[256];
	off_t log_size; /* of its whole lines */
	struct device devices[DEVICES];
	struct process processes[PROCESSES];
	struct queue queues[STREAMS];
	struct event events[EVENTS];
	struct communicator communicators[COMMUNICATORS];
	struct op ops[STREAMS][QUEUE];
};

static inline struct op *op_at(struct gpu *gpu, uint32_t stream, uint64_t position)
{
	return &gpu->ops[stream][position % QUEUE];
}

/* timeline.c: all with the lock held */
void advance(struct gpu *gpu, int64_t to_ns);
int64_t next_change_ns(struct gpu *gpu);
bool push(struct gpu *gpu, uint32_t stream, const struct op *op);
void drop(struct gpu *gpu, uint32_t process);
void repair(struct gpu *gpu);
void leave_communicator(struct gpu *gpu, uint32_t communicator, uint32_t rank);

/* shared.c */
extern struct gpu *gpu; /* NULL until attach() */
extern uint32_t self;	/* this process's slot */
int attach(void);
int64_t now_ns(void);
void lock_gpu(void);	/* ... and advance to now */
void unlock_gpu(void);
void log_op(const struct gpu *gpu, uint32_t stream, const struct op *op);
void flush_log(struct gpu *gpu);

#endif
