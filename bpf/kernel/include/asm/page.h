/* SPDX-License-Identifier: GPL-2.0 */
/* Included by BCC for the page size of its networking helpers, which we do not use. */
