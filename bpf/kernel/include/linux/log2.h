/* SPDX-License-Identifier: GPL-2.0 */
/* Included by BCC for the sizes of its queue maps, which we do not use. */
