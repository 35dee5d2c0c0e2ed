/* SPDX-License-Identifier: GPL-2.0-only */
/* Hypercalls of Xen's grant windows that more than one module makes. */
#ifndef RINGFENCE_GRANT_WINDOW_CALLS_H
#define RINGFENCE_GRANT_WINDOW_CALLS_H

#include <linux/errno.h>
#include <linux/types.h>
#include <xen/interface/xen.h>
#include <xen/interface/grant_table.h>
#include <asm/xen/hypercall.h>
#include "grant_window.h"

/* Revocations that share one flush of the hypervisor. */
#define GRANT_WINDOW_BATCH 64

/* Queries version and limits. Returns -ENOSYS on a hypervisor without grant windows. */
static inline int grant_window_query(struct gnttab_window_query *op)
{
	return HYPERVISOR_grant_table_op(GNTTABOP_window_query, op, 1);
}

/* Creates a window to a domain, which needs the handle and the number of references to register. */
static inline int grant_window_create(u16 grantee, u32 references, u32 *handle)
{
	struct gnttab_window_create op = { .grantee = grantee, .nr_entries = references };
	int rc = HYPERVISOR_grant_table_op(GNTTABOP_window_create, &op, 1);

	*handle = op.handle;
	if (rc || !op.status)
		return rc;
	switch (op.status) {
	case GNTST_eagain:
		return -EAGAIN;
	case GNTST_permission_denied:
		return -EACCES;
	case GNTST_no_space:
		return -ENOSPC;
	default:
		return -ENXIO;
	}
}

/*
 * Destroys a window, which revokes what is issued. The granter is DOMID_SELF for itself. Returns
 * true if it is gone.
 */
static inline bool grant_window_destroy(u16 granter, u32 handle)
{
	struct gnttab_window_destroy op = { .granter = granter, .handle = handle };
	int rc = HYPERVISOR_grant_table_op(GNTTABOP_window_destroy, &op, 1);

	/*
	 * A bad handle or a domain that is gone: the other side has destroyed it, and nothing is
	 * mapped.
	 */
	return !rc &&
	       (!op.status || op.status == GNTST_bad_handle || op.status == GNTST_bad_domain);
}

/*
 * Returns true if a revocation with this status left the page unmapped: it is revoked now, or was
 * not issued, or the whole window is gone.
 */
static inline bool grant_window_is_revoked(s16 status)
{
	return status == GNTST_okay || status == GNTST_bad_handle || status == GNTST_bad_gntref;
}

#endif
