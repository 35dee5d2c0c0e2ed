// SPDX-License-Identifier: GPL-2.0-only
/*
 * Grant windows: pages that this driver issues and revokes by hypercall, without the backend.
 *
 * A connection has a window for each ring if the backend opens windows and the hypervisor has them.
 * Page n of the ring has reference RFN_WINDOW_FIRST + n of the window, and no grant. The windows
 * are created before the keys are published. All pages are issued when the backend is Connected,
 * because it has registered the windows then; until then nothing is posted. They stay issued, so a
 * packet costs neither side an operation.
 *
 * A page is revoked when the shrinker takes it, and when the connection ends. The backend's status
 * word delays a revocation by a few ms at most; then the page is revoked by force. A page is given
 * back to the kernel only after the hypervisor has said that it is not mapped. A reference that was
 * revoked is not issued again in the same window, so no old transfer of the backend reaches another
 * page.
 *
 * A connection that cannot have windows for every ring has none: its pages are granted, and staged
 * where possible.
 */
#include <linux/delay.h>
#include "netfront.h"

/* Attempts by force, 1 to 2 ms apart, while the hypervisor's flush rate is exceeded. */
#define RFN_REVOKE_ATTEMPTS 50

/* Creates the window of a ring's pages, with nothing issued. */
int rfn_window_create(struct rfn_window *w, struct rfn_dev *rd, struct rfn_page *pages,
		      bool readonly)
{
	int err = grant_window_create(rd->xdev->otherend_id, RFN_WINDOW_REFS, &w->handle);

	if (err)
		return err;
	w->rd = rd;
	w->page = pages;
	w->readonly = readonly;
	w->open = true;
	return 0;
}

/* Issues up to one batch of pages. Returns an error if one of them is not issued. */
static int rfn_window_issue_batch(struct rfn_window *w, unsigned int first, unsigned int count)
{
	struct gnttab_window_issue op[GRANT_WINDOW_BATCH];
	unsigned int issued = 0, i;
	int rc, err;

	for (i = 0; i < count; i++)
		op[i] = (struct gnttab_window_issue){
			.handle = w->handle,
			.ref = RFN_WINDOW_FIRST + first + i,
			.gfn = xen_page_to_gfn(w->page[first + i].page),
			.flags = w->readonly ? GNTWIN_readonly : 0,
			.status = GNTST_general_error,
		};
	rc = HYPERVISOR_grant_table_op(GNTTABOP_window_issue, op, count);
	err = rc;
	for (i = 0; i < count; i++) {
		/*
		 * After a failed call the statuses may be those of a part: what may be issued
		 * counts as issued.
		 */
		w->page[first + i].issued = rc || !op[i].status;
		issued += w->page[first + i].issued;
		if (op[i].status && !err)
			err = -EIO;
	}
	atomic_add(issued, &w->rd->issued);
	atomic64_add(issued, &w->rd->event[RFN_EV_ISSUES]);
	return err;
}

static int rfn_window_issue(struct rfn_window *w)
{
	unsigned int first;
	int err = 0;

	for (first = 0; !err && first < RFN_RING; first += GRANT_WINDOW_BATCH)
		err = rfn_window_issue_batch(w, first, GRANT_WINDOW_BATCH);
	return err;
}

/*
 * Revokes what is issued of up to one batch of pages. Returns the number of pages that still are.
 */
static unsigned int rfn_window_revoke_batch(struct rfn_window *w, const u16 *ids,
					    unsigned int count, bool force)
{
	struct gnttab_window_revoke op[GRANT_WINDOW_BATCH];
	unsigned int n = 0, gone = 0, revoked = 0, i;

	for (i = 0; i < count; i++)
		if (w->page[ids[i]].issued)
			op[n++] = (struct gnttab_window_revoke){
				.handle = w->handle,
				.ref = RFN_WINDOW_FIRST + ids[i],
				.flags = force ? GNTWIN_force : 0,
				/* Entries after the failed one are still issued. */
				.status = GNTST_general_error,
			};
	w->busy = 0;
	if (n && HYPERVISOR_grant_table_op(GNTTABOP_window_revoke, op, n))
		netdev_dbg(w->rd->ndev, "revoking %u pages failed\n", n);
	for (i = 0; i < n; i++) {
		w->busy += op[i].status == GNTST_busy;
		if (!grant_window_is_revoked(op[i].status))
			continue;
		w->page[op[i].ref - RFN_WINDOW_FIRST].issued = false;
		gone++;
		revoked += op[i].status == GNTST_okay;
	}
	atomic_sub(gone, &w->rd->issued);
	atomic64_add(revoked, &w->rd->event[RFN_EV_REVOKES]);
	if (force)
		atomic64_add(revoked, &w->rd->event[RFN_EV_FORCED]);
	return n - gone;
}

