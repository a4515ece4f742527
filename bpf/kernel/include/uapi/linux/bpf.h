/* SPDX-License-Identifier: GPL-2.0 */
/* BCC brings its own copy of bpf.h and includes it first. */
