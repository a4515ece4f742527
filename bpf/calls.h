/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Calls in flight, and the record of each finished one. gputail/probes/kernel.py joins this file, cuda.c, nccl.c and
 * host.c into one program, since BCC rewrites map accesses only in the main file.
 *
 * A call's record lies in the map from its entry on: entry fills it, return completes it and hands that same memory
 * to the ring. So a traced call costs one map look-up at entry and one at return, no insert and no delete, and the
 * programs need next to no stack (a program with 64 bytes of stack or more gets a per-CPU "private" one since Linux
 * 6.13, which does not go together with preemptible uprobes).
 */
#include <uapi/linux/ptrace.h>
#include "events.h"

#define FRAMES 4 /* nested calls that can be open in one thread: a framework's NCCL call reaches 3 */

#define ARGS 16  /* room for arguments, a power of two */

/* Records that one thread may make in a span of time (2^SPAN_SHIFT ns, about 67 ms): what keeps one that calls the driver in
 * an endless loop from filling the rings of its CPU, and the time of who reads them. */
#ifndef MAX_IN_SPAN
#define MAX_IN_SPAN 32768
#endif
#define SPAN_SHIFT 26

#ifndef MAX_THREADS
#define MAX_THREADS 16384
#endif

/* enum Kind in gputail/probes/table.py: how the arguments are read */
enum kind {
	KIND_PLAIN,
	KIND_LAUNCH,
	KIND_LAUNCH_CONFIG,
	KIND_LAUNCH_LIST,
	KIND_COPY_2D,
	KIND_COPY_3D,
	KIND_COLLECTIVE,
	KIND_MEMBERS,
};

/* The cookie of an attached address, packed by gputail/probes/table.py. */
#define COOKIE_CALL(cookie) ((cookie) & 0xffff)
#define COOKIE_KIND(cookie) (((cookie) >> 16) & 15)
#define COOKIE_HANDLE(cookie) (((cookie) >> 20) & 15)
#define COOKIE_STREAM(cookie) (((cookie) >> 24) & 15)
#define COOKIE_SIZE(cookie) (((cookie) >> 28) & 15)
#define COOKIE_TIMES(cookie) (((cookie) >> 32) & 15)
#define COOKIE_SHIFT(cookie) (((cookie) >> 36) & 15)
#define COOKIE_BLOCK(cookie) (((cookie) >> 40) & 15)
#define COOKIE_OUT(cookie) (((cookie) >> 44) & 15)
#define COOKIE_NAME(cookie) (((cookie) >> 48) & 15)
#define COOKIE_PER_THREAD(cookie) (((cookie) >> 52) & 1)
#define COOKIE_NARROW(cookie) (((cookie) >> 53) & 1)
#define COOKIE_STACK_ARGS(cookie) (((cookie) >> 54) & 1)
#define COOKIE_ID(cookie) (((cookie) >> 55) & 15)

#define STREAM_LEGACY 1     /* CU_STREAM_LEGACY: the default stream by its other name */
#define STREAM_PER_THREAD 2 /* CU_STREAM_PER_THREAD */

struct frame {
	struct call_event event; /* first: what goes to the ring */
	u64 sp;                  /* stack pointer at entry: tells the call's frame from all others */
	u64 out;                 /* where the call will leave its handle, 0 if it does not */
	u64 name;                /* the string that names that handle, 0 if there is none */
	u64 members;             /* handles that the call will leave there, if more than one */
};

struct thread {
	u32 depth;       /* frames in use */
	u16 gap;         /* whether records were lost since the last one that reached the ring */
	u16 is_named;    /* whether its comm was sent */
	u32 span;        /* the span of time that its last record was made in */
	u32 in_span;     /* how many records it has made in that */
	u64 args[ARGS];  /* of the call being entered: of use only within its entry program */
	u64 scratch[5];  /* likewise: parts of its argument structs */
	struct frame frames[FRAMES];
};

BPF_TABLE("hash", u64, struct thread, threads, MAX_THREADS);
BPF_TABLE("array", u32, struct thread, blank_thread, 1);
BPF_TABLE("hash", u64, struct name_event, names_open, 1024);
BPF_TABLE("array", u32, struct name_event, blank_name, 1);
BPF_TABLE("percpu_array", u32, u64, counters, COUNTERS);
BPF_PERF_OUTPUT(calls_ring);
BPF_PERF_OUTPUT(names_ring);

#ifdef ONLY_TARGETS
/* Processes that were asked for, by tgid; host.c adds their children. */
BPF_TABLE("hash", u32, u8, targets, 16384);

static __always_inline bool is_target(u64 id)
{
	u32 tgid = id >> 32;

	return targets.lookup(&tgid) != NULL;
}
#else
static __always_inline bool is_target(u64 id)
{
	return true;
}
#endif

