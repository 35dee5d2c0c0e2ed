// SPDX-License-Identifier: GPL-2.0-only
/*
 * The granter's end: pins pages of the calling process, issues them, and releases a page only when
 * the hypervisor says that it is not mapped any more.
 */
#include <linux/delay.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <xen/page.h>
#include "window.h"

#define CHUNK GRANT_WINDOW_BATCH

/* Time limit of a revoke that waits for the hypervisor's flush rate. */
#define THROTTLED_MS 2000

long granter_create(struct window *w, void __user *arg)
{
	struct rfwin_create c;
	int rc;

	if (copy_from_user(&c, arg, sizeof(c)))
		return -EFAULT;
	if (c.pad)
		return -EINVAL;
	rc = grant_window_create(c.grantee, c.nr_entries, &c.handle);
	if (rc)
		return rc;
	w->peer = c.grantee;
	w->handle = c.handle;
	w->nr = c.nr_entries;
	w->role = GRANTER;
	w->pages = kvcalloc(w->nr, sizeof(*w->pages), GFP_KERNEL_ACCOUNT);
	if (!w->pages || copy_to_user(arg, &c, sizeof(c))) {
		rc = w->pages ? -EFAULT : -ENOMEM;
		destroy_window(w);
		kvfree(w->pages);
		w->pages = NULL;
		w->role = NONE;
		return rc;
	}
	w->mm = current->mm;
	mmgrab(w->mm);
	return 0;
}

/*
 * Pins a page of the caller. File pages are refused: their writeback would miss what the grantee
 * writes.
 */
static int pin(const struct rfwin_issue *op, struct page **page)
{
	bool ro = op->flags & GNTWIN_readonly;
	int n;

	if (op->pad || (op->flags & ~GNTWIN_readonly) || (op->address & ~PAGE_MASK))
		return GNTST_general_error;
	n = pin_user_pages_fast(op->address, 1, FOLL_LONGTERM | (ro ? 0 : FOLL_WRITE), page);
	if (n != 1)
		return GNTST_bad_virt_addr;
	if (is_zone_device_page(*page) ||
	    !(PageAnon(*page) || folio_test_swapbacked(page_folio(*page)))) {
		unpin_user_page(*page);
		return GNTST_bad_page;
	}
	return 0;
}

static void unpin(struct window *w, struct page *page)
{
	unpin_user_pages_dirty_lock(&page, 1, true);
	w->pinned--;
	account_locked_vm(w->mm, 1, false);
}

static long issue_chunk(struct window *w, struct rfwin_issue *ops, struct gnttab_window_issue *x,
			u32 n)
{
	struct page *pages[CHUNK];
	u8 of[CHUNK];
	u32 i, k = 0;
	int rc = 0;

	for (i = 0; i < n; i++) {
		ops[i].status = GNTST_bad_gntref;
		if (ops[i].ref >= w->nr || w->pages[ops[i].ref])
			continue;
		ops[i].status = GNTST_no_space;
		if (account_locked_vm(w->mm, 1, true))
			continue;
		ops[i].status = pin(&ops[i], &pages[k]);
		if (ops[i].status) {
			account_locked_vm(w->mm, 1, false);
			continue;
		}
		w->pinned++;
		x[k] = (struct gnttab_window_issue) {
			.handle = w->handle,
			.ref = ops[i].ref,
			.gfn = xen_page_to_gfn(pages[k]),
			.flags = ops[i].flags,
			.status = GNTST_general_error,
		};
		of[k++] = i;
	}
	if (k)
		rc = HYPERVISOR_grant_table_op(GNTTABOP_window_issue, x, k);
	for (i = 0; i < k; i++) {
		ops[of[i]].status = x[i].status;
		/*
		 * After a failed call the statuses may be those of a part: what may be issued stays
		 * pinned.
		 */
		if (!x[i].status || rc)
			w->pages[x[i].ref] = pages[i];
		else
			unpin(w, pages[i]);
	}
	return rc;
}

