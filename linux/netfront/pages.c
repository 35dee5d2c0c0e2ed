// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pages that the backend reaches: allocation, with a grant or for a grant window, and release.
 *
 * A page is zeroed before it is granted, and holds packets and ring entries of one device for its
 * whole life. A page that the backend still maps at its release stays allocated until the backend
 * unmaps it: the grant table's deferred list frees it then. A page of a window that the hypervisor
 * could not take back stays allocated for good.
 */
#include "netfront.h"

/* Allocates a zeroed page that has no grant: rfn_window_issue() lets the backend reach it. */
int rfn_page_alloc_for_window(struct rfn_page *p, unsigned int number)
{
	p->page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!p->page)
		return -ENOMEM;
	p->va = page_address(p->page);
	p->ref = RFN_WINDOW_MARK | (RFN_WINDOW_FIRST + number);
	p->staged = false;
	p->issued = false;
	return 0;
}

/* Allocates a zeroed page and grants it to the backend. */
int rfn_page_alloc(struct rfn_page *p, domid_t peer, bool readonly)
{
	int ref, err = rfn_page_alloc_for_window(p, 0);

	if (err)
		return err;
	ref = gnttab_grant_foreign_access(peer, xen_page_to_gfn(p->page), readonly);
	if (ref < 0) {
		__free_page(p->page);
		p->page = NULL;
		return ref;
	}
	p->ref = ref;
	return 0;
}

/*
 * Frees a page. A granted one is revoked, and freed at once or when the backend has unmapped it;
 * one of a window was revoked before.
 */
void rfn_page_free(struct rfn_dev *rd, struct rfn_page *p)
{
	if (!p->page)
		return;
	if (!rfn_page_in_window(p))
		gnttab_end_foreign_access(p->ref, p->page);
	else if (!p->issued)
		__free_page(p->page);
	else
		rfn_count(rd, RFN_EV_LOST_PAGES);
	p->page = NULL;
	p->va = NULL;
	p->staged = false;
}
