/* SPDX-License-Identifier: GPL-2.0 */
/* Entries and returns of NCCL's functions. The launches that NCCL makes inside are records of their own, one deeper. */

/* log2 of the bytes of an ncclDataType_t (nccl.h): int8, uint8, int32, uint32, int64, uint64, float16, float32,
 * float64, bfloat16, float8e4m3, float8e5m2; one hexadecimal digit each, the first lowest */
#define DATATYPE_SHIFTS 0x001321332200ULL
#define DATATYPES 12

/* Where an ncclUniqueId lies: behind the pointer that is argument `place`, or, on the stack, as the first thing there. */
#define ID_ON_STACK 15
#define ID_WORDS 16 /* as many as there is room for in thread->args */

/* Note in the record what tells the communicator from all others: 64 bits made of the 128 bytes of its id. */
static __always_inline void read_id(struct thread *thread, struct frame *frame, u64 place)
{
	u64 hash = 0;
	u32 word;

	if (bpf_probe_read_user(thread->args, sizeof(thread->args),
				(void *)(place == ID_ON_STACK ? STACK_ARGS(frame->sp) : ARGUMENT(thread, place)))) {
		frame->event.flags |= CALL_ARGS_UNREAD;
		return;
	}
#pragma unroll
	for (word = 0; word < ID_WORDS; word++) {
		FORGET(thread); /* or all words are loaded first, onto the stack */
		hash = mix(hash, thread->args[word]);
	}
	FORGET(frame);
	frame->event.stream = hash;
}

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
	FORGET(frame);
	if (COOKIE_KIND(cookie) == KIND_MEMBERS)
		frame->members = frame->event.size;
	if (COOKIE_ID(cookie))
		read_id(thread, frame, COOKIE_ID(cookie)); /* last: it takes the place of the arguments */
	close_entry(thread, frame, 0); /* no function of NCCL's has a per-thread variant */
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
