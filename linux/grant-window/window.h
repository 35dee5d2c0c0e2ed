/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef RINGFENCE_WINDOW_KERNEL_H
#define RINGFENCE_WINDOW_KERNEL_H

#include <linux/mm.h>
#include <linux/mutex.h>
#include "grant_window_calls.h"
#include "ringfence-window.h"

enum role { NONE, GRANTER, GRANTEE };

/* An open file. */
struct window {
	/* Guards all fields but the role, which is set last and read without it by mmap. */
	struct mutex lock;
	enum role role;
	u16 peer;
	u32 handle;
	u32 nr;

	/* Granter: the pinned page of each reference that is issued. */
	struct page **pages;
	struct mm_struct *mm;	/* whose locked memory is charged */
	u32 pinned;

	/* Grantee: the table, and a range of frames without memory. */
	void *table;
	u32 table_pages;
	unsigned long first;	/* index of the range in the pool */
};

long granter_create(struct window *w, void __user *arg);
long granter_issue(struct window *w, void __user *arg);
long granter_revoke(struct window *w, void __user *arg);
void granter_release(struct window *w);

int pool_init(void);
void pool_exit(void);
long grantee_register(struct window *w, void __user *arg);
int grantee_mmap(struct window *w, struct vm_area_struct *vma);
void grantee_release(struct window *w);

/* Destroys the window in the hypervisor. Returns true if it is gone. */
static inline bool destroy_window(const struct window *w)
{
	return grant_window_destroy(w->role == GRANTER ? DOMID_SELF : w->peer, w->handle);
}

#endif