/*
 * Revokes pages that are in no packet, unless the hypervisor's flush rate forbids it. Called with
 * rfn_dev.lock held.
 */
void rfn_window_revoke(struct rfn_window *w, const u16 *ids, unsigned int count)
{
	unsigned int busy = 0, n;

	for (; count; ids += n, count -= n) {
		unsigned int kept, attempt;

		n = min_t(unsigned int, count, GRANT_WINDOW_BATCH);
		kept = rfn_window_revoke_batch(w, ids, n, false);
		busy += w->busy;
		for (attempt = 0; kept && attempt < RFN_REVOKE_ATTEMPTS; attempt++) {
			usleep_range(1000, 2000);
			kept = rfn_window_revoke_batch(w, ids, n, true);
		}
	}
	if (busy && !w->rd->kept_pages) {
		w->rd->kept_pages = true;
		netdev_warn(w->rd->ndev,
			    "the backend, domain %d, keeps %u pages of packets that it has answered; they were revoked by force\n",
			    w->rd->xdev->otherend_id, busy);
	}
}

/*
 * Revokes every page, by force what the backend uses, and destroys the window. A page that may
 * still be mapped stays marked as issued, and is never freed. The rings are no longer served, or
 * the guest is about to be suspended.
 */
void rfn_window_close(struct rfn_window *w)
{
	u16 ids[GRANT_WINDOW_BATCH];
	unsigned int first, i;

	if (!w->open)
		return;
	for (first = 0; first < RFN_RING; first += GRANT_WINDOW_BATCH) {
		for (i = 0; i < GRANT_WINDOW_BATCH; i++)
			ids[i] = first + i;
		if (rfn_window_revoke_batch(w, ids, GRANT_WINDOW_BATCH, false))
			rfn_window_revoke_batch(w, ids, GRANT_WINDOW_BATCH, true);
	}
	w->open = false;
	if (!grant_window_destroy(DOMID_SELF, w->handle)) {
		netdev_warn(w->rd->ndev, "a grant window cannot be destroyed\n");
		return;
	}
	/* Destroying has no flush rate: it revoked what was over the rate. */
	for (i = 0; i < RFN_RING; i++)
		if (w->page[i].issued) {
			w->page[i].issued = false;
			atomic_dec(&w->rd->issued);
		}
}

/* Returns the reason for which a connection has no windows, or NULL if it may have them. */
const char *rfn_windows_refused(struct rfn_dev *rd)
{
	struct gnttab_window_query query = {};

	if (!READ_ONCE(rfn_windows))
		return "they are switched off";
	if (!xenbus_read_unsigned(rd->xdev->otherend, "feature-ringfence-window", 0))
		return "the backend opens none";
	if (grant_window_query(&query))
		return "this Xen has none";
	return query.version == GNTWIN_VERSION ? NULL : "those of this Xen have another version";
}

/*
 * Issues the pages of all queues, and lets them be posted. The backend is Connected, so it has
 * registered the windows. Called with rfn_dev.lock held. Returns an error if a page is not issued.
 */
int rfn_windows_issue(struct rfn_dev *rd)
{
	unsigned int i;
	int err = 0;

	for (i = 0; !err && i < rd->queues; i++) {
		err = rfn_window_issue(&rd->queue[i]->tx_window);
		if (!err)
			err = rfn_window_issue(&rd->queue[i]->rx_window);
	}
	if (err)
		return err;
	for (i = 0; i < rd->queues; i++)
		rfn_tx_issued(rd->queue[i]);
	atomic_set(&rd->tx_spare, rd->queues * (RFN_RING - RFN_TX_KEPT));
	netdev_info(rd->ndev, "%u pages are issued in grant windows, %u of them for sending\n",
		    2 * rd->queues * RFN_RING, rd->queues * RFN_RING);
	return 0;
}

/* Closes the windows of a connection that goes on without them, until it is made anew. */
void rfn_windows_close(struct rfn_dev *rd)
{
	unsigned int i;

	atomic_set(&rd->tx_spare, 0);
	for (i = 0; i < rd->queues; i++) {
		rfn_window_close(&rd->queue[i]->tx_window);
		rfn_window_close(&rd->queue[i]->rx_window);
	}
}