/* Keep the compiler from computing what derives from a pointer ahead of its use, which would have to lie on the stack. */
#define FORGET(pointer) asm volatile("" : "+r"(pointer))

static u64 (*get_attach_cookie)(void *ctx) = (void *)174; /* BPF_FUNC_get_attach_cookie, unknown to old BCC */

static __always_inline void count(u32 stage, u64 how_many)
{
	u64 *cell = counters.lookup(&stage);

	if (cell)
		*cell += how_many;
}

/*
 * The registers at a probe. Loads from the context are spelled in assembly, since the compiler likes to merge them
 * into one load at a computed address, which the verifier refuses.
 */
#define CONTEXT(ctx, field) \
	({ \
		u64 __value; \
		asm volatile("%0 = *(u64 *)(%1 + %2)" : "=r"(__value) : "r"(ctx), "i"(__builtin_offsetof(struct pt_regs, field))); \
		__value; \
	})

#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)

#define ENTRY_SP(ctx) CONTEXT(ctx, sp)
#define ENTRY_SP_AT_RETURN(ctx) CONTEXT(ctx, sp)
#define RESULT(ctx) CONTEXT(ctx, regs[0])
#define REGISTER_ARGS 8
#define STACK_ARGS(sp) (sp)

static __always_inline void read_registers(struct pt_regs *ctx, u64 *args)
{
	args[0] = CONTEXT(ctx, regs[0]);
	args[1] = CONTEXT(ctx, regs[1]);
	args[2] = CONTEXT(ctx, regs[2]);
	args[3] = CONTEXT(ctx, regs[3]);
	args[4] = CONTEXT(ctx, regs[4]);
	args[5] = CONTEXT(ctx, regs[5]);
	args[6] = CONTEXT(ctx, regs[6]);
	args[7] = CONTEXT(ctx, regs[7]);
}

#else

#define ENTRY_SP(ctx) CONTEXT(ctx, sp)
#define ENTRY_SP_AT_RETURN(ctx) (CONTEXT(ctx, sp) - 8) /* the return took the return address off the stack */
#define RESULT(ctx) CONTEXT(ctx, ax)
#define REGISTER_ARGS 6
#define STACK_ARGS(sp) ((sp) + 8) /* the return address lies below them */

static __always_inline void read_registers(struct pt_regs *ctx, u64 *args)
{
	args[0] = CONTEXT(ctx, di);
	args[1] = CONTEXT(ctx, si);
	args[2] = CONTEXT(ctx, dx);
	args[3] = CONTEXT(ctx, cx);
	args[4] = CONTEXT(ctx, r8);
	args[5] = CONTEXT(ctx, r9);
}

#endif

/* Fetch the arguments of the call being entered, those on the stack only where the cookie says that they are wanted. */
static __always_inline void read_arguments(struct pt_regs *ctx, struct thread *thread, struct frame *frame, u64 cookie)
{
	read_registers(ctx, thread->args);
	if (COOKIE_STACK_ARGS(cookie) &&
	    bpf_probe_read_user(&thread->args[REGISTER_ARGS], 8 * (9 - REGISTER_ARGS), (void *)STACK_ARGS(frame->sp)))
		frame->event.flags |= CALL_ARGS_UNREAD;
}

/* Argument n, from 1. */
#define ARGUMENT(thread, n) ((thread)->args[((n) - 1) & (ARGS - 1)])

/* The mask is spelled in assembly, since the compiler drops one that it can prove needless and the verifier cannot. */
static __always_inline struct frame *frame_at(struct thread *thread, u64 index)
{
	asm volatile("%0 &= %1" : "+r"(index) : "i"(FRAMES - 1));
	return &thread->frames[index];
}

/* Copy a part of an argument struct into the scratch space; false and a flag in the record when it cannot be read. */
static __always_inline bool read_struct(struct thread *thread, struct frame *frame, u64 address, u32 bytes)
{
	if (!bpf_probe_read_user(thread->scratch, bytes, (void *)address))
		return true;
	frame->event.flags |= CALL_ARGS_UNREAD;
	return false;
}

