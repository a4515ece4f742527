/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The scheduler's side: time that traced threads spend off the CPU, and the end of threads.
 *
 * Only threads that have made a traced call are followed. Tracepoint fields are read at the offsets that tracefs
 * states (FIELD_event_field, defined by gputail/probes/kernel.py), since they move between kernels.
 */
#define FIELD(ctx, type, offset) (*(type *)((char *)(ctx) + (offset)))

/* Threads off the CPU, by tid. The record lies in the map from the switch on, as a call's does. */
BPF_TABLE("hash", u32, struct call_event, off_cpu, MAX_THREADS);
BPF_TABLE("array", u32, struct call_event, blank_event, 1);

static __always_inline void forget_thread(u64 id)
{
	struct thread *thread = threads.lookup(&id);

	if (!thread)
		return;
	if (thread->depth)
		count(COUNTER_ENTRY_ORPHANED, thread->depth);
	threads.delete(&id);
}

/* Processes whose time off the CPU is not recorded, by tgid: those whose budget does not pay for it. */
BPF_TABLE("hash", u32, u8, quiet, 4096);

#ifdef FIELD_sched_switch_next_pid
int sched_switch(void *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns(); /* current is still the one that leaves */
	u32 next = FIELD(ctx, u32, FIELD_sched_switch_next_pid), tid = id, tgid = id >> 32, zero = 0;
	struct call_event *event;
	struct thread *thread;

	event = off_cpu.lookup(&next);
	if (event) {
		event->duration_ns = now - event->start_ns;
		event->stream = tid;
		event->cpu = bpf_get_smp_processor_id();
		if (calls_ring.perf_submit(ctx, event, sizeof(*event))) {
			u64 owner = (u64)event->tgid << 32 | next;

			count(COUNTER_RING_FULL, 1);
			thread = threads.lookup(&owner);
			if (thread)
				thread->gap = 1;
		}
		off_cpu.delete(&next);
	}
	if (!threads.lookup(&id) || quiet.lookup(&tgid))
		return 0;
	event = blank_event.lookup(&zero);
	if (!event || off_cpu.update(&tid, event) || !(event = off_cpu.lookup(&tid))) {
		count(COUNTER_OFF_CPU_FULL, 1);
		return 0;
	}
	event->start_ns = now;
	event->handle = FIELD(ctx, u64, FIELD_sched_switch_prev_state);
	event->tgid = id >> 32;
	event->tid = tid;
	event->call = OFF_CPU_CALL;
	return 0;
}

/* The waker is current; a wake-up from an interrupt names whatever that interrupted, so tid 0 or a stranger. */
int sched_wakeup(void *ctx)
{
	u32 tid = FIELD(ctx, u32, FIELD_sched_wakeup_pid);
	struct call_event *event = off_cpu.lookup(&tid);

	if (event && !event->size) {
		event->size = bpf_ktime_get_ns();
		event->block = bpf_get_current_pid_tgid();
	}
	return 0;
}
#endif

int sched_process_exit(void *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = id;

	forget_thread(id);
	off_cpu.delete(&tid);
#ifdef ONLY_TARGETS
	targets.delete(&tid); /* threads that the process leaves behind stay traced: they are known by now */
#endif
	return 0;
}

/* A thread that executes a program takes over its process's own id, without an exit of the old one. */
int sched_process_exec(void *ctx)
{
	u64 id = bpf_get_current_pid_tgid();

	forget_thread(id);
	forget_thread((id & 0xffffffff00000000ULL) | FIELD(ctx, u32, FIELD_sched_process_exec_old_pid));
	return 0;
}

#ifdef ONLY_TARGETS
/* The child may be a thread: its tid is then a key that no process has. */
int sched_process_fork(void *ctx)
{
	u32 parent = bpf_get_current_pid_tgid() >> 32, child = FIELD(ctx, u32, FIELD_sched_process_fork_child_pid);
	u8 one = 1;

	if (targets.lookup(&parent) && targets.update(&child, &one))
		count(COUNTER_IN_FLIGHT_FULL, 1);
	return 0;
}
#endif
