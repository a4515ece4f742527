/* SPDX-License-Identifier: GPL-2.0 */
/* BCC copies LINUX_VERSION_CODE into the program; kernels since 5.0 do not look at it for these program types. */
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + ((c) > 255 ? 255 : (c)))
#define LINUX_VERSION_CODE KERNEL_VERSION(6, 1, 0)
