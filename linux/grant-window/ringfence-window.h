/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * /dev/ringfence-window: grant windows of Xen for user space.
 *
 * An open file is one window, of one role: RFWIN_CREATE makes it the granter's end, RFWIN_REGISTER
 * the grantee's. Closing the file, or the death of the last process that has it open, destroys the
 * window.
 */
#ifndef RINGFENCE_WINDOW_H
#define RINGFENCE_WINDOW_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Statuses in the arrays are those of Xen's grant table operations: 0, or negative GNTST_*. */

struct rfwin_query {
	__u32 version, max_entries, max_windows, max_registered, flush_rate, batch;
};

struct rfwin_create {
	__u16 grantee;		/* in */
	__u16 pad;
	__u32 nr_entries;	/* in */
	__u32 handle;		/* out: for the grantee */
};

struct rfwin_register {
	__u16 granter;		/* in */
	__u16 pad;
	__u32 handle;		/* in */
	__u32 nr_entries;	/* in: the granter's number */
	__u32 table_pages;	/* out: length of the table in pages */
};

struct rfwin_issue {
	__u64 address;		/* in: a page of the caller */
	__u32 ref;		/* in */
	__u32 flags;		/* in: 1 = read-only for the grantee */
	__s32 status;		/* out */
	__u32 pad;
};

struct rfwin_revoke {
	__u32 ref;		/* in */
	__u32 flags;		/* in: 1 = even if the grantee says that it uses the page */
	__s32 status;		/* out */
	__u32 pad;
};

struct rfwin_batch {
	__u64 array;		/* in: address of struct rfwin_issue[] or struct rfwin_revoke[] */
	__u32 count;		/* in */
	__u32 pad;
};

#define RFWIN_QUERY	_IOR('w', 0x40, struct rfwin_query)
#define RFWIN_CREATE	_IOWR('w', 0x41, struct rfwin_create)
#define RFWIN_REGISTER	_IOWR('w', 0x42, struct rfwin_register)
#define RFWIN_ISSUE	_IOW('w', 0x43, struct rfwin_batch)
#define RFWIN_REVOKE	_IOW('w', 0x44, struct rfwin_batch)

/* Offsets for mmap by the grantee, MAP_SHARED: the table, and the window's pages by reference. */
#define RFWIN_TABLE_OFFSET	0UL
#define RFWIN_PAGES_OFFSET	0x40000000UL

#endif
