/* SPDX-License-Identifier: GPL-2.0 */
/* BCC's bpf.h includes this for instruction encodings that only hand-assembled programs use. */
