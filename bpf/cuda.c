/* SPDX-License-Identifier: GPL-2.0 */
/* Entries and returns of libcuda's functions: the struct and dimension arguments that a cookie cannot describe. */

/* cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, ...) and its cooperative twin */
static __always_inline void read_launch(struct thread *thread, struct frame *frame)
{
	frame->event.size = (u64)(u32)thread->args[1] * (u32)thread->args[2] * (u32)thread->args[3];
	frame->event.block = (u32)thread->args[4] * (u32)thread->args[5] * (u32)thread->args[6];
	frame->event.stream = thread->args[8];
}

/* CUlaunchConfig: gx, gy, gz, bx, by, bz, shared as u32 from offset 0, the stream at 32 */
static __always_inline void read_launch_config(struct thread *thread, struct frame *frame)
{
	u32 *words = (u32 *)thread->scratch;

	if (!read_struct(thread, frame, thread->args[0], 40))
		return;
	frame->event.size = (u64)words[0] * words[1] * words[2];
	frame->event.block = words[3] * words[4] * words[5];
	frame->event.stream = thread->scratch[4];
}

/* CUDA_LAUNCH_PARAMS: the function at 0, gx, gy, gz, bx, by, bz as u32 from 8, shared at 32, the stream at 40 */
static __always_inline void read_launch_list(struct thread *thread, struct frame *frame)
{
	u64 first = thread->args[0];
	u32 *words = (u32 *)&thread->scratch[1];

	if (!read_struct(thread, frame, first, 32))
		return;
	frame->event.handle = thread->scratch[0];
	frame->event.size = (u64)words[0] * words[1] * words[2];
	frame->event.block = words[3] * words[4] * words[5];
	if (read_struct(thread, frame, first + 40, 8))
		frame->event.stream = thread->scratch[0];
}

/* CUDA_MEMCPY2D: width and height at 112; in the 32-bit ABI as u32 at 84 */
static __always_inline void read_copy_2d(struct thread *thread, struct frame *frame, u64 cookie)
{
	u64 copy = thread->args[0];
	u32 *words = (u32 *)thread->scratch;

	if (COOKIE_NARROW(cookie)) {
		if (read_struct(thread, frame, copy + 84, 8))
			frame->event.size = (u64)words[0] * words[1];
	} else if (read_struct(thread, frame, copy + 112, 16)) {
		frame->event.size = thread->scratch[0] * thread->scratch[1];
	}
}

/* CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER: width, height and depth at 176; in the 32-bit ABI as u32 at 128 */
static __always_inline void read_copy_3d(struct thread *thread, struct frame *frame, u64 cookie)
{
	u64 copy = thread->args[0];
	u32 *words = (u32 *)thread->scratch;

	if (COOKIE_NARROW(cookie)) {
		if (read_struct(thread, frame, copy + 128, 12))
			frame->event.size = (u64)words[0] * words[1] * words[2];
	} else if (read_struct(thread, frame, copy + 176, 24)) {
		frame->event.size = thread->scratch[0] * thread->scratch[1] * thread->scratch[2];
	}
}

/* Open a frame for the call being entered, and read its arguments; NULL when it cannot be followed. */
static __always_inline struct frame *read_call(struct pt_regs *ctx, u64 id, struct thread *thread, u64 cookie)
{
	struct frame *frame = open_frame(ctx, thread, id, cookie);

	if (!frame)
		return NULL;
	read_arguments(ctx, thread, frame, cookie);
	read_plain(thread, frame, cookie);
	FORGET(frame);
	switch (COOKIE_KIND(cookie)) {
	case KIND_LAUNCH:
		read_launch(thread, frame);
		break;
	case KIND_LAUNCH_CONFIG:
		read_launch_config(thread, frame);
		break;
	case KIND_LAUNCH_LIST:
		read_launch_list(thread, frame);
		break;
	case KIND_COPY_2D:
		read_copy_2d(thread, frame, cookie);
		break;
	case KIND_COPY_3D:
		read_copy_3d(thread, frame, cookie);
		break;
	}
	return frame;
}

static __always_inline int enter_cuda(struct pt_regs *ctx, u64 cookie)
{
	u64 id = bpf_get_current_pid_tgid();
	struct thread *thread = threads.lookup(&id);
	struct frame *frame;

	if (!thread && !(thread = new_thread(id)))
		return 0;
	frame = read_call(ctx, id, thread, cookie);
	if (frame)
		close_entry(thread, frame, cookie);
	return 0;
}

#ifdef PROBES
/* No cookies on this kernel: an entry program per function. CUDA_PROBES has PROBE(index, cookie) for each. */
#define PROBE(index, cookie) \
	PROGRAM("cuda_enter_" #index) int cuda_enter_##index(struct pt_regs *ctx) { return enter_cuda(ctx, cookie); }
CUDA_PROBES
#undef PROBE
#else
int cuda_enter(struct pt_regs *ctx)
{
	return enter_cuda(ctx, get_attach_cookie(ctx));
}

/* Does nothing: what a probe costs before it does anything, which calibration wants to know. */
int nothing(struct pt_regs *ctx)
{
	return 0;
}

/* Where only entries are probed, the record is complete at the entry: the frame that it is made in is free again at once. */
int cuda_pass(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), cookie = get_attach_cookie(ctx);
	struct thread *thread = threads.lookup(&id);
	struct frame *frame;

	if (!thread && !(thread = new_thread(id)))
		return 0;
	frame = read_call(ctx, id, thread, cookie);
	if (!frame)
		return 0;
	close_entry(thread, frame, cookie);
	FORGET(frame);
	thread->depth = frame->event.depth;
	frame->event.flags |= CALL_ENTRY_ONLY;
	frame->event.duration_ns = 0;
	frame->event.result = 0;
	frame->event.cpu = bpf_get_smp_processor_id();
	submit(ctx, thread, frame, frame->event.start_ns);
	return 0;
}
#endif
