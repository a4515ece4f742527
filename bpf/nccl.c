/* SPDX-License-Identifier: GPL-2.0 */
/* Entries and returns of NCCL's functions. The launches that NCCL makes inside are records of their own, one deeper. */

/* log2 of the bytes of an ncclDataType_t (nccl.h): int8, uint8, int32, uint32, int64, uint64, float16, float32,
 * float64, bfloat16, float8e4m3, float8e5m2; one hexadecimal digit each, the first lowest */
#define DATATYPE_SHIFTS 0x001321332200ULL
#define DATATYPES 12

static __always_inline int enter_nccl(struct pt_regs *ctx, u64 cookie)
{
	u64 id = bpf_get_current_pid_tgid();
	struct thread *thread = threads.lookup(&id);
	struct frame *frame;
	u32 datatype;

	if (!thread && !(thread = new_thread(id)))
		return 0;
	frame = open_frame(ctx, thread, id, cookie);
	if (!frame)
		return 0;
	read_arguments(ctx, thread, frame, cookie);
	read_plain(thread, frame, cookie);
	if (COOKIE_KIND(cookie) == KIND_COLLECTIVE) {
		datatype = frame->event.block;
		if (datatype < DATATYPES) {
			frame->event.size <<= (DATATYPE_SHIFTS >> (4 * datatype)) & 15;
		} else {
			frame->event.size = 0;
			frame->event.flags |= CALL_ARGS_UNREAD;
		}
	}
	close_entry(thread, frame, cookie);
	return 0;
}

#ifdef PROBES
#define PROBE(index, cookie) \
	PROGRAM("nccl_enter_" #index) int nccl_enter_##index(struct pt_regs *ctx) { return enter_nccl(ctx, cookie); }
NCCL_PROBES
#undef PROBE
#else
int nccl_enter(struct pt_regs *ctx)
{
	return enter_nccl(ctx, get_attach_cookie(ctx));
}
#endif