/* Revokes; waits while the hypervisor's flush rate says so. */
static long revoke_chunk(struct window *w, struct rfwin_revoke *ops, struct gnttab_window_revoke *x,
			 u32 n)
{
	unsigned long until = jiffies + msecs_to_jiffies(THROTTLED_MS);
	u8 of[CHUNK];
	u32 i, k;
	int rc;

	for (i = 0; i < n; i++)
		ops[i].status = GNTST_eagain;
	do {
		for (i = k = 0; i < n; i++) {
			if (ops[i].status != GNTST_eagain)
				continue;
			if (ops[i].pad || ops[i].ref >= w->nr || !w->pages[ops[i].ref]) {
				ops[i].status = GNTST_bad_gntref;
				continue;
			}
			x[k] = (struct gnttab_window_revoke) {
				.handle = w->handle,
				.ref = ops[i].ref,
				.flags = ops[i].flags,
				.status = GNTST_general_error,
			};
			of[k++] = i;
		}
		if (!k)
			return 0;
		rc = HYPERVISOR_grant_table_op(GNTTABOP_window_revoke, x, k);
		if (rc)
			return rc;
		for (i = k; i-- > 0;) {
			struct page **page = &w->pages[x[i].ref];
			s32 status = x[i].status;

			ops[of[i]].status = status;
			if (grant_window_is_revoked(status) && *page) {
				unpin(w, *page);
				*page = NULL;
			}
			if (status != GNTST_eagain)
				k--;
		}
		if (!k)
			return 0;
		usleep_range(1000, 2000);
	} while (time_before(jiffies, until) && !fatal_signal_pending(current));
	return 0;
}

typedef long (*chunk_fn)(struct window *, void *, void *, u32);

static long run(struct window *w, void __user *arg, size_t size, size_t xsize, chunk_fn chunk)
{
	struct rfwin_batch b;
	void *ops, *x;
	long rc = 0;
	u32 i, n;

	if (copy_from_user(&b, arg, sizeof(b)))
		return -EFAULT;
	if (b.pad)
		return -EINVAL;
	/* The pages of another process are not this window's to give. */
	if (current->mm != w->mm)
		return -EPERM;
	ops = kmalloc_array(CHUNK, size, GFP_KERNEL);
	x = kmalloc_array(CHUNK, xsize, GFP_KERNEL);
	if (!ops || !x)
		rc = -ENOMEM;
	for (i = 0; !rc && i < b.count; i += n) {
		void __user *at = u64_to_user_ptr(b.array) + (size_t)i * size;

		n = min_t(u32, b.count - i, CHUNK);
		if (copy_from_user(ops, at, n * size))
			rc = -EFAULT;
		else
			rc = chunk(w, ops, x, n);
		if (rc != -EFAULT && copy_to_user(at, ops, n * size))
			rc = -EFAULT;
		if (!rc && fatal_signal_pending(current))
			rc = -EINTR;
		cond_resched();
	}
	kfree(ops);
	kfree(x);
	return rc;
}

static long issue_any(struct window *w, void *ops, void *x, u32 n)
{
	return issue_chunk(w, ops, x, n);
}

static long revoke_any(struct window *w, void *ops, void *x, u32 n)
{
	return revoke_chunk(w, ops, x, n);
}

long granter_issue(struct window *w, void __user *arg)
{
	return run(w, arg, sizeof(struct rfwin_issue), sizeof(struct gnttab_window_issue),
		   issue_any);
}

long granter_revoke(struct window *w, void __user *arg)
{
	return run(w, arg, sizeof(struct rfwin_revoke), sizeof(struct gnttab_window_revoke),
		   revoke_any);
}

void granter_release(struct window *w)
{
	u32 ref;

	/*
	 * Pages that may still be mapped are never unpinned: the memory is lost, which is better
	 * than shared.
	 */
	if (WARN_ON_ONCE(!destroy_window(w)))
		return;
	for (ref = 0; ref < w->nr; ref++)
		if (w->pages[ref]) {
			unpin(w, w->pages[ref]);
			cond_resched();
		}
	kvfree(w->pages);
	mmdrop(w->mm);
}
