/* SPDX-License-Identifier: GPL-2.0 */
/* Included by BCC for its networking helpers, which we do not use. */