/* Send the comm of the thread, or the name of what the call has looked up. */
static __always_inline void send_name(void *ctx, struct frame *frame, u16 kind)
{
	u64 id = bpf_get_current_pid_tgid();
	struct name_event *name;
	u32 zero = 0;
	int length;

	name = blank_name.lookup(&zero);
	if (!name || names_open.update(&id, name) || !(name = names_open.lookup(&id))) {
		count(COUNTER_NAME_LOST, 1);
		return;
	}
	name->time_ns = bpf_ktime_get_ns();
	name->tgid = id >> 32;
	name->tid = id;
	name->kind = kind;
	if (kind == NAME_THREAD) {
		name->handle = 0;
		bpf_get_current_comm(name->text, 16);
		name->length = 16;
	} else {
		name->handle = frame->event.handle;
		length = bpf_probe_read_user_str(name->text, GPUTAIL_NAME_BYTES, (void *)frame->name);
		name->length = length > 0 ? length - 1 : 0;
		name->flags = length == GPUTAIL_NAME_BYTES ? NAME_TRUNCATED : 0;
	}
	if (!name->length || names_ring.perf_submit(ctx, name, sizeof(*name)))
		count(COUNTER_NAME_LOST, 1);
	names_open.delete(&id);
}

/* The state of a thread that makes its first traced call. */
static __always_inline struct thread *new_thread(u64 id)
{
	struct thread *blank;
	u32 zero = 0;

	if (!is_target(id))
		return NULL;
	blank = blank_thread.lookup(&zero);
	if (!blank || threads.update(&id, blank)) {
		count(COUNTER_IN_FLIGHT_FULL, 1);
		return NULL;
	}
	return threads.lookup(&id);
}

/*
 * Drop the frames of calls that were left without returning (longjmp), and return how many are open. Stacks grow down,
 * so those are the frames below the stack pointer of a call that is entered or has just returned. At entry, so is one at
 * the same place for the same function; another function at the same place was jumped to from that one (a tail call),
 * and both will return.
 */
static __always_inline u64 unwind(struct thread *thread, u64 sp, u32 entered_call)
{
	u64 depth = thread->depth, before = depth;

#define DROP(index) \
	if (depth == (index) + 1 && \
	    (thread->frames[index].sp < sp || \
	     (thread->frames[index].sp == sp && thread->frames[index].event.call == entered_call))) \
		depth = index;
	DROP(3)
	DROP(2)
	DROP(1)
	DROP(0)
#undef DROP
	if (depth != before) {
		thread->depth = depth;
		count(COUNTER_ENTRY_ORPHANED, before - depth);
	}
	return depth;
}

/* Open a frame for the call being entered; NULL when as many are open as there is room for. */
static __always_inline struct frame *open_frame(struct pt_regs *ctx, struct thread *thread, u64 id, u64 cookie)
{
	u64 sp = ENTRY_SP(ctx), depth = unwind(thread, sp, COOKIE_CALL(cookie));
	struct frame *frame;

	if (depth >= FRAMES) {
		count(COUNTER_TOO_DEEP, 1);
		return NULL;
	}
	frame = frame_at(thread, depth);
	frame->sp = sp;
	frame->out = 0;
	frame->name = 0;
	frame->members = 0;
	frame->event.handle = 0;
	frame->event.stream = 0;
	frame->event.size = 0;
	frame->event.block = 0;
	frame->event.tgid = id >> 32;
	frame->event.tid = id;
	frame->event.call = COOKIE_CALL(cookie);
	frame->event.flags = 0;
	frame->event.depth = depth;
	return frame;
}

/* The arguments that are where the cookie says, for calls of every kind. */
static __always_inline void read_plain(struct thread *thread, struct frame *frame, u64 cookie)
{
	u64 size;

	FORGET(frame);
	if (COOKIE_HANDLE(cookie))
		frame->event.handle = ARGUMENT(thread, COOKIE_HANDLE(cookie));
	if (COOKIE_STREAM(cookie))
		frame->event.stream = ARGUMENT(thread, COOKIE_STREAM(cookie));
	if (COOKIE_BLOCK(cookie))
		frame->event.block = ARGUMENT(thread, COOKIE_BLOCK(cookie));
	if (COOKIE_OUT(cookie))
		frame->out = ARGUMENT(thread, COOKIE_OUT(cookie));
	if (COOKIE_NAME(cookie))
		frame->name = ARGUMENT(thread, COOKIE_NAME(cookie));
	FORGET(frame);
	if (COOKIE_SIZE(cookie)) {
		size = ARGUMENT(thread, COOKIE_SIZE(cookie));
		if (COOKIE_TIMES(cookie))
			size = COOKIE_NARROW(cookie) ? (u64)(u32)size * (u32)ARGUMENT(thread, COOKIE_TIMES(cookie))
						     : size * ARGUMENT(thread, COOKIE_TIMES(cookie));
		else if (COOKIE_NARROW(cookie))
			size = (u32)size;
		frame->event.size = size << COOKIE_SHIFT(cookie);
	}
}

/* The frame is complete: from here on the call is in flight. The clock is read last, so that the probe's own work is
 * not in the call's duration. */
