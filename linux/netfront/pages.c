// SPDX-License-Identifier: GPL-2.0-only
/*
 * Granted pages: allocation with a grant, and release.
 *
 * A page is zeroed before it is granted, and holds packets and ring entries of one device for its whole life. A page
 * that the backend still maps at its release stays allocated until the backend unmaps it: the grant table's deferred
 * list frees it then.
 */
#include "netfront.h"

/* Allocates a zeroed page and grants it to the backend. */
int rfn_page_alloc(struct rfn_page *p, domid_t peer, bool readonly)
{
	int ref;

	p->page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!p->page)
		return -ENOMEM;
	ref = gnttab_grant_foreign_access(peer, xen_page_to_gfn(p->page), readonly);
	if (ref < 0) {
		__free_page(p->page);
		p->page = NULL;
		return ref;
	}
	p->va = page_address(p->page);
	p->ref = ref;
	p->staged = false;
	return 0;
}

/* Revokes the grant and frees the page, at once or when the backend has unmapped it. */
void rfn_page_free(struct rfn_page *p)
{
	if (!p->page)
		return;
	gnttab_end_foreign_access(p->ref, p->page);
	p->page = NULL;
	p->va = NULL;
	p->staged = false;
}
