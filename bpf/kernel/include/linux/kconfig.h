/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The few kernel headers that BCC includes in every program, reduced to what it and our programs use, so that no
 * kernel headers need to be installed. Our programs touch no kernel struct but pt_regs and tracepoint fields, which
 * are stable ABI.
 */
#define CONFIG_BPF_SYSCALL 1
#define CONFIG_64BIT 1
