/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What crosses from the kernel to gputail/events.py, byte for byte. The numpy dtypes there mirror these structs;
 * tests/unit/test_events.py compares every offset.
 */
#ifndef GPUTAIL_EVENTS_H
#define GPUTAIL_EVENTS_H

#define GPUTAIL_NAME_BYTES 224

#define OFF_CPU_CALL 200 /* call number of a stretch off the CPU; 201 is user space's, for a change of tier */

#define MEMBER_CALL 338 /* a further communicator that one call has made */
#define MAX_MEMBERS 16 /* of which so many are told, the first included */

/* flags of struct call_event */
#define CALL_AFTER_GAP 1   /* records of this thread before this one were lost */
#define CALL_ARGS_UNREAD 2 /* an argument lay in memory that could not be read: handle, size or block may be 0 */
#define CALL_PER_THREAD 4  /* the _ptsz or _ptds variant: stream 0 was turned into CU_STREAM_PER_THREAD (2) */
#define CALL_ENTRY_ONLY 8  /* only the entry was probed: duration_ns and result are not known */

/* One finished driver or NCCL call, or one stretch of a traced thread off the CPU (call == CALL_OFF_CPU). */
struct call_event {
	__u64 start_ns;    /* CLOCK_MONOTONIC at entry; off-CPU: when it was switched out */
	__u64 duration_ns; /* entry to return; off-CPU: until it ran again */
	__u64 handle;      /* what the call is about, see gputail/probes/table.py; off-CPU: prev_state */
	__u64 stream;      /* CUstream; off-CPU: tid that ran just before on that CPU */
	__u64 size;        /* bytes, or blocks in the grid of a launch; off-CPU: when it was woken, 0 if it never slept */
	__u32 tgid;
	__u32 tid;
	__s32 result; /* CUresult or ncclResult_t */
	__u32 block;  /* threads in a block of a launch; off-CPU: tid of the waker */
	__u16 call;   /* number in gputail/probes/table.py */
	__u16 cpu;    /* CPU of the return */
	__u16 flags;
	__u8 depth; /* traced calls of this thread that were open around this one */
	__u8 reserved;
};

/* kinds of struct name_event */
#define NAME_KERNEL 1 /* handle is a CUfunction or CUkernel, text its mangled name */
#define NAME_THREAD 2 /* text is the comm of a thread at its first traced call */

/* flags of struct name_event */
#define NAME_TRUNCATED 1

struct name_event {
	__u64 time_ns;
	__u64 handle;
	__u32 tgid;
	__u32 tid;
	__u16 kind;
	__u16 length; /* bytes of text that hold the name */
	__u16 flags;
	__u16 reserved;
	char text[GPUTAIL_NAME_BYTES];
};

_Static_assert(sizeof(struct call_event) == 64, "call_event is 64 bytes on the wire");
_Static_assert(sizeof(struct name_event) == 32 + GPUTAIL_NAME_BYTES, "name_event is 256 bytes on the wire");

/* Cells of the per-CPU counters: what the kernel side could not record, by stage. */
enum counter {
	COUNTER_RING_FULL,        /* finished calls whose record did not fit into the ring */
	COUNTER_IN_FLIGHT_FULL,   /* calls of threads for which the in-flight map had no room */
	COUNTER_TOO_DEEP,         /* calls nested deeper than the in-flight stack holds */
	COUNTER_ENTRY_ORPHANED,   /* entries whose return never came: longjmp, thread exit, a call open at detach */
	COUNTER_RETURN_ORPHANED,  /* returns whose entry was not seen: attached in the middle of the call */
	COUNTER_NAME_LOST,        /* names that could not be read, or did not fit into the ring */
	COUNTER_OFF_CPU_FULL,     /* switches of threads for which the off-CPU map had no room */
	COUNTER_RATE_BOUND,       /* finished calls of threads that make more of them than one may */
	COUNTERS,
};

#endif
