/* SPDX-License-Identifier: GPL-2.0 */
#ifndef GPUTAIL_PTRACE_H
#define GPUTAIL_PTRACE_H

/* The registers at a probe, as the kernel hands them to the program: ABI, see arch/<arch>/include/uapi/asm/ptrace.h */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
struct pt_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
	__u64 pstate;
};
#define user_pt_regs pt_regs
#else
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di;
	unsigned long orig_ax, ip, cs, flags, sp, ss;
};
#endif

#endif