static __always_inline void close_entry(struct thread *thread, struct frame *frame, u64 cookie)
{
	FORGET(frame);
	if (COOKIE_PER_THREAD(cookie)) {
		frame->event.flags |= CALL_PER_THREAD;
		if (frame->event.stream == 0)
			frame->event.stream = STREAM_PER_THREAD;
	}
	if (frame->event.stream == STREAM_LEGACY)
		frame->event.stream = 0;
	thread->depth = frame->event.depth + 1;
	frame->event.start_ns = bpf_ktime_get_ns();
}

/*
 * Before a function that a macro makes. A program is what lies in such a section, and BCC 0.18 puts the attribute where the
 * macro is used, so in front of the first of several functions only.
 */
#define PROGRAM(name) __attribute__((section(".bpf.fn." name)))

/* Without cookies the stack pointer alone has to tell. */
static __always_inline bool is_return_of(struct pt_regs *ctx, struct frame *frame)
{
#ifdef PROBES
	return true;
#else
	return frame->event.call == COOKIE_CALL(get_attach_cookie(ctx));
#endif
}

/* Hand a finished record to the ring, or count it as lost. */
static __always_inline void submit(void *ctx, struct thread *thread, struct frame *frame, u64 now)
{
	u32 span = now >> SPAN_SHIFT;

	if (thread->span != span) {
		thread->span = span;
		thread->in_span = 0;
	}
	if (++thread->in_span > MAX_IN_SPAN) {
		thread->gap = 1;
		count(COUNTER_RATE_BOUND, 1);
		return;
	}
	if (thread->gap)
		frame->event.flags |= CALL_AFTER_GAP;
	if (calls_ring.perf_submit(ctx, &frame->event, sizeof(frame->event))) {
		thread->gap = 1;
		count(COUNTER_RING_FULL, 1);
	} else {
		thread->gap = 0;
	}
}

/* Take a word into a hash of 64 bits. */
static __always_inline u64 mix(u64 hash, u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
	return hash ^ (hash >> 29);
}

#define NCCL_IN_PROGRESS 7 /* a communicator that is still being made in the background; its handle is there */

/* A record for each further communicator that the call has made; its own, the first's, is in the ring by now. */
static __always_inline void submit_members(void *ctx, struct thread *thread, struct frame *frame, u64 now)
{
	u32 rank;

	frame->event.call = MEMBER_CALL;
	frame->event.depth++;
#pragma clang loop unroll(disable)
	for (rank = 1; rank < MAX_MEMBERS; rank++) {
		if (rank >= frame->members)
			break;
		if (bpf_probe_read_user(&frame->event.handle, 8, (void *)(frame->out + 8 * rank)))
			break;
		frame->event.block = rank;
		submit(ctx, thread, frame, now);
	}
}

/* Complete the record of the call that returns, and hand it to the ring. */
int leave(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid(), sp = ENTRY_SP_AT_RETURN(ctx);
	struct thread *thread = threads.lookup(&id);
	struct frame *frame;
	u32 name_kind = 0;
	u64 depth;

	if (!thread) {
		if (is_target(id))
			count(COUNTER_RETURN_ORPHANED, 1);
		return 0;
	}
	depth = unwind(thread, sp, 0);
	frame = frame_at(thread, depth - 1);
	if (depth == 0 || frame->sp != sp || !is_return_of(ctx, frame)) {
		/* Below a full stack of frames it is one that its entry has counted as too deep. */
		if (thread->depth < FRAMES)
			count(COUNTER_RETURN_ORPHANED, 1);
		return 0;
	}
	thread->depth--;
	frame->event.duration_ns = now - frame->event.start_ns;
	frame->event.result = RESULT(ctx);
	frame->event.cpu = bpf_get_smp_processor_id();
	if (frame->out && (!frame->event.result || frame->event.result == NCCL_IN_PROGRESS)) {
		if (bpf_probe_read_user(&frame->event.handle, 8, (void *)frame->out))
			frame->event.flags |= CALL_ARGS_UNREAD;
		else if (frame->name)
			name_kind = NAME_KERNEL;
	}
	/* One name a call at the most, so that its code is here once: a thread's comm can wait for its next call. */
	if (!name_kind && !thread->is_named) {
		thread->is_named = 1;
		name_kind = NAME_THREAD;
	}
	if (frame->members) /* no id was passed: all its ranks are in this process */
		frame->event.stream = frame->event.handle ? mix(id, frame->event.handle) : 0;
	FORGET(frame);
	if (name_kind)
		send_name(ctx, frame, name_kind);
	FORGET(frame);
	submit(ctx, thread, frame, now);
	if (frame->members && !frame->event.result)
		submit_members(ctx, thread, frame, now);
	return 0;
}
